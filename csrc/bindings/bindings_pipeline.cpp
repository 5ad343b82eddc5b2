// Python's way to pipelines.
#include "bindings/bindings.h"

#include "pipeline/autograd.h"
#include "pipeline/pipeline.h"

#include <pybind11/functional.h>
#include <torch/extension.h>

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

// As gpipe_fast/schedule/actions.py writes them.
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

// As GPipe's argument has it.
Choice choice_of(const std::string& transport) {
  static const std::map<std::string, Choice> choices = {
      {"auto", Choice::automatic}, {"peer", Choice::peer}, {"pinned", Choice::pinned}};
  return choices.at(transport);
}

// How tensors go from one device to another; nothing where they cannot as is asked for.
std::optional<std::string> route(at::Device sender, at::Device receiver, const std::string& transport) {
  static const std::map<Route, std::string> names = {{Route::hand_over, "hand-over"},
                                                     {Route::peer, "peer"},
                                                     {Route::pinned, "pinned"},
                                                     {Route::copy, "copy"}};
  const std::optional<Route> found = choose(sender, receiver, choice_of(transport));
  return found ? std::optional<std::string>(names.at(*found)) : std::nullopt;
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

// The workers of one pipeline that run layers in Python now. Used under the GIL.
class Interpreted {
 public:
  // Takes the GIL for a worker.
  class Here {
   public:
    explicit Here(Interpreted& all) : all_(all), thread_(PyThread_get_thread_ident()) {
      all_.threads_.insert(thread_);
    }
    ~Here() { all_.threads_.erase(thread_); }
    Here(const Here&) = delete;
    Here& operator=(const Here&) = delete;

   private:
    const py::gil_scoped_acquire gil_;
    Interpreted& all_;
    const unsigned long thread_;  // Python's number for it
  };

  void interrupt() const {
    for (unsigned long thread : threads_) PyThreadState_SetAsyncExc(thread, PyExc_KeyboardInterrupt);
  }

 private:
  std::set<unsigned long> threads_;
};

// Lets Ctrl-C through, which only reaches the thread that waits: what layers are doing in Python ends, too.
void check_signals(const Interpreted& interpreted) {
  if (!Py_IsInitialized()) return;
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() == 0) return;
  const py::error_already_set error;
  interpreted.interrupt();
  throw error;
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

// An object of Python's for C++ to hold without the GIL. At the interpreter's end it is left alone.
Opaque opaque(py::object value) {
  return Opaque(value.release().ptr(), [](void* held) {
    if (!Py_IsInitialized()) return;
    const py::gil_scoped_acquire gil;
    Py_XDECREF(static_cast<PyObject*>(held));
  });
}

py::object object(const Opaque& held) {
  return py::reinterpret_borrow<py::object>(static_cast<PyObject*>(held.get()));
}

// Calls a gpipe_fast.runtime.eager.EagerLayers.
class LayersObject final : public PythonLayers {
 public:
  LayersObject(py::object layers, std::shared_ptr<Interpreted> interpreted)
      : layers_(opaque(std::move(layers))), interpreted_(std::move(interpreted)) {}

  Opaque note() override {
    const py::gil_scoped_acquire gil;
    return opaque(object(layers_).attr("note")());
  }

  void restore(const Opaque& noted) override {
    const py::gil_scoped_acquire gil;
    object(layers_).attr("restore")(object(noted));
  }

  Result forward(const Boundary& inputs, const std::function<int64_t()>& key, int32_t microbatch,
                 const std::string& action) override {
    const Interpreted::Here here(*interpreted_);
    const py::tuple result = object(layers_).attr("forward")(inputs.tensors, object(inputs.form->structure),
                                                             inputs.form->needs_gradient, inputs.form->skips,
                                                             key, microbatch, action);
    auto form =
        std::make_shared<Form>(Form{opaque(py::object(result[1])), result[2].cast<std::vector<bool>>(),
                                    result[4].cast<std::vector<std::optional<bool>>>()});
    return {
        {result[0].cast<Tensors>(), std::move(form)}, opaque(py::object(result[3])), result[5].cast<bool>()};
  }

  Tensors backward(const Opaque& kept, const Tensors& tangents, Tensors& gradients, bool retain,
                   const std::string& action) override {
    const Interpreted::Here here(*interpreted_);
    const py::tuple result =
        object(layers_).attr("backward")(object(kept), tangents, gradients, retain, action);
    gradients = undefined_for_none(result[1]);
    return undefined_for_none(result[0]);
  }

 private:
  static Tensors undefined_for_none(const py::handle& list) {
    Tensors tensors;
    for (const py::handle tensor : list) {
      tensors.push_back(tensor.is_none() ? at::Tensor() : tensor.cast<at::Tensor>());
    }
    return tensors;
  }

  const Opaque layers_;
  const std::shared_ptr<Interpreted> interpreted_;
};

[[noreturn]] void raise_planted(const std::string& error) {
  const std::string message = "planted " + error;
  if (error == "IndexError") TORCH_CHECK_INDEX(false, message);
  if (error == "ValueError") TORCH_CHECK_VALUE(false, message);
  if (error == "TypeError") TORCH_CHECK_TYPE(false, message);
  if (error == "AcceleratorError")
    throw c10::AcceleratorError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, 700, message);
  TORCH_CHECK_WITH(OutOfMemoryError, error != "OutOfMemoryError", message);
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

std::function<int64_t()> drawn(const std::variant<int64_t, std::function<int64_t()>>& key) {
  if (const auto* draw = std::get_if<std::function<int64_t()>>(&key)) return *draw;
  return [value = std::get<int64_t>(key)] { return value; };
}

std::shared_ptr<Segment> lowered(int64_t begin, int64_t end, std::vector<int64_t> pops,
                                 std::vector<int64_t> stashes, std::shared_ptr<Pass> pass,
                                 std::vector<Layout> inputs, std::shared_ptr<Form> takes,
                                 std::shared_ptr<Form> returns, int64_t first_layer, bool draws,
                                 bool writes_inputs, std::vector<std::optional<Layout>> tangents) {
  auto segment = std::make_shared<Segment>();
  segment->begin = begin;
  segment->end = end;
  segment->pops = std::move(pops);
  segment->stashes = std::move(stashes);
  segment->pass = std::move(pass);
  segment->inputs = std::move(inputs);
  segment->takes = std::move(takes);
  segment->returns = std::move(returns);
  segment->first_layer = first_layer;
  segment->draws = draws;
  segment->writes_inputs = writes_inputs;
  segment->tangents = std::move(tangents);
  return segment;
}

std::shared_ptr<Segment> in_python(int64_t begin, int64_t end, std::vector<int64_t> pops,
                                   std::vector<int64_t> stashes, py::object layers,
                                   std::vector<int64_t> parameters, std::vector<int64_t> buffers,
                                   std::shared_ptr<Interpreted> interpreted, bool provisional) {
  auto segment = std::make_shared<Segment>();
  segment->begin = begin;
  segment->end = end;
  segment->pops = std::move(pops);
  segment->stashes = std::move(stashes);
  segment->python = std::make_shared<LayersObject>(std::move(layers), std::move(interpreted));
  segment->parameters = std::move(parameters);
  segment->buffers = std::move(buffers);
  segment->provisional = provisional;
  return segment;
}

// What is stashed of each skip connection, None if there is nothing or None, and whether it needs a gradient.
using Stashed = std::vector<std::pair<at::Tensor, bool>>;
using Find = std::function<std::shared_ptr<Segment>(int64_t layer, int32_t microbatch,
                                                    const Boundary& boundary, const Stashed& stashed)>;
using FindInstead =
    std::function<std::shared_ptr<Segment>(py::object origin, int32_t microbatch, const Tensors& tangents)>;

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
      py::init([](PortedProgram forward, std::optional<PortedProgram> backward,
                  std::vector<int64_t> gradients) {
        return Pass{std::move(forward), std::move(backward).value_or(PortedProgram{}), std::move(gradients)};
      }),
      py::arg("forward"), py::arg("backward"), py::arg("gradients"));
  py::class_<Form, std::shared_ptr<Form>>(m, "Form")
      .def(py::init([](py::object structure, std::vector<bool> needs_gradient,
                       std::vector<std::optional<bool>> skips) {
             return Form{opaque(std::move(structure)), std::move(needs_gradient), std::move(skips)};
           }),
           py::arg("structure"), py::arg("needs_gradient"), py::arg("skips"))
      .def_property_readonly("structure", [](const Form& form) { return object(form.structure); })
      .def_readonly("needs_gradient", &Form::needs_gradient);
  py::class_<Boundary>(m, "Boundary")
      .def_readonly("tensors", &Boundary::tensors)
      .def_property_readonly("form", [](const Boundary& boundary) { return boundary.form; });
  py::class_<Interpreted, std::shared_ptr<Interpreted>>(m, "Interpreted").def(py::init<>());
  py::class_<Segment, std::shared_ptr<Segment>>(m, "Segment")
      .def_static("lowered", &lowered, py::arg("begin"), py::arg("end"), py::arg("pops"), py::arg("stashes"),
                  py::arg("run_pass"), py::arg("inputs"), py::arg("takes"), py::arg("returns"),
                  py::arg("first_layer"), py::arg("draws"), py::arg("writes_inputs"), py::arg("tangents"))
      .def_static("in_python", &in_python, py::arg("begin"), py::arg("end"), py::arg("pops"),
                  py::arg("stashes"), py::arg("layers"), py::arg("parameters"), py::arg("buffers"),
                  py::arg("interpreted"), py::arg("provisional"))
      .def("set_origin",
           [](Segment& segment, py::object origin) { segment.origin = opaque(std::move(origin)); });
  py::class_<Actions>(m, "Actions").def(py::init(&make_actions), py::arg("stages"), py::arg("capacity"));
  // Functions are called, and let go of, by pybind's own wrapper, which takes the GIL.
  py::class_<StagePlan>(m, "StagePlan")
      .def(py::init(
               [](int64_t num_layers, std::vector<int64_t> parameters, std::vector<int64_t> buffers,
                  std::vector<int64_t> replicas, at::Device device,
                  const std::vector<std::tuple<int64_t, int64_t, int64_t, std::optional<double>>>& statistics,
                  const std::vector<std::vector<std::shared_ptr<Segment>>>& chains, std::optional<Find> find,
                  std::optional<FindInstead> instead) {
                 StagePlan plan{num_layers,
                                std::move(parameters),
                                std::move(buffers),
                                std::move(replicas),
                                device,
                                {},
                                {},
                                {},
                                {}};
                 for (const auto& [mean, variance, count, momentum] : statistics)
                   plan.statistics.push_back({mean, variance, count, momentum});
                 for (const auto& chain : chains) plan.chains.emplace_back(chain.begin(), chain.end());
                 if (find) {
                   plan.find = [find = std::move(*find)](int64_t layer, int32_t microbatch,
                                                         const Boundary& boundary, const Skips& skips) {
                     Stashed stashed;
                     for (const Skip& skip : skips) stashed.emplace_back(skip.tensor, skip.needs_gradient);
                     return find(layer, microbatch, boundary, stashed);
                   };
                 }
                 if (instead) {
                   plan.instead = [find = std::move(*instead)](const Segment& segment, int32_t microbatch,
                                                               const Tensors& tangents) {
                     const py::gil_scoped_acquire gil;
                     return find(object(segment.origin), microbatch, tangents);
                   };
                 }
                 return plan;
               }),
           py::arg("num_layers"), py::arg("parameters"), py::arg("buffers"), py::arg("replicas"),
           py::arg("device"), py::arg("statistics"), py::arg("chains"), py::arg("find") = py::none(),
           py::arg("instead") = py::none());
  py::class_<Plan, std::shared_ptr<Plan>>(m, "Plan")
      .def(py::init([](std::vector<StagePlan> stages, int64_t num_skips, Actions forward,
                       std::optional<Actions> backward, int num_threads, std::shared_ptr<Form> inputs,
                       std::vector<std::optional<int64_t>> cut_along, int64_t join_along,
                       std::optional<std::vector<bool>> expected,
                       std::optional<std::function<std::shared_ptr<Plan>(std::vector<bool>)>> instead,
                       std::optional<std::function<void(const std::vector<Boundary>&)>> check_outputs) {
             auto plan = std::make_shared<Plan>(Plan{std::move(stages),
                                                     num_skips,
                                                     std::move(forward),
                                                     std::move(backward),
                                                     num_threads,
                                                     std::move(inputs),
                                                     std::move(cut_along),
                                                     join_along,
                                                     std::move(expected),
                                                     {},
                                                     {}});
             if (instead) plan->instead = std::move(*instead);
             if (check_outputs) plan->check_outputs = std::move(*check_outputs);
             return plan;
           }),
           py::arg("stages"), py::arg("num_skips"), py::arg("forward"), py::arg("backward"),
           py::arg("num_threads"), py::arg("inputs"), py::arg("cut_along"), py::arg("join_along"),
           py::arg("expected"), py::arg("instead"), py::arg("check_outputs"))
      // Of a stage and a micro-batch, the layers of each segment, and whether it is lowered: as they were last.
      .def("segments", [](const Plan& plan, int32_t stage, int32_t microbatch) {
        std::vector<std::tuple<int64_t, int64_t, bool>> found;
        for (const auto& s : plan.stages.at(stage).chains.at(microbatch))
          found.emplace_back(s->begin, s->end, !s->python);
        return found;
      });

  // Workers that end give back what autograd's queues hold on their threads, for which they may want the GIL.
  const auto destroy = [](Pipeline* pipeline) {
    std::optional<py::gil_scoped_release> no_gil;
    if (Py_IsInitialized() && PyGILState_Check()) no_gil.emplace();
    delete pipeline;
  };
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<ReplayReport>(m, "ReplayReport")
      .def_readonly("forward", &ReplayReport::forward)
      .def_readonly("backward", &ReplayReport::backward)
      .def_readonly("num_nodes", &ReplayReport::num_nodes)
      .def_readonly("bytes", &ReplayReport::bytes)
      .def_readonly("replays", &ReplayReport::replays)
      .def_readonly("as_they_are", &ReplayReport::as_they_are)
      .def_readonly("obstacle", &ReplayReport::obstacle);
  py::class_<Pipeline, std::shared_ptr<Pipeline>>(m, "Pipeline")
      .def(py::init([destroy](int32_t num_stages, std::shared_ptr<Interpreted> interpreted,
                              const std::string& transport) {
             const auto poll = [interpreted] { check_signals(*interpreted); };
             return std::shared_ptr<Pipeline>(new Pipeline(num_stages, poll, choice_of(transport)), destroy);
           }),
           py::arg("num_stages"), py::arg("interpreted"), py::arg("transport") = "auto")
      .def(
          "forward",
          [](Pipeline& pipeline, const std::shared_ptr<Plan>& plan, const Tensors& inputs,
             const Tensors& parameters, const Tensors& buffers,
             const std::variant<int64_t, std::function<int64_t()>>& key) {
            Boundary outputs;
            {
              const py::gil_scoped_release no_gil;
              outputs = pipeline.forward(plan, inputs, parameters, buffers, drawn(key));
            }
            return std::make_pair(std::move(outputs.tensors), object(outputs.form->structure));
          },
          py::arg("plan"), py::arg("inputs"), py::arg("parameters"), py::arg("buffers"), py::arg("key"))
      .def("record", &Pipeline::record, py::arg("events_per_stage"), no_gil)
      .def("recorded", &Pipeline::recorded, no_gil)
      .def("events", &events)
      .def("disturb", &disturb, py::arg("seed") = 0, py::arg("longest_delay_us") = 0,
           py::arg("faults") = std::vector<std::tuple<std::string, int64_t, std::string>>())
      .def("set_capture", &Pipeline::set_capture, py::arg("capture"), no_gil)
      .def("forget_replays", &Pipeline::forget_replays, no_gil)
      .def("replays", &Pipeline::replays, no_gil)
      .def("close", &Pipeline::close, no_gil)
      .def("after_fork", &Pipeline::after_fork);
  m.def("route", &route, py::arg("sender"), py::arg("receiver"), py::arg("transport"));
  m.def("kept_bytes", &kept_bytes, py::arg("output"), no_gil);
}

}  // namespace gpipe_fast
