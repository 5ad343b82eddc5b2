// Channels over process groups of torch.distributed: of gloo, which transfers host memory, or of NCCL, which transfers
// device memory.
//
// With gloo, tensors on a GPU go through pinned memory. A thread waits for the copy to the host, so that the stage's
// worker does not:
//
//   work stream    ──F0──┬────F1──────           in stream             ┌─copy─┐
//   out stream           └copy┐                  work stream           │      └──F0──
//   thread                    └send ─ ─ ─ ─ ─ ─ ▶ receive, waits ──────┘
#pragma once

#include "transport/channels.h"

#ifdef USE_C10D

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <utility>

namespace gpipe_fast {

// By sending and receiving stage, a group of those two alone; the sender has rank 0 in it.
using ProcessGroups = std::map<std::pair<int32_t, int32_t>, c10::intrusive_ptr<c10d::Backend>>;

// `stages`: those of this process. `timeout`: the maximum time of a wait. `on_device`: the groups transfer device memory.
// `replicas`: a group of the processes with these stages, which transfers the same memory; null if there are no others.
std::shared_ptr<Channels> make_channels(std::set<int32_t> stages, ProcessGroups groups,
                                        std::chrono::milliseconds timeout, bool on_device,
                                        c10::intrusive_ptr<c10d::Backend> replicas);

}  // namespace gpipe_fast

#endif
