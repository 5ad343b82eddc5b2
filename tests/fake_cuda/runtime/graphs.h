// Stream capture and graphs.
//
// An operation that is enqueued during a capture is executed, so that operators return results, and recorded as a
// node. When the capture ends, all memory that it wrote is filled with NaNs, since a GPU would not have computed
// anything; memory that is older than the capture and may have been changed in place is restored. A launch executes
// the nodes again in their order and logs them on new streams with new events.
//
// Two threads that enqueue work into one capture at the same time invalidate it: CUDA does not synchronize accesses to
// a graph.
#pragma once

#include "deferred.h"

#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

struct Capture;

// These types are opaque in CUDA's headers; handles point to them.
struct CUstream_st {
  int device;
  int64_t number;
  std::shared_ptr<Capture> capture{};  // the active capture, or null
  std::shared_ptr<fake_cuda::Queue> queue = fake_cuda::make_queue(device);
  double lag =
      0.0;  // milliseconds by which its work is behind the host, which computes at once; only copies take long
};
struct CUevent_st {
  int device;
  int64_t number;
  int64_t recorded;  // number of records
  bool timing;
  std::shared_ptr<Capture> capture;         // the capture of the latest record, or null
  std::map<CUstream_st*, int64_t> clock{};  // vector clock of the latest record: number of nodes by stream
  fake_cuda::TaskPtr task{};                // the task after which the event was recorded
  std::shared_ptr<double> time{};           // milliseconds at which it completed; null before it was recorded
  bool seen = false;                        // a query or synchronization has found its latest record complete
};

struct Node {
  CUstream_st* stream;
  std::string kind, rest;     // the line of the log; empty for nodes that are not logged
  int64_t event, count;       // the event of a record or wait
  std::function<void()> run;  // empty for nodes that are only logged
};

struct Capture {
  CUstream_st* origin;
  int64_t id;
  std::atomic<bool> valid = true;
  bool active = true;
  std::atomic<std::thread::id> toucher{};  // the thread that is enqueuing work
  std::vector<Node> nodes;
  std::map<CUstream_st*, std::map<CUstream_st*, int64_t>> clocks;  // vector clock of each captured stream
  std::vector<std::pair<void*, size_t>> written;
  std::vector<std::pair<void*, std::string>> saved;  // contents to restore when the capture ends
  int64_t num_allocated = 0;                         // blocks allocated before the capture began

  void add(Node node) {
    ++clocks[node.stream][node.stream];
    nodes.push_back(std::move(node));
  }
  void join(CUstream_st* stream, const std::map<CUstream_st*, int64_t>& clock) {
    for (const auto& [other, place] : clock) {
      clocks[stream][other] = std::max(clocks[stream][other], place);
    }
  }
  // Returns whether all captured streams have joined the stream on which the capture began.
  bool joined() {
    for (const auto& [stream, clock] : clocks) {
      if (clocks[origin][stream] < clock.at(stream)) {
        return false;
      }
    }
    return true;
  }
};

struct CUgraph_st {
  std::shared_ptr<Capture> capture;
};
struct CUgraphExec_st {
  std::shared_ptr<Capture> capture;
  fake_cuda::TaskPtr task{};  // the last task of the latest launch
};

namespace fake_cuda {

// While it lives, its thread enqueues work into a capture. It lasts a while, so that another thread is likely to try
// the same. A thread may nest them: kernels that are interpreted enqueue their accesses.
class Touch {
 public:
  explicit Touch(Capture& capture) : capture_(capture) {
    std::thread::id other{};
    is_outermost_ = capture.toucher.compare_exchange_strong(other, std::this_thread::get_id());
    if (!is_outermost_ && other != std::this_thread::get_id()) capture.valid = false;
    if (is_outermost_) std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  ~Touch() {
    if (is_outermost_) capture_.toucher = std::thread::id();
  }
  Touch(const Touch&) = delete;
  Touch& operator=(const Touch&) = delete;

 private:
  Capture& capture_;
  bool is_outermost_;
};

// Returns how many captures have begun. Tests call it.
extern "C" long fake_cuda_num_captures();

// Returns the active captures.
std::set<Capture*>& captures();

// Invalidates the capture, and returns the error.
cudaError_t invalidate(Capture& capture, cudaError_t error);

// During a capture, records that memory is written: a GPU would not write it yet, so its contents are lost when the
// capture ends.
void record_write(cudaStream_t stream, void* to, size_t bytes);

}  // namespace fake_cuda
