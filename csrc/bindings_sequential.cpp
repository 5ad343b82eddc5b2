// Python's way to the sequential executor.
#include "bindings.h"

#include "sequential.h"

#include <torch/extension.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace gpipe_fast {
namespace {

using OptionalTensors = std::vector<std::optional<at::Tensor>>;

std::vector<OptionalTensors> optional(std::vector<Tensors> groups) {
  std::vector<OptionalTensors> result;
  for (Tensors& group : groups) {
    OptionalTensors& tensors = result.emplace_back();
    for (at::Tensor& tensor : group) {
      tensors.push_back(tensor.defined() ? std::optional<at::Tensor>(std::move(tensor)) : std::nullopt);
    }
  }
  return result;
}

std::pair<std::vector<OptionalTensors>, std::vector<OptionalTensors>> backward(MiniBatch& minibatch,
                                                                               std::vector<Tensors> tangents,
                                                                               bool keep) {
  MiniBatch::Gradients gradients;
  {
    py::gil_scoped_release no_gil;
    gradients = minibatch.backward(std::move(tangents), keep);
  }
  return {optional(std::move(gradients.inputs)), optional(std::move(gradients.parameters))};
}

}  // namespace

void bind_sequential(py::module_& m) {
  py::enum_<Role>(m, "Role")
      .value("BUFFER", Role::buffer)
      .value("KEY", Role::key)
      .value("INPUT", Role::input)
      .value("OUTPUT", Role::output)
      .value("SAVED", Role::saved)
      .value("TANGENT", Role::tangent)
      .value("INPUT_GRADIENT", Role::input_gradient);
  py::class_<Port>(m, "Port").def(py::init([](Role role, int64_t index) { return Port{role, index}; }),
                                  py::arg("role"), py::arg("index"));
  py::class_<PortedProgram>(m, "PortedProgram")
      .def(
          py::init([](std::shared_ptr<Program> program, std::vector<Port> inputs, std::vector<Port> outputs) {
            return PortedProgram{std::move(program), std::move(inputs), std::move(outputs)};
          }),
          py::arg("program"), py::arg("inputs"), py::arg("outputs"));
  py::class_<Pass, std::shared_ptr<Pass>>(m, "Pass").def(
      py::init([](PortedProgram forward, std::optional<PortedProgram> backward) {
        return Pass{std::move(forward), std::move(backward).value_or(PortedProgram{})};
      }),
      py::arg("forward"), py::arg("backward"));
  py::class_<StageRun>(m, "StageRun")
      .def(py::init([](Tensors parameters, Tensors buffers, int64_t first_layer,
                       const std::vector<std::shared_ptr<Pass>>& passes) {
             return StageRun{
                 std::move(parameters), std::move(buffers), first_layer, {passes.begin(), passes.end()}};
           }),
           py::arg("parameters"), py::arg("buffers"), py::arg("first_layer"), py::arg("passes"))
      .def_readonly("parameters", &StageRun::parameters);
  py::class_<MiniBatch>(m, "MiniBatch")
      .def(py::init<std::vector<StageRun>, int64_t>(), py::arg("stages"), py::arg("key"))
      .def("forward", &MiniBatch::forward, py::arg("microbatches"), py::call_guard<py::gil_scoped_release>())
      .def("backward", &backward, py::arg("tangents"), py::arg("keep"))
      .def_property_readonly("kept_bytes", &MiniBatch::kept_bytes);
}

}  // namespace gpipe_fast
