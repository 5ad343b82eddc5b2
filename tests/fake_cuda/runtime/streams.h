// A CUDA runtime without a GPU: preloaded before libcudart, it gives a process devices whose memory is the host's.
//
// Copies and memsets move bytes at once, in the order of their calls. What they would do in time on a GPU is in the
// log: which thread put what on which stream, what waited for which event, and which bytes were read and written;
// tests/fake_cuda/check.py reads it. Or streams hold their work as long as they may (deferred.h), and a missing wait gives
// wrong bits. Kernels are logged and do not run; operators of ATen that would launch them are computed by those of the
// CPU (operators.cpp).
//
// The environment: FAKE_CUDA_DEVICES how many there are (4), FAKE_CUDA_PEERS which reach another's memory: all without
// it, none if it is 0, else those named (0-1,1-0), or all by what they say, where it then fails (unplugged),
// FAKE_CUDA_LOG the file (none without it), FAKE_CUDA_LATE a seed: events then are found unfinished at times,
// FAKE_CUDA_DEFER a seed: work then is deferred, FAKE_CUDA_SITES a file: see sites.h,
// FAKE_CUDA_MEMORY how many bytes each device has (1 TiB): no more can be allocated.
//
// Here: streams, events, and what is put on a stream.
#pragma once

#include "graphs.h"

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace fake_cuda {

CUstream_st* made_stream(int device);
// The default stream of each device is a stream of its own here, as torch takes it.
CUstream_st* of(cudaStream_t stream);
long number(cudaStream_t stream);

// Something on a stream: `kind stream rest` in the log, now or whenever a graph is launched that captures it; `event` is
// what it records or waits for.
cudaError_t put(cudaStream_t given, const std::string& kind, const std::string& rest,
                const std::function<void()>& run = {}, CUevent_st* event = nullptr);

// The stream that computed last.
CUstream_st* computed_last();

}  // namespace fake_cuda
