#include "graphs.h"

#include "deferred.h"
#include "devices.h"
#include "log.h"
#include "memory.h"
#include "streams.h"

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace fake_cuda {
namespace {

int64_t next_event_count() {
  static std::atomic<int64_t> next{int64_t{1} << 40};
  return next++;
}

// A graph's nodes, on queues of their own: in the order of the captured edges, after what is on the stream and after the
// last launch of the same graph. What comes on the stream comes after all of them.
void defer_nodes(CUgraphExec_st& executable, CUstream_st* stream) {
  const TaskPtr begin = defer(stream->queue, {executable.task}, {});
  std::map<CUstream_st*, std::shared_ptr<Queue>> queues;
  for (const auto& [member, clock] : executable.capture->clocks) {
    queues[member] = make_queue(member->device);
    defer(queues[member], {begin}, {});
  }
  std::map<std::pair<int64_t, int64_t>, TaskPtr> recorded;
  for (const Node& node : executable.capture->nodes) {
    const std::shared_ptr<Queue>& queue = queues.at(node.stream);
    if (node.kind == "record") {
      recorded[{node.event, node.count}] = newest(queue);
    } else if (node.kind == "wait") {
      defer(queue, {recorded.at({node.event, node.count})}, {});
    } else if (node.run) {
      defer(queue, {}, node.run);
    }
  }
  std::vector<TaskPtr> ends;
  for (const auto& [member, queue] : queues) {
    ends.push_back(newest(queue));
  }
  executable.task = defer(stream->queue, ends, {});
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
  const std::shared_ptr<Capture> capture = of(stream)->capture;
  if (capture && !deferring()) {
    const std::lock_guard<std::mutex> lock(mutex);
    capture->written.emplace_back(to, bytes);
  }
}

extern "C" {

// Before an operator changes it in place.
void fake_cuda_keep(cudaStream_t stream, const void* pointer, size_t bytes) {
  const std::shared_ptr<Capture> capture = of(stream)->capture;
  const Block* const block = block_of(pointer);
  if (!capture || block == nullptr || deferring()) {
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex);
  if (block->number < capture->num_allocated) {
    capture->kept.emplace_back(const_cast<void*>(pointer),
                               std::string(static_cast<const char*>(pointer), bytes));
  }
}

int fake_cuda_capturing(cudaStream_t stream) { return of(stream)->capture != nullptr ? 1 : 0; }
// Before an operator that draws numbers, in the order of the calls.
void fake_cuda_finish(cudaStream_t stream) { complete(newest(of(stream)->queue)); }
int fake_cuda_deferring() { return deferring() ? 1 : 0; }

// What an operator computes, at every launch of a graph that captures it, or else once and later.
void fake_cuda_node(cudaStream_t stream, void (*run)(void*), void (*drop)(void*), void* data) {
  const std::shared_ptr<void> owned(data, [=](void* data) { drop(data); });
  const std::shared_ptr<Capture> capture = of(stream)->capture;
  const std::function<void()> compute = [run, owned] { run(owned.get()); };
  if (!capture) {
    defer(of(stream)->queue, {}, compute);
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex);
  capture->add({of(stream), "", "", 0, 0, compute});
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  RETURN_IF_FAILED_FOR_GOOD()

  const std::shared_ptr<Capture> capture = of(stream)->capture;
  *status = !capture         ? cudaStreamCaptureStatusNone
            : capture->valid ? cudaStreamCaptureStatusActive
                             : cudaStreamCaptureStatusInvalidated;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t*, const cudaGraphNode_t**,
                                     const cudaGraphEdgeData**, size_t* count) {
  RETURN_IF_FAILED_FOR_GOOD()

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
  RETURN_IF_FAILED_FOR_GOOD()

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
  RETURN_IF_FAILED_FOR_GOOD()

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
  RETURN_IF_FAILED_FOR_GOOD()

  *count = graph->capture->nodes.size();
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  RETURN_IF_FAILED_FOR_GOOD()

  *executable = new CUgraphExec_st{graph->capture};
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  RETURN_IF_FAILED_FOR_GOOD()

  delete graph;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  RETURN_IF_FAILED_FOR_GOOD()

  delete executable;
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  RETURN_IF_FAILED_FOR_GOOD()
  RETURN_IF_NOT_CURRENT(stream)

  const Capture& graph = *executable->capture;
  if (planted("sticky")) {
    fail_for_good();
  }
  if (deferring()) {
    defer_nodes(*executable, of(stream));
  }
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
      const size_t site = node.rest.find('\t', node.rest.find('\t') + 1);
      rest = text("%ld\t%ld", static_cast<long>(node.event), found->second);
      rest += site != std::string::npos ? node.rest.substr(site) : "";
    }
    if (!node.kind.empty()) {
      write("%s\t%ld\t%s", node.kind.c_str(), streams.at(node.stream), rest.c_str());
    }
    if (node.run && !deferring()) {
      node.run();
    }
  }
  order(streams.at(graph.origin), number(stream));
  return cudaSuccess;
}

}  // extern "C"

}  // namespace fake_cuda
