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
class Recycler : public std::enable_shared_from_this<Recycler> {
 public:
  ~Recycler();

  // During its lifetime, large CPU allocations of the current thread come from `recycler`. Scopes can be nested.
  class Use {
   public:
    explicit Use(Recycler& recycler);
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    Recycler* before_;
  };

  // Returns a block of at least `bytes`, aligned as PyTorch aligns its own.
  void* take(size_t bytes);
  // Frees a block: returns it to the allocator whose take() returned it, or to the system.
  static void give_back(void* block);

  // Returns the cached free bytes, which never exceed the peak of bytes in use.
  size_t kept_bytes() const;

 private:
  // Caches a freed block. Returns false if the cache is full. Requires the shared mutex to be locked.
  bool keep(void* block, size_t size);

  std::unordered_map<size_t, std::vector<void*>> free_;  // by size
  size_t kept_ = 0;
  size_t in_use_ = 0;
  size_t most_in_use_ = 0;
};

}  // namespace gpipe_fast
