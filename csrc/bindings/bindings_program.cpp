// Bindings that build and run a Program.
#include "bindings/bindings.h"
#include "bindings/python_workers.h"

#include "check.h"
#include "program/launch.h"
#include "program/place.h"
#include "program/program.h"

#include <ATen/ScalarOps.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace gpipe_fast {
namespace {

// A value's slot, as a type of its own to distinguish it from a constant integer.
struct Value {
  Slot slot;
};

bool is_tensor_list(const c10::TypePtr& type) {
  auto list = type->cast<c10::ListType>();
  if (!list) return false;
  auto element = list->getElementType();
  if (auto optional = element->cast<c10::OptionalType>()) element = optional->getElementType();
  return element->kind() == c10::TypeKind::TensorType;
}

c10::IValue to_constant(py::handle object, const c10::TypePtr& type) {
  const bool number =
      py::isinstance<py::int_>(object) || py::isinstance<py::float_>(object) || PyComplex_Check(object.ptr());
  if (type->kind() == c10::TypeKind::TensorType && number) {
    // As in eager mode's `tensor + 1`, a wrapped number does not promote the result's dtype.
    at::Tensor tensor = at::scalar_to_tensor(torch::jit::toIValue(object, c10::NumberType::get()).toScalar());
    tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
    return tensor;
  }
  return torch::jit::toIValue(object, type);
}

Argument to_argument(Program& program, py::handle object, const c10::TypePtr& type) {
  if (py::isinstance<Value>(object)) return program.tensor(object.cast<Value>().slot);
  if (is_tensor_list(type) && py::isinstance<py::sequence>(object)) {
    std::vector<at::Tensor*> tensors;
    for (py::handle element : object) {
      tensors.push_back(element.is_none() ? nullptr : program.tensor(element.cast<Value>().slot));
    }
    return tensors;
  }
  return to_constant(object, type);
}

void add_operator(Program& program, const std::string& name, const std::string& overload,
                  const py::list& arguments, const std::optional<std::vector<std::optional<Slot>>>& results,
                  ActiveRuns when) {
  auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
  const auto& schema = op.schema().arguments();
  GPIPE_CHECK_ARG(arguments.size() == schema.size(), name, ".", overload, " takes ", schema.size(),
                  " arguments, got ", arguments.size());
  std::vector<Argument> converted;
  for (size_t i = 0; i < schema.size(); ++i)
    converted.push_back(to_argument(program, arguments[i], schema[i].type()));
  auto call = make_boxed(op, std::move(converted), !results);
  if (results) {
    program.add_call_returning(std::move(call), *results, when);
  } else {
    program.add_call(std::move(call), when);
  }
}

std::shared_ptr<Kernel> make_kernel(const py::bytes& image, std::string name, int64_t num_threads,
                                    int64_t num_ctas, int64_t shared_bytes, bool cooperative, bool launch_pdl,
                                    at::Device device) {
  const KernelImage made{image,        std::move(name), num_threads, num_ctas,
                         shared_bytes, cooperative,     launch_pdl};
  const py::gil_scoped_release no_gil;
  return load_kernel(made, device);
}

void add_launch(Program& program, const std::shared_ptr<Kernel>& aligned,
                const std::shared_ptr<Kernel>& unaligned, const Grid& grid, const py::sequence& arguments,
                const std::vector<int64_t>& aligned_positions, ActiveRuns when) {
  std::vector<LaunchArgument> converted;
  for (const py::handle argument : arguments) {
    if (py::isinstance<Value>(argument)) {
      converted.emplace_back(program.tensor(argument.cast<Value>().slot));
      continue;
    }
    GPIPE_CHECK_ARG(py::isinstance<py::bytes>(argument), "argument ", converted.size(), " of kernel ",
                    aligned->name(), " must be a Value or bytes, got ",
                    py::str(argument).cast<std::string>());
    converted.emplace_back(argument.cast<std::string>());
  }
  program.add_call(make_launch(aligned, unaligned, grid, converted, aligned_positions), when);
}

// The check calls a Python function, and releases it under the GIL.
void add_check(Program& program, py::function check, const std::vector<Value>& inputs,
               const std::vector<Value>& outputs) {
  const auto tensors = [&](const std::vector<Value>& values) {
    std::vector<at::Tensor*> found;
    for (const Value& value : values) found.push_back(program.tensor(value.slot));
    return found;
  };
  const auto call = [function = wrap_object(std::move(check))](const std::vector<at::Tensor>& given,
                                                               const std::vector<at::Tensor>& computed) {
    const py::gil_scoped_acquire gil;
    return unwrap_object(function)(given, computed).cast<bool>();
  };
  program.add_call(make_check(call, tensors(inputs), tensors(outputs)), ActiveRuns::always);
}

// How a program follows from sizes: the positions, in a list of known numbers, tuples and arguments, of what differs.
struct Resizing {
  using Value = std::tuple<Slot, size_t, size_t, size_t>;  // a value, its sizes, strides and offset
  using Constant = std::tuple<size_t, size_t, size_t>;     // a step, an argument and its position
  using Chain = std::tuple<std::vector<Slot>, size_t, int64_t, int64_t>;  // values, bytes, begin and end
  std::vector<Value> values;
  std::vector<Constant> constants;
  std::vector<Chain> chains;
  int64_t alignment;
};

std::shared_ptr<Program> resized(const Program& program, const Resizing& how, const py::list& known) {
  std::vector<std::optional<std::vector<int64_t>>> converted(known.size());
  const auto numbers_at = [&](size_t position) -> const std::vector<int64_t>& {
    auto& found = converted.at(position);
    if (!found) found = known[position].cast<std::vector<int64_t>>();
    return *found;
  };
  std::vector<LiveRange> ranges;
  for (const auto& [values, bytes, begin, end] : how.chains) {
    ranges.push_back({known[bytes].cast<int64_t>(), begin, end});
  }
  const Placement placement = place(ranges, how.alignment);
  std::unordered_map<Slot, int64_t> offsets;
  for (size_t i = 0; i < ranges.size(); ++i) {
    for (Slot value : std::get<0>(how.chains[i])) offsets[value] = placement.offsets[i];
  }
  Program::Resize resize;
  resize.arena_bytes = placement.bytes;
  for (const auto& [slot, sizes, strides, offset] : how.values) {
    const auto in_arena = offsets.find(slot);
    const int64_t at = in_arena == offsets.end() ? known[offset].cast<int64_t>() : in_arena->second;
    resize.values.push_back({slot, numbers_at(sizes), numbers_at(strides), at});
  }
  for (const auto& [step, argument, position] : how.constants) {
    const c10::TypePtr type = program.operator_of(step).argument_type(argument);
    resize.constants.push_back({step, argument, to_constant(known[position], type)});
  }
  return program.resized(resize);
}

std::pair<std::vector<int64_t>, int64_t> place_ranges(
    const std::vector<std::tuple<int64_t, int64_t, int64_t>>& given, int64_t alignment) {
  std::vector<LiveRange> ranges;
  for (const auto& [bytes, begin, end] : given) ranges.push_back({bytes, begin, end});
  Placement found = place(ranges, alignment);
  return {std::move(found.offsets), found.bytes};
}

Layout layout(std::vector<int64_t> sizes, std::vector<int64_t> strides, at::ScalarType dtype,
              std::pair<bool, bool> bits) {
  return Layout{std::move(sizes), std::move(strides), dtype, bits.first, bits.second};
}

void bind(Program& program, const std::vector<at::Tensor>& parameters) {
  ParameterCasts casts;
  program.bind(parameters, casts);
}

using Accumulators = std::vector<std::optional<at::Tensor>>;

std::pair<std::vector<at::Tensor>, Accumulators> run(Program& program, const std::vector<at::Tensor>& inputs,
                                                     const Accumulators& accumulators, bool first) {
  py::gil_scoped_release no_gil;
  std::vector<at::Tensor> defined;
  for (const auto& accumulator : accumulators) defined.push_back(accumulator.value_or(at::Tensor()));
  auto outputs = program.run(inputs, defined, first);
  Accumulators result;
  for (auto& accumulator : defined) {
    result.push_back(accumulator.defined() ? std::optional<at::Tensor>(std::move(accumulator))
                                           : std::nullopt);
  }
  return {std::move(outputs), std::move(result)};
}

}  // namespace

void bind_program(py::module_& m) {
  py::enum_<ActiveRuns>(m, "ActiveRuns")
      .value("ALWAYS", ActiveRuns::always)
      .value("FIRST", ActiveRuns::first)
      .value("LATER", ActiveRuns::later);
  py::class_<Value>(m, "Value").def(py::init<Slot>()).def_readonly("slot", &Value::slot);
  py::class_<Layout>(m, "Layout")
      .def(py::init(&layout), py::arg("sizes"), py::arg("strides"), py::arg("dtype"),
           py::arg("bits") = std::pair(false, false));
  py::class_<Kernel, std::shared_ptr<Kernel>>(m, "Kernel")
      .def(py::init(&make_kernel), py::arg("image"), py::arg("name"), py::arg("num_threads"),
           py::arg("num_ctas"), py::arg("shared_bytes"), py::arg("cooperative"), py::arg("launch_pdl"),
           py::arg("device"));
  py::class_<Arena, std::shared_ptr<Arena>>(m, "Arena")
      .def(py::init<>())
      .def_property_readonly("bytes", &Arena::bytes)
      .def("release_cached", [](Arena& arena) { arena.allocator().release_cached(); })
      .def_property_readonly("cached_bytes", [](Arena& arena) { return arena.allocator().cached_bytes(); });
  py::class_<Resizing>(m, "Resizing")
      .def(py::init([](std::vector<Resizing::Value> values, std::vector<Resizing::Constant> constants,
                       std::vector<Resizing::Chain> chains, int64_t alignment) {
             return Resizing{std::move(values), std::move(constants), std::move(chains), alignment};
           }),
           py::arg("values"), py::arg("constants"), py::arg("chains"), py::arg("alignment"));
  py::class_<Program, std::shared_ptr<Program>>(m, "Program")
      .def(py::init<std::shared_ptr<Arena>, at::Device>(), py::arg("arena"), py::arg("device"))
      .def("add_input", &Program::add_input, py::arg("layout"), py::arg("any_dtype") = false)
      .def("add_parameter", &Program::add_parameter)
      .def("add_parameter_cast", &Program::add_parameter_cast)
      .def("add_constant", &Program::add_constant)
      .def("add_accumulator", &Program::add_accumulator)
      .def("add_arena", &Program::add_arena)
      .def("add_fresh", &Program::add_fresh)
      .def("add_result", &Program::add_result)
      .def("add_view", &Program::add_view)
      .def("set_layer", &Program::set_layer)
      .def("add_operator", &add_operator, py::arg("name"), py::arg("overload"), py::arg("arguments"),
           py::arg("results"), py::arg("when") = ActiveRuns::always)
      .def("add_launch", &add_launch, py::arg("aligned"), py::arg("unaligned"), py::arg("grid"),
           py::arg("arguments"), py::arg("aligned_positions"), py::arg("when") = ActiveRuns::always)
      .def("add_check", &add_check, py::arg("check"), py::arg("inputs"), py::arg("outputs"))
      .def("add_allocate", &Program::add_allocate)
      .def("add_accumulate", &Program::add_accumulate)
      .def("add_accumulate_all", &Program::add_accumulate_all)
      .def("add_adopt", &Program::add_adopt)
      .def("add_release", &Program::add_release)
      .def("set_outputs", &Program::set_outputs)
      .def("set_placeable", &Program::set_placeable)
      .def("set_parts", &Program::set_parts)
      .def("set_arena_bytes", &Program::set_arena_bytes)
      .def("resized", &resized, py::arg("how"), py::arg("known"))
      .def("bind", &bind, py::call_guard<py::gil_scoped_release>())
      .def("run", &run, py::arg("inputs"), py::arg("accumulators"), py::arg("first"))
      .def_property_readonly("arena_bytes", &Program::arena_bytes);
  m.def("alignment_of", &alignment_of);
  m.def("place", &place_ranges, py::arg("ranges"), py::arg("alignment"));
}

}  // namespace gpipe_fast
