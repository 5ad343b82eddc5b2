#include "program/program.h"

#include "check.h"
#include "program/accumulate.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <set>
#include <utility>

namespace gpipe_fast {
namespace {

// An add_() of a small gradient spends more time on set-up than on additions, so small contiguous tensors use a loop.
constexpr int64_t kLoopElements = 16384;

template <class T>
void add_loop(at::Tensor& accumulator, const at::Tensor& value) {
  T* __restrict__ a = accumulator.mutable_data_ptr<T>();
  const T* __restrict__ v = value.const_data_ptr<T>();
  for (int64_t i = 0, n = accumulator.numel(); i < n; ++i) a[i] += v[i];
}

void accumulate(at::Tensor& accumulator, const at::Tensor& value) {
  const bool plain = accumulator.is_cpu() && accumulator.numel() <= kLoopElements &&
                     accumulator.is_contiguous() && value.is_contiguous() &&
                     accumulator.dtype() == value.dtype() && accumulator.numel() == value.numel();
  if (plain && accumulator.scalar_type() == at::kFloat) {
    add_loop<float>(accumulator, value);
  } else if (plain && accumulator.scalar_type() == at::kDouble) {
    add_loop<double>(accumulator, value);
  } else {
    accumulator.add_(value);
  }
}

}  // namespace

bool Layout::matches(const at::Tensor& tensor) const {
  return tensor.scalar_type() == dtype && tensor.sizes() == sizes && tensor.strides() == strides;
}

void Arena::reserve(int64_t bytes, at::Device device) {
  if (block_.defined() && bytes <= bytes_) return;
  block_ = at::empty({bytes}, at::TensorOptions(at::kByte).device(device));
  bytes_ = bytes;
  ++generation_;
}

Program::Program(std::shared_ptr<Arena> arena, at::Device device)
    : arena_(std::move(arena)), device_(device), nothing_(at::empty({0}, at::TensorOptions(device))) {}

Slot Program::add_value(Layout layout, at::Tensor tensor) {
  slots_.push_back(std::move(tensor));
  values_.push_back(Value{std::move(layout), {}, std::nullopt});
  return static_cast<Slot>(slots_.size()) - 1;
}

Slot Program::add_input(Layout layout, bool any_dtype) {
  Slot slot = add_value(std::move(layout), {});
  inputs_.push_back({slot, any_dtype});
  of_this_run_.push_back(slot);
  return slot;
}

Slot Program::add_parameter(int64_t index, Layout layout) {
  Slot slot = add_value(std::move(layout), {});
  parameters_.push_back({slot, index});
  return slot;
}

Slot Program::add_constant(at::Tensor value) {
  Layout layout{value.sizes().vec(), value.strides().vec(), value.scalar_type()};
  return add_value(std::move(layout), std::move(value));
}

Slot Program::add_accumulator(int64_t index, Layout layout) {
  Slot slot = add_value(std::move(layout), {});
  accumulators_.push_back({slot, index});
  of_this_run_.push_back(slot);
  return slot;
}

Slot Program::add_arena(int64_t offset_bytes, Layout layout) {
  at::Tensor tensor = hollow(layout);
  Slot slot = add_value(std::move(layout), std::move(tensor));
  in_arena_.push_back({slot, offset_bytes});
  return slot;
}

Slot Program::add_fresh(Layout layout) { return add_result(std::move(layout)); }

Slot Program::add_result(Layout layout) {
  Slot slot = add_value(std::move(layout), {});
  of_this_run_.push_back(slot);
  return slot;
}

Slot Program::add_view(Slot base, int64_t offset_elements, Layout layout) {
  GPIPE_CHECK(!values_.at(base).base, "add_view: the base must not be a view itself, got value ", base);
  at::Tensor tensor = hollow(layout);
  Slot slot = add_value(std::move(layout), std::move(tensor));
  values_[slot].base = base;
  values_[base].views.push_back({slot, offset_elements});
  if (slots_[base].defined()) repoint(base);
  return slot;
}

void Program::set_layer(std::string title) { layers_.push_back(std::move(title)); }

void Program::add_step(Step step, When when) {
  if (!layers_.empty()) step.layer = &layers_.back();
  steps_.push_back(std::make_unique<Step>(std::move(step)));
  if (when != When::later) first_.push_back(steps_.back().get());
  if (when != When::first) later_.push_back(steps_.back().get());
}

void Program::add_call(std::unique_ptr<Operator> op, When when) {
  add_step({Step::Kind::call, std::move(op), {}}, when);
}

void Program::add_call_returning(std::unique_ptr<Operator> op, std::vector<std::optional<Slot>> results,
                                 When when) {
  add_step({Step::Kind::call_returning, std::move(op), std::move(results)}, when);
}

void Program::add_make(Slot value, When when) { add_step({Step::Kind::make, nullptr, {value}}, when); }

void Program::add_accumulate(Slot accumulator, Slot value, When when) {
  add_step({Step::Kind::accumulate, nullptr, {accumulator, value}}, when);
}

void Program::add_accumulate_all(const std::vector<Slot>& accumulators, const std::vector<Slot>& values,
                                 When when) {
  GPIPE_CHECK(!values.empty() && accumulators.size() == values.size(), accumulators.size(),
              " accumulators, but ", values.size(), " values");
  Step step{Step::Kind::accumulate_all, nullptr, {}};
  step.slots.assign(accumulators.begin(), accumulators.end());
  step.slots.insert(step.slots.end(), values.begin(), values.end());
  add_step(std::move(step), when);
}

void Program::add_take(Slot accumulator, Slot value) {
  add_step({Step::Kind::take, nullptr, {accumulator, value}}, When::first);
}

void Program::add_release(Slot value) { add_step({Step::Kind::release, nullptr, {value}}, When::always); }

void Program::set_outputs(std::vector<Slot> outputs) {
  outputs_ = std::move(outputs);
  std::set<Slot> leaving;
  for (Slot slot : outputs_) leaving.insert(base_of(slot));
  for (const auto& step : steps_) {
    if (step->kind == Step::Kind::take) leaving.insert(base_of(*step->slots[1]));
  }
  for (const auto& step : steps_) {
    if (step->kind != Step::Kind::call_returning) continue;
    for (const auto& slot : step->slots) step->leaves = step->leaves || (slot && leaving.count(*slot) != 0);
  }
}

void Program::set_parts(int64_t before_results, int64_t before_rest) {
  GPIPE_CHECK(0 <= before_results && before_results <= before_rest &&
                  before_rest <= static_cast<int64_t>(steps_.size()),
              "set_parts: expected 0 <= before_results <= before_rest <= ", steps_.size(), ", got ",
              before_results, " and ", before_rest);
  for (int64_t i = before_results; i < static_cast<int64_t>(steps_.size()); ++i) {
    steps_[i]->part = i < before_rest ? Part::results : Part::rest;
  }
}

at::Tensor Program::hollow(const Layout& layout) const {
  at::Tensor tensor = at::empty({0}, at::TensorOptions(layout.dtype).device(device_));
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(nothing_.storage());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(layout.sizes, layout.strides);
  return tensor;
}

at::Tensor Program::make(const Layout& layout) const {
  return at::empty_strided(layout.sizes, layout.strides, at::TensorOptions(layout.dtype).device(device_));
}

void Program::set(Slot slot, at::Tensor tensor) {
  slots_[slot] = std::move(tensor);
  repoint(slot);
}

// Operator results and inputs may differ from tracing's prediction in layout or, for statistics, in dtype. Operators
// read such a tensor as in eager mode; only views, whose strides were precomputed, need the predicted layout. A tensor
// that tracing saw as empty bytes is the reserve space of a library (cuDNN), which chooses its size.
void Program::take_result(Slot slot, at::Tensor tensor) {
  const Value& value = values_[slot];
  const bool reserve = value.layout.dtype == at::kByte && value.layout.sizes == std::vector<int64_t>{0};
  if (value.views.empty() && tensor.defined() && (reserve || tensor.sizes() == value.layout.sizes)) {
    slots_[slot] = std::move(tensor);
  } else {
    take_in(slot, std::move(tensor));
  }
}

// Copies a tensor of another layout into the layout that the value was lowered for, from which the strides of its
// views and of later values were precomputed.
void Program::take_in(Slot slot, at::Tensor tensor) {
  const Layout& layout = values_[slot].layout;
  if (tensor.defined() && !layout.matches(tensor)) {
    GPIPE_CHECK(tensor.sizes() == layout.sizes && tensor.scalar_type() == layout.dtype, "value ", slot,
                " was lowered as ", layout.dtype, at::IntArrayRef(layout.sizes), ", got ",
                tensor.scalar_type(), tensor.sizes());
    at::Tensor copied = make(layout);
    copied.copy_(tensor);
    tensor = std::move(copied);
  }
  set(slot, std::move(tensor));
}

// Returns a tensor that aliases neither the arena nor an input, since some operators return an argument unchanged if
// there is nothing to do. A program may return its own tensors or accumulate into them.
at::Tensor Program::owned(at::Tensor tensor) const {
  if (!tensor.defined()) return tensor;
  const auto& storage = tensor.storage();
  bool shared = storage.is_alias_of(arena_->storage());
  for (const Input& input : inputs_) {
    const at::Tensor& given = slots_[input.slot];  // undefined before Run::take()
    shared = shared || (given.defined() && storage.is_alias_of(given.storage()));
  }
  return shared ? tensor.clone() : tensor;
}

void Program::repoint(Slot slot) {
  const at::Tensor& base = slots_[slot];
  if (!base.defined()) return;
  for (const View& view : values_[slot].views) {
    auto* impl = slots_[view.slot].unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(base.storage());
    impl->set_storage_offset(base.storage_offset() + view.offset);
  }
}

void Program::release(Slot slot) {
  slots_[slot] = at::Tensor();
  for (const View& view : values_[slot].views) {
    auto* impl = slots_[view.slot].unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(nothing_.storage());
    impl->set_storage_offset(0);
  }
}

// Returns the tensor of a slot for use outside of the program. The next run repoints a view's tensor, so a view is
// returned as a new tensor.
at::Tensor Program::hand_out(Slot slot) const {
  const at::Tensor& tensor = slots_[slot];
  return values_[slot].base ? tensor.detach() : tensor;
}

void Program::bind(const std::vector<at::Tensor>& parameters) {
  for (const Indexed& parameter : parameters_) {
    const at::Tensor& tensor = parameters.at(parameter.index);
    const Layout& layout = values_[parameter.slot].layout;
    GPIPE_CHECK(layout.matches(tensor), "parameter ", parameter.index, " was lowered as ", layout.dtype,
                at::IntArrayRef(layout.sizes), ", got ", tensor.scalar_type(), tensor.sizes(),
                " with strides ", tensor.strides());
    set(parameter.slot, tensor);
  }
}

Program::Run::Run(Program& program, std::vector<at::Tensor>& accumulators, bool first)
    : program_(program), accumulators_(accumulators), first_(first), drop_at_end_{program} {
  program_.settle_in_arena();
  if (first_) return;
  // Excludes autograd and version counters, here and in the functions below.
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (const Indexed& accumulator : program_.accumulators_) {
    at::Tensor& tensor = accumulators_.at(accumulator.index);
    GPIPE_CHECK(tensor.defined(), "the mini-batch's first backward made no gradient of parameter ",
                accumulator.index);
    program_.take_in(accumulator.slot, tensor);
    // The program of another shape may have allocated the accumulator with another layout.
    tensor = program_.slots_[accumulator.slot];
  }
}

Program::Run::DropAtEnd::~DropAtEnd() {
  for (Slot slot : program.of_this_run_) program.release(slot);
  program.returned_.clear();
}

void Program::Run::take(size_t position, const at::Tensor& tensor) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Input& input = program_.inputs_.at(position);
  const bool fits = input.any_dtype || tensor.scalar_type() == program_.values_[input.slot].layout.dtype;
  fits ? program_.take_result(input.slot, tensor) : program_.take_in(input.slot, tensor);
}

void Program::Run::execute(Part part, Watch* watch) {
  // The steps need no autograd: tracing has already differentiated them.
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const std::vector<const Step*>& steps = first_ ? program_.first_ : program_.later_;
  const auto before = [](const Step* step, Part wanted) { return step->part < wanted; };
  for (auto it = std::lower_bound(steps.begin(), steps.end(), part, before);
       it != steps.end() && (*it)->part == part; ++it) {
    try {
      if (watch != nullptr) watch->look();
      program_.execute(**it);
    } catch (...) {
      if (watch != nullptr && (*it)->layer != nullptr) watch->blame(*(*it)->layer);
      throw;
    }
  }
}

std::vector<at::Tensor> Program::Run::outputs() const {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::vector<at::Tensor> outputs;
  outputs.reserve(program_.outputs_.size());
  for (Slot slot : program_.outputs_) outputs.push_back(program_.hand_out(slot));
  return outputs;
}

void Program::Run::finish() {
  if (!first_) return;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (const Indexed& accumulator : program_.accumulators_)
    accumulators_.at(accumulator.index) = program_.hand_out(accumulator.slot);
}

std::vector<at::Tensor> Program::run(const std::vector<at::Tensor>& inputs,
                                     std::vector<at::Tensor>& accumulators, bool first, Watch* watch) {
  GPIPE_CHECK(inputs.size() == inputs_.size(), "a program of ", inputs_.size(), " inputs got ",
              inputs.size());
  Run run(*this, accumulators, first);
  for (size_t i = 0; i < inputs.size(); ++i) run.take(i, inputs[i]);
  for (Part part : {Part::early, Part::results, Part::rest}) run.execute(part, watch);
  run.finish();
  return run.outputs();
}

void Program::settle_in_arena() {
  arena_->reserve(arena_bytes_, device_);
  if (arena_generation_ == arena_->generation()) return;
  for (const Indexed& value : in_arena_) {
    at::Tensor& tensor = slots_[value.slot];
    tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(arena_->storage());
    tensor.unsafeGetTensorImpl()->set_storage_offset(value.index / static_cast<int64_t>(tensor.itemsize()));
    repoint(value.slot);
  }
  arena_generation_ = arena_->generation();
}

void Program::execute(const Step& step) {
  switch (step.kind) {
    case Step::Kind::call:
    case Step::Kind::call_returning: {
      std::optional<Recycler::Use> recycled;
      if (!step.leaves) recycled.emplace(arena_->recycler());
      step.op->call(returned_);
      for (size_t i = 0; i < step.slots.size(); ++i) {
        if (step.slots[i]) take_result(*step.slots[i], owned(std::move(returned_.at(i))));
      }
      returned_.clear();
      break;
    }
    case Step::Kind::make:
      set(*step.slots[0], make(values_[*step.slots[0]].layout));
      break;
    case Step::Kind::accumulate:
      accumulate(slots_[*step.slots[0]], slots_[*step.slots[1]]);
      break;
    case Step::Kind::accumulate_all:
      accumulate_all(step);
      break;
    case Step::Kind::take:
      set(*step.slots[0], hand_out(*step.slots[1]));
      break;
    case Step::Kind::release:
      release(*step.slots[0]);
      break;
  }
}

void Program::accumulate_all(const Step& step) {
  const size_t number = step.slots.size() / 2;
  std::vector<at::Tensor> accumulators, values;
  accumulators.reserve(number);
  values.reserve(number);
  for (size_t i = 0; i < number; ++i) {
    accumulators.push_back(slots_[*step.slots[i]]);
    values.push_back(slots_[*step.slots[number + i]]);
  }
  accumulate_unchecked(accumulators, values);
}

}  // namespace gpipe_fast
