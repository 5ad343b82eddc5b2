// Blocks of memory, by address.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fake_cuda {

struct Block {
  size_t bytes;
  int device;      // -1: of the host, pinned
  int64_t number;  // counted up
};

// Null for pageable memory of the host.
const Block* block_of(const void* pointer);

// How many blocks there have been; the caller holds the mutex.
int64_t num_blocks();

}  // namespace fake_cuda
