// An inference stream: forwards of mini-batches that follow one another without draining the pipeline.
//
// One run of the engine serves many mini-batches, the items. Its actions number micro-batches on from item to item;
// each stage maps a number to its next micro-batch. Here items have two micro-batches each:
//
//   stage 0    0F0 0F1 0F2 0F3 0F4 ..      waits for an item that has not been pushed yet
//   stage 1        1F0 1F1 1F2 1F3 ..
//   item        0   0   1   1   2
//
// Ranks grow with the number, so an action that fails cancels later micro-batches only: the items before are complete.
#pragma once

#include "engine/engine.h"
#include "pipeline/minibatch.h"
#include "pipeline/pipeline.h"

#include <atomic>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace gpipe_fast {

// push(), pop(), wait_for_all() and close() are for one thread at a time, or for several that take turns. While the
// stream has work, its own thread holds the pipeline's lock. If another thread waits for the lock, the stream completes
// the items that were pushed, and lets the other run go first.
class InferenceStream final : private Work {
 public:
  explicit InferenceStream(std::shared_ptr<Pipeline> pipeline);
  // Calls close().
  ~InferenceStream() override;
  InferenceStream(const InferenceStream&) = delete;
  InferenceStream& operator=(const InferenceStream&) = delete;

  // Adds an item; the arguments are those of Pipeline::forward(), and the plan has no backward. Polls while another
  // run has to go first.
  void push(const std::shared_ptr<const Plan>& plan, Tensors inputs, const Tensors& parameters,
            const Tensors& buffers, const std::function<int64_t()>& key);
  // Waits for the oldest item, removes it, and returns its outputs. Polls meanwhile. Throws the item's error; no item
  // follows a failed one.
  Boundary pop();
  // Waits until all items are complete, or one has failed.
  void wait_for_all();
  // Cancels the items that are not complete, and ends the stream's thread.
  void close();

  // Returns whether this is the copy of a stream in the child of a fork. Then only close() may be called, which does
  // nothing.
  bool is_copy_of_parents() const;

 private:
  struct Item;
  // The micro-batch that a stage's worker has reached.
  struct Position {
    int64_t number = -1;  // of the micro-batch, counted from the first of the stream
    int64_t item_index = -1;
    std::shared_ptr<Item> item;
    int64_t microbatch = 0;  // within the item
    int64_t num_microbatches = 1;

    bool is_last() const { return microbatch + 1 == num_microbatches; }
  };
  struct ItemWork;
  struct NoMoreItems {};  // ends a run before an item that was not pushed, and a closed stream's run

  void run(const Action& action, CancellationToken& token) override;
  // Returns the position of an action's micro-batch. Throws NoMoreItems if the run must end before it.
  const Position& advance(const Action& action, CancellationToken& token);
  std::shared_ptr<Item> wait_for_item(int64_t index, CancellationToken& token);
  void complete(Item& item);

  void loop();
  bool has_work() const;
  void run_window();
  // Ends a run that has failed or was cancelled: undoes what the items that are not complete have done.
  void abort();
  // Keeps the error of a failed run for pop().
  void keep_error(Failure failure);
  void check_process() const;
  // Sleeps until the condition holds, and polls.
  template <class Condition>
  void wait(const Condition& condition);

  const std::shared_ptr<Pipeline> pipeline_;
  const int owner_pid_;
  std::vector<Position> positions_;  // by stage; each is used by the stage's worker
  int64_t window_begin_ = 0;         // micro-batches of earlier runs
  bool is_aborted_ = false;

  std::mutex mutex_;                         // guards `items_`, and changes of `num_popped_`
  std::deque<std::shared_ptr<Item>> items_;  // pushed and not popped
  std::atomic<int64_t> num_pushed_{0}, num_complete_{0}, num_popped_{0};

  std::atomic<bool> closing_{false}, ended_{false}, is_waiting_for_lock_{false};
  // Set before `ended_`.
  std::exception_ptr error_;
  bool exited_ = false;                // the interpreter is exiting
  std::vector<StreamEvent> leftover_;  // work of cancelled items
  std::thread thread_;
};

}  // namespace gpipe_fast
