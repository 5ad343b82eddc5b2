// Bindings of plans: programs with ports, boundary forms, segments, and stage plans.
#include "bindings/bindings.h"
#include "bindings/interpreted.h"

#include "pipeline/lowered_segment.h"
#include "pipeline/plan.h"
#include "pipeline/python_segment.h"

#include <pybind11/functional.h>
#include <torch/extension.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace gpipe_fast {
namespace {

// The names of action kinds in gpipe_fast/schedule/actions.py.
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

// Returns the actions of every stage, given as (kind, micro-batch, rank).
std::shared_ptr<Actions> make_actions(
    const std::vector<std::vector<std::tuple<std::string, int32_t, int64_t>>>& stages, int64_t capacity) {
  std::vector<std::vector<Action>> result;
  for (const auto& list : stages) {
    const int32_t stage = static_cast<int32_t>(result.size());
    auto& actions = result.emplace_back();
    for (const auto& [kind, microbatch, rank] : list) {
      actions.push_back({action_kinds().at(kind), stage, microbatch, rank});
    }
  }
  return std::make_shared<Actions>(std::move(result), capacity);
}

// Forwards calls to a gpipe_fast.runtime.eager.EagerLayers.
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
                 const std::string& action, bool tell_reached) override {
    const Interpreted::Here here(*interpreted_);
    const py::object result = object(layers_).attr("forward")(inputs.tensors, object(inputs.form->structure),
                                                              inputs.form->needs_gradient, inputs.form->skips,
                                                              key, microbatch, action, tell_reached);
    const auto get = [&](const char* name) { return py::object(result.attr(name)); };
    auto form =
        std::make_shared<Form>(Form{opaque(get("structure")), get("needs_gradient").cast<std::vector<bool>>(),
                                    get("skips").cast<std::vector<std::optional<bool>>>()});
    return {{get("outputs").cast<Tensors>(), std::move(form)},
            opaque(get("kept")),
            get("writes_inputs").cast<bool>(),
            get("reached").cast<std::vector<bool>>()};
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

// Forwards calls to a gpipe_fast.runtime.plan.Finder. Releases its reference under the GIL.
class FinderObject final : public Finder {
 public:
  explicit FinderObject(py::object finder) : finder_(opaque(std::move(finder))) {}

  std::shared_ptr<const Segment> find(int64_t layer, int32_t microbatch, const Boundary& boundary,
                                      const Skips& skips) override {
    const py::gil_scoped_acquire gil;
    std::vector<std::pair<at::Tensor, bool>> stashed;  // undefined tensors become None
    for (const Skip& skip : skips) stashed.emplace_back(skip.tensor, skip.needs_gradient);
    return object(finder_)
        .attr("find")(layer, microbatch, boundary, stashed)
        .cast<std::shared_ptr<Segment>>();
  }

  std::shared_ptr<const Segment> stand_in(const Segment& segment, const Tensors& tangents) override {
    const py::gil_scoped_acquire gil;
    const auto& lowered = dynamic_cast<const LoweredSegment&>(segment);
    return object(finder_)
        .attr("stand_in")(object(lowered.origin), tangents)
        .cast<std::shared_ptr<Segment>>();
  }

 private:
  const Opaque finder_;
};

// Returns a new T whose attributes are set from keyword arguments.
template <class T>
std::shared_ptr<T> by_keywords(const py::kwargs& attributes) {
  auto made = std::make_shared<T>();
  const py::object wrapped = py::cast(made);
  for (const auto& [name, value] : attributes) wrapped.attr(name) = value;
  return made;
}

// Defines an attribute that Python can set but not read.
template <class Class, class Of, class T>
void settable(Class& wrapped, const char* name, T Of::* member) {
  wrapped.def_property(name, nullptr, [member](Of& object, T value) { object.*member = std::move(value); });
}
template <class Class, class Of, class T>
void settable(Class& wrapped, const char* name, std::shared_ptr<const T> Of::* member) {
  wrapped.def_property(name, nullptr,
                       [member](Of& object, std::shared_ptr<T> value) { object.*member = std::move(value); });
}

void bind_programs(py::module_& m) {
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
}

void bind_boundaries(py::module_& m) {
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
}

void bind_segments(py::module_& m) {
  py::class_<Segment, std::shared_ptr<Segment>> segment(m, "Segment");
  settable(segment, "begin", &Segment::begin);
  settable(segment, "end", &Segment::end);
  settable(segment, "pops", &Segment::pops);
  settable(segment, "stashes", &Segment::stashes);

  py::class_<LoweredSegment, Segment, std::shared_ptr<LoweredSegment>> lowered(m, "LoweredSegment");
  lowered.def(py::init(&by_keywords<LoweredSegment>));
  settable(lowered, "run_pass", &LoweredSegment::pass);
  settable(lowered, "inputs", &LoweredSegment::inputs);
  settable(lowered, "takes", &LoweredSegment::takes);
  settable(lowered, "returns", &LoweredSegment::returns);
  settable(lowered, "tangents", &LoweredSegment::tangents);
  settable(lowered, "draws", &LoweredSegment::draws);
  settable(lowered, "writes_inputs", &LoweredSegment::writes_inputs);
  settable(lowered, "reached", &LoweredSegment::reached);
  lowered.def_property("origin", nullptr, [](LoweredSegment& own, py::object origin) {
    own.origin = opaque(std::move(origin));
  });

  py::class_<PythonSegment, Segment, std::shared_ptr<PythonSegment>> in_python(m, "PythonSegment");
  in_python.def(
      py::init([](py::object layers, std::shared_ptr<Interpreted> interpreted, const py::kwargs& attributes) {
        auto made = by_keywords<PythonSegment>(attributes);
        made->layers = std::make_shared<LayersObject>(std::move(layers), std::move(interpreted));
        return made;
      }),
      py::arg("layers"), py::arg("interpreted"));
  settable(in_python, "parameters", &PythonSegment::parameters);
  settable(in_python, "buffers", &PythonSegment::buffers);
  settable(in_python, "provisional", &PythonSegment::provisional);
}

void bind_stage_plan(py::module_& m) {
  py::class_<StagePlan, std::shared_ptr<StagePlan>> stage(m, "StagePlan");
  stage.def(py::init(&by_keywords<StagePlan>));
  settable(stage, "num_layers", &StagePlan::num_layers);
  settable(stage, "parameters", &StagePlan::parameters);
  settable(stage, "buffers", &StagePlan::buffers);
  settable(stage, "replicas", &StagePlan::replicas);
  settable(stage, "device", &StagePlan::device);
  settable(stage, "known", &StagePlan::known);
  using StatisticsTuple = std::tuple<int64_t, int64_t, int64_t, std::optional<double>>;
  stage.def_property("statistics", nullptr, [](StagePlan& plan, const std::vector<StatisticsTuple>& all) {
    for (const auto& [mean, variance, count, momentum] : all)
      plan.statistics.push_back({mean, variance, count, momentum});
  });
  using Segments = std::vector<std::vector<std::shared_ptr<Segment>>>;
  stage.def_property("chains", nullptr, [](StagePlan& plan, const Segments& chains) {
    for (const auto& chain : chains) plan.chains.emplace_back(chain.begin(), chain.end());
  });
  stage.def_property("finder", nullptr, [](StagePlan& plan, py::object finder) {
    plan.finder = std::make_shared<FinderObject>(std::move(finder));
  });
}

}  // namespace

void bind_plan(py::module_& m) {
  bind_programs(m);
  bind_boundaries(m);
  bind_segments(m);
  bind_stage_plan(m);
  py::class_<Actions, std::shared_ptr<Actions>>(m, "Actions")
      .def(py::init(&make_actions), py::arg("stages"), py::arg("capacity"));
  py::class_<Plan, std::shared_ptr<Plan>> plan(m, "Plan");
  plan.def(py::init(&by_keywords<Plan>));
  plan.def_property("stages", nullptr, [](Plan& own, const std::vector<std::shared_ptr<StagePlan>>& stages) {
    for (const auto& stage : stages) own.stages.push_back(*stage);
  });
  settable(plan, "num_skips", &Plan::num_skips);
  settable(plan, "forward", &Plan::forward);
  settable(plan, "backward", &Plan::backward);
  settable(plan, "num_threads", &Plan::num_threads);
  settable(plan, "inputs", &Plan::inputs);
  settable(plan, "cut_along", &Plan::cut_along);
  settable(plan, "join_along", &Plan::join_along);
  // pybind11's function wrapper takes the GIL to call and to destroy the Python function.
  settable(plan, "check_outputs", &Plan::check_outputs);
  // Returns (begin, end, is_lowered) of each segment in the latest chain of a stage and micro-batch.
  plan.def("segments", [](const Plan& own, int32_t stage, int32_t microbatch) {
    std::vector<std::tuple<int64_t, int64_t, bool>> found;
    for (const auto& segment : own.stages.at(stage).chains.at(microbatch))
      found.emplace_back(segment->begin, segment->end, segment->is_lowered());
    return found;
  });
}

}  // namespace gpipe_fast
