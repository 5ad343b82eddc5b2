// Memory that operators allocate inside a program, used again instead of being given back.
//
// The C library unmaps large blocks when they are freed, and new ones come as pages to be zeroed one by one. A program's
// operators ask for the same sizes in every run.
#pragma once

#include <cstddef>
#include <memory>
#include <unordered_map>
#include <vector>

namespace gpipe_fast {

// Blocks of one stage. They outlive it where a tensor still lies in them, and may be freed by any thread.
class Recycler : public std::enable_shared_from_this<Recycler> {
 public:
  ~Recycler();

  // While one of these lives, large CPU allocations of this thread come from the recycler.
  class Use {
   public:
    explicit Use(Recycler& recycler);
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    Recycler* before_;
  };

  // At least `bytes`, aligned as PyTorch aligns.
  void* take(size_t bytes);
  // Returns what `take` gave to the recycler it came from.
  static void give_back(void* block);

  // Free bytes kept now: never more than were in use at once.
  size_t kept_bytes() const;

 private:
  // False if there are enough blocks. Under the mutex that all share.
  bool keep(void* block, size_t size);

  std::unordered_map<size_t, std::vector<void*>> free_;  // by size
  size_t kept_ = 0;
  size_t in_use_ = 0;
  size_t most_in_use_ = 0;
};

}  // namespace gpipe_fast
