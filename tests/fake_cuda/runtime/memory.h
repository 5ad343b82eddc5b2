// Allocated memory blocks by address.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fake_cuda {

struct Block {
  size_t bytes;
  int device;      // -1 for pinned host memory
  int64_t number;  // index in the order of allocation
};

// Returns the block that contains an address; null for pageable host memory.
const Block* block_of(const void* pointer);

// Returns the number of blocks allocated so far. The caller holds the mutex.
int64_t num_blocks_allocated();

}  // namespace fake_cuda
