// Bindings of pipelines.
#include "bindings/bindings.h"
#include "bindings/python_workers.h"

#include "pipeline/autograd.h"
#include "pipeline/inference_stream.h"
#include "pipeline/pipeline.h"
#include "pipeline/settings.h"
#include "transport/process_groups.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <map>
#include <optional>
#include <set>
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

// Returns the route of tensors from one device to another and, if it should be direct and is not, the fault.
std::pair<std::string, std::string> route(at::Device sender, at::Device receiver,
                                          const std::string& transport) {
  static const std::map<Route, std::string> names = {{Route::hand_over, "hand-over"},
                                                     {Route::peer, "peer"},
                                                     {Route::pinned, "pinned"},
                                                     {Route::copy, "copy"}};
  const TransportChoice choice = parse_transport(transport);
  return {names.at(choose(sender, receiver, choice)), peer_fault(sender, receiver, choice)};
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

// Action, is_wait, begin and end in nanoseconds, run, bytes of kept boundary tensors, of saved tensors and of scratch
// memory, and the nanoseconds from the end of a send until the tensor has arrived.
using EventTuple =
    std::tuple<std::string, bool, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>;

// Appends an event with the host's times, or with those of its device: there, a receive is a wait for the copy, and a
// send takes no time of its stage.
void append(std::vector<EventTuple>& tuples, const Event& event) {
  const std::string name = event.action.name();
  const KeptBytes& kept = event.observed.kept;
  const auto add = [&](bool is_wait, int64_t begin, int64_t end, int64_t transit) {
    tuples.emplace_back(name, is_wait, begin, end, event.run, kept.boundary, kept.saved, kept.scratch,
                        transit);
  };
  if (!event.observed.times) return add(event.is_wait, event.begin, event.end, 0);
  const DeviceTimes::Times times = event.observed.times->get();
  switch (event.action.kind) {
    case ActionKind::recv_forward:
    case ActionKind::recv_backward:
      add(true, times.begin, times.end, 0);
      return add(false, times.end, times.end, 0);
    case ActionKind::send_forward:
    case ActionKind::send_backward:
      return add(false, times.begin, times.begin, std::max<int64_t>(0, times.arrival - times.begin));
    default:
      return add(false, times.begin, times.end, 0);
  }
}

std::vector<std::vector<EventTuple>> events(Pipeline& pipeline) {
  const py::gil_scoped_release no_gil;
  std::vector<std::vector<EventTuple>> result;
  for (const auto& stage : pipeline.events()) {
    auto& tuples = result.emplace_back();
    const bool is_on_device =
        std::any_of(stage.begin(), stage.end(), [](const Event& event) { return event.observed.times; });
    for (const Event& event : stage) {
      if (!is_on_device || !event.is_wait) append(tuples, event);  // the host's waits are not the device's
    }
  }
  return result;
}

[[noreturn]] void raise_injected(const std::string& error) {
  if (error == "SIGKILL") std::raise(SIGKILL);
  if (error == "SIGSTOP") std::raise(SIGSTOP);
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

// Forwards calls to a gpipe_fast.distributed.ranks.Ranks. Polls it only at times, because it asks a store.
class PeersAdapter final : public Peers {
 public:
  explicit PeersAdapter(py::object ranks) : ranks_(wrap_object(std::move(ranks))) {}

  void begin_backward(int64_t forward) override {
    const py::gil_scoped_acquire gil;
    unwrap_object(ranks_).attr("begin_backward")(forward);
  }
  void poll() override {
    const auto now = std::chrono::steady_clock::now();
    if (now - latest_poll_ < std::chrono::milliseconds(100) || !Py_IsInitialized()) return;
    const py::gil_scoped_acquire gil;
    unwrap_object(ranks_).attr("poll")();
    latest_poll_ = std::chrono::steady_clock::now();
  }
  int64_t succeed() override {
    const py::gil_scoped_acquire gil;
    return unwrap_object(ranks_).attr("succeed")().cast<int64_t>();
  }
  void fail(const std::string& error) override {
    const py::gil_scoped_acquire gil;
    unwrap_object(ranks_).attr("fail")(error);
  }

 private:
  const PythonObject ranks_;
  std::chrono::steady_clock::time_point latest_poll_;
};

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
  py::enum_<Capture>(m, "Capture")
      .value("NEVER", Capture::never)
      .value("WHERE_IT_PAYS", Capture::where_it_pays)
      .value("ALWAYS", Capture::always);
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
             const Pipeline::Offer& offer) {
            Boundary outputs;
            {
              const py::gil_scoped_release no_gil;
              outputs = pipeline.step(plan, inputs, given, gradients, parameters, buffers,
                                      to_key_function(key), offer);
            }
            return std::make_pair(std::move(outputs.tensors), unwrap_object(outputs.form->structure));
          },
          py::arg("plan"), py::arg("inputs"), py::arg("given"), py::arg("gradients"), py::arg("parameters"),
          py::arg("buffers"), py::arg("key"), py::arg("offer") = nullptr)
      .def(
          "set_peers",
          [](Pipeline& pipeline, std::shared_ptr<Channels> channels, py::object ranks) {
            auto peers = ranks.is_none() ? nullptr : std::make_shared<PeersAdapter>(std::move(ranks));
            const py::gil_scoped_release no_gil;
            pipeline.set_peers(std::move(channels), std::move(peers));
          },
          py::arg("channels"), py::arg("ranks"))
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
  py::class_<Channels, std::shared_ptr<Channels>> channels(m, "Channels");
#ifdef USE_C10D
  channels.def(
      "abandon_too",
      [](Channels& own, const c10::intrusive_ptr<c10d::Backend>& group) {
        own.abandon_too([group] { group->abort(); });
      },
      py::arg("group"));
  m.def(
      "make_channels",
      [](std::set<int32_t> stages, ProcessGroups groups, double timeout, bool on_device,
         std::optional<c10::intrusive_ptr<c10d::Backend>> replicas) {
        const auto milliseconds = std::chrono::milliseconds(static_cast<int64_t>(timeout * 1000));
        return make_channels(std::move(stages), std::move(groups), milliseconds, on_device,
                             std::move(replicas).value_or(nullptr));
      },
      py::arg("stages"), py::arg("groups"), py::arg("timeout"), py::arg("on_device"), py::arg("replicas"));
#endif
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
