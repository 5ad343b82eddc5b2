// Call sites of stream waits in the extension: return addresses, as offsets in its file.
//
// FAKE_CUDA_SITES names a file to which each call site is written once; wait lines of the log then contain the call
// site, too. The waits of one call site can be dropped. tests/fake_cuda/call_sites.py maps offsets to lines of csrc/.
#pragma once

#include <cstdint>

namespace fake_cuda {

// Returns the innermost call site of the calling thread in the extension; 0 if there is none or FAKE_CUDA_SITES is
// not set.
uintptr_t call_site();

// Returns whether the waits of this call site are dropped.
bool is_dropped(uintptr_t site);

}  // namespace fake_cuda
