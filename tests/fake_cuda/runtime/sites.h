// Where the extension tells a stream to wait: return addresses in it, as offsets in its file.
//
// FAKE_CUDA_SITES names a file into which each is written once; the log then has it in lines of waits too. Those of one
// call site can be left out. tests/fake_cuda/sites.py turns offsets into lines of csrc/.
#pragma once

#include <cstdint>

namespace fake_cuda {

// Where the calling thread is in the extension; 0 if nobody asked for it.
uintptr_t call_site();

// Whether no wait is to be made there.
bool left_out(uintptr_t site);

}  // namespace fake_cuda
