// A fake CUDA runtime, preloaded in place of libcudart: it emulates devices in host memory.
//
// Copies and memsets run synchronously, in the order of the calls. The log records what a GPU could run concurrently:
// which thread enqueued which operation on which stream, which stream waited for which event, and which bytes were
// read and written; tests/fake_cuda/race_detector.py reads it. Alternatively, streams defer their work as long as possible
// (deferred.h), so that a missing wait gives wrong bits. ATen operators that would launch kernels are computed by the
// CPU's operators (operators/operators.cpp). Other kernels are logged; Triton's kernels run if a runner is registered
// (kernels.cpp).
//
// Environment variables:
//   FAKE_CUDA_DEVICES  number of devices (default: 4)
//   FAKE_CUDA_MEMORY   memory of each device in bytes (default: 1 TiB)
//   FAKE_CUDA_PEERS    pairs of devices with peer access, as in 0-1,1-0 (default: all pairs); 0 for none; "unplugged"
//                      for devices that report peer access and then fail to enable it
//   FAKE_CUDA_MAX_PEERS  peers that a device may have (default: 8)
//   FAKE_CUDA_WRONG_COPIES  pairs of devices between which copies arrive wrong if they are peers, as in 0-1 (default:
//                      none); FAKE_CUDA_DAMAGE says how: a wrong bit (bit, the default) or last byte (tail), zeros, or
//                      none of the bytes arrive (none)
//   FAKE_CUDA_LOG      file of the log (default: no log)
//   FAKE_CUDA_LATE     seed: half of the event and stream queries report unfinished work
//   FAKE_CUDA_DEFER    seed: work is deferred
//   FAKE_CUDA_SCARCE   an allocation waits for the device, as where PyTorch has to free memory; nothing is freed
//   FAKE_CUDA_ROOM     with FAKE_CUDA_DEFER: how many operations a stream holds before an enqueueing caller blocks
//   FAKE_CUDA_COPY_NS  nanoseconds that a copy between devices takes for each byte (default: 0)
//
// This file: streams, events, and the operations that are enqueued on a stream.
#pragma once

#include "graphs.h"

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace fake_cuda {

CUstream_st* make_stream(int device);
// Resolves a handle. The default stream of each device is a separate stream here, as torch assumes.
CUstream_st* stream_of(cudaStream_t stream);
long number(cudaStream_t stream);

// Enqueues an operation on a stream. It is logged as `kind stream rest`: now, or at every launch of the graph that
// captures it. `event` is the event of a record or wait.
cudaError_t enqueue(cudaStream_t given, const std::string& kind, const std::string& rest,
                    const std::function<void()>& run = {}, CUevent_st* event = nullptr);

}  // namespace fake_cuda
