#include "streams.h"

#include "devices.h"
#include "log.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <optional>
#include <random>

namespace fake_cuda {
namespace {

std::atomic<int64_t> num_events{0}, num_timed_events{0};  // created so far

// With FAKE_CUDA_LATE, returns true for half of the queries: on a GPU, work can be unfinished for any length of time.
bool answers_not_ready() {
  static const char* const seed = std::getenv("FAKE_CUDA_LATE");
  if (seed == nullptr) {
    return false;
  }
  const std::lock_guard<std::mutex> lock(mutex);
  static std::minstd_rand random(static_cast<unsigned>(std::atoi(seed)));
  return random() % 2 == 0;
}

// Returns whether a query reports completion. With deferred work, a query completes the task or reports it as
// unfinished, at random.
bool query(const TaskPtr& task) {
  if (answers_not_ready()) {
    return false;
  }
  if (is_complete(task)) {
    return true;
  }
  if (works_alone() || coin_flip()) {
    return false;
  }
  complete(task);
  return true;
}

double now() {
  const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now().time_since_epoch();
  return time.count();
}

// Returns an event's number and its number of records, as the log has them.
std::string place_of(cudaEvent_t event) {
  return text("%ld\t%ld", static_cast<long>(event->number), static_cast<long>(event->recorded));
}

// A query or synchronization of a stream or event under capture invalidates the capture.
cudaError_t check_not_captured(cudaStream_t stream) {
  const std::shared_ptr<Capture> capture = stream_of(stream)->capture;
  return capture ? invalidate(*capture, cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}
cudaError_t check_not_captured(cudaEvent_t event) {
  if (!event->capture) {
    return cudaSuccess;
  }
  return event->capture->active ? invalidate(*event->capture, cudaErrorCapturedEvent)
                                : fail(cudaErrorCapturedEvent);
}

}  // namespace

CUstream_st* make_stream(int device) {
  static std::atomic<int64_t> next{0};
  auto* const stream = new CUstream_st{device, next++};
  write("stream\t%ld\t%d", static_cast<long>(stream->number), device);
  return stream;
}

CUstream_st* stream_of(cudaStream_t stream) {
  if (stream != nullptr && stream != cudaStreamLegacy && stream != cudaStreamPerThread) {
    return stream;
  }
  static CUstream_st* const* const defaults = [] {
    auto** const made = new CUstream_st*[static_cast<size_t>(num_devices())];
    for (int device = 0; device < num_devices(); ++device) {
      made[device] = make_stream(device);
    }
    return made;
  }();
  return defaults[current_device];
}

long number(cudaStream_t stream) { return static_cast<long>(stream_of(stream)->number); }

cudaError_t enqueue(cudaStream_t given, const std::string& kind, const std::string& rest,
                    const std::function<void()>& run, CUevent_st* event) {
  CUstream_st* const stream = stream_of(given);
  const std::shared_ptr<Capture> capture = stream->capture;
  std::optional<Touch> touch;
  if (capture) touch.emplace(*capture);
  if (capture && !capture->valid) {
    return fail(cudaErrorStreamCaptureInvalidated);
  }
  if (kind != "record" && kind != "wait" && is_illegal()) {
    set_sticky_error();
  }
  if (!capture) {
    write("%s\t%ld\t%s", kind.c_str(), static_cast<long>(stream->number), rest.c_str());
  }
  if (run && !deferring()) {
    run();
  }
  if (capture) {
    const std::lock_guard<std::mutex> lock(mutex);
    const int64_t number = event != nullptr ? event->number : 0;
    capture->add({stream, kind, rest, number, event != nullptr ? event->recorded : 0, run});
  } else if (deferring() && (run || kind == "wait")) {
    defer(stream->queue, {event != nullptr ? event->task : nullptr}, run);
  }
  return cudaSuccess;
}

extern "C" {

// Called by operators/.

cudaError_t fake_cuda_access(cudaStream_t stream, const void* pointer, size_t bytes, int writes) {
  RETURN_IF_STICKY_ERROR()
  if (writes != 0) {
    record_write(stream, const_cast<void*>(pointer), bytes);
  }
  return enqueue(stream, writes != 0 ? "write" : "read", text("%p\t%zu", pointer, bytes));
}

// Called by fake_nccl.py, if work is deferred: later work of the stream waits until what is returned is released.

void* fake_cuda_hold(cudaStream_t stream) { return new TaskPtr(hold(stream_of(stream)->queue)); }
void fake_cuda_release(void* held) {
  const std::unique_ptr<TaskPtr> task(static_cast<TaskPtr*>(held));
  release(*task);
}

// Streams.

cudaError_t cudaDeviceSynchronize() {
  RETURN_IF_STICKY_ERROR()

  for (Capture* capture : captures()) {
    return invalidate(*capture, cudaErrorStreamCaptureUnsupported);
  }
  if (deferring()) {
    complete_device(current_device);
  }
  write("synchronize device\t%d", current_device);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned int, int) {
  RETURN_IF_STICKY_ERROR()

  *stream = make_stream(current_device);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int) {
  return cudaStreamCreateWithPriority(stream, 0, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t) {
  RETURN_IF_STICKY_ERROR()
  return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  RETURN_IF_STICKY_ERROR()

  if (const cudaError_t error = check_not_captured(stream); error != cudaSuccess) {
    return error;
  }
  if (!query(newest(stream_of(stream)->queue))) {
    return cudaErrorNotReady;
  }
  write("finished stream\t%ld", number(stream));
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  RETURN_IF_STICKY_ERROR()

  if (const cudaError_t error = check_not_captured(stream); error != cudaSuccess) {
    return error;
  }
  complete(newest(stream_of(stream)->queue));
  write("synchronize stream\t%ld", number(stream));
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int) {
  RETURN_IF_STICKY_ERROR()

  CUstream_st* const waiting = stream_of(stream);
  if (event->capture && !event->capture->active) {
    return fail(cudaErrorCapturedEvent);
  }
  if (waiting->capture && waiting->capture != event->capture) {
    return invalidate(*waiting->capture, cudaErrorStreamCaptureIsolation);
  }
  if (event->capture) {
    const std::lock_guard<std::mutex> lock(mutex);
    waiting->capture = event->capture;
    event->capture->join(waiting, event->clock);
  }
  if (event->time && !deferring()) waiting->lag = std::max(waiting->lag, *event->time - now());
  return enqueue(stream, "wait", place_of(event), {}, event);
}
// Events.

long fake_cuda_num_events() { return num_events; }
long fake_cuda_num_timed_events() { return num_timed_events; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int flags) {
  RETURN_IF_STICKY_ERROR()

  const bool timing = (flags & cudaEventDisableTiming) == 0;
  num_timed_events += timing;
  *event = new CUevent_st{current_device, num_events++, 0, timing, nullptr};
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  RETURN_IF_STICKY_ERROR()

  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  RETURN_IF_STICKY_ERROR()

  if (stream_of(stream)->device != event->device) {
    return fail(cudaErrorInvalidResourceHandle);
  }
  ++event->recorded;
  event->seen = false;
  event->time = std::make_shared<double>(0.0);
  std::function<void()> run;
  // Otherwise a record defers nothing.
  if (event->timing || !deferring()) {
    run = [time = event->time, on = stream_of(stream)] { *time = now() + on->lag; };
  }
  const cudaError_t done = enqueue(stream, "record", place_of(event), run, event);
  const std::lock_guard<std::mutex> lock(mutex);
  event->capture = stream_of(stream)->capture;
  if (event->capture) {
    event->clock = event->capture->clocks[stream_of(stream)];
    event->task = nullptr;
  } else {
    event->task = newest(stream_of(stream)->queue);
  }
  return done;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned int) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  RETURN_IF_STICKY_ERROR()

  if (const cudaError_t error = check_not_captured(event); error != cudaSuccess) {
    return error;
  }
  if (!event->seen && !query(event->task)) {
    return cudaErrorNotReady;
  }
  event->seen = true;
  write("finished event\t%s", place_of(event).c_str());
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  RETURN_IF_STICKY_ERROR()

  if (const cudaError_t error = check_not_captured(event); error != cudaSuccess) {
    return error;
  }
  complete(event->task);
  event->seen = true;
  write("synchronize event\t%s", place_of(event).c_str());
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  RETURN_IF_STICKY_ERROR()

  if (!begin->timing || !end->timing || begin->device != end->device)
    return fail(cudaErrorInvalidResourceHandle);
  if (!is_complete(begin->task) || !is_complete(end->task)) return fail(cudaErrorNotReady);
  // FAKE_CUDA_ELAPSED: the milliseconds between all events, so that tests do not depend on this machine's speed.
  const char* given = std::getenv("FAKE_CUDA_ELAPSED");
  *milliseconds = given != nullptr ? std::stof(given) : static_cast<float>(*end->time - *begin->time);
  return cudaSuccess;
}

}  // extern "C"

}  // namespace fake_cuda
