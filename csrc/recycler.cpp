#include "recycler.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <algorithm>
#include <new>
#include <utility>

namespace gpipe_fast {
namespace {

constexpr size_t kSmallest = 32 * 1024;  // what the C library keeps by itself is left to it
constexpr size_t kHeader = 64;           // one alignment of PyTorch's
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

}  // namespace

struct Recycler::Header {
  size_t size;  // of the block without the header
  std::shared_ptr<Recycler> owner;
};

Recycler::~Recycler() {
  for (auto& [size, blocks] : free_) {
    for (Header* block : blocks) {
      block->~Header();
      c10::free_cpu(block);
    }
  }
}

Recycler::Use::Use(Recycler& recycler) : before_(active) {
  install();
  active = &recycler;
}

Recycler::Use::~Use() { active = before_; }

void* Recycler::take(size_t bytes) {
  static_assert(sizeof(Header) <= kHeader);
  const size_t size = (bytes + kGranularity - 1) / kGranularity * kGranularity;
  Header* block = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = free_.find(size);
    if (found != free_.end() && !found->second.empty()) {
      block = found->second.back();
      found->second.pop_back();
      kept_ -= size;
    }
    in_use_ += size;
    most_in_use_ = std::max(most_in_use_, in_use_);
  }
  if (block == nullptr) block = new (c10::alloc_cpu(kHeader + size)) Header{size, nullptr};
  block->owner = shared_from_this();
  return reinterpret_cast<char*>(block) + kHeader;
}

void Recycler::give_back(void* data) {
  auto* block = reinterpret_cast<Header*>(static_cast<char*>(data) - kHeader);
  // Held until the end: the block may be the last thing that keeps its recycler.
  std::shared_ptr<Recycler> owner = std::move(block->owner);
  {
    std::lock_guard<std::mutex> lock(owner->mutex_);
    owner->in_use_ -= block->size;
    if (owner->kept_ + block->size <= owner->most_in_use_) {
      owner->free_[block->size].push_back(block);
      owner->kept_ += block->size;
      return;
    }
  }
  block->~Header();
  c10::free_cpu(block);
}

size_t Recycler::kept_bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return kept_;
}

}  // namespace gpipe_fast
