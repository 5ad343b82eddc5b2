// A program: one stage's forward or backward, lowered to a list of operators that runs without Python.
//
// Where its tensors live, for a stage of two layers (b: bytes into the arena):
//
//   inputs       [x] [key] ..       set by the caller for each run
//   parameters   [w1] [w2] ..       bound once per mini-batch
//   casts        [w1 bf16] ..       of parameters, computed when they are bound, shared by a stage's programs
//   arena        [ h1 b=0 | g2 b=4096 | .. ]   one block per stage, laid out when lowering
//   fresh        [y]                allocated in each run: values that outlive the run
//   results      [mean] [rstd] ..   returned by operators without an out variant
//   accumulators [dw1] [dw2] ..     allocated by a mini-batch's first run, added to by later ones
//
// A view of any of these is a tensor that is built once; when its base moves, the view is pointed at the new storage.
#pragma once

#include "engine/cancellation_token.h"
#include "program/caching_allocator.h"
#include "program/operator.h"
#include "program/parameter_casts.h"

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
  // Whether the elements are conjugated or negated when they are read, as a tensor's bits say.
  bool conj = false;
  bool neg = false;

  static Layout of(const at::Tensor& tensor);
  bool matches(const at::Tensor& tensor) const;
  // Returns an uninitialized tensor.
  at::Tensor empty(at::Device device) const;
  void set_bits(const at::Tensor& tensor) const;
};

// Returns a view in which expanded dimensions have size 1, so that each element occurs once.
at::Tensor unexpanded(const at::Tensor& tensor);

// Index of a value in its program.
using Slot = int64_t;

// The parts of a run, in order: the steps before the first that reads a late input (a boundary gradient), the steps
// up to the last that writes a result, and the remaining steps.
enum class Part : uint8_t { early, results, rest };

// The runs of a mini-batch in which a step is executed; the first run allocates the accumulators.
enum class ActiveRuns : uint8_t { always, first, later };

// Returns the alignment, in bytes, of what PyTorch allocates on a device. Libraries such as cuBLASLt choose kernels by
// it, so tensors that share memory must have it, too.
inline int64_t alignment_of(at::Device device) { return device.is_cuda() ? 512 : 64; }

// A block of memory that the programs of one stage use in turn. Not thread-safe: a stage has one worker.
//
// Blocks take each other's place in one storage, to which the programs' tensors refer. On the CPU, where new pages
// take time, a block stays until a larger one is needed. On a GPU, it belongs to a run, so that between runs what is
// saved can have its memory; if graphs are captured, it stays, because they refer to its address.
class Arena {
 public:
  // Makes the block at least `bytes` large.
  void reserve(int64_t bytes, at::Device device);
  // Call at the end of a run.
  void release();
  // Makes the block at least `bytes` large, and keeps it from now on. A larger one gets a new storage, and increments
  // generation(), by which programs detect it; whoever owns the old storage keeps the old block.
  void hold(int64_t bytes, at::Device device);
  int64_t bytes() const { return bytes_; }
  int64_t generation() const { return generation_; }
  const c10::Storage& storage() const { return block_.storage(); }
  // Serves the memory that operators allocate themselves.
  CachingAllocator& allocator() { return *allocator_; }

 private:
  at::Tensor block_;
  std::shared_ptr<CachingAllocator> allocator_ = std::make_shared<CachingAllocator>();
  int64_t bytes_ = 0;
  int64_t generation_ = 0;
  bool held_ = false;
};

class Program {
 public:
  Program(std::shared_ptr<Arena> arena, at::Device device);
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  // Building: a value must be added before the steps that use it. Each function returns the new value's slot.
  // `any_dtype`: accepts the dtype that an operator of another program returned, even if tracing predicted another.
  Slot add_input(Layout layout, bool any_dtype = false);
  Slot add_parameter(int64_t index, Layout layout);
  // Adds a parameter in another dtype, that of `layout`, with the parameter's sizes and strides.
  Slot add_parameter_cast(int64_t index, Layout layout);
  Slot add_constant(at::Tensor value);
  Slot add_accumulator(int64_t index, Layout layout);
  Slot add_arena(int64_t offset_bytes, Layout layout);
  Slot add_fresh(Layout layout);
  Slot add_result(Layout layout);
  Slot add_view(Slot base, int64_t offset_elements, Layout layout);

  // Sets the layer of the steps that are added from now on, by its title in error messages; initially none.
  void set_layer(std::string title);
  // Appends an operator call that writes its results into its argument tensors.
  void add_call(std::unique_ptr<Operator> op, ActiveRuns when);
  // Appends an operator call that returns its results; a null slot discards a result.
  void add_call_returning(std::unique_ptr<Operator> op, std::vector<std::optional<Slot>> results,
                          ActiveRuns when);
  // Appends the allocation of a fresh value or an accumulator, uninitialized.
  void add_allocate(Slot value, ActiveRuns when);
  // Appends accumulator += value.
  void add_accumulate(Slot accumulator, Slot value, ActiveRuns when);
  // Appends accumulator += value for several pairs, in one kernel where possible. No two tensors may share memory.
  void add_accumulate_all(const std::vector<Slot>& accumulators, const std::vector<Slot>& values,
                          ActiveRuns when);
  // Appends accumulator = value without a copy. Nothing else may refer to the value's tensor.
  void add_adopt(Slot accumulator, Slot value);
  // Appends the release of a value of this run and of all its views.
  void add_release(Slot value);
  // Sets the results, in order. No result may be in the arena.
  void set_outputs(std::vector<Slot> outputs);
  // Sets which results a run can write into memory that it is given. The run must allocate the memory of such a result
  // in a step, in the result's order of elements, and use it for no other result.
  void set_placeable(std::vector<bool> placeable) { placeable_ = std::move(placeable); }
  // Sets the number of steps before Part::results and before Part::rest. By default all steps are in Part::early.
  void set_parts(int64_t before_results, int64_t before_rest);
  void set_arena_bytes(int64_t bytes) { arena_bytes_ = bytes; }

  // What differs in a program that has the same steps for tensors of other sizes.
  struct Resize {
    struct Value {
      Slot slot;
      std::vector<int64_t> sizes, strides;
      int64_t offset;  // in bytes into the arena, or in elements from a view's base
    };
    struct Constant {
      size_t step, argument;
      c10::IValue value;
    };
    std::vector<Value> values;
    std::vector<Constant> constants;
    int64_t arena_bytes;
  };
  // Returns such a program, without placeable results. This one may be running.
  std::shared_ptr<Program> resized(const Resize& resize) const;
  // Returns the operator that a step calls, by the number of steps added before.
  const Operator& operator_of(size_t step) const { return *steps_.at(step)->op; }

  // Returns the tensor of a slot, for building operators. Its address is fixed; its content changes with every run.
  at::Tensor* tensor(Slot slot) { return &slots_.at(slot); }

  // Points parameter values at `parameters`, indexed as in add_parameter(), and parameter casts at `casts`. Casts that
  // are missing there are computed, on the current stream, and added. Call once per run of the stage.
  void bind(const std::vector<at::Tensor>& parameters, ParameterCasts& casts);
  // Releases the parameter casts; bind() must be called before the program runs again.
  void release_casts();

  // One run, whose parts may be executed at different times; needs no GIL. At most one program of an arena may run
  // at a time.
  //
  // `accumulators` is indexed as in add_accumulator() and must outlive the run: if `first`, the run allocates this
  // program's accumulators, otherwise it adds to them. `token`, if not null, is checked before every step, and
  // while a step waits for other processes, and receives the layer of a step that throws. A run that throws, or that is
  // never finished, leaves the accumulators undefined; the program can be run again.
  class Run {
   public:
    Run(Program& program, std::vector<at::Tensor>& accumulators, bool first);
    Run(const Run&) = delete;
    Run& operator=(const Run&) = delete;

    // Sets an input, by position. Call before the first part that reads the input.
    void take(size_t position, const at::Tensor& input);
    // Gives the run the memory of a placeable result, a tensor of its layout. Call before the first part.
    void place(size_t output, const at::Tensor& memory);
    void execute(Part part, CancellationToken* token = nullptr);
    // Returns the results. Call after Part::results.
    std::vector<at::Tensor> outputs() const;
    // Stores the accumulators that a first run allocated. Call after the last part.
    void finish();

   private:
    struct ReleaseAtEnd {
      Program& program;
      ~ReleaseAtEnd();
    };
    Program& program_;
    std::vector<at::Tensor>& accumulators_;
    bool first_;
    ReleaseAtEnd release_at_end_;
  };
  // Executes a complete run and returns its results. `memory` is that of results; undefined where there is none.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs, std::vector<at::Tensor>& accumulators,
                              bool first, CancellationToken* token = nullptr,
                              const std::vector<at::Tensor>& memory = {});
  // Returns the layout of a result if it is placeable, else null.
  const Layout* placeable(size_t output) const;

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
    std::optional<Slot> base;  // if this value is a view
  };
  struct Input {
    Slot slot;
    bool any_dtype;
  };
  struct IndexedSlot {
    Slot slot;
    int64_t index;
  };
  struct Step {
    enum class Kind : uint8_t {
      call,
      call_returning,
      allocate,
      accumulate,
      accumulate_all,
      adopt,
      release
    } kind;
    std::unique_ptr<Operator> op;
    std::vector<std::optional<Slot>> slots;  // for accumulate_all: the accumulators, then their values
    bool escapes = false;  // a result outlives the run, so the caching allocator must not serve it
    Part part = Part::early;
    const std::string* layer = nullptr;  // title of the step's layer; null if none
    ActiveRuns when = ActiveRuns::always;
  };

  Slot add_value(Layout layout, at::Tensor tensor);
  void add_step(Step step, ActiveRuns when);
  void append(std::unique_ptr<Step> step);
  Slot base_of(Slot slot) const { return values_[slot].base.value_or(slot); }
  void point_into_arena();
  void execute(const Step& step, CancellationToken* token);
  void accumulate_all(const Step& step);

  at::Tensor make_placeholder(const Layout& layout) const;  // has sizes and strides, but no memory
  void set(Slot slot, at::Tensor tensor);
  void set_in_layout(Slot slot, at::Tensor tensor);
  void set_in_any_layout(Slot slot, at::Tensor tensor);
  at::Tensor unaliased(at::Tensor tensor) const;
  void repoint(Slot slot);
  void release(Slot slot);
  at::Tensor export_tensor(Slot slot) const;

  std::shared_ptr<Arena> arena_;
  at::Device device_;
  at::Tensor empty_tensor_;  // its storage is the placeholder of values without memory
  int64_t arena_bytes_ = 0;
  int64_t arena_generation_ = -1;

  std::deque<at::Tensor> slots_;  // a deque, because operators keep the addresses
  std::vector<Value> values_;
  std::vector<Input> inputs_;
  std::vector<IndexedSlot> parameters_, accumulators_;
  std::vector<IndexedSlot> in_arena_;  // the index is an offset in bytes
  std::vector<Slot> constants_;
  std::vector<ParameterCasts::Key> casts_;
  std::vector<Slot> cast_slots_;  // by cast
  std::vector<Slot> run_values_;  // released at the end of the run
  std::vector<Slot> outputs_;
  std::vector<bool> placeable_;  // by output
  std::vector<std::unique_ptr<Step>> steps_;
  std::vector<const Step*> first_run_steps_, later_run_steps_;
  // Titles; a deque, because steps keep the addresses, also those of resized programs.
  std::shared_ptr<std::deque<std::string>> layers_ = std::make_shared<std::deque<std::string>>();
  std::vector<at::Tensor> call_results_;  // scratch
};

}  // namespace gpipe_fast
