#include "program/recycler.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <pthread.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

namespace gpipe_fast {
namespace {

constexpr size_t kSmallest = 32 * 1024;  // what the C library keeps by itself is left to it
constexpr size_t kGranularity = 4096;

thread_local Recycler* active = nullptr;

// Stands before PyTorch's CPU allocator and asks it, but for large blocks while a recycler is in use.
class Allocator final : public c10::Allocator {
 public:
  explicit Allocator(c10::Allocator* original) : original_(original) {}

  c10::DataPtr allocate(size_t bytes) override {
    if (active == nullptr || bytes < kSmallest) return original_->allocate(bytes);
    void* data = active->take(bytes);
    return {data, data, &Recycler::give_back, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return original_->raw_deleter(); }
  void copy_data(void* destination, const void* source, size_t bytes) const override {
    original_->copy_data(destination, source, bytes);
  }

 private:
  c10::Allocator* original_;
};

// Put in place by the first use, once and for the life of the process, as tensors keep pointers to it.
void install() {
  static const bool installed = [] {
    c10::SetCPUAllocator(new Allocator(c10::GetCPUAllocator()), 255);
    return true;
  }();
  (void)installed;
}

// Whose block it is, and how large. Kept beside the blocks, which are just what PyTorch's own allocator would have made:
// code that releases one by hand (raw_deallocate) frees it rightly, and only leaves an entry behind.
struct Owner {
  size_t size;
  std::shared_ptr<Recycler> recycler;
};
// Of all recyclers; its mutex is theirs too. Never destroyed: tensors may be freed after everything else.
struct Registry {
  std::mutex mutex;
  std::unordered_map<void*, Owner> owners;
};

Registry& registry() {
  static Registry* const blocks = [] {
    auto* made = new Registry;
    // The child of a fork must not find it locked by a thread that it does not have.
    pthread_atfork([] { registry().mutex.lock(); }, [] { registry().mutex.unlock(); },
                   [] { registry().mutex.unlock(); });
    return made;
  }();
  return *blocks;
}

}  // namespace

Recycler::~Recycler() {
  for (auto& [size, blocks] : free_) {
    for (void* block : blocks) c10::free_cpu(block);
  }
}

Recycler::Use::Use(Recycler& recycler) : before_(active) {
  install();
  active = &recycler;
}

Recycler::Use::~Use() { active = before_; }

void* Recycler::take(size_t bytes) {
  const size_t size = (bytes + kGranularity - 1) / kGranularity * kGranularity;
  void* block = nullptr;
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    auto found = free_.find(size);
    if (found != free_.end() && !found->second.empty()) {
      block = found->second.back();
      found->second.pop_back();
      kept_ -= size;
    }
    in_use_ += size;
    most_in_use_ = std::max(most_in_use_, in_use_);
  }
  if (block == nullptr) block = c10::alloc_cpu(size);
  std::lock_guard<std::mutex> lock(registry().mutex);
  registry().owners[block] = {size, shared_from_this()};
  return block;
}

void Recycler::give_back(void* block) {
  Owner owner;  // may be the last reference: it goes when the mutex has been given back
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    owner = std::move(registry().owners.extract(block).mapped());
    if (owner.recycler->keep(block, owner.size)) return;
  }
  c10::free_cpu(block);
}

bool Recycler::keep(void* block, size_t size) {
  in_use_ -= size;
  if (kept_ + size > most_in_use_) return false;
  free_[size].push_back(block);
  kept_ += size;
  return true;
}

size_t Recycler::kept_bytes() const {
  std::lock_guard<std::mutex> lock(registry().mutex);
  return kept_;
}

}  // namespace gpipe_fast
