#include "program/caching_allocator.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <pthread.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

namespace gpipe_fast {
namespace {

constexpr size_t kMinBytes = 32 * 1024;  // the C library caches smaller blocks itself
constexpr size_t kGranularity = 4096;

thread_local CachingAllocator* active = nullptr;

// Wraps PyTorch's CPU allocator: forwards every request except large ones in the scope of a caching allocator.
class Allocator final : public c10::Allocator {
 public:
  explicit Allocator(c10::Allocator* original) : original_(original) {}

  c10::DataPtr allocate(size_t bytes) override {
    if (active == nullptr || bytes < kMinBytes) return original_->allocate(bytes);
    void* data = active->allocate_block(bytes);
    return {data, data, &CachingAllocator::free_block, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return original_->raw_deleter(); }
  void copy_data(void* destination, const void* source, size_t bytes) const override {
    original_->copy_data(destination, source, bytes);
  }

 private:
  c10::Allocator* original_;
};

// Installs the wrapper on first use, for the lifetime of the process, because tensors keep pointers to it.
void install() {
  static const bool installed = [] {
    c10::SetCPUAllocator(new Allocator(c10::GetCPUAllocator()), 255);
    return true;
  }();
  (void)installed;
}

// The allocator that owns a block, and the block's size. Stored outside of the block, so that a block is identical to
// one from PyTorch's own allocator: raw_deallocate() frees it correctly, and only leaks its entry here.
struct Owner {
  size_t size;
  std::shared_ptr<CachingAllocator> allocator;
};
// The owners of all blocks of all caching allocators, and the mutex that guards them and the allocators. Never
// destroyed, because tensors may be freed after static destruction.
struct Registry {
  std::mutex mutex;
  std::unordered_map<void*, Owner> owners;
};

Registry& registry() {
  static Registry* const blocks = [] {
    auto* made = new Registry;
    // Held across fork(): otherwise the child could inherit it locked by a thread that does not exist there.
    pthread_atfork([] { registry().mutex.lock(); }, [] { registry().mutex.unlock(); },
                   [] { registry().mutex.unlock(); });
    return made;
  }();
  return *blocks;
}

}  // namespace

CachingAllocator::~CachingAllocator() {
  for (auto& [size, blocks] : free_) {
    for (void* block : blocks) c10::free_cpu(block);
  }
}

CachingAllocator::Scope::Scope(CachingAllocator& allocator) : outer_(active) {
  install();
  active = &allocator;
}

CachingAllocator::Scope::~Scope() { active = outer_; }

void* CachingAllocator::allocate_block(size_t bytes) {
  const size_t size = (bytes + kGranularity - 1) / kGranularity * kGranularity;
  void* block = nullptr;
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    auto found = free_.find(size);
    if (found != free_.end() && !found->second.empty()) {
      block = found->second.back();
      found->second.pop_back();
      cached_ -= size;
    }
    in_use_ += size;
    peak_in_use_ = std::max(peak_in_use_, in_use_);
  }
  if (block == nullptr) block = c10::alloc_cpu(size);
  std::lock_guard<std::mutex> lock(registry().mutex);
  registry().owners[block] = {size, shared_from_this()};
  return block;
}

void CachingAllocator::free_block(void* block) {
  Owner owner;  // may hold the last reference, so it is destroyed after the mutex is unlocked
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    owner = std::move(registry().owners.extract(block).mapped());
    if (owner.allocator->cache_block(block, owner.size)) return;
  }
  c10::free_cpu(block);
}

bool CachingAllocator::cache_block(void* block, size_t size) {
  in_use_ -= size;
  if (cached_ + size > peak_in_use_) return false;
  free_[size].push_back(block);
  cached_ += size;
  return true;
}

void CachingAllocator::release_cached() {
  std::unordered_map<size_t, std::vector<void*>> released;
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    released.swap(free_);
    cached_ = 0;
    peak_in_use_ = in_use_;
  }
  for (auto& [size, blocks] : released) {
    for (void* block : blocks) c10::free_cpu(block);
  }
}

size_t CachingAllocator::cached_bytes() const {
  std::lock_guard<std::mutex> lock(registry().mutex);
  return cached_;
}

}  // namespace gpipe_fast
