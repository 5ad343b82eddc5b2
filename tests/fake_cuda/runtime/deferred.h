// Deferred execution: with FAKE_CUDA_DEFER, streams hold enqueued work until a caller waits for its completion.
//
// Each stream has a queue of tasks. A task is ready when all earlier tasks of its queue and all tasks that its events
// wait for are done. A caller that waits for a task makes ready tasks of all queues run, in a seeded random order,
// until the task is done:
//
//   queue of stream 1   copy ── compute ── (record e)
//   queue of stream 2   compute ──────────── (wait e) ── copy      without the wait this copy may run first
//
// In half of the waits, only the tasks that the caller needs run, so that all others are as late as possible; in the
// other half, each queue has a random weight. One thread runs all tasks, so they do not see the callers' thread-local
// settings.
//
// With FAKE_CUDA_ROOM, tasks run whether or not a caller waits, and a queue holds so many of them: as on a GPU, a caller
// that enqueues more blocks. A held task, such as the kernel of a receive, ends when another thread releases it.
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
// Returns the newest task of a queue; null if the queue never had a task.
TaskPtr newest(const std::shared_ptr<Queue>& queue);
// Appends a task to a queue; it also runs after the tasks in `after`, which may be null.
TaskPtr defer(const std::shared_ptr<Queue>& queue, const std::vector<TaskPtr>& after,
              std::function<void()> run);

// Appends a task that is not ready before release().
TaskPtr hold(const std::shared_ptr<Queue>& queue);
void release(const TaskPtr& task);
// Returns whether tasks run while no caller waits.
bool works_alone();

// A null task counts as complete. The complete functions block until the tasks are done.
bool is_complete(const TaskPtr& task);
void complete(const TaskPtr& task);
void complete_device(int device);
void complete_everything();

// Returns true for half of the calls, at random.
bool coin_flip();

}  // namespace fake_cuda
