// Bindings of pipelines.
#include "bindings/bindings.h"
#include "bindings/python_workers.h"

#include "pipeline/autograd.h"
#include "pipeline/inference_stream.h"
#include "pipeline/pipeline.h"
#include "pipeline/settings.h"

#include <pybind11/functional.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

namespace py = pybind11;

namespace gpipe_fast {
namespace {

// Returns the transport for the value of GPipe's `transport` argument.
TransportChoice parse_transport(const std::string& transport) {
  static const std::map<std::string, TransportChoice> choices = {{"auto", TransportChoice::automatic},
                                                                 {"peer", TransportChoice::peer},
                                                                 {"pinned", TransportChoice::pinned}};
  return choices.at(transport);
}

// Returns the route of tensors from one device to another; nullopt if the requested transport does not support it.
std::optional<std::string> route(at::Device sender, at::Device receiver, const std::string& transport) {
  static const std::map<Route, std::string> names = {{Route::hand_over, "hand-over"},
                                                     {Route::peer, "peer"},
                                                     {Route::pinned, "pinned"},
                                                     {Route::copy, "copy"}};
  const std::optional<Route> found = choose(sender, receiver, parse_transport(transport));
  return found ? std::optional<std::string>(names.at(*found)) : std::nullopt;
}

// Runs pending signal handlers, such as Ctrl-C's. If one raises, also interrupts the layers that are running in Python,
// whose threads receive no signals, and throws the error.
void check_signals(const PythonWorkers& python_workers) {
  if (!Py_IsInitialized()) return;
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() == 0) return;
  const py::error_already_set error;
  python_workers.interrupt();
  throw error;
}

// Action, is_wait, begin and end in nanoseconds, run.
using EventTuple = std::tuple<std::string, bool, int64_t, int64_t, int64_t>;

std::vector<std::vector<EventTuple>> events(Pipeline& pipeline) {
  std::vector<std::vector<Event>> found;
  {
    const py::gil_scoped_release no_gil;
    found = pipeline.events();
  }
  std::vector<std::vector<EventTuple>> result;
  for (const auto& stage : found) {
    auto& tuples = result.emplace_back();
    for (const Event& event : stage)
      tuples.emplace_back(event.action.name(), event.is_wait, event.begin, event.end, event.run);
  }
  return result;
}

[[noreturn]] void raise_injected(const std::string& error) {
  const std::string message = "injected " + error;
  if (error == "IndexError") TORCH_CHECK_INDEX(false, message);
  if (error == "ValueError") TORCH_CHECK_VALUE(false, message);
  if (error == "TypeError") TORCH_CHECK_TYPE(false, message);
  if (error == "AcceleratorError")
    throw c10::AcceleratorError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, 700, message);
  TORCH_CHECK_WITH(OutOfMemoryError, error != "OutOfMemoryError", message);
  if (error == "NotImplementedError") TORCH_CHECK_NOT_IMPLEMENTED(false, message);
  throw std::runtime_error(message);
}

void inject_faults(Pipeline& pipeline, uint64_t seed, int64_t max_delay_us,
                   const std::vector<std::tuple<std::string, int64_t, std::string>>& faults) {
  FaultInjection fault_injection{seed, max_delay_us, {}};
  for (const auto& [action, step, error] : faults) {
    fault_injection.faults.push_back({action, step, [error = error] { raise_injected(error); }});
  }
  const py::gil_scoped_release no_gil;
  pipeline.inject_faults(std::move(fault_injection));
}

std::function<int64_t()> to_key_function(const std::variant<int64_t, std::function<int64_t()>>& key) {
  if (const auto* draw = std::get_if<std::function<int64_t()>>(&key)) return *draw;
  return [value = std::get<int64_t>(key)] { return value; };
}

}  // namespace

void bind_pipeline(py::module_& m) {
  // The destructor joins the workers. A worker that exits frees the objects in its thread's autograd queues, which may
  // require the GIL, so the destroying thread releases it.
  const auto destroy = [](Pipeline* pipeline) {
    std::optional<py::gil_scoped_release> no_gil;
    if (Py_IsInitialized() && PyGILState_Check()) no_gil.emplace();
    delete pipeline;
  };
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<GraphReport>(m, "GraphReport")
      .def_readonly("forward", &GraphReport::forward)
      .def_readonly("backward", &GraphReport::backward)
      .def_readonly("num_nodes", &GraphReport::num_nodes)
      .def_readonly("bytes", &GraphReport::bytes)
      .def_readonly("replays", &GraphReport::replays)
      .def_readonly("uncaptured", &GraphReport::uncaptured)
      .def_readonly("obstacle", &GraphReport::obstacle)
      .def_readonly("postponed", &GraphReport::postponed);
  py::class_<Pipeline, std::shared_ptr<Pipeline>>(m, "Pipeline")
      .def(py::init([destroy](int32_t num_stages, std::shared_ptr<PythonWorkers> python_workers,
                              const std::string& transport) {
             const auto poll = [python_workers] { check_signals(*python_workers); };
             return std::shared_ptr<Pipeline>(new Pipeline(num_stages, poll, parse_transport(transport)),
                                              destroy);
           }),
           py::arg("num_stages"), py::arg("python_workers"), py::arg("transport") = "auto")
      .def(
          "forward",
          [](Pipeline& pipeline, const std::shared_ptr<Plan>& plan, const Tensors& inputs,
             const Tensors& parameters, const Tensors& buffers,
             const std::variant<int64_t, std::function<int64_t()>>& key) {
            Boundary outputs;
            {
              const py::gil_scoped_release no_gil;
              outputs = pipeline.forward(plan, inputs, parameters, buffers, to_key_function(key));
            }
            return std::make_pair(std::move(outputs.tensors), unwrap_object(outputs.form->structure));
          },
          py::arg("plan"), py::arg("inputs"), py::arg("parameters"), py::arg("buffers"), py::arg("key"))
      .def(
          "step",
          [](Pipeline& pipeline, const std::shared_ptr<Plan>& plan, const Tensors& inputs,
             const Tensors& given, const std::vector<Tensors>& gradients, const Tensors& parameters,
             const Tensors& buffers, const std::variant<int64_t, std::function<int64_t()>>& key,
             const Pipeline::Update& update) {
            Boundary outputs;
            {
              const py::gil_scoped_release no_gil;
              outputs = pipeline.step(plan, inputs, given, gradients, parameters, buffers,
                                      to_key_function(key), update);
            }
            return std::make_pair(std::move(outputs.tensors), unwrap_object(outputs.form->structure));
          },
          py::arg("plan"), py::arg("inputs"), py::arg("given"), py::arg("gradients"), py::arg("parameters"),
          py::arg("buffers"), py::arg("key"), py::arg("update"))
      .def("record", &Pipeline::record, py::arg("events_per_stage"), no_gil)
      .def("recorded", &Pipeline::recorded, no_gil)
      .def("events", &events)
      .def("inject_faults", &inject_faults, py::arg("seed") = 0, py::arg("max_delay_us") = 0,
           py::arg("faults") = std::vector<std::tuple<std::string, int64_t, std::string>>())
      .def("set_capture", &Pipeline::set_capture, py::arg("capture"), no_gil)
      .def("forget_graphs", &Pipeline::forget_graphs, no_gil)
      .def("graph_reports", &Pipeline::graph_reports, no_gil)
      .def("close", &Pipeline::close, no_gil)
      .def("after_fork", &Pipeline::after_fork);
  const auto destroy_stream = [](InferenceStream* stream) {
    if (stream->is_copy_of_parents()) return;
    std::optional<py::gil_scoped_release> no_gil;
    if (Py_IsInitialized() && PyGILState_Check()) no_gil.emplace();
    delete stream;
  };
  py::class_<InferenceStream, std::shared_ptr<InferenceStream>>(m, "InferenceStream")
      .def(py::init([destroy_stream](std::shared_ptr<Pipeline> pipeline) {
             return std::shared_ptr<InferenceStream>(new InferenceStream(std::move(pipeline)),
                                                     destroy_stream);
           }),
           py::arg("pipeline"))
      .def(
          "push",
          [](InferenceStream& stream, const std::shared_ptr<Plan>& plan, Tensors inputs,
             const Tensors& parameters, const Tensors& buffers,
             const std::variant<int64_t, std::function<int64_t()>>& key) {
            const py::gil_scoped_release no_gil;
            stream.push(plan, std::move(inputs), parameters, buffers, to_key_function(key));
          },
          py::arg("plan"), py::arg("inputs"), py::arg("parameters"), py::arg("buffers"), py::arg("key"))
      .def("pop",
           [](InferenceStream& stream) {
             Boundary outputs;
             {
               const py::gil_scoped_release no_gil;
               outputs = stream.pop();
             }
             return std::make_pair(std::move(outputs.tensors), unwrap_object(outputs.form->structure));
           })
      .def("wait_for_all", &InferenceStream::wait_for_all, no_gil)
      .def("close", &InferenceStream::close, no_gil);
  m.def("route", &route, py::arg("sender"), py::arg("receiver"), py::arg("transport"));
  m.def("kept_bytes", &kept_bytes, py::arg("output"), no_gil);
  m.def("operator_settings", [] { return py::bytes(operator_settings()); });
  m.def(
      "restore_operator_settings", [](const py::bytes& choices) { restore_operator_settings(choices); },
      py::arg("choices"));
  m.def("all_settings", [] { return py::bytes(all_settings()); });
}

}  // namespace gpipe_fast
