// Python's way to pipelines.
#include "bindings.h"

#include "autograd.h"
#include "pipeline.h"

#include <pybind11/functional.h>
#include <torch/extension.h>

#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace gpipe_fast {
namespace {

// As schedule.py writes them.
const std::map<std::string, ActionKind>& action_kinds() {
  static const std::map<std::string, ActionKind> kinds = {
      {"F", ActionKind::forward},
      {"R", ActionKind::recompute},
      {"B", ActionKind::backward},
      {"I", ActionKind::backward_inputs},
      {"W", ActionKind::backward_weights},
      {"SEND_F", ActionKind::send_forward},
      {"RECV_F", ActionKind::recv_forward},
      {"SEND_B", ActionKind::send_backward},
      {"RECV_B", ActionKind::recv_backward},
  };
  return kinds;
}

// Kind, micro-batch, rank; by stage.
Actions make_actions(const std::vector<std::vector<std::tuple<std::string, int32_t, int64_t>>>& stages,
                     int64_t capacity) {
  std::vector<std::vector<Action>> result;
  for (const auto& list : stages) {
    const int32_t stage = static_cast<int32_t>(result.size());
    auto& actions = result.emplace_back();
    for (const auto& [kind, microbatch, rank] : list) {
      actions.push_back({action_kinds().at(kind), stage, microbatch, rank});
    }
  }
  return Actions(std::move(result), capacity);
}

// Lets Ctrl-C through; the workers never come here.
void check_signals() {
  if (!Py_IsInitialized()) return;
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

// Action, whether it is a wait, begin and end in nanoseconds, run.
using PlainEvent = std::tuple<std::string, bool, int64_t, int64_t, int64_t>;

std::vector<std::vector<PlainEvent>> events(Pipeline& pipeline) {
  std::vector<std::vector<Event>> found;
  {
    const py::gil_scoped_release no_gil;
    found = pipeline.events();
  }
  std::vector<std::vector<PlainEvent>> result;
  for (const auto& stage : found) {
    auto& plain = result.emplace_back();
    for (const Event& event : stage)
      plain.emplace_back(event.action.name(), event.is_wait, event.begin, event.end, event.run);
  }
  return result;
}

[[noreturn]] void raise_planted(const std::string& error) {
  const std::string message = "planted " + error;
  if (error == "IndexError") TORCH_CHECK_INDEX(false, message);
  if (error == "ValueError") TORCH_CHECK_VALUE(false, message);
  if (error == "TypeError") TORCH_CHECK_TYPE(false, message);
  if (error == "NotImplementedError") TORCH_CHECK_NOT_IMPLEMENTED(false, message);
  throw std::runtime_error(message);
}

void disturb(Pipeline& pipeline, uint64_t seed, int64_t longest_delay_us,
             const std::vector<std::tuple<std::string, int64_t, std::string>>& faults) {
  Disturbance disturbance{seed, longest_delay_us, {}};
  for (const auto& [action, step, error] : faults) {
    disturbance.faults.push_back({action, step, [error = error] { raise_planted(error); }});
  }
  const py::gil_scoped_release no_gil;
  pipeline.disturb(std::move(disturbance));
}

}  // namespace

void bind_pipeline(py::module_& m) {
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
  py::class_<Actions>(m, "Actions").def(py::init(&make_actions), py::arg("stages"), py::arg("capacity"));
  py::class_<StagePlan>(m, "StagePlan")
      .def(py::init([](int64_t first_layer, std::vector<int64_t> parameters, std::vector<int64_t> buffers,
                       const std::vector<std::shared_ptr<Pass>>& passes) {
             return StagePlan{
                 first_layer, std::move(parameters), std::move(buffers), {passes.begin(), passes.end()}};
           }),
           py::arg("first_layer"), py::arg("parameters"), py::arg("buffers"), py::arg("passes"));
  py::class_<Plan, std::shared_ptr<Plan>>(m, "Plan").def(
      py::init([](std::vector<StagePlan> stages, Actions forward, std::optional<Actions> backward,
                  int num_threads, std::vector<bool> replicated, std::vector<bool> differentiable,
                  std::vector<bool> expected,
                  std::optional<std::function<std::shared_ptr<Plan>(std::vector<bool>)>> instead) {
        // pybind's own wrapper takes the GIL to call and to let go.
        auto plan = std::make_shared<Plan>(Plan{std::move(stages),
                                                std::move(forward),
                                                std::move(backward),
                                                num_threads,
                                                std::move(replicated),
                                                std::move(differentiable),
                                                std::move(expected),
                                                {}});
        if (instead) plan->instead = std::move(*instead);
        return plan;
      }),
      py::arg("stages"), py::arg("forward"), py::arg("backward"), py::arg("num_threads"),
      py::arg("replicated"), py::arg("differentiable"), py::arg("expected"), py::arg("instead"));

  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<Pipeline, std::shared_ptr<Pipeline>>(m, "Pipeline")
      .def(
          py::init([](int32_t num_stages) { return std::make_shared<Pipeline>(num_stages, &check_signals); }),
          py::arg("num_stages"))
      .def(
          "forward",
          [](Pipeline& pipeline, const std::shared_ptr<Plan>& plan, const Tensors& inputs,
             const Tensors& parameters, const Tensors& buffers,
             int64_t key) { return pipeline.forward(plan, inputs, parameters, buffers, key); },
          py::arg("plan"), py::arg("inputs"), py::arg("parameters"), py::arg("buffers"), py::arg("key"),
          no_gil)
      .def("record", &Pipeline::record, py::arg("events_per_stage"), no_gil)
      .def("recorded", &Pipeline::recorded, no_gil)
      .def("events", &events)
      .def("disturb", &disturb, py::arg("seed") = 0, py::arg("longest_delay_us") = 0,
           py::arg("faults") = std::vector<std::tuple<std::string, int64_t, std::string>>())
      .def("close", &Pipeline::close, no_gil)
      .def("after_fork", &Pipeline::after_fork);
  m.def("kept_bytes", &kept_bytes, py::arg("output"), no_gil);
}

}  // namespace gpipe_fast
