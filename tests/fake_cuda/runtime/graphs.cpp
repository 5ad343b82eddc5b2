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

std::atomic<long> num_captures{0};

int64_t next_event_count() {
  static std::atomic<int64_t> next{int64_t{1} << 40};
  return next++;
}

// Enqueues a graph's nodes on new queues, in the order of the captured dependencies. They run after all earlier work
// of the stream and after the graph's latest launch; all later work of the stream runs after them.
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

void record_write(cudaStream_t stream, void* to, size_t bytes) {
  const std::shared_ptr<Capture> capture = stream_of(stream)->capture;
  if (capture && !deferring()) {
    const std::lock_guard<std::mutex> lock(mutex);
    capture->written.emplace_back(to, bytes);
  }
}

extern "C" {

// Saves memory before an operator changes it in place.
void fake_cuda_save(cudaStream_t stream, const void* pointer, size_t bytes) {
  const std::shared_ptr<Capture> capture = stream_of(stream)->capture;
  const Block* const block = block_of(pointer);
  if (!capture || block == nullptr || deferring()) {
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex);
  if (block->number < capture->num_allocated) {
    capture->saved.emplace_back(const_cast<void*>(pointer),
                                std::string(static_cast<const char*>(pointer), bytes));
  }
}

long fake_cuda_num_captures() { return num_captures; }

int fake_cuda_capturing(cudaStream_t stream) { return stream_of(stream)->capture != nullptr ? 1 : 0; }
// Completes the stream's work before an operator that draws random numbers, so that it draws in the order of the calls.
void fake_cuda_complete(cudaStream_t stream) { complete(newest(stream_of(stream)->queue)); }
int fake_cuda_deferring() { return deferring() ? 1 : 0; }

// Enqueues an operator's computation: at every launch of the graph that captures it; otherwise once, as deferred work.
void fake_cuda_enqueue(cudaStream_t stream, void (*run)(void*), void (*drop)(void*), void* data) {
  const std::shared_ptr<void> owned(data, [=](void* data) { drop(data); });
  const std::shared_ptr<Capture> capture = stream_of(stream)->capture;
  const std::function<void()> compute = [run, owned] { run(owned.get()); };
  if (!capture) {
    defer(stream_of(stream)->queue, {}, compute);
    return;
  }
  const Touch touch(*capture);
  const std::lock_guard<std::mutex> lock(mutex);
  capture->add({stream_of(stream), "", "", 0, 0, compute});
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  RETURN_IF_STICKY_ERROR()

  const std::shared_ptr<Capture> capture = stream_of(stream)->capture;
  *status = !capture         ? cudaStreamCaptureStatusNone
            : capture->valid ? cudaStreamCaptureStatusActive
                             : cudaStreamCaptureStatusInvalidated;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t*, const cudaGraphNode_t**,
                                     const cudaGraphEdgeData**, size_t* count) {
  RETURN_IF_STICKY_ERROR()

  (void)cudaStreamIsCapturing(stream, status);
  if (id != nullptr) {
    *id = stream_of(stream)->capture ? static_cast<unsigned long long>(stream_of(stream)->capture->id) : 0;
  }
  if (count != nullptr) {
    *count = 0;
  }
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

// Graphs.

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  RETURN_IF_STICKY_ERROR()

  if (stream_of(stream)->capture) {
    return fail(cudaErrorIllegalState);
  }
  auto capture = std::make_shared<Capture>();
  capture->origin = stream_of(stream);
  capture->id = ++num_captures;
  const std::lock_guard<std::mutex> lock(mutex);
  capture->clocks[capture->origin];
  capture->num_allocated = num_blocks_allocated();
  captures().insert(capture.get());
  stream_of(stream)->capture = std::move(capture);
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  RETURN_IF_STICKY_ERROR()

  const std::shared_ptr<Capture> capture = stream_of(stream)->capture;
  *graph = nullptr;
  if (!capture || capture->origin != stream_of(stream)) {
    return fail(cudaErrorStreamCaptureUnmatched);
  }
  capture->active = false;
  for (const auto& [pointer, bytes] : capture->written) {
    if (block_of(pointer) != nullptr) {
      std::memset(pointer, 0xff, bytes);
    }
  }
  for (auto saved = capture->saved.rbegin(); saved != capture->saved.rend(); ++saved) {
    if (block_of(saved->first) != nullptr) {
      std::memcpy(saved->first, saved->second.data(), saved->second.size());
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
  RETURN_IF_STICKY_ERROR()

  *count = graph->capture->nodes.size();
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  RETURN_IF_STICKY_ERROR()

  *executable = new CUgraphExec_st{graph->capture};
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph,
                                          unsigned long long flags) {
  return cudaGraphInstantiate(executable, graph, flags);
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  RETURN_IF_STICKY_ERROR()

  delete graph;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  RETURN_IF_STICKY_ERROR()

  delete executable;
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  RETURN_IF_STICKY_ERROR()
  RETURN_IF_NOT_CURRENT(stream)

  const Capture& graph = *executable->capture;
  if (is_illegal()) {
    set_sticky_error();
  }
  if (deferring()) {
    defer_nodes(*executable, stream_of(stream));
  }
  std::map<CUstream_st*, long> streams;
  for (const auto& [member, clock] : graph.clocks) {
    streams[member] = static_cast<long>(make_stream(member->device)->number);
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
    if (node.run && !deferring()) {
      node.run();
    }
  }
  order(streams.at(graph.origin), number(stream));
  return cudaSuccess;
}

}  // extern "C"

}  // namespace fake_cuda
