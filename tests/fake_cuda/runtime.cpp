// A CUDA runtime without a GPU: preloaded before libcudart, it gives a process devices whose memory is the host's.
//
// Copies and memsets move bytes at once, in the order of their calls. What they would do in time on a GPU is in the
// log: which thread put what on which stream, what waited for which event, and which bytes were read and written;
// tests/fake_cuda/check.py reads it. Kernels are logged and do not run; operators of ATen that would launch them are
// computed by those of the CPU (operators.cpp).
//
// The environment: FAKE_CUDA_DEVICES how many there are (4), FAKE_CUDA_PEERS which reach another's memory: all without
// it, none if it is 0, else those named (0-1,1-0), or all by what they say, where it then fails (unplugged),
// FAKE_CUDA_LOG the file (none without it), FAKE_CUDA_LATE a seed: events then are found unfinished at times,
// FAKE_CUDA_MEMORY how many bytes each device has (1 TiB): no more can be allocated.

#include "faults.h"
#include "graphs.h"

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <tuple>

namespace {

// Of each device.
size_t memory_bytes() {
  static const size_t bytes = [] {
    const char* given = std::getenv("FAKE_CUDA_MEMORY");
    return given != nullptr ? std::strtoull(given, nullptr, 10) : size_t{1} << 40;
  }();
  return bytes;
}

int num_devices() {
  static const int number = [] {
    const char* given = std::getenv("FAKE_CUDA_DEVICES");
    return given != nullptr ? std::atoi(given) : 4;
  }();
  return number;
}

bool says_it_reaches(int device, int other) {
  const char* given = std::getenv("FAKE_CUDA_PEERS");
  const std::string all = given == nullptr ? "unplugged" : given;
  const std::string pair = std::to_string(device) + "-" + std::to_string(other);
  return device != other && (all == "unplugged" || all.find(pair) != std::string::npos);
}

bool unplugged() {
  const char* given = std::getenv("FAKE_CUDA_PEERS");
  return given != nullptr && std::string(given) == "unplugged";
}

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;

cudaError_t fail(cudaError_t error) {
  last_error = error;
  return error;
}

// Whoever holds this writes a line; its order is that in which calls were made.
std::mutex mutex;

FILE* log_file() {
  static FILE* const file = [] {
    const char* path = std::getenv("FAKE_CUDA_LOG");
    return path != nullptr ? std::fopen(path, "w") : nullptr;
  }();
  return file;
}

int64_t thread_number() {
  static std::atomic<int64_t> next{0};
  thread_local const int64_t number = next++;
  return number;
}

// A line: thread, then words between tabs.
void write(const char* format, ...) {
  FILE* const file = log_file();
  if (file == nullptr) {
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex);
  std::fprintf(file, "%ld\t", static_cast<long>(thread_number()));
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(file, format, arguments);
  va_end(arguments);
  std::fputc('\n', file);
  std::fflush(file);
}

Faults faults;  // see fake_cuda_plant

bool planted(const char* kind) {
  if (!faults.now(kind)) {
    return false;
  }
  write("mark\tplanted %s", kind);
  return true;
}

// Blocks of memory, by address.
struct Block {
  size_t bytes;
  int device;      // -1: of the host, pinned
  int64_t number;  // counted up
};

int64_t num_allocated = 0;

std::map<uintptr_t, Block>& blocks() {
  static auto* const found = new std::map<uintptr_t, Block>;
  return *found;
}

const Block* block_of(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  const std::lock_guard<std::mutex> lock(mutex);
  auto after = blocks().upper_bound(address);
  if (after == blocks().begin()) {
    return nullptr;
  }
  --after;
  return address < after->first + after->second.bytes ? &after->second : nullptr;
}

size_t free_bytes(int device) {
  const std::lock_guard<std::mutex> lock(mutex);
  size_t used = 0;
  for (const auto& [address, block] : blocks()) {
    used += block.device == device ? block.bytes : 0;
  }
  return memory_bytes() - used;
}

cudaError_t allocate(void** pointer, size_t bytes, int device) {
  constexpr size_t kAlignment = 512;
  const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  if (device >= 0 && rounded > free_bytes(device)) {
    return fail(cudaErrorMemoryAllocation);
  }
  *pointer = std::aligned_alloc(kAlignment, rounded == 0 ? kAlignment : rounded);
  if (*pointer == nullptr) {
    return fail(cudaErrorMemoryAllocation);
  }
  {
    const std::lock_guard<std::mutex> lock(mutex);
    blocks()[reinterpret_cast<uintptr_t>(*pointer)] = {rounded, device, num_allocated++};
  }
  write("malloc\t%d\t%p\t%zu", device, *pointer, rounded);
  return cudaSuccess;
}

cudaError_t deallocate(void* pointer) {
  if (pointer == nullptr) {
    return cudaSuccess;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex);
    blocks().erase(reinterpret_cast<uintptr_t>(pointer));
  }
  write("free\t%p", pointer);
  std::free(pointer);
  return cudaSuccess;
}

CUstream_st* made_stream(int device) {
  static std::atomic<int64_t> next{0};
  auto* const stream = new CUstream_st{device, next++, nullptr};
  write("stream\t%ld\t%d", static_cast<long>(stream->number), device);
  return stream;
}

// The default stream of each device is a stream of its own here, as torch takes it.
CUstream_st* of(cudaStream_t stream) {
  if (stream != nullptr && stream != cudaStreamLegacy && stream != cudaStreamPerThread) {
    return stream;
  }
  static CUstream_st* const* const defaults = [] {
    auto** const made = new CUstream_st*[static_cast<size_t>(num_devices())];
    for (int device = 0; device < num_devices(); ++device) {
      made[device] = made_stream(device);
    }
    return made;
  }();
  return defaults[current_device];
}

long number(cudaStream_t stream) { return static_cast<long>(of(stream)->number); }

// Events may be unfinished for as long as a GPU likes; here for some of the questions.
bool late() {
  static const char* const seed = std::getenv("FAKE_CUDA_LATE");
  if (seed == nullptr) {
    return false;
  }
  const std::lock_guard<std::mutex> lock(mutex);
  static std::minstd_rand random(static_cast<unsigned>(std::atoi(seed)));
  return random() % 2 == 0;
}

const char* kind_name(const void* to, const void* from) {
  const Block* const target = block_of(to);
  const Block* const source = block_of(from);
  const auto word = [](const Block* block) { return block == nullptr ? 'h' : block->device < 0 ? 'p' : 'd'; };
  static const std::map<std::pair<char, char>, const char*> names = {
      {{'h', 'h'}, "h2h"}, {{'h', 'p'}, "h2p"}, {{'h', 'd'}, "h2d"}, {{'p', 'h'}, "p2h"}, {{'p', 'p'}, "p2p"},
      {{'p', 'd'}, "p2d"}, {{'d', 'h'}, "d2h"}, {{'d', 'p'}, "d2p"}, {{'d', 'd'}, "d2d"}};
  return names.at({word(source), word(target)});
}

std::string text(const char* format, ...) {
  char found[256];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(found, sizeof(found), format, arguments);
  va_end(arguments);
  return found;
}

cudaError_t invalidate(Capture& capture, cudaError_t error) {
  capture.valid = false;
  return fail(error);
}

// Something on a stream: `kind stream rest` in the log, now or whenever a graph is launched that captures it.
cudaError_t put(cudaStream_t given, const std::string& kind, const std::string& rest,
                const std::function<void()>& run = {}, int64_t event = 0, int64_t count = 0) {
  CUstream_st* const stream = of(given);
  const std::shared_ptr<Capture> capture = stream->capture;
  if (capture && !capture->valid) {
    return fail(cudaErrorStreamCaptureInvalidated);
  }
  if (!capture) {
    write("%s\t%ld\t%s", kind.c_str(), static_cast<long>(stream->number), rest.c_str());
  }
  if (run) {
    run();
  }
  if (capture) {
    const std::lock_guard<std::mutex> lock(mutex);
    capture->add({stream, kind, rest, event, count, run});
  }
  return cudaSuccess;
}

// In a capture, which would compute nothing yet.
void note_written(cudaStream_t stream, void* to, size_t bytes) {
  if (const std::shared_ptr<Capture> capture = of(stream)->capture) {
    const std::lock_guard<std::mutex> lock(mutex);
    capture->written.emplace_back(to, bytes);
  }
}

std::atomic<cudaStream_t> computed_last{nullptr};

cudaError_t copy(void* to, const void* from, size_t bytes, cudaStream_t stream, const char* how) {
  const Block* const target = block_of(to);
  const Block* const source = block_of(from);
  const bool between = target != nullptr && source != nullptr && target->device >= 0 && source->device >= 0 &&
                       target->device != source->device;
  if (between && planted("misplaced")) {
    stream = computed_last;
  }
  const std::string kind = kind_name(to, from);
  if (of(stream)->capture && kind.find('h') != std::string::npos) {
    return invalidate(*of(stream)->capture, cudaErrorStreamCaptureUnsupported);
  }
  note_written(stream, to, bytes);
  return put(stream, how, text("%s\t%p\t%p\t%zu", kind.c_str(), to, from, bytes),
             [=] { std::memmove(to, from, bytes); });
}

cudaError_t set(void* to, int value, size_t bytes, cudaStream_t stream) {
  note_written(stream, to, bytes);
  return put(stream, "memset", text("%p\t%zu", to, bytes), [=] { std::memset(to, value, bytes); });
}

// Whatever the host asks of a stream that is being captured ends the capture.
cudaError_t ask(cudaStream_t stream) {
  const std::shared_ptr<Capture> capture = of(stream)->capture;
  return capture ? invalidate(*capture, cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}
cudaError_t ask(cudaEvent_t event) {
  if (!event->capture) {
    return cudaSuccess;
  }
  return event->capture->active ? invalidate(*event->capture, cudaErrorCapturedEvent)
                                : fail(cudaErrorCapturedEvent);
}

std::set<Capture*>& captures() {
  static auto* const found = new std::set<Capture*>;
  return *found;
}

int64_t next_event_count() {
  static std::atomic<int64_t> next{int64_t{1} << 40};
  return next++;
}

std::set<std::pair<int, int>>& enabled_peers() {
  static auto* const found = new std::set<std::pair<int, int>>;
  return *found;
}

}  // namespace

extern "C" {

// For operators.cpp and for marks of the tests.

void fake_cuda_access(cudaStream_t stream, const void* pointer, size_t bytes, int writes) {
  computed_last = stream;
  if (writes != 0) {
    note_written(stream, const_cast<void*>(pointer), bytes);
  }
  (void)put(stream, writes != 0 ? "write" : "read", text("%p\t%zu", pointer, bytes));
}

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

void fake_cuda_mark(const char* text) {
  faults.mark(text);
  write("mark\t%s", text);
}

void fake_cuda_plant(const char* fault) { faults.plant(fault); }

// Devices.

cudaError_t cudaGetDeviceCount(int* count) {
  *count = num_devices();
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= num_devices()) {
    return fail(cudaErrorInvalidDevice);
  }
  current_device = device;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int device) {
  std::memset(found, 0, sizeof(*found));
  std::snprintf(found->name, sizeof(found->name), "Fake GPU");
  found->totalGlobalMem = memory_bytes();
  found->major = 9;
  found->minor = 0;
  found->multiProcessorCount = 132;
  found->maxThreadsPerMultiProcessor = 2048;
  found->maxThreadsPerBlock = 1024;
  found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
  found->maxThreadsDim[2] = 64;
  found->maxGridSize[0] = 2147483647;
  found->maxGridSize[1] = found->maxGridSize[2] = 65535;
  found->warpSize = 32;
  found->regsPerBlock = found->regsPerMultiprocessor = 65536;
  found->sharedMemPerBlock = 49152;
  found->sharedMemPerMultiprocessor = 233472;
  found->sharedMemPerBlockOptin = 232448;
  found->l2CacheSize = 50 << 20;
  found->unifiedAddressing = 1;
  found->pciBusID = device;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = 132;
      break;
    case cudaDevAttrWarpSize:
      *value = 32;
      break;
    case cudaDevAttrMaxThreadsPerBlock:
      *value = 1024;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = 232448;
      break;
    case cudaDevAttrUnifiedAddressing:
      *value = 1;
      break;
    default:
      *value = 0;
  }
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  std::snprintf(text, static_cast<size_t>(length), "0000:%02x:00.0", device);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int other) {
  *can = says_it_reaches(device, other) ? 1 : 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int other, unsigned int) {
  if (unplugged() || !says_it_reaches(current_device, other)) {
    return fail(cudaErrorPeerAccessUnsupported);
  }
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (!enabled_peers().insert({current_device, other}).second) {
      return fail(cudaErrorPeerAccessAlreadyEnabled);
    }
  }
  write("peer\t%d\t%d", current_device, other);
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  for (Capture* capture : captures()) {
    return invalidate(*capture, cudaErrorStreamCaptureUnsupported);
  }
  write("synchronize device\t%d", current_device);
  return cudaSuccess;
}

// Errors.

cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() { return last_error; }

// Memory.

cudaError_t cudaMalloc(void** pointer, size_t bytes) { return allocate(pointer, bytes, current_device); }
cudaError_t cudaFree(void* pointer) { return deallocate(pointer); }
cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned int) { return allocate(pointer, bytes, -1); }
cudaError_t cudaMallocHost(void** pointer, size_t bytes) { return allocate(pointer, bytes, -1); }
cudaError_t cudaFreeHost(void* pointer) { return deallocate(pointer); }
cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned int) {
  const std::lock_guard<std::mutex> lock(mutex);
  blocks()[reinterpret_cast<uintptr_t>(pointer)] = {bytes, -1, num_allocated++};
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* pointer) {
  const std::lock_guard<std::mutex> lock(mutex);
  blocks().erase(reinterpret_cast<uintptr_t>(pointer));
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
  *available = free_bytes(current_device);
  *total = memory_bytes();
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* pointer) {
  std::memset(found, 0, sizeof(*found));
  const Block* const block = block_of(pointer);
  found->type = block == nullptr    ? cudaMemoryTypeUnregistered
                : block->device < 0 ? cudaMemoryTypeHost
                                    : cudaMemoryTypeDevice;
  found->device = block == nullptr ? -1 : std::max(block->device, 0);
  found->devicePointer = block == nullptr ? nullptr : const_cast<void*>(pointer);
  found->hostPointer = block != nullptr && block->device < 0 ? const_cast<void*>(pointer) : nullptr;
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return copy(to, from, bytes, stream, "copy");
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  return copy(to, from, bytes, stream, "copy");
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  const cudaError_t done = copy(to, from, bytes, nullptr, "copy");
  write("synchronize stream\t%ld", number(nullptr));
  return done;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  return set(to, value, bytes, stream);
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) { return set(to, value, bytes, nullptr); }

// Streams.

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned int, int) {
  *stream = made_stream(current_device);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int) {
  *stream = made_stream(current_device);
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = made_stream(current_device);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (const cudaError_t error = ask(stream); error != cudaSuccess) {
    return error;
  }
  if (late()) {
    return cudaErrorNotReady;
  }
  write("finished stream\t%ld", number(stream));
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (const cudaError_t error = ask(stream); error != cudaSuccess) {
    return error;
  }
  write("synchronize stream\t%ld", number(stream));
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int) {
  if (planted("dropped")) {
    return cudaSuccess;
  }
  if (planted("hosted")) {
    return cudaEventSynchronize(event);
  }
  CUstream_st* const waiting = of(stream);
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
  return put(stream, "wait",
             text("%ld\t%ld", static_cast<long>(event->number), static_cast<long>(event->recorded)), {},
             event->number, event->recorded);
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
  capture->num_allocated = num_allocated;
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

// Events.

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int flags) {
  static std::atomic<int64_t> next{0};
  *event = new CUevent_st{current_device, next++, 0, (flags & cudaEventDisableTiming) == 0, nullptr};
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (of(stream)->device != event->device) {
    return fail(cudaErrorInvalidResourceHandle);
  }
  if (planted("stale")) {
    return cudaSuccess;
  }
  ++event->recorded;
  const cudaError_t done =
      put(stream, "record",
          text("%ld\t%ld", static_cast<long>(event->number), static_cast<long>(event->recorded)), {},
          event->number, event->recorded);
  const std::lock_guard<std::mutex> lock(mutex);
  event->capture = of(stream)->capture;
  if (event->capture) {
    event->clock = event->capture->clocks[of(stream)];
  }
  return done;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned int) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (planted("early")) {
    return cudaSuccess;
  }
  if (const cudaError_t error = ask(event); error != cudaSuccess) {
    return error;
  }
  if (late()) {
    return cudaErrorNotReady;
  }
  write("finished event\t%ld\t%ld", static_cast<long>(event->number), static_cast<long>(event->recorded));
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (const cudaError_t error = ask(event); error != cudaSuccess) {
    return error;
  }
  write("synchronize event\t%ld\t%ld", static_cast<long>(event->number), static_cast<long>(event->recorded));
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 1.0F;
  return cudaSuccess;
}

// The driver. The library also has its name, so that it is found where one is looked for; hardly any of it is there.

int fake_cuda_no_driver_call() { return 801; }  // CUDA_ERROR_NOT_SUPPORTED

int cuDevicePrimaryCtxGetState(int, unsigned int* flags, int* active) {
  *flags = 0;
  *active = 1;
  return 0;
}
int cuGetErrorString(int, const char** text) {
  *text = "not there in a fake driver";
  return 0;
}
int cuLaunchKernel(void* kernel, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int,
                   unsigned int, unsigned int, cudaStream_t stream, void**, void**) {
  (void)put(stream, "kernel", text("%p", kernel));
  return 0;
}

#define NO_DRIVER_CALL(NAME) \
  int NAME() { return fake_cuda_no_driver_call(); }
NO_DRIVER_CALL(cuCtxGetCurrent)
NO_DRIVER_CALL(cuCtxSetCurrent)
NO_DRIVER_CALL(cuDeviceGet)
NO_DRIVER_CALL(cuDeviceGetAttribute)
NO_DRIVER_CALL(cuDevicePrimaryCtxRetain)
NO_DRIVER_CALL(cuFuncGetAttribute)
NO_DRIVER_CALL(cuFuncSetAttribute)
NO_DRIVER_CALL(cuFuncSetCacheConfig)
NO_DRIVER_CALL(cuLaunchCooperativeKernel)
NO_DRIVER_CALL(cuLinkAddData_v2)
NO_DRIVER_CALL(cuLinkComplete)
NO_DRIVER_CALL(cuLinkCreate_v2)
NO_DRIVER_CALL(cuModuleGetFunction)
NO_DRIVER_CALL(cuModuleLoad)
NO_DRIVER_CALL(cuModuleLoadData)
NO_DRIVER_CALL(cuModuleLoadDataEx)
NO_DRIVER_CALL(cuModuleUnload)
NO_DRIVER_CALL(cuOccupancyMaxActiveBlocksPerMultiprocessor)
NO_DRIVER_CALL(cuPointerGetAttribute)
NO_DRIVER_CALL(cuTensorMapEncodeTiled)
#undef NO_DRIVER_CALL

cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned int, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = reinterpret_cast<void*>(&fake_cuda_no_driver_call);
  if (result != nullptr) {
    *result = cudaDriverEntryPointSuccess;
  }
  return cudaSuccess;
}

// Kernels do not run.

cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return put(stream, "kernel", text("%p", kernel));
}
// As newer headers have it.
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return put(stream, "kernel", text("%p", static_cast<const void*>(kernel)));
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void**) {
  return put(config->stream, "kernel", text("%p", kernel));
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  std::memset(found, 0, sizeof(*found));
  found->maxThreadsPerBlock = 1024;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void*, int, size_t,
                                                                   unsigned int) {
  *count = 2;
  return cudaSuccess;
}

}  // extern "C"
