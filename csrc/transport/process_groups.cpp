#include "transport/process_groups.h"

#ifdef USE_C10D

#include "check.h"
#include "device/failure.h"
#include "device/stream.h"
#include "transport/coalesced_copy.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <functional>
#include <future>
#include <list>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace gpipe_fast {
namespace {

using WorkPointer = c10::intrusive_ptr<c10d::Work>;

using Ends = std::pair<int32_t, int32_t>;  // the sending and the receiving stage
constexpr const char* kSumming = "summing the gradients of this stage with a replica";
constexpr int kSender = 0, kReceiver = 1;  // ranks in a group
constexpr auto kPollInterval = std::chrono::milliseconds(20);

[[noreturn]] void throw_lost(const std::string& what, const std::exception& error) {
  GPIPE_CHECK(
      false, what,
      ", in another process, failed: that process has ended, or takes longer than the argument timeout of "
      "GPipe allows: ",
      error.what());
  std::abort();  // unreachable
}

// Begins work with another stage; `what` names it for an error message.
template <class Begin>
WorkPointer begun(const Begin& begin, const std::string& what) {
  try {
    return begin();
  } catch (const std::exception& error) {
    throw_lost(what, error);
  }
}

std::string sending_to(int32_t stage) { return "sending to stage " + std::to_string(stage); }
std::string receiving_from(int32_t stage) { return "receiving from stage " + std::to_string(stage); }

// The waits of actions, which an abort ends.
class Waits {
 public:
  explicit Waits(std::chrono::milliseconds timeout) : timeout_(timeout) {}

  void begin_run() {
    const std::lock_guard<std::mutex> lock(mutex_);
    aborted_from_ = kNothing;
  }

  void abort_from(int64_t rank) {
    const std::lock_guard<std::mutex> lock(mutex_);
    aborted_from_ = std::min(aborted_from_, rank);
    for (const Wait& wait : waits_) {
      if (wait.rank >= aborted_from_) wait.work->abort();
    }
    changed_.notify_all();
  }

  // Waits for work with another stage; `what` names it for an error message.
  void wait(const WorkPointer& work, int64_t rank, const std::string& what) {
    const auto here = begin(work, rank);
    bool completed = false;
    try {
      completed = work->wait(timeout_);
    } catch (const std::exception& error) {
      end(here);
      check(rank);
      throw_lost(what, error);
    }
    end(here);
    if (completed) return;
    check(rank);
    GPIPE_CHECK(false, what, " was aborted from outside");
  }

  // Call when a future that wait_for() may wait for has completed.
  void notify() {
    const std::lock_guard<std::mutex> lock(mutex_);
    changed_.notify_all();
  }

  // As wait(), for work that cannot be aborted: after an abort it goes on, but nobody waits for it.
  void wait_for(const c10::intrusive_ptr<c10::ivalue::Future>& future, int64_t rank,
                const std::string& what) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_for(lock, timeout_, [&] { return future->completed() || rank >= aborted_from_; });
    if (rank >= aborted_from_) throw Aborted();
    lock.unlock();
    const std::string error = !future->completed() ? "it has not ended"
                              : future->hasError() ? future->tryRetrieveErrorMessage()
                                                   : "";
    if (!error.empty()) throw_lost(what, std::runtime_error(error));
  }

  // Throws Aborted if the actions of this rank were aborted.
  void check(int64_t rank) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (rank >= aborted_from_) throw Aborted();
  }

 private:
  static constexpr int64_t kNothing = INT64_MAX;
  struct Wait {
    WorkPointer work;
    int64_t rank;
  };
  std::list<Wait>::iterator begin(const WorkPointer& work, int64_t rank) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (rank >= aborted_from_) throw Aborted();
    return waits_.insert(waits_.end(), {work, rank});
  }
  void end(std::list<Wait>::iterator wait) {
    const std::lock_guard<std::mutex> lock(mutex_);
    waits_.erase(wait);
  }

  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<Wait> waits_;
  int64_t aborted_from_ = kNothing;
};

// A thread that runs tasks in their order.
class TaskThread {
 public:
  using Task = std::packaged_task<WorkPointer()>;

  TaskThread() : thread_([this] { run_tasks(); }) {}
  // Drops the tasks that have not begun.
  ~TaskThread() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }
  TaskThread(const TaskThread&) = delete;
  TaskThread& operator=(const TaskThread&) = delete;

  std::future<WorkPointer> push(Task task) {
    std::future<WorkPointer> result = task.get_future();
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    changed_.notify_one();
    return result;
  }

 private:
  void run_tasks() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
      if (stopping_) return;
      Task task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      task = {};  // frees what it holds before the lock is taken
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool stopping_ = false;
  std::thread thread_;
};

// Returns pinned memory for as many elements as a flat tensor on a GPU has. Blocks are reused by PyTorch's allocator.
at::Tensor pinned_like(const at::Tensor& tensor) {
  at::Tensor pinned = at::empty(tensor.sizes(), at::TensorOptions(tensor.scalar_type()).pinned_memory(true));
  note_shared(pinned);
  return pinned;
}

// Enqueues a copy on the device's current stream. Returns the stream event that completes it.
StreamEvent enqueue_copy(const at::Tensor& target, const at::Tensor& source) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::Device device = source.is_cpu() ? target.device() : source.device();
  try {
    target.copy_(source, /*non_blocking=*/true);
    return StreamEvent(Stream::current_on(device));
  } catch (...) {
    survive_failure(device);  // before the pinned memory is freed
    throw;
  }
}

class HostArrival final : public Channels::Arrival {
 public:
  // `target`: where the tensor is copied from `received`, which is host memory; undefined if it is received there.
  HostArrival(WorkPointer work, at::Tensor received, at::Tensor target, int32_t sender,
              std::shared_ptr<Waits> waits)
      : work_(std::move(work)),
        received_(std::move(received)),
        target_(std::move(target)),
        sender_(sender),
        waits_(std::move(waits)) {}

  ~HostArrival() override { free(); }
  HostArrival(const HostArrival&) = delete;
  HostArrival& operator=(const HostArrival&) = delete;

  void wait(int64_t rank) override {
    waits_->wait(work_, rank, receiving_from(sender_));
    if (!target_.defined()) return;
    enqueue_copy(target_, received_);
    free();
  }

 private:
  void free() noexcept {
    work_.reset();
    target_.reset();
    std::vector<at::Tensor> done{std::move(received_)};
    free_shared(done);
  }

  WorkPointer work_;
  at::Tensor received_, target_;
  const int32_t sender_;
  const std::shared_ptr<Waits> waits_;
};

class ProcessGroupSum : public Channels::Arrival {
 public:
  ProcessGroupSum(WorkPointer work, std::shared_ptr<Waits> waits)
      : work_(std::move(work)), waits_(std::move(waits)) {
    work_->getFuture()->addCallback([waits = waits_](c10::ivalue::Future&) { waits->notify(); });
  }
  void wait(int64_t rank) override {
    waits_->wait_for(work_->getFuture(), rank, kSumming);
    work_->synchronize();
  }

 private:
  const WorkPointer work_;
  const std::shared_ptr<Waits> waits_;
};

// Gloo's own sum of rows has no future, and adds in another order in each row.
class ProcessGroupSumOfRows final : public ProcessGroupSum {
 public:
  ProcessGroupSumOfRows(WorkPointer work, std::shared_ptr<Waits> waits, at::Tensor rows, at::Tensor sum)
      : ProcessGroupSum(std::move(work), std::move(waits)), rows_(std::move(rows)), sum_(std::move(sum)) {}
  void wait(int64_t rank) override {
    ProcessGroupSum::wait(rank);
    sum_.copy_(rows_[0]);
    for (int64_t replica = 1; replica < rows_.size(0); ++replica) sum_.add_(rows_[replica]);
  }

 private:
  const at::Tensor rows_, sum_;
};

class HostChannels final : public Channels {
 public:
  HostChannels(std::set<int32_t> stages, ProcessGroups groups, std::chrono::milliseconds timeout,
               c10::intrusive_ptr<c10d::Backend> replicas)
      : stages_(std::move(stages)),
        groups_(std::move(groups)),
        replicas_(std::move(replicas)),
        waits_(std::make_shared<Waits>(timeout)) {
    for (const auto& [ends, group] : groups_) {
      if (has(ends.first)) sends_[ends];
    }
  }

  bool has(int32_t stage) const override { return stages_.count(stage) > 0; }
  bool is_on_device() const override { return false; }

  void begin_run() override { waits_->begin_run(); }

  void send(const at::Tensor& tensor, int32_t sender, int32_t receiver, int64_t rank) override {
    if (tensor.numel() == 0) return;
    waits_->check(rank);
    std::deque<Send>& sends = sends_.at({sender, receiver});
    // Without a limit, a stage would keep all tensors that it has sent. The receiver may be this many micro-batches
    // behind, if each stage between the two works on one and has received another. The proof that a schedule cannot
    // deadlock counts on it: MAX_UNDER_WAY_PER_STAGE.
    const size_t limit = 2 * static_cast<size_t>(std::abs(receiver - sender));
    while (sends.size() >= limit) wait_for_first(sends, receiver, rank);
    const at::Tensor source = flat(tensor);
    if (source.is_cpu()) {
      std::promise<WorkPointer> work;
      work.set_value(begin_send(source, {sender, receiver}));
      sends.push_back({work.get_future(), at::Tensor()});
      return;
    }
    at::Tensor pinned = pinned_like(source);
    const StreamEvent copied = enqueue_copy(pinned, source);
    sends.push_back(
        {thread().push(TaskThread::Task([this, sender, receiver, held = pinned, copied]() mutable {
           const at::Tensor own = std::move(held);  // freed before the result is known
           copied.synchronize();
           return begin_send(own, {sender, receiver});
         })),
         pinned});
  }

  void flush() override {
    for (auto& [ends, sends] : sends_) {
      while (!sends.empty()) wait_for_first(sends, ends.second, kAfterAllActions);
    }
  }

  std::shared_ptr<Arrival> receive(const at::Tensor& tensor, int32_t sender, int32_t receiver) override {
    if (tensor.numel() == 0) return nullptr;
    const at::Tensor target = flat(tensor);
    std::vector<at::Tensor> received{target.is_cpu() ? target : pinned_like(target)};
    c10d::Backend& group = *groups_.at({sender, receiver});
    return std::make_shared<HostArrival>(
        begun([&] { return group.recv(received, kSender, /*tag=*/0); }, receiving_from(sender)),
        received.front(), target.is_cpu() ? at::Tensor() : target, sender, waits_);
  }

  int32_t num_replicas() const override { return replicas_ ? replicas_->getSize() : 1; }
  int32_t replica() const override { return replicas_ ? replicas_->getRank() : 0; }

  std::shared_ptr<Arrival> sum_replicas(const at::Tensor& tensor, int64_t rank) override {
    waits_->check(rank);
    std::vector<at::Tensor> tensors{tensor};
    return std::make_shared<ProcessGroupSum>(begun([&] { return replicas_->allreduce(tensors); }, kSumming),
                                             waits_);
  }

  std::shared_ptr<Arrival> sum_rows(const at::Tensor& all, const at::Tensor& own, int64_t rank) override {
    waits_->check(rank);
    at::Tensor sent = all.flatten(), received = at::empty_like(all), flat = received.flatten();
    std::vector<int64_t> equal;
    return std::make_shared<ProcessGroupSumOfRows>(
        begun([&] { return replicas_->alltoall_base(flat, sent, equal, equal); }, kSumming), waits_, received,
        own);
  }

  void abort_from(int64_t rank) override { waits_->abort_from(rank); }
  void abandon() noexcept override {}  // no device waits for a transfer

 private:
  WorkPointer begin_send(const at::Tensor& tensor, Ends ends) const {
    std::vector<at::Tensor> tensors{tensor};
    c10d::Backend& group = *groups_.at(ends);
    return begun([&] { return group.send(tensors, kReceiver, /*tag=*/0); }, sending_to(ends.second));
  }

  struct Send {
    std::future<WorkPointer> work;
    at::Tensor pinned;  // which it sends; undefined if the tensor is in host memory
  };

  void wait_for_first(std::deque<Send>& sends, int32_t receiver, int64_t rank) {
    Send& first = sends.front();
    // For a copy to the host; a device needs finite time for it.
    while (first.work.wait_for(kPollInterval) != std::future_status::ready) waits_->check(rank);
    waits_->wait(first.work.get(), rank, sending_to(receiver));
    std::vector<at::Tensor> done{std::move(first.pinned)};
    sends.pop_front();
    free_shared(done);
  }

  TaskThread& thread() {
    std::call_once(thread_created_, [&] { thread_.emplace(); });
    return *thread_;
  }

  const std::set<int32_t> stages_;
  const ProcessGroups groups_;
  const c10::intrusive_ptr<c10d::Backend> replicas_;  // null if there is one
  const std::shared_ptr<Waits> waits_;
  std::map<Ends, std::deque<Send>> sends_;  // those that may be unfinished
  std::once_flag thread_created_;
  std::optional<TaskThread> thread_;  // for tensors on a GPU
};

// Transfers of NCCL run on a stream of the group, after the work that is on the current stream when they begin. Its
// wait() makes the current stream wait; with a timeout it would block the thread, so the groups have the timeout.
class DeviceChannels final : public Channels {
 public:
  DeviceChannels(std::set<int32_t> stages, ProcessGroups groups, c10::intrusive_ptr<c10d::Backend> replicas)
      : stages_(std::move(stages)), groups_(std::move(groups)), replicas_(std::move(replicas)) {
    for (const auto& [ends, group] : groups_) {
      if (has(ends.first)) sends_[ends];
    }
  }

  bool has(int32_t stage) const override { return stages_.count(stage) > 0; }
  bool is_on_device() const override { return true; }
  void begin_run() override {}

  void send(const at::Tensor& tensor, int32_t sender, int32_t receiver, int64_t) override {
    if (tensor.numel() == 0) return;
    std::deque<Send>& sends = sends_.at({sender, receiver});
    while (!sends.empty() && sends.front().work->isCompleted()) sends.pop_front();
    std::vector<at::Tensor> bytes{as_bytes(tensor)};
    c10d::Backend& group = *groups_.at({sender, receiver});
    sends.push_back({begun([&] { return group.send(bytes, kReceiver, /*tag=*/0); }, sending_to(receiver)),
                     bytes.front()});
  }

  void flush() override {
    for (auto& [ends, sends] : sends_) {
      for (; !sends.empty(); sends.pop_front()) sends.front().work->wait();
    }
  }

  std::shared_ptr<Arrival> receive(const at::Tensor& tensor, int32_t sender, int32_t receiver) override {
    if (tensor.numel() == 0) return nullptr;
    std::vector<at::Tensor> bytes{as_bytes(tensor)};
    c10d::Backend& group = *groups_.at({sender, receiver});
    return std::make_shared<DeviceArrival>(
        begun([&] { return group.recv(bytes, kSender, /*tag=*/0); }, receiving_from(sender)));
  }

  int32_t num_replicas() const override { return replicas_ ? replicas_->getSize() : 1; }
  int32_t replica() const override { return replicas_ ? replicas_->getRank() : 0; }

  std::shared_ptr<Arrival> sum_replicas(const at::Tensor& tensor, int64_t) override {
    std::vector<at::Tensor> tensors{tensor};
    return std::make_shared<DeviceArrival>(begun([&] { return replicas_->allreduce(tensors); }, kSumming));
  }

  // NCCL's own sum of rows: the order of additions is that of its rings, as in sum_replicas().
  std::shared_ptr<Arrival> sum_rows(const at::Tensor& all, const at::Tensor& own, int64_t) override {
    std::vector<at::Tensor> inputs{all.flatten()}, outputs{own};
    return std::make_shared<DeviceArrival>(
        begun([&] { return replicas_->reduce_scatter_tensor_coalesced(outputs, inputs); }, kSumming));
  }

  // The host may be blocked in a launch behind a transfer of a lower rank.
  void abort_from(int64_t) override { abandon(); }

  void abandon() noexcept override {
    for (const auto& [ends, group] : groups_) end([own = group] { own->abort(); });
    if (replicas_) end([this] { replicas_->abort(); });
    for (const auto& abort : others_) end(abort);
  }

  void abandon_too(std::function<void()> abort) override { others_.push_back(std::move(abort)); }

 private:
  static void end(const std::function<void()>& abort) noexcept {
    try {
      abort();
    } catch (const std::exception&) {
      // The run has failed for another reason, which the caller reports.
    }
  }

  class DeviceArrival final : public Arrival {
   public:
    explicit DeviceArrival(WorkPointer work) : work_(std::move(work)) {}
    void wait(int64_t) override { work_->wait(); }

   private:
    const WorkPointer work_;
  };
  struct Send {
    WorkPointer work;
    at::Tensor tensor;
  };

  const std::set<int32_t> stages_;
  const ProcessGroups groups_;
  const c10::intrusive_ptr<c10d::Backend> replicas_;  // null if there is one
  std::vector<std::function<void()>> others_;         // see abandon_too
  std::map<Ends, std::deque<Send>> sends_;            // those that may be unfinished
};

}  // namespace

std::shared_ptr<Channels> make_channels(std::set<int32_t> stages, ProcessGroups groups,
                                        std::chrono::milliseconds timeout, bool on_device,
                                        c10::intrusive_ptr<c10d::Backend> replicas) {
  if (on_device)
    return std::make_shared<DeviceChannels>(std::move(stages), std::move(groups), std::move(replicas));
  return std::make_shared<HostChannels>(std::move(stages), std::move(groups), timeout, std::move(replicas));
}

}  // namespace gpipe_fast

#endif
