// Where skip connections leave a run of layers and enter another: what is stashed lies with the micro-batch until it is
// popped, and its gradient likewise on the way back.
#pragma once

#include "pipeline/segment.h"

namespace gpipe_fast {

// What a segment takes: what comes to it, and behind that what it pops.
Boundary pop(const Segment& segment, Skips& skips, Boundary value);
// What it hands on: what it returned without what it stashed.
Boundary stash(const Segment& segment, Skips& skips, Boundary outputs);
// Throws if layers changed in place what they took, `num_plain` tensors and what they popped, and the same memory is
// stashed: in a pipeline they change a copy, and whoever pops the other would not see it.
void check_not_stashed(const Segment& segment, const Skips& skips, const Tensors& taken, size_t num_plain);

// The gradients of all that a segment returned, given those of what it handed on.
void pop_gradients(const Segment& segment, const Form& returned, Skips& skips, Tensors& tangents);
// Those that it hands back, of all that it took.
void stash_gradients(const Segment& segment, const Form& taken, Skips& skips, Tensors& gradients);

}  // namespace gpipe_fast
