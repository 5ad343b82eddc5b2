// Deferred work: with FAKE_CUDA_DEFER streams hold what is put on them until something must be complete.
//
// Each stream has a queue of tasks. A task is ready when those before it in its queue are done, and those that its event
// edges name. Whoever needs a task done has ready tasks run, of all queues, in an order drawn from the seed, until it is:
//
//   queue of stream 1   copy ── compute ── (record e)
//   queue of stream 2   compute ──────────── (wait e) ── copy      without the wait this copy may run first
//
// Half of the times only what is needed runs, so that everything else is as late as it can be; else each queue has a
// haste of its own. One thread runs all tasks, so what the callers' threads have set does not matter to them.
#pragma once

#include <functional>
#include <memory>
#include <vector>

namespace fake_cuda {

struct Task;
using TaskPtr = std::shared_ptr<Task>;

class Queue;

bool deferring();

std::shared_ptr<Queue> make_queue(int device);
// The newest task of a queue; null if there never was one.
TaskPtr newest(const std::shared_ptr<Queue>& queue);
// Puts a task at the end of a queue; `after` are others that come before it, or null.
TaskPtr defer(const std::shared_ptr<Queue>& queue, const std::vector<TaskPtr>& after,
              std::function<void()> run);

// Null is complete. These return when the tasks are.
bool is_complete(const TaskPtr& task);
void complete(const TaskPtr& task);
void complete_device(int device);
void complete_everything();

// For half of the questions.
bool by_chance();

}  // namespace fake_cuda
