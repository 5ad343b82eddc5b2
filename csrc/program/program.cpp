#include "program/program.h"

#include "check.h"
#include "program/accumulate.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <set>
#include <unordered_map>
#include <utility>

namespace gpipe_fast {
namespace {

// An add_() of a small gradient spends more time on set-up than on additions, so small contiguous tensors use a loop.
constexpr int64_t kMaxLoopElements = 16384;

template <class T>
void add_loop(at::Tensor& accumulator, const at::Tensor& value) {
  T* __restrict__ a = accumulator.mutable_data_ptr<T>();
  const T* __restrict__ v = value.const_data_ptr<T>();
  for (int64_t i = 0, n = accumulator.numel(); i < n; ++i) a[i] += v[i];
}

void accumulate(at::Tensor& accumulator, const at::Tensor& value) {
  const bool use_loop = accumulator.is_cpu() && accumulator.numel() <= kMaxLoopElements &&
                        accumulator.is_contiguous() && value.is_contiguous() && !value.is_neg() &&
                        accumulator.dtype() == value.dtype() && accumulator.numel() == value.numel();
  if (use_loop && accumulator.scalar_type() == at::kFloat) {
    add_loop<float>(accumulator, value);
  } else if (use_loop && accumulator.scalar_type() == at::kDouble) {
    add_loop<double>(accumulator, value);
  } else {
    accumulator.add_(value);
  }
}

}  // namespace

Layout Layout::of(const at::Tensor& tensor) {
  return {tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type(), tensor.is_conj(),
          tensor.is_neg()};
}

bool Layout::matches(const at::Tensor& tensor) const {
  return tensor.scalar_type() == dtype && tensor.sizes() == sizes && tensor.strides() == strides &&
         tensor.is_conj() == conj && tensor.is_neg() == neg;
}

at::Tensor Layout::empty(at::Device device) const {
  at::Tensor tensor = at::empty_strided(sizes, strides, at::TensorOptions(dtype).device(device));
  set_bits(tensor);
  return tensor;
}

void Layout::set_bits(const at::Tensor& tensor) const {
  tensor.unsafeGetTensorImpl()->_set_conj(conj);
  tensor.unsafeGetTensorImpl()->_set_neg(neg);
}

at::Tensor unexpanded(const at::Tensor& tensor) {
  std::vector<int64_t> sizes = tensor.sizes().vec();
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (tensor.stride(static_cast<int64_t>(i)) == 0) sizes[i] = 1;
  }
  return tensor.as_strided(sizes, tensor.strides(), tensor.storage_offset());
}

void Arena::reserve(int64_t bytes, at::Device device) {
  if (block_.defined() && bytes <= bytes_) return;
  const auto options = at::TensorOptions(at::kByte).device(device);
  if (!block_.defined() || held_) {
    block_ = at::empty({0}, options);
    ++generation_;
  }
  c10::StorageImpl* storage = block_.storage().unsafeGetStorageImpl();
  bytes_ = 0;  // if memory runs out below, the next call allocates
  storage->set_data_ptr_noswap(c10::DataPtr(nullptr, device));
  storage->set_nbytes(bytes);
  const at::Tensor fresh = at::empty({bytes}, options);
  storage->set_data_ptr_noswap(fresh.storage().set_data_ptr(c10::DataPtr(nullptr, device)));
  bytes_ = bytes;
}

void Arena::release() {
  if (bytes_ == 0 || held_ || block_.device().is_cpu()) return;
  block_.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(c10::DataPtr(nullptr, block_.device()));
  bytes_ = 0;
}

void Arena::hold(int64_t bytes, at::Device device) {
  reserve(bytes, device);
  held_ = true;
}

Program::Program(std::shared_ptr<Arena> arena, at::Device device)
    : arena_(std::move(arena)), device_(device), empty_tensor_(at::empty({0}, at::TensorOptions(device))) {}

Slot Program::add_value(Layout layout, at::Tensor tensor) {
  slots_.push_back(std::move(tensor));
  values_.push_back(Value{std::move(layout), {}, std::nullopt});
  return static_cast<Slot>(slots_.size()) - 1;
}

Slot Program::add_input(Layout layout, bool any_dtype) {
  Slot slot = add_value(std::move(layout), {});
  inputs_.push_back({slot, any_dtype});
  run_values_.push_back(slot);
  return slot;
}

Slot Program::add_parameter(int64_t index, Layout layout) {
  Slot slot = add_value(std::move(layout), {});
  parameters_.push_back({slot, index});
  return slot;
}

Slot Program::add_parameter_cast(int64_t index, Layout layout) {
  casts_.emplace_back(index, layout.dtype);
  cast_slots_.push_back(add_value(std::move(layout), {}));
  return cast_slots_.back();
}

Slot Program::add_constant(at::Tensor value) {
  Layout layout = Layout::of(value);
  constants_.push_back(add_value(std::move(layout), std::move(value)));
  return constants_.back();
}

Slot Program::add_accumulator(int64_t index, Layout layout) {
  Slot slot = add_value(std::move(layout), {});
  accumulators_.push_back({slot, index});
  run_values_.push_back(slot);
  return slot;
}

Slot Program::add_arena(int64_t offset_bytes, Layout layout) {
  at::Tensor tensor = make_placeholder(layout);
  Slot slot = add_value(std::move(layout), std::move(tensor));
  in_arena_.push_back({slot, offset_bytes});
  return slot;
}

Slot Program::add_fresh(Layout layout) { return add_result(std::move(layout)); }

Slot Program::add_result(Layout layout) {
  Slot slot = add_value(std::move(layout), {});
  run_values_.push_back(slot);
  return slot;
}

Slot Program::add_view(Slot base, int64_t offset_elements, Layout layout) {
  GPIPE_CHECK(!values_.at(base).base, "add_view: the base must not be a view itself, got value ", base);
  at::Tensor tensor = make_placeholder(layout);
  Slot slot = add_value(std::move(layout), std::move(tensor));
  values_[slot].base = base;
  values_[base].views.push_back({slot, offset_elements});
  if (slots_[base].defined()) repoint(base);
  return slot;
}

void Program::set_layer(std::string title) { layers_->push_back(std::move(title)); }

void Program::add_step(Step step, ActiveRuns when) {
  if (!layers_->empty()) step.layer = &layers_->back();
  step.when = when;
  append(std::make_unique<Step>(std::move(step)));
}

void Program::append(std::unique_ptr<Step> step) {
  steps_.push_back(std::move(step));
  const Step* added = steps_.back().get();
  if (added->when != ActiveRuns::later) first_run_steps_.push_back(added);
  if (added->when != ActiveRuns::first) later_run_steps_.push_back(added);
}

void Program::add_call(std::unique_ptr<Operator> op, ActiveRuns when) {
  add_step({Step::Kind::call, std::move(op), {}}, when);
}

void Program::add_call_returning(std::unique_ptr<Operator> op, std::vector<std::optional<Slot>> results,
                                 ActiveRuns when) {
  add_step({Step::Kind::call_returning, std::move(op), std::move(results)}, when);
}

void Program::add_allocate(Slot value, ActiveRuns when) {
  add_step({Step::Kind::allocate, nullptr, {value}}, when);
}

void Program::add_accumulate(Slot accumulator, Slot value, ActiveRuns when) {
  add_step({Step::Kind::accumulate, nullptr, {accumulator, value}}, when);
}

void Program::add_accumulate_all(const std::vector<Slot>& accumulators, const std::vector<Slot>& values,
                                 ActiveRuns when) {
  GPIPE_CHECK(!values.empty() && accumulators.size() == values.size(), accumulators.size(),
              " accumulators, but ", values.size(), " values");
  Step step{Step::Kind::accumulate_all, nullptr, {}};
  step.slots.assign(accumulators.begin(), accumulators.end());
  step.slots.insert(step.slots.end(), values.begin(), values.end());
  add_step(std::move(step), when);
}

void Program::add_adopt(Slot accumulator, Slot value) {
  add_step({Step::Kind::adopt, nullptr, {accumulator, value}}, ActiveRuns::first);
}

void Program::add_release(Slot value) {
  add_step({Step::Kind::release, nullptr, {value}}, ActiveRuns::always);
}

void Program::set_outputs(std::vector<Slot> outputs) {
  outputs_ = std::move(outputs);
  std::set<Slot> escaping;
  for (Slot slot : outputs_) escaping.insert(base_of(slot));
  for (const auto& step : steps_) {
    if (step->kind == Step::Kind::adopt) escaping.insert(base_of(*step->slots[1]));
  }
  for (const auto& step : steps_) {
    if (step->kind != Step::Kind::call_returning) continue;
    for (const auto& slot : step->slots)
      step->escapes = step->escapes || (slot && escaping.count(*slot) != 0);
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

std::shared_ptr<Program> Program::resized(const Resize& resize) const {
  auto found = std::make_shared<Program>(arena_, device_);
  found->arena_bytes_ = resize.arena_bytes;
  found->values_ = values_;
  found->inputs_ = inputs_;
  found->parameters_ = parameters_;
  found->accumulators_ = accumulators_;
  found->in_arena_ = in_arena_;
  found->constants_ = constants_;
  found->casts_ = casts_;
  found->cast_slots_ = cast_slots_;
  found->run_values_ = run_values_;
  found->outputs_ = outputs_;
  found->layers_ = layers_;

  std::vector<std::optional<int64_t>> offsets(values_.size());
  for (const Resize::Value& value : resize.values) {
    Layout& layout = found->values_.at(value.slot).layout;
    layout.sizes = value.sizes;
    layout.strides = value.strides;
    offsets[value.slot] = value.offset;
  }
  for (IndexedSlot& value : found->in_arena_) value.index = offsets[value.slot].value_or(value.index);
  for (Value& value : found->values_) {
    for (View& view : value.views) view.offset = offsets[view.slot].value_or(view.offset);
  }

  std::vector<bool> has_placeholder(values_.size());
  for (const IndexedSlot& value : in_arena_) has_placeholder[value.slot] = true;
  for (size_t i = 0; i < values_.size(); ++i) {
    const bool placeholder = has_placeholder[i] || values_[i].base;
    found->slots_.push_back(placeholder ? make_placeholder(found->values_[i].layout) : at::Tensor());
  }
  for (Slot slot : constants_) found->set(slot, slots_[slot]);

  std::unordered_map<const at::Tensor*, at::Tensor*> moved;
  for (size_t i = 0; i < slots_.size(); ++i) moved[&slots_[i]] = &found->slots_[i];
  const auto in_copy = [&](at::Tensor* tensor) { return moved.at(tensor); };
  for (const auto& step : steps_) {
    auto op = step->op ? step->op->copy(in_copy) : nullptr;
    found->append(std::make_unique<Step>(
        Step{step->kind, std::move(op), step->slots, step->escapes, step->part, step->layer, step->when}));
  }
  for (const Resize::Constant& each : resize.constants) {
    found->steps_.at(each.step)->op->set_constant(each.argument, each.value);
  }
  return found;
}

at::Tensor Program::make_placeholder(const Layout& layout) const {
  at::Tensor tensor = at::empty({0}, at::TensorOptions(layout.dtype).device(device_));
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(empty_tensor_.storage());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(layout.sizes, layout.strides);
  layout.set_bits(tensor);
  return tensor;
}

void Program::set(Slot slot, at::Tensor tensor) {
  slots_[slot] = std::move(tensor);
  repoint(slot);
}

// Operator results and inputs may differ from tracing's prediction in layout or, for statistics, in dtype. Operators
// read such a tensor as in eager mode; only views, whose strides were precomputed, need the predicted layout. A tensor
// that tracing saw as empty bytes is the reserve space of a library (cuDNN), which chooses its size.
void Program::set_in_any_layout(Slot slot, at::Tensor tensor) {
  const Value& value = values_[slot];
  const bool reserve = value.layout.dtype == at::kByte && value.layout.sizes == std::vector<int64_t>{0};
  if (value.views.empty() && tensor.defined() && (reserve || tensor.sizes() == value.layout.sizes)) {
    slots_[slot] = std::move(tensor);
  } else {
    set_in_layout(slot, std::move(tensor));
  }
}

// Copies a tensor into the layout that the value was lowered for: its views and later values assume these strides.
void Program::set_in_layout(Slot slot, at::Tensor tensor) {
  const Layout& layout = values_[slot].layout;
  if (tensor.defined() && !layout.matches(tensor)) {
    GPIPE_CHECK(tensor.sizes() == layout.sizes && tensor.scalar_type() == layout.dtype, "value ", slot,
                " was lowered as ", layout.dtype, at::IntArrayRef(layout.sizes), ", got ",
                tensor.scalar_type(), tensor.sizes());
    at::Tensor copied = layout.empty(device_);
    const at::Tensor once = unexpanded(copied);  // of an expanded layout, each element is written once
    once.copy_(tensor.as_strided(once.sizes(), tensor.strides()));
    tensor = std::move(copied);
  }
  set(slot, std::move(tensor));
}

// Returns a tensor that aliases neither the arena nor an input, since some operators return an argument unchanged if
// there is nothing to do. A program may return its own tensors or accumulate into them.
at::Tensor Program::unaliased(at::Tensor tensor) const {
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
    impl->set_storage_keep_dtype(empty_tensor_.storage());
    impl->set_storage_offset(0);
  }
}

// Returns a slot's tensor for use outside of the program. Views become new tensors, as the next run repoints them.
at::Tensor Program::export_tensor(Slot slot) const {
  const at::Tensor& tensor = slots_[slot];
  return values_[slot].base ? tensor.detach() : tensor;
}

void Program::bind(const std::vector<at::Tensor>& parameters, ParameterCasts& casts) {
  for (const IndexedSlot& parameter : parameters_) {
    const at::Tensor& tensor = parameters.at(parameter.index);
    const Layout& layout = values_[parameter.slot].layout;
    GPIPE_CHECK(layout.matches(tensor), "parameter ", parameter.index, " was lowered as ", layout.dtype,
                at::IntArrayRef(layout.sizes), ", got ", tensor.scalar_type(), tensor.sizes(),
                " with strides ", tensor.strides());
    set(parameter.slot, tensor);
  }
  if (casts_.empty()) return;
  casts.compute(casts_, parameters);
  for (size_t i = 0; i < casts_.size(); ++i) {
    const at::Tensor& cast = casts.at(casts_[i]);
    const Layout& layout = values_[cast_slots_[i]].layout;
    GPIPE_CHECK(layout.matches(cast), "the cast of parameter ", casts_[i].first, " was lowered as ",
                layout.dtype, at::IntArrayRef(layout.sizes), ", got ", cast.sizes(), " with strides ",
                cast.strides());
    set(cast_slots_[i], cast);
  }
}

void Program::release_casts() {
  for (Slot slot : cast_slots_) release(slot);
}

Program::Run::Run(Program& program, std::vector<at::Tensor>& accumulators, bool first)
    : program_(program), accumulators_(accumulators), first_(first), release_at_end_{program} {
  program_.point_into_arena();
  if (first_) return;
  // Excludes autograd and version counters, here and in the functions below.
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (const IndexedSlot& accumulator : program_.accumulators_) {
    at::Tensor& tensor = accumulators_.at(accumulator.index);
    GPIPE_CHECK(tensor.defined(), "the mini-batch's first backward made no gradient of parameter ",
                accumulator.index);
    program_.set_in_layout(accumulator.slot, tensor);
    // The program of another shape may have allocated the accumulator with another layout.
    tensor = program_.slots_[accumulator.slot];
  }
}

Program::Run::ReleaseAtEnd::~ReleaseAtEnd() {
  for (Slot slot : program.run_values_) program.release(slot);
  program.call_results_.clear();
  program.arena_->release();
}

void Program::Run::take(size_t position, const at::Tensor& tensor) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Input& input = program_.inputs_.at(position);
  const bool fits = input.any_dtype || tensor.scalar_type() == program_.values_[input.slot].layout.dtype;
  fits ? program_.set_in_any_layout(input.slot, tensor) : program_.set_in_layout(input.slot, tensor);
}

void Program::Run::place(size_t output, const at::Tensor& memory) {
  const Slot base = program_.base_of(program_.outputs_.at(output));
  at::Tensor tensor = program_.make_placeholder(program_.values_[base].layout);
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(memory.storage());
  tensor.unsafeGetTensorImpl()->set_storage_offset(memory.storage_offset());
  program_.set(base, std::move(tensor));
}

void Program::Run::execute(Part part, CancellationToken* token) {
  // The steps need no autograd: tracing has already differentiated them.
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const std::vector<const Step*>& steps = first_ ? program_.first_run_steps_ : program_.later_run_steps_;
  const auto before = [](const Step* step, Part wanted) { return step->part < wanted; };
  for (auto it = std::lower_bound(steps.begin(), steps.end(), part, before);
       it != steps.end() && (*it)->part == part; ++it) {
    try {
      if (token != nullptr) token->check();
      program_.execute(**it, token);
    } catch (...) {
      if (token != nullptr && (*it)->layer != nullptr) token->set_layer_title(*(*it)->layer);
      throw;
    }
  }
}

std::vector<at::Tensor> Program::Run::outputs() const {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::vector<at::Tensor> outputs;
  outputs.reserve(program_.outputs_.size());
  for (Slot slot : program_.outputs_) outputs.push_back(program_.export_tensor(slot));
  return outputs;
}

void Program::Run::finish() {
  if (!first_) return;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (const IndexedSlot& accumulator : program_.accumulators_)
    accumulators_.at(accumulator.index) = program_.export_tensor(accumulator.slot);
}

std::vector<at::Tensor> Program::run(const std::vector<at::Tensor>& inputs,
                                     std::vector<at::Tensor>& accumulators, bool first,
                                     CancellationToken* token, const std::vector<at::Tensor>& memory) {
  GPIPE_CHECK(inputs.size() == inputs_.size(), "a program of ", inputs_.size(), " inputs got ",
              inputs.size());
  Run run(*this, accumulators, first);
  for (size_t i = 0; i < inputs.size(); ++i) run.take(i, inputs[i]);
  for (size_t i = 0; i < memory.size(); ++i) {
    if (memory[i].defined()) run.place(i, memory[i]);
  }
  for (Part part : {Part::early, Part::results, Part::rest}) run.execute(part, token);
  run.finish();
  return run.outputs();
}

const Layout* Program::placeable(size_t output) const {
  return output < placeable_.size() && placeable_[output] ? &values_[outputs_.at(output)].layout : nullptr;
}

void Program::point_into_arena() {
  arena_->reserve(arena_bytes_, device_);
  if (std::exchange(arena_generation_, arena_->generation()) == arena_->generation()) return;
  for (const IndexedSlot& value : in_arena_) {
    at::Tensor& tensor = slots_[value.slot];
    tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(arena_->storage());
    tensor.unsafeGetTensorImpl()->set_storage_offset(value.index / static_cast<int64_t>(tensor.itemsize()));
    repoint(value.slot);
  }
}

void Program::execute(const Step& step, CancellationToken* token) {
  switch (step.kind) {
    case Step::Kind::call:
    case Step::Kind::call_returning: {
      std::optional<CachingAllocator::Scope> allocator_scope;
      if (!step.escapes) allocator_scope.emplace(arena_->allocator());
      step.op->call(call_results_, token);
      for (size_t i = 0; i < step.slots.size(); ++i) {
        if (step.slots[i]) set_in_any_layout(*step.slots[i], unaliased(std::move(call_results_.at(i))));
      }
      call_results_.clear();
      break;
    }
    case Step::Kind::allocate:
      if (!slots_[*step.slots[0]].defined())  // else it was placed
        set(*step.slots[0], values_[*step.slots[0]].layout.empty(device_));
      break;
    case Step::Kind::accumulate:
      accumulate(slots_[*step.slots[0]], slots_[*step.slots[1]]);
      break;
    case Step::Kind::accumulate_all:
      accumulate_all(step);
      break;
    case Step::Kind::adopt:
      set(*step.slots[0], export_tensor(*step.slots[1]));
      break;
    case Step::Kind::release:
      release(*step.slots[0]);
      break;
  }
}

void Program::accumulate_all(const Step& step) {
  const size_t num_pairs = step.slots.size() / 2;
  std::vector<at::Tensor> accumulators, values;
  accumulators.reserve(num_pairs);
  values.reserve(num_pairs);
  for (size_t i = 0; i < num_pairs; ++i) {
    accumulators.push_back(slots_[*step.slots[i]]);
    values.push_back(slots_[*step.slots[num_pairs + i]]);
  }
  accumulate_unchecked(accumulators, values);
}

}  // namespace gpipe_fast
