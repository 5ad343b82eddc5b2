#include "deferred.h"

#include "devices.h"

#include <dlfcn.h>

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <exception>
#include <mutex>
#include <random>
#include <thread>
#include <utility>

namespace fake_cuda {

struct Task {
  std::function<void()> run;
  std::vector<TaskPtr> after;  // empty once the task is done
  bool done = false;
  bool needed = false;
  bool held = false;
};

class Queue {
 public:
  explicit Queue(int device) : device(device) {}

  const int device;
  std::deque<TaskPtr> tasks;  // unfinished
  TaskPtr newest;
  uint32_t weight = 1;
};

namespace {

const char* seed() {
  static const char* const given = std::getenv("FAKE_CUDA_DEFER");
  return given;
}

// Returns how many tasks a queue holds before enqueue() blocks; 0 if nothing does.
size_t room() {
  static const char* const given = std::getenv("FAKE_CUDA_ROOM");
  return given == nullptr ? 0 : static_cast<size_t>(std::atoi(given));
}

// Releases Python's global interpreter lock if the calling thread holds it: torch keeps it during some queries.
class ReleasedGil {
 public:
  ReleasedGil() {
    static const auto holds = find<int()>("PyGILState_Check");
    static const auto initialized = find<int()>("Py_IsInitialized");
    static const auto release = find<void*()>("PyEval_SaveThread");
    if (holds != nullptr && initialized() != 0 && holds() != 0) {
      state_ = release();
    }
  }
  ~ReleasedGil() {
    static const auto acquire = find<void(void*)>("PyEval_RestoreThread");
    if (state_ != nullptr) {
      acquire(state_);
    }
  }
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;

 private:
  // Returns a function of the process; null if it does not run Python.
  template <class Function>
  static Function* find(const char* name) {
    return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
  }

  void* state_ = nullptr;
};

// Holds all queues and the thread that runs their tasks.
class Scheduler {
 public:
  Scheduler() : random_(static_cast<unsigned>(std::atoi(seed()))) {
    std::thread([this] { loop(); }).detach();
  }

  TaskPtr newest(const std::shared_ptr<Queue>& queue) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return queue->newest;
  }

  TaskPtr defer(const std::shared_ptr<Queue>& queue, const std::vector<TaskPtr>& after,
                std::function<void()> run, bool held) {
    auto task = std::make_shared<Task>();
    task->run = std::move(run);
    task->held = held;
    wait_for_room(*queue);
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const TaskPtr& each : after) {
      add(*task, each);
    }
    add(*task, queue->newest);
    if (queue->tasks.empty()) {
      queues_.push_back(queue);
    }
    queue->tasks.push_back(task);
    queue->newest = task;
    // A device also works while no caller waits for it.
    if (random_() % 4 < eagerness_ || room() > 0) {
      ++num_background_;
      wake_.notify_one();
    }
    return task;
  }

  void release(const TaskPtr& task) {
    const std::lock_guard<std::mutex> lock(mutex_);
    task->held = false;
    wake_.notify_one();
  }

  bool is_complete(const TaskPtr& task) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return !task || task->done;
  }

  void complete(const std::vector<TaskPtr>& tasks) {
    const ReleasedGil released;  // a task may run Python
    std::unique_lock<std::mutex> lock(mutex_);
    bool all_done = true;
    for (const TaskPtr& task : tasks) {
      mark_needed(task);
      all_done = all_done && (!task || task->done);
    }
    if (all_done) {
      return;
    }
    draw_policy();
    ++num_waiting_;
    wake_.notify_one();
    done_.wait(lock, [&] {
      return std::all_of(tasks.begin(), tasks.end(), [](const TaskPtr& task) { return !task || task->done; });
    });
    --num_waiting_;
  }

  // Returns the newest task of each queue of a device; of all devices if `device` is negative.
  std::vector<TaskPtr> newest_of_device(int device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<TaskPtr> found;
    for (const auto& queue : queues_) {
      if (device < 0 || queue->device == device) {
        found.push_back(queue->newest);
      }
    }
    return found;
  }

  bool coin_flip() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return random_() % 2 == 0;
  }

 private:
  static void add(Task& task, const TaskPtr& before) {
    if (before && !before->done) {
      task.after.push_back(before);
    }
  }

  void wait_for_room(const Queue& queue) {
    const auto has_room = [&] { return room() == 0 || queue.tasks.size() < room(); };
    std::unique_lock<std::mutex> lock(mutex_);
    if (has_room()) {
      return;
    }
    lock.unlock();
    const ReleasedGil released;
    lock.lock();
    done_.wait(lock, has_room);
    lock.unlock();
  }

  static void mark_needed(const TaskPtr& task) {
    std::vector<Task*> open{task.get()};
    while (!open.empty()) {
      Task* const next = open.back();
      open.pop_back();
      if (next == nullptr || next->done || next->needed) {
        continue;
      }
      next->needed = true;
      for (const TaskPtr& before : next->after) {
        open.push_back(before.get());
      }
    }
  }

  void draw_policy() {
    only_needed_ = random_() % 2 == 0;
    static constexpr uint32_t kEagerness[] = {0, 0, 1, 4};
    eagerness_ = kEagerness[random_() % 4];
    for (const auto& queue : queues_) {
      queue->weight = 1U << (4 * (random_() % 5));
    }
  }

  static bool ready(const Task& task) {
    return !task.held && std::all_of(task.after.begin(), task.after.end(),
                                     [](const TaskPtr& before) { return before->done; });
  }

  // Removes a ready task from its queue and returns it; null if no task may run now.
  TaskPtr pop_ready() {
    const bool only_needed = num_waiting_ > 0 && only_needed_ && room() == 0;
    uint64_t total = 0;
    Queue* chosen = nullptr;
    for (const auto& queue : queues_) {
      const Task& task = *queue->tasks.front();
      if ((only_needed && !task.needed) || !ready(task)) {
        continue;
      }
      total += queue->weight;
      if (random_() % total < queue->weight) {
        chosen = queue.get();
      }
    }
    if (chosen == nullptr) {
      return nullptr;
    }
    TaskPtr task = std::move(chosen->tasks.front());
    chosen->tasks.pop_front();
    if (chosen->tasks.empty()) {
      queues_.erase(std::find_if(queues_.begin(), queues_.end(),
                                 [&](const auto& queue) { return queue.get() == chosen; }));
    }
    return task;
  }

  void loop() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] {
        return num_waiting_ > 0 || num_background_ > 0 || (room() > 0 && !queues_.empty());
      });
      const TaskPtr task = pop_ready();
      if (!task) {
        // Either the awaited task has just finished, or a caller waits for tasks that are not enqueued yet.
        num_background_ = 0;
        if (num_waiting_ > 0 || room() > 0) {
          wake_.wait(lock);
        }
        continue;
      }
      num_background_ -= num_background_ > 0 ? 1 : 0;
      lock.unlock();
      run(*task);
      lock.lock();
      task->done = true;
      task->after.clear();
      done_.notify_all();
    }
  }

  static void run(Task& task) {
    try {
      if (task.run && !has_sticky_error()) {
        task.run();
      }
    } catch (const std::exception&) {
      set_sticky_error();  // an operator failed on wrong values, so a wait is missing
    }
    task.run = nullptr;
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::mt19937 random_;
  std::vector<std::shared_ptr<Queue>> queues_;  // queues with unfinished tasks
  int num_waiting_ = 0;
  int64_t num_background_ = 0;  // number of tasks that may run while no caller waits
  uint32_t eagerness_ = 0;
  bool only_needed_ = true;
};

// The scheduler is never destroyed: its thread runs until the process ends.
Scheduler& scheduler() {
  static auto* const instance = new Scheduler;
  return *instance;
}

}  // namespace

bool deferring() { return seed() != nullptr; }

std::shared_ptr<Queue> make_queue(int device) { return std::make_shared<Queue>(device); }
TaskPtr newest(const std::shared_ptr<Queue>& queue) {
  return deferring() ? scheduler().newest(queue) : nullptr;
}
TaskPtr defer(const std::shared_ptr<Queue>& queue, const std::vector<TaskPtr>& after,
              std::function<void()> run) {
  return scheduler().defer(queue, after, std::move(run), /*held=*/false);
}
TaskPtr hold(const std::shared_ptr<Queue>& queue) { return scheduler().defer(queue, {}, {}, /*held=*/true); }
void release(const TaskPtr& task) { scheduler().release(task); }
bool works_alone() { return room() > 0; }

bool is_complete(const TaskPtr& task) { return !task || scheduler().is_complete(task); }
void complete(const TaskPtr& task) {
  if (task) {
    scheduler().complete({task});
  }
}
void complete_device(int device) { scheduler().complete(scheduler().newest_of_device(device)); }
void complete_everything() { complete_device(-1); }

bool coin_flip() { return scheduler().coin_flip(); }

}  // namespace fake_cuda
