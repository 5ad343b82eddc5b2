#include "graphs.h"

#include "devices.h"
#include "log.h"
#include "memory.h"
#include "streams.h"

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>

namespace fake_cuda {
namespace {

int64_t next_event_count() {
  static std::atomic<int64_t> next{int64_t{1} << 40};
  return next++;
}

}  // namespace

std::set<Capture*>& captures() {
  static auto* const found = new std::set<Capture*>;
  return *found;
}

cudaError_t invalidate(Capture& capture, cudaError_t error) {
  capture.valid = false;
  return fail(error);
}

void note_written(cudaStream_t stream, void* to, size_t bytes) {
  if (const std::shared_ptr<Capture> capture = of(stream)->capture) {
    const std::lock_guard<std::mutex> lock(mutex);
    capture->written.emplace_back(to, bytes);
  }
}

extern "C" {

// Before an operator changes it in place.
void fake_cuda_keep(cudaStream_t stream, const void* pointer, size_t bytes) {
  const std::shared_ptr<Capture> capture = of(stream)->capture;
  const Block* const block = block_of(pointer);
  if (!capture || block == nullptr) {
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex);
  if (block->number < capture->num_allocated) {
    capture->kept.emplace_back(const_cast<void*>(pointer),
                               std::string(static_cast<const char*>(pointer), bytes));
  }
}

// What an operator computes, again at every launch of a graph that captures it; null where none does.
int fake_cuda_capturing(cudaStream_t stream) { return of(stream)->capture != nullptr ? 1 : 0; }
void fake_cuda_node(cudaStream_t stream, void (*run)(void*), void* data) {
  const std::shared_ptr<Capture> capture = of(stream)->capture;
  const std::lock_guard<std::mutex> lock(mutex);
  capture->add({of(stream), "", "", 0, 0, [run, data] { run(data); }});
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  const std::shared_ptr<Capture> capture = of(stream)->capture;
  *status = !capture         ? cudaStreamCaptureStatusNone
            : capture->valid ? cudaStreamCaptureStatusActive
                             : cudaStreamCaptureStatusInvalidated;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t*, const cudaGraphNode_t**,
                                     const cudaGraphEdgeData**, size_t* count) {
  (void)cudaStreamIsCapturing(stream, status);
  if (id != nullptr) {
    *id = of(stream)->capture ? static_cast<unsigned long long>(of(stream)->capture->id) : 0;
  }
  if (count != nullptr) {
    *count = 0;
  }
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

// Graphs.

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  static std::atomic<int64_t> next{1};
  if (of(stream)->capture) {
    return fail(cudaErrorIllegalState);
  }
  auto capture = std::make_shared<Capture>();
  capture->origin = of(stream);
  capture->id = next++;
  const std::lock_guard<std::mutex> lock(mutex);
  capture->clocks[capture->origin];
  capture->num_allocated = num_blocks();
  captures().insert(capture.get());
  of(stream)->capture = std::move(capture);
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  const std::shared_ptr<Capture> capture = of(stream)->capture;
  *graph = nullptr;
  if (!capture || capture->origin != of(stream)) {
    return fail(cudaErrorStreamCaptureUnmatched);
  }
  capture->active = false;
  for (const auto& [pointer, bytes] : capture->written) {
    if (block_of(pointer) != nullptr) {
      std::memset(pointer, 0xff, bytes);
    }
  }
  for (auto kept = capture->kept.rbegin(); kept != capture->kept.rend(); ++kept) {
    if (block_of(kept->first) != nullptr) {
      std::memcpy(kept->first, kept->second.data(), kept->second.size());
    }
  }
  const std::lock_guard<std::mutex> lock(mutex);
  captures().erase(capture.get());
  for (auto& [member, clock] : capture->clocks) {
    member->capture.reset();
  }
  if (!capture->valid) {
    return fail(cudaErrorStreamCaptureInvalidated);
  }
  if (!capture->joined()) {
    return fail(cudaErrorStreamCaptureUnjoined);
  }
  *graph = new CUgraph_st{capture};
  return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = graph->capture->nodes.size();
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  *executable = new CUgraphExec_st{graph->capture};
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete executable;
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  const Capture& graph = *executable->capture;
  std::map<CUstream_st*, long> streams;
  for (const auto& [member, clock] : graph.clocks) {
    streams[member] = static_cast<long>(made_stream(member->device)->number);
  }
  const auto order = [](long before, long after) {
    const auto count = static_cast<long>(next_event_count());
    write("record\t%ld\t-1\t%ld", before, count);
    write("wait\t%ld\t-1\t%ld", after, count);
  };
  write("launch\t%ld", number(stream));
  order(number(stream), streams.at(graph.origin));
  std::map<std::pair<int64_t, int64_t>, long> counts;
  for (const Node& node : graph.nodes) {
    std::string rest = node.rest;
    if (node.kind == "record" || node.kind == "wait") {
      const auto [found, made] = counts.try_emplace({node.event, node.count}, 0);
      if (made) {
        found->second = static_cast<long>(next_event_count());
      }
      rest = text("%ld\t%ld", static_cast<long>(node.event), found->second);
    }
    if (!node.kind.empty()) {
      write("%s\t%ld\t%s", node.kind.c_str(), streams.at(node.stream), rest.c_str());
    }
    if (node.run) {
      node.run();
    }
  }
  order(streams.at(graph.origin), number(stream));
  return cudaSuccess;
}

}  // extern "C"

}  // namespace fake_cuda
