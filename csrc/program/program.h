// A program: one stage's forward or backward, lowered to a list of operators that runs without Python.
//
// Where its tensors live, for a stage of two layers (b: bytes into the arena):
//
//   inputs       [x] [key] ..       set by the caller for each run
//   parameters   [w1] [w2] ..       bound once per mini-batch
//   arena        [ h1 b=0 | g2 b=4096 | .. ]   one block per stage, laid out when lowering
//   fresh        [y]                made for each run: what outlives it
//   results      [mean] [rstd] ..   whatever an operator without an out variant returns
//   accumulators [dw1] [dw2] ..     made by a mini-batch's first run, added to by later ones
//
// A view of any of these is a tensor built once; when its base moves, it is pointed at the new storage.
#pragma once

#include "engine/watch.h"
#include "program/operator.h"
#include "program/recycler.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace gpipe_fast {

struct Layout {
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  at::ScalarType dtype;

  bool matches(const at::Tensor& tensor) const;
};

// Index of a value in its program.
using Slot = int64_t;

// The parts of a run, in order: what needs no late input, what makes the results, and the rest.
enum class Part : uint8_t { early, results, rest };

// In which runs of a mini-batch a step takes part: the first one makes the accumulators.
enum class When : uint8_t { always, first, later };

// A block of memory that the programs of one stage use in turn. Not thread safe: a stage has one worker.
class Arena {
 public:
  // Grows to at least `bytes`; programs notice by the generation.
  void reserve(int64_t bytes, at::Device device);
  const c10::Storage& storage() const { return block_.storage(); }
  int64_t bytes() const { return bytes_; }
  int64_t generation() const { return generation_; }
  // For what operators allocate themselves.
  Recycler& recycler() { return *recycler_; }

 private:
  at::Tensor block_;
  std::shared_ptr<Recycler> recycler_ = std::make_shared<Recycler>();
  int64_t bytes_ = 0;
  int64_t generation_ = 0;
};

class Program {
 public:
  Program(std::shared_ptr<Arena> arena, at::Device device);
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  // Building: a value is added before the steps that use it. Each returns the new value's slot.
  // `any_dtype`: as an operator of another program returned it, which may differ from what tracing foresaw.
  Slot add_input(Layout layout, bool any_dtype = false);
  Slot add_parameter(int64_t index, Layout layout);
  Slot add_constant(at::Tensor value);
  Slot add_accumulator(int64_t index, Layout layout);
  Slot add_arena(int64_t offset_bytes, Layout layout);
  Slot add_fresh(Layout layout);
  Slot add_result(Layout layout);
  Slot add_view(Slot base, int64_t offset_elements, Layout layout);

  // Which layer the steps that are added from now on belong to, as errors call it; at first none.
  void set_layer(std::string title);
  // Appends a call that writes its results into tensors it was given.
  void add_call(std::unique_ptr<Operator> op, When when);
  // Appends a call whose results are taken in; null where nobody reads one.
  void add_call_returning(std::unique_ptr<Operator> op, std::vector<std::optional<Slot>> results, When when);
  // Makes a fresh value or an accumulator, uninitialised.
  void add_make(Slot value, When when);
  // accumulator += value.
  void add_accumulate(Slot accumulator, Slot value, When when);
  // The same for several at once, of which none shares memory with another's; where it can, by one kernel.
  void add_accumulate_all(const std::vector<Slot>& accumulators, const std::vector<Slot>& values, When when);
  // The accumulator becomes the value's tensor, which nothing else refers to.
  void add_take(Slot accumulator, Slot value);
  // Drops a value of this run, and all views of it.
  void add_release(Slot value);
  // The results, in order. None may lie in the arena.
  void set_outputs(std::vector<Slot> outputs);
  // Of all steps, how many come before the second part, and before the third, by which results are made; by default
  // there is but the first.
  void set_parts(int64_t before_results, int64_t before_rest);
  void set_arena_bytes(int64_t bytes) { arena_bytes_ = bytes; }

  // For building operators: the tensor of a slot; its address stays, its content changes with every run.
  at::Tensor* tensor(Slot slot) { return &slots_.at(slot); }

  // Points parameter values at `parameters`, indexed as in add_parameter. Once per mini-batch.
  void bind(const std::vector<at::Tensor>& parameters);

  // A run whose parts may lie apart in time; needs no GIL. `accumulators`, which outlives it, is indexed as in
  // add_accumulator: with `first` this program's are made, else added to. `watch`, where given, is asked before every
  // step, and told the layer of a step that throws. What an exception ends, and what does not finish, leaves the accumulators undefined; the program can be run
  // again. Of the programs of one arena one runs at a time.
  class Run {
   public:
    Run(Program& program, std::vector<at::Tensor>& accumulators, bool first);
    Run(const Run&) = delete;
    Run& operator=(const Run&) = delete;

    // An input, by position: before the first part that reads it.
    void take(size_t position, const at::Tensor& input);
    void execute(Part part, Watch* watch = nullptr);
    // The results, once they are made.
    std::vector<at::Tensor> outputs() const;
    // After the last part.
    void finish();

   private:
    struct DropAtEnd {
      Program& program;
      ~DropAtEnd();
    };
    Program& program_;
    std::vector<at::Tensor>& accumulators_;
    bool first_;
    DropAtEnd drop_at_end_;
  };
  // All of one.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs, std::vector<at::Tensor>& accumulators,
                              bool first, Watch* watch = nullptr);

  int64_t num_inputs() const { return static_cast<int64_t>(inputs_.size()); }
  int64_t arena_bytes() const { return arena_bytes_; }
  const std::shared_ptr<Arena>& arena() const { return arena_; }

 private:
  struct View {
    Slot slot;
    int64_t offset;  // in elements
  };
  struct Value {
    Layout layout;
    std::vector<View> views;
    std::optional<Slot> base;  // of a view
  };
  struct Input {
    Slot slot;
    bool any_dtype;
  };
  struct Indexed {
    Slot slot;
    int64_t index;
  };
  struct Step {
    enum class Kind : uint8_t { call, call_returning, make, accumulate, accumulate_all, take, release } kind;
    std::unique_ptr<Operator> op;
    std::vector<std::optional<Slot>> slots;  // to accumulate all: accumulators, then as many values
    bool leaves = false;  // a result outlives the run, so its memory must not be the recycler's
    Part part = Part::early;
    const std::string* layer = nullptr;  // its title; null if it belongs to none
  };

  Slot add_value(Layout layout, at::Tensor tensor);
  void add_step(Step step, When when);
  Slot base_of(Slot slot) const { return values_[slot].base.value_or(slot); }
  void settle_in_arena();
  void execute(const Step& step);
  void accumulate_all(const Step& step);

  at::Tensor hollow(const Layout& layout) const;  // laid out, but over no memory
  at::Tensor make(const Layout& layout) const;
  void set(Slot slot, at::Tensor tensor);
  void take_in(Slot slot, at::Tensor tensor);
  void take_result(Slot slot, at::Tensor tensor);
  at::Tensor owned(at::Tensor tensor) const;
  void repoint(Slot slot);
  void release(Slot slot);
  at::Tensor hand_out(Slot slot) const;

  std::shared_ptr<Arena> arena_;
  at::Device device_;
  at::Tensor nothing_;  // its storage stands in where a value has none
  int64_t arena_bytes_ = 0;
  int64_t arena_generation_ = -1;

  std::deque<at::Tensor> slots_;  // a deque: operators keep the addresses
  std::vector<Value> values_;
  std::vector<Input> inputs_;
  std::vector<Indexed> parameters_, accumulators_, in_arena_;  // the last one's index: offset in bytes
  std::vector<Slot> of_this_run_;                              // dropped when it ends
  std::vector<Slot> outputs_;
  std::vector<std::unique_ptr<Step>> steps_;
  std::vector<const Step*> first_, later_;
  std::deque<std::string> layers_;    // titles; a deque: steps keep the addresses
  std::vector<at::Tensor> returned_;  // scratch
};

}  // namespace gpipe_fast
