#include "memory.h"

#include "deferred.h"
#include "devices.h"
#include "log.h"
#include "streams.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

namespace fake_cuda {
namespace {

int64_t num_allocated = 0;

std::map<uintptr_t, Block>& blocks() {
  static auto* const found = new std::map<uintptr_t, Block>;
  return *found;
}

size_t free_bytes(int device) {
  const std::lock_guard<std::mutex> lock(mutex);
  size_t used = 0;
  for (const auto& [address, block] : blocks()) {
    used += block.device == device ? block.bytes : 0;
  }
  return memory_bytes() - used;
}

bool is_scarce() {
  static const bool found = std::getenv("FAKE_CUDA_SCARCE") != nullptr;
  return found;
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
  if (device >= 0 && is_scarce()) {
    complete_device(device);
  }
  if (deferring()) {
    std::memset(*pointer, 0xff, rounded);  // NaNs, so that a read before the first write gives wrong bits
  }
  {
    const std::lock_guard<std::mutex> lock(mutex);
    blocks()[reinterpret_cast<uintptr_t>(*pointer)] = {rounded, device, num_allocated++};
  }
  write("malloc\t%d\t%p\t%zu", device, *pointer, rounded);
  return cudaSuccess;
}

cudaError_t deallocate(void* pointer) {
  if (pointer == nullptr || is_scarce()) {
    return cudaSuccess;
  }
  if (deferring()) {
    complete_everything();
  }
  Block block;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = blocks().find(reinterpret_cast<uintptr_t>(pointer));
    block = found->second;
    blocks().erase(found);
  }
  write("free\t%p", pointer);
  std::free(pointer);
  return cudaSuccess;
}

std::string copy_kind(const Block* target, const Block* source) {
  const auto word = [](const Block* block) { return block == nullptr ? 'h' : block->device < 0 ? 'p' : 'd'; };
  return {word(source), '2', word(target)};
}

// Copies as a peer whose copies arrive wrong.
void damage(void* to, const void* from, size_t bytes) {
  const char* given = std::getenv("FAKE_CUDA_DAMAGE");
  const std::string kind = given == nullptr ? "bit" : given;
  if (kind == "zeros") {
    std::memset(to, 0, bytes);
  } else if (kind == "bit" || kind == "tail") {
    std::memmove(to, from, bytes);
    static_cast<char*>(to)[kind == "bit" ? bytes / 3 : bytes - 1] ^= 4;
  }  // else "none": nothing arrives
}

cudaError_t copy(void* to, const void* from, size_t bytes, cudaStream_t stream) {
  const Block* const target = block_of(to);
  const Block* const source = block_of(from);
  const bool between = target != nullptr && source != nullptr && target->device >= 0 && source->device >= 0 &&
                       target->device != source->device;
  const std::string kind = copy_kind(target, source);
  if (stream_of(stream)->capture && kind.find('h') != std::string::npos) {
    return invalidate(*stream_of(stream)->capture, cudaErrorStreamCaptureUnsupported);
  }
  record_write(stream, to, bytes);
  const std::string line = text("%s\t%p\t%p\t%zu", kind.c_str(), to, from, bytes);
  static const char* const delay = std::getenv("FAKE_CUDA_COPY_NS");
  const std::chrono::duration<double, std::milli> latency = std::chrono::nanoseconds(
      between && delay != nullptr ? std::atoll(delay) * static_cast<long long>(bytes) : 0);
  CUstream_st* const on = stream_of(stream);
  const bool wrong = between && copies_arrive_wrong(source->device, target->device);
  std::function<void()> run = [=] {
    on->lag += latency.count();
    if (wrong) {
      damage(to, from, bytes);
    } else {
      std::memmove(to, from, bytes);
    }
  };
  if (deferring() && source == nullptr) {  // pageable memory, which the caller may change after the call
    const auto staged = std::make_shared<const std::string>(static_cast<const char*>(from), bytes);
    run = [=] { std::memcpy(to, staged->data(), bytes); };
  }
  const cudaError_t done = enqueue(stream, "copy", line, run);
  if (target == nullptr) {
    complete(
        newest(stream_of(stream)->queue));  // a copy to pageable memory is complete when the call returns
  }
  return done;
}

cudaError_t set(void* to, int value, size_t bytes, cudaStream_t stream) {
  record_write(stream, to, bytes);
  return enqueue(stream, "memset", text("%p\t%zu", to, bytes), [=] { std::memset(to, value, bytes); });
}

}  // namespace

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

int64_t num_blocks_allocated() { return num_allocated; }

extern "C" {

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  RETURN_IF_STICKY_ERROR()
  return allocate(pointer, bytes, current_device);
}
cudaError_t cudaFree(void* pointer) {
  RETURN_IF_STICKY_ERROR()
  return deallocate(pointer);
}
cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned int) {
  RETURN_IF_STICKY_ERROR()
  return allocate(pointer, bytes, -1);
}
cudaError_t cudaMallocHost(void** pointer, size_t bytes) { return cudaHostAlloc(pointer, bytes, 0); }
cudaError_t cudaFreeHost(void* pointer) { return cudaFree(pointer); }
cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned int) {
  RETURN_IF_STICKY_ERROR()

  const std::lock_guard<std::mutex> lock(mutex);
  blocks()[reinterpret_cast<uintptr_t>(pointer)] = {bytes, -1, num_allocated++};
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* pointer) {
  RETURN_IF_STICKY_ERROR()

  const std::lock_guard<std::mutex> lock(mutex);
  blocks().erase(reinterpret_cast<uintptr_t>(pointer));
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
  RETURN_IF_STICKY_ERROR()

  *available = free_bytes(current_device);
  *total = memory_bytes();
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* pointer) {
  RETURN_IF_STICKY_ERROR()

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
  RETURN_IF_STICKY_ERROR()

  return copy(to, from, bytes, stream);
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream);
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  RETURN_IF_STICKY_ERROR()

  const cudaError_t done = copy(to, from, bytes, nullptr);
  complete(newest(stream_of(nullptr)->queue));
  write("synchronize stream\t%ld", number(nullptr));
  return done;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  RETURN_IF_STICKY_ERROR()

  return set(to, value, bytes, stream);
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  RETURN_IF_STICKY_ERROR()
  return set(to, value, bytes, nullptr);
}

}  // extern "C"

}  // namespace fake_cuda
