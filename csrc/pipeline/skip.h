// Skip connections at segments. The micro-batch holds a stashed tensor from its stash to its pop, and the gradient
// from the pop's backward to the stash's backward.
#pragma once

#include "pipeline/segment.h"

namespace gpipe_fast {

// Returns a segment's inputs: `value`, followed by the skip tensors that the segment pops.
Boundary pop(const Segment& segment, Skips& skips, Boundary value);
// Moves the skip tensors that a segment stashed from its outputs to `skips`, and returns the other outputs.
Boundary stash(const Segment& segment, Skips& skips, Boundary outputs);
// Throws if an input that the layers change in place shares memory with another input or a stashed tensor: in a
// pipeline they change a copy, so what reads the other one would not see the change. `taken`: the boundary tensors,
// followed by the popped skip tensors; `written`: the inputs that are changed, as indices.
void check_not_shared(const Segment& segment, const Skips& skips, const Tensors& taken,
                      const std::vector<int64_t>& written);

// Given the gradients of a segment's other outputs, appends those of the skip tensors that it stashed.
void pop_gradients(const Segment& segment, const BoundaryForm& returned, Skips& skips, Tensors& tangents);
// Given the gradients of all inputs of a segment, moves those of the skip tensors that it popped to `skips`.
void stash_gradients(const Segment& segment, const BoundaryForm& taken, Skips& skips, Tensors& gradients);

}  // namespace gpipe_fast
