#include "pipeline/inference_stream.h"

#include "check.h"
#include "device/failure.h"
#include "pipeline/microbatches.h"

#include <unistd.h>

#include <optional>
#include <string>
#include <utility>

namespace gpipe_fast {
namespace {

// Micro-batches per run of the engine. The pipeline drains between runs.
constexpr int64_t kWindow = 1024;
// Boundary tensors in flight between two stages, as in other inference.
constexpr int64_t kSlots = 4;

Actions make_actions(int32_t num_stages) {
  std::vector<std::vector<Action>> stages(num_stages);
  int64_t rank = 0;
  for (int32_t number = 0; number < kWindow; ++number) {
    for (int32_t stage = 0; stage < num_stages; ++stage) {
      const auto add = [&](ActionKind kind) { stages[stage].push_back({kind, stage, number, rank++}); };
      if (stage > 0) add(ActionKind::recv_forward);
      add(ActionKind::forward);
      if (stage + 1 < num_stages) add(ActionKind::send_forward);
    }
  }
  return Actions(std::move(stages), kSlots);
}

}  // namespace

struct InferenceStream::Item {
  std::shared_ptr<MiniBatch> minibatch;
  Tensors inputs;                  // the stages read them, possibly after their last reference here
  std::vector<StreamEvent> ready;  // by stage: the caller's work before push()
  std::vector<Boundary> outputs;   // by micro-batch
  StreamEvent computed;            // completes when the outputs are computed
};

// Runs an action of the stream as that of an item's mini-batch.
struct InferenceStream::ItemWork final : Work {
  ItemWork(const Transport& transport, const Position& position)
      : transport(transport), item(*position.item), microbatch(static_cast<int32_t>(position.microbatch)) {}

  void run(const Action& action, CancellationToken& token) override {
    item.minibatch->enter_stage(action.stage, [&] {
      if (action.stage == 0 && action.kind == ActionKind::forward && microbatch == 0) begin();
      item.minibatch->run({action.kind, action.stage, microbatch, action.rank}, token);
    });
  }

  // The first stage's worker does this for all stages: their work for this item follows.
  void begin() const {
    for (size_t i = 0; i < item.ready.size(); ++i)
      transport.work(static_cast<int32_t>(i)).wait(item.ready[i]);
    item.minibatch->make_random_keys();
    item.minibatch->replicate();
  }

  const Transport& transport;
  Item& item;
  const int32_t microbatch;
};

InferenceStream::InferenceStream(std::shared_ptr<Pipeline> pipeline)
    : pipeline_(std::move(pipeline)),
      owner_pid_(getpid()),
      positions_(pipeline_->engine_.num_stages()),
      thread_([this] { loop(); }) {}

InferenceStream::~InferenceStream() { close(); }

bool InferenceStream::is_copy_of_parents() const { return owner_pid_ != getpid(); }

void InferenceStream::check_process() const {
  GPIPE_CHECK(!is_copy_of_parents(), "the stream was opened before a fork; call model.stream() in the child");
}

template <class Condition>
void InferenceStream::wait(const Condition& condition) {
  while (!pipeline_->stream_changed_.wait_for(condition, kPollInterval)) pipeline_->poll_();
}

void InferenceStream::push(const std::shared_ptr<const Plan>& plan, Tensors inputs, const Tensors& parameters,
                           const Tensors& buffers, const std::function<int64_t()>& key) {
  check_process();
  GPIPE_CHECK(!plan->has_backward(), "an inference stream got a plan with a backward");
  GPIPE_CHECK(plan->stages.size() == positions_.size(), "an inference stream of ", positions_.size(),
              " stages got a plan for ", plan->stages.size());
  pipeline_->create_transport(*plan);
  const std::shared_ptr<const Transport>& transport = pipeline_->transport_;
  transport->check_alive();
  const auto item = std::make_shared<Item>();
  item->minibatch = std::make_shared<MiniBatch>(plan, transport, parameters, buffers, key);
  item->minibatch->begin_forward(split_along(inputs, plan->split_dims, plan->num_microbatches()));
  item->inputs = std::move(inputs);
  for (const Stream& stream : item->minibatch->caller_streams()) item->ready.emplace_back(stream);
  wait([this] { return ended_ || pipeline_->num_waiting_ <= (is_waiting_for_lock_ ? 1 : 0); });
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    items_.push_back(item);
  }
  num_pushed_.fetch_add(1, std::memory_order_seq_cst);
  pipeline_->stream_changed_.wake();
}

void InferenceStream::wait_for_all() {
  wait([this] { return num_complete_ == num_pushed_ || ended_; });
}

Boundary InferenceStream::pop() {
  check_process();
  GPIPE_CHECK(num_popped_ < num_pushed_, "an inference stream has no item to pop");
  wait([this] { return num_complete_ > num_popped_ || ended_; });
  if (num_complete_ <= num_popped_) {
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
    GPIPE_CHECK(exited_, "an inference stream was closed");
    Pipeline::block_if_closed([this] {
      const Pipeline::EngineLock lock(*pipeline_);
      pipeline_->check_open();
      throw Pipeline::Closed();
    });
  }
  std::shared_ptr<Item> item;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    item = std::move(items_.front());
    items_.pop_front();
    ++num_popped_;
  }
  const Transport& transport = *pipeline_->transport_;
  // The caller may use other streams now than at push(), which may have allocated the inputs.
  const std::vector<Stream> caller_streams = transport.caller_streams();
  for (const std::vector<Stream>* streams : {&caller_streams, &item->minibatch->caller_streams()}) {
    for (const Stream& stream : *streams) stream.wait(item->computed);
  }
  for (const Boundary& part : item->outputs) {
    for (const at::Tensor& tensor : part.tensors) transport.hand_over(tensor, caller_streams);
  }
  Boundary outputs = item->minibatch->join(item->outputs);
  for (Boundary& part : item->outputs) free_shared(part.tensors);
  // A stage's position may still refer to the item.
  item->minibatch.reset();
  item->inputs.clear();
  return outputs;
}

void InferenceStream::close() {
  if (!thread_.joinable() || is_copy_of_parents()) return;
  closing_.store(true, std::memory_order_seq_cst);
  pipeline_->stream_changed_.wake();
  thread_.join();
  // Cancelled work may read the inputs, which are freed now.
  std::vector<Stream> streams;
  if (pipeline_->transport_) streams = pipeline_->transport_->caller_streams();
  for (const auto& item : items_) {
    const std::vector<Stream>& own = item->minibatch->caller_streams();
    streams.insert(streams.end(), own.begin(), own.end());
  }
  for (const Stream& stream : streams) {
    for (const StreamEvent& event : leftover_) stream.wait(event);
  }
  items_.clear();
  for (Position& position : positions_) position.item.reset();
}

void InferenceStream::run(const Action& action, CancellationToken& token) {
  if (closing_) throw NoMoreItems();
  const Position& position = advance(action, token);
  ItemWork work(*pipeline_->transport_, position);
  const FaultInjection& faults = pipeline_->fault_injection_;
  faults.empty() ? work.run(action, token) : FaultInjectingWork(work, faults).run(action, token);
  if (action.kind != ActionKind::forward || !position.is_last()) return;
  position.item->minibatch->end_stage_forward(action.stage);
  if (action.stage + 1 == pipeline_->engine_.num_stages()) complete(*position.item);
}

const InferenceStream::Position& InferenceStream::advance(const Action& action, CancellationToken& token) {
  Position& position = positions_[action.stage];
  const int64_t number = window_begin_ + action.microbatch;
  if (number == position.number) return position;
  if (position.is_last()) {
    position.item = wait_for_item(position.item_index + 1, token);
    ++position.item_index;
    position.microbatch = 0;
    position.num_microbatches = position.item->minibatch->plan()->num_microbatches();
  } else {
    ++position.microbatch;
  }
  position.number = number;
  return position;
}

// Only the first stage has to wait: the others have received a micro-batch of the item.
std::shared_ptr<InferenceStream::Item> InferenceStream::wait_for_item(int64_t index,
                                                                      CancellationToken& token) {
  const auto is_pushed = [&] { return num_pushed_ > index; };
  const auto changed = [&] { return is_pushed() || closing_ || pipeline_->num_waiting_ > 0; };
  while (!pipeline_->stream_changed_.wait_for(changed, kPollInterval)) token.check();
  if (!is_pushed() || closing_) throw NoMoreItems();
  const std::lock_guard<std::mutex> lock(mutex_);
  return items_.at(index - num_popped_);
}

// Called by the last stage's worker.
void InferenceStream::complete(Item& item) {
  MiniBatch& minibatch = *item.minibatch;
  std::vector<Boundary> outputs = minibatch.take_outputs();
  // Checked before end_forward(), because it may throw, and then the layers' state is restored.
  if (minibatch.plan()->check_outputs) minibatch.plan()->check_outputs(outputs);
  minibatch.end_forward();
  item.outputs = std::move(outputs);
  item.computed = StreamEvent(pipeline_->transport_->work(pipeline_->engine_.num_stages() - 1));
  num_complete_.fetch_add(1, std::memory_order_seq_cst);
  pipeline_->stream_changed_.wake();
}

bool InferenceStream::has_work() const {
  const Position& first = positions_.front();
  return !first.is_last() || first.item_index + 1 < num_pushed_;
}

void InferenceStream::loop() {
  try {
    while (!closing_ && !error_) {
      const auto may_go_on = [this] { return closing_ || has_work(); };
      if (pipeline_->stream_changed_.wait_for(may_go_on, kPollInterval) && !closing_) run_window();
    }
  } catch (const NoMoreItems&) {  // closed
  } catch (const Pipeline::Closed&) {
    exited_ = true;
  } catch (...) {
    error_ = std::current_exception();
  }
  if (!is_aborted_ && !positions_.front().is_last()) {  // closed between two runs, within an item
    const Pipeline::EngineLock lock(*pipeline_, [] {});
    abort();
  }
  ended_.store(true, std::memory_order_seq_cst);
  pipeline_->stream_changed_.wake();
}

void InferenceStream::run_window() {
  const auto poll = [this] {
    if (closing_) throw NoMoreItems();
  };
  is_waiting_for_lock_ = true;
  const Pipeline::EngineLock lock(*pipeline_, poll);
  is_waiting_for_lock_ = false;
  pipeline_->check_open();
  pipeline_->transport_->check_alive();
  if (pipeline_->graph_cache_) pipeline_->graph_cache_->before_run();
  std::shared_ptr<const Actions>& actions = pipeline_->stream_actions_;
  if (!actions) actions = std::make_shared<const Actions>(make_actions(pipeline_->engine_.num_stages()));
  std::optional<Failure> failure;
  try {
    failure = pipeline_->engine_.run(*actions, *this, poll);
  } catch (const Cancelled&) {
    abort();
    throw Pipeline::Closed();
  } catch (...) {
    abort();
    throw;
  }
  window_begin_ = positions_.front().number + 1;
  if (failure) keep_error(std::move(*failure));
  if (error_ || closing_) abort();
}

void InferenceStream::keep_error(Failure failure) {
  const Position& position = positions_[failure.action.stage];
  failure.action.microbatch = static_cast<int32_t>(position.microbatch);
  try {
    std::rethrow_exception(failure.error);
  } catch (const NoMoreItems&) {
    return;
  } catch (...) {
    if (!position.item) throw;
  }
  try {
    Pipeline::raise(failure, *position.item->minibatch);
  } catch (...) {
    error_ = std::current_exception();
  }
}

void InferenceStream::abort() {
  is_aborted_ = true;
  const Transport& transport = *pipeline_->transport_;
  transport.survive_failures();
  if (!transport.is_cpu()) {
    for (const Stream& stream : transport.streams()) leftover_.emplace_back(stream);
  }
  std::deque<std::shared_ptr<Item>> items;
  int64_t num_complete = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    items = items_;
    num_complete = num_complete_ - num_popped_;
  }
  // The latest first, because each restores the state that it has found.
  for (auto i = static_cast<int64_t>(items.size()); i-- > num_complete;) items[i]->minibatch->abandon();
}

}  // namespace gpipe_fast
