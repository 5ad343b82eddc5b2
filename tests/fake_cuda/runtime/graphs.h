// Capture of streams, and graphs.
//
// What is put on a stream that is being captured is done, so that operators return something, and noted as a node; when
// the capture ends, all that was written gets NaNs, since on a GPU nothing of it would have been computed; only what was
// changed in place in older memory, or might have been, is put back. A launch does
// the nodes again in their order. The log then has their lines, on streams and with events that are the launch's own.
#pragma once

#include "deferred.h"

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

struct Capture;

// Opaque in CUDA's headers: handles point to these.
struct CUstream_st {
  int device;
  int64_t number;
  std::shared_ptr<Capture> capture{};  // that is going on
  std::shared_ptr<fake_cuda::Queue> queue = fake_cuda::make_queue(device);
};
struct CUevent_st {
  int device;
  int64_t number;
  int64_t recorded;  // how many times
  bool timing;
  std::shared_ptr<Capture> capture;         // in which it was recorded last
  std::map<CUstream_st*, int64_t> clock{};  // of the nodes that come before it, by stream
  fake_cuda::TaskPtr task{};                // the one that it was recorded after
};

struct Node {
  CUstream_st* stream;
  std::string kind, rest;     // a line of the log; none for what is only done
  int64_t event, count;       // of what records or waits
  std::function<void()> run;  // nothing for lines only
};

struct Capture {
  CUstream_st* origin;
  int64_t id;
  bool valid = true;
  bool active = true;
  std::vector<Node> nodes;
  std::map<CUstream_st*, std::map<CUstream_st*, int64_t>> clocks;  // of each stream in it
  std::vector<std::pair<void*, size_t>> written;
  std::vector<std::pair<void*, std::string>> kept;  // what was there before, where that is to come back
  int64_t num_allocated = 0;                        // before it began

  void add(Node node) {
    ++clocks[node.stream][node.stream];
    nodes.push_back(std::move(node));
  }
  void join(CUstream_st* stream, const std::map<CUstream_st*, int64_t>& clock) {
    for (const auto& [other, place] : clock) {
      clocks[stream][other] = std::max(clocks[stream][other], place);
    }
  }
  // Whether everything comes before the end of the stream where it began.
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
  fake_cuda::TaskPtr task{};  // with which its last launch ends
};

namespace fake_cuda {

// Captures that are going on.
std::set<Capture*>& captures();

// Returns the error, after which nothing can be captured.
cudaError_t invalidate(Capture& capture, cudaError_t error);

// While a stream is captured nothing would be computed yet, so what is written is lost when the capture ends.
void note_written(cudaStream_t stream, void* to, size_t bytes);

}  // namespace fake_cuda
