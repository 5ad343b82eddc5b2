// A caching allocator for the CPU memory that operators allocate inside a program.
//
// The C library unmaps a large block when it is freed, and the kernel zeroes every page of a new one at the first
// access. A program's operators allocate the same sizes in every run, so freed blocks are cached for the next run.
#pragma once

#include <cstddef>
#include <memory>
#include <unordered_map>
#include <vector>

namespace gpipe_fast {

// The blocks of one stage. A block may outlive the stage, as long as a tensor uses it, and any thread may free it.
class CachingAllocator : public std::enable_shared_from_this<CachingAllocator> {
 public:
  ~CachingAllocator();

  // During its lifetime, large CPU allocations of the current thread come from `allocator`. Scopes can be nested.
  class Scope {
   public:
    explicit Scope(CachingAllocator& allocator);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    CachingAllocator* outer_;
  };

  // Returns a block of at least `bytes`, aligned as PyTorch aligns its own.
  void* allocate_block(size_t bytes);
  // Frees a block: returns it to the allocator whose allocate_block() returned it, or to the system.
  static void free_block(void* block);

  // Returns the cached free bytes, which never exceed the peak of bytes in use.
  size_t cached_bytes() const;
  // Returns the cached blocks to the system. Call when other sizes will be needed from now on.
  void release_cached();

 private:
  // Caches a freed block. Returns false if the cache is full. Requires the shared mutex to be locked.
  bool cache_block(void* block, size_t size);

  std::unordered_map<size_t, std::vector<void*>> free_;  // by size
  size_t cached_ = 0;
  size_t in_use_ = 0;
  size_t peak_in_use_ = 0;
};

}  // namespace gpipe_fast
