// Bindings of plans: programs with ports, boundary forms, segments, and stage plans.
#include "bindings/bindings.h"
#include "bindings/python_workers.h"

#include "pipeline/lowered_segment.h"
#include "pipeline/plan.h"
#include "pipeline/python_segment.h"

#include <pybind11/functional.h>
#include <torch/csrc/utils/pybind.h>

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

// Returns the actions of every stage, given as (kind, micro-batch, rank). Receives are given as (rank, kind, sender,
// receiver, micro-batch).
std::shared_ptr<Actions> make_actions(
    const std::vector<std::vector<std::tuple<std::string, int32_t, int64_t>>>& stages, int64_t num_slots,
    std::vector<int32_t> groups, std::vector<bool> is_here,
    const std::vector<std::tuple<int64_t, std::string, int32_t, int32_t, int32_t>>& receives) {
  std::vector<std::vector<Action>> result;
  for (const auto& list : stages) {
    const int32_t stage = static_cast<int32_t>(result.size());
    auto& actions = result.emplace_back();
    for (const auto& [kind, microbatch, rank] : list) {
      actions.push_back({action_kinds().at(kind), stage, microbatch, rank});
    }
  }
  std::vector<Receive> received;
  for (const auto& [rank, kind, sender, receiver, microbatch] : receives)
    received.push_back({rank, action_kinds().at(kind), sender, receiver, microbatch});
  return std::make_shared<Actions>(std::move(result), num_slots, std::move(groups), std::move(is_here),
                                   std::move(received));
}

// Forwards calls to a gpipe_fast.runtime.python_layers.PythonLayers.
class LayersAdapter final : public PythonLayers {
 public:
  LayersAdapter(py::object layers, std::shared_ptr<PythonWorkers> python_workers)
      : layers_(wrap_object(std::move(layers))), python_workers_(std::move(python_workers)) {}

  PythonObject snapshot() override {
    const py::gil_scoped_acquire gil;
    return wrap_object(unwrap_object(layers_).attr("snapshot")());
  }

  void restore(const PythonObject& snapshot) override {
    const py::gil_scoped_acquire gil;
    // A failed run is being undone, so nothing may be thrown: after another Ctrl-C the buffers are restored again, and
    // other errors are printed.
    for (int attempts = 3; attempts > 0; --attempts) {
      try {
        unwrap_object(layers_).attr("restore")(unwrap_object(snapshot));
        return;
      } catch (py::error_already_set& error) {
        if (error.matches(PyExc_KeyboardInterrupt) && attempts > 1) continue;
        error.discard_as_unraisable("the restoration of buffers after a failure");
        return;
      }
    }
  }

  Result forward(const Boundary& inputs, const std::function<int64_t()>& key, int32_t microbatch,
                 const std::string& action, bool want_reached) override {
    const PythonWorkers::Scope scope(*python_workers_);
    const py::object result = unwrap_object(layers_).attr("forward")(
        inputs.tensors, unwrap_object(inputs.form->structure), inputs.form->needs_gradient,
        inputs.form->skips, key, microbatch, action, want_reached);
    const auto get = [&](const char* name) { return py::object(result.attr(name)); };
    auto form = std::make_shared<BoundaryForm>(
        BoundaryForm{wrap_object(get("structure")), get("needs_gradient").cast<std::vector<bool>>(),
                     get("skips").cast<std::vector<std::optional<bool>>>()});
    return {{get("outputs").cast<Tensors>(), std::move(form)},
            wrap_object(get("saved")),
            get("written_inputs").cast<std::vector<int64_t>>(),
            get("reached").cast<std::vector<bool>>()};
  }

  Tensors backward(const PythonObject& kept, const Tensors& tangents, Tensors& gradients, bool retain,
                   const std::string& action) override {
    const PythonWorkers::Scope scope(*python_workers_);
    const py::tuple result =
        unwrap_object(layers_).attr("backward")(unwrap_object(kept), tangents, gradients, retain, action);
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

  const PythonObject layers_;
  const std::shared_ptr<PythonWorkers> python_workers_;
};

// Forwards calls to a gpipe_fast.runtime.plan.SegmentFinder. Releases its reference under the GIL.
class SegmentFinderAdapter final : public SegmentFinder {
 public:
  explicit SegmentFinderAdapter(py::object finder) : finder_(wrap_object(std::move(finder))) {}

  std::shared_ptr<const Segment> find(int64_t layer, int32_t microbatch, const Boundary& boundary,
                                      const Skips& skips) override {
    const py::gil_scoped_acquire gil;
    std::vector<std::pair<at::Tensor, bool>> stashed;  // undefined tensors become None
    for (const Skip& skip : skips) stashed.emplace_back(skip.tensor, skip.needs_gradient);
    return unwrap_object(finder_)
        .attr("find")(layer, microbatch, boundary, stashed)
        .cast<std::shared_ptr<Segment>>();
  }

  std::shared_ptr<const Segment> fallback(const Segment& segment, const Tensors& tangents) override {
    const py::gil_scoped_acquire gil;
    const auto& lowered = dynamic_cast<const LoweredSegment&>(segment);
    return unwrap_object(finder_)
        .attr("fallback")(unwrap_object(lowered.origin), tangents)
        .cast<std::shared_ptr<Segment>>();
  }

 private:
  const PythonObject finder_;
};

// Returns a new T whose attributes are set from keyword arguments.
template <class T>
std::shared_ptr<T> from_keywords(const py::kwargs& attributes) {
  auto made = std::make_shared<T>();
  const py::object wrapped = py::cast(made);
  for (const auto& [name, value] : attributes) wrapped.attr(name) = value;
  return made;
}

// Defines an attribute that Python can set but not read.
template <class Class, class Owner, class T>
void def_write_only(Class& wrapped, const char* name, T Owner::* member) {
  wrapped.def_property(name, nullptr,
                       [member](Owner& object, T value) { object.*member = std::move(value); });
}
template <class Class, class Owner, class T>
void def_write_only(Class& wrapped, const char* name, std::shared_ptr<const T> Owner::* member) {
  wrapped.def_property(name, nullptr, [member](Owner& object, std::shared_ptr<T> value) {
    object.*member = std::move(value);
  });
}

void bind_programs(py::module_& m) {
  py::enum_<Role>(m, "Role")
      .value("BUFFER", Role::buffer)
      .value("KEY", Role::key)
      .value("INPUT", Role::input)
      .value("OUTPUT", Role::output)
      .value("SAVED", Role::saved)
      .value("HELD", Role::held)
      .value("TANGENT", Role::tangent)
      .value("INPUT_GRADIENT", Role::input_gradient);
  py::class_<Port>(m, "Port").def(
      py::init([](Role role, int64_t index, bool keeps_version) { return Port{role, index, keeps_version}; }),
      py::arg("role"), py::arg("index"), py::arg("keeps_version"));
  py::class_<ProgramWithPorts>(m, "ProgramWithPorts")
      .def(
          py::init([](std::shared_ptr<Program> program, std::vector<Port> inputs, std::vector<Port> outputs) {
            return ProgramWithPorts{std::move(program), std::move(inputs), std::move(outputs)};
          }),
          py::arg("program"), py::arg("inputs"), py::arg("outputs"));
  py::class_<ProgramPair, std::shared_ptr<ProgramPair>>(m, "ProgramPair")
      .def(py::init([](ProgramWithPorts forward, std::optional<ProgramWithPorts> backward,
                       std::optional<ProgramWithPorts> weights, std::vector<int64_t> gradients) {
             return ProgramPair{std::move(forward), std::move(backward).value_or(ProgramWithPorts{}),
                                std::move(weights).value_or(ProgramWithPorts{}), std::move(gradients)};
           }),
           py::arg("forward"), py::arg("backward"), py::arg("weights"), py::arg("gradients"));
}

void bind_boundaries(py::module_& m) {
  py::class_<BoundaryForm, std::shared_ptr<BoundaryForm>>(m, "BoundaryForm")
      .def(py::init([](py::object structure, std::vector<bool> needs_gradient,
                       std::vector<std::optional<bool>> skips) {
             return BoundaryForm{wrap_object(std::move(structure)), std::move(needs_gradient),
                                 std::move(skips)};
           }),
           py::arg("structure"), py::arg("needs_gradient"), py::arg("skips"))
      .def_property_readonly("structure",
                             [](const BoundaryForm& form) { return unwrap_object(form.structure); })
      .def_readonly("needs_gradient", &BoundaryForm::needs_gradient);
  py::class_<Boundary>(m, "Boundary")
      .def_readonly("tensors", &Boundary::tensors)
      .def_property_readonly("form", [](const Boundary& boundary) { return boundary.form; });
  py::class_<PythonWorkers, std::shared_ptr<PythonWorkers>>(m, "PythonWorkers").def(py::init<>());
}

void bind_segments(py::module_& m) {
  py::class_<Segment, std::shared_ptr<Segment>> segment(m, "Segment");
  def_write_only(segment, "begin", &Segment::begin);
  def_write_only(segment, "end", &Segment::end);
  def_write_only(segment, "pops", &Segment::pops);
  def_write_only(segment, "stashes", &Segment::stashes);

  py::class_<LoweredSegment, Segment, std::shared_ptr<LoweredSegment>> lowered(m, "LoweredSegment");
  lowered.def(py::init(&from_keywords<LoweredSegment>));
  def_write_only(lowered, "programs", &LoweredSegment::programs);
  def_write_only(lowered, "inputs", &LoweredSegment::inputs);
  def_write_only(lowered, "input_form", &LoweredSegment::input_form);
  def_write_only(lowered, "output_form", &LoweredSegment::output_form);
  def_write_only(lowered, "tangent_layouts", &LoweredSegment::tangent_layouts);
  def_write_only(lowered, "first_random_layer", &LoweredSegment::first_random_layer);
  def_write_only(lowered, "written_inputs", &LoweredSegment::written_inputs);
  def_write_only(lowered, "reached", &LoweredSegment::reached);
  lowered.def_property("origin", nullptr, [](LoweredSegment& self, py::object origin) {
    self.origin = wrap_object(std::move(origin));
  });

  py::class_<PythonSegment, Segment, std::shared_ptr<PythonSegment>> in_python(m, "PythonSegment");
  in_python.def(py::init([](py::object layers, std::shared_ptr<PythonWorkers> python_workers,
                            const py::kwargs& attributes) {
                  auto made = from_keywords<PythonSegment>(attributes);
                  made->layers =
                      std::make_shared<LayersAdapter>(std::move(layers), std::move(python_workers));
                  return made;
                }),
                py::arg("layers"), py::arg("python_workers"));
  def_write_only(in_python, "parameters", &PythonSegment::parameters);
  def_write_only(in_python, "buffers", &PythonSegment::buffers);
  def_write_only(in_python, "single_use", &PythonSegment::single_use);
}

void bind_stage_plan(py::module_& m) {
  py::class_<StagePlan, std::shared_ptr<StagePlan>> stage(m, "StagePlan");
  stage.def(py::init(&from_keywords<StagePlan>));
  def_write_only(stage, "num_layers", &StagePlan::num_layers);
  def_write_only(stage, "parameters", &StagePlan::parameters);
  def_write_only(stage, "buffers", &StagePlan::buffers);
  def_write_only(stage, "replicated_parameters", &StagePlan::replicated_parameters);
  def_write_only(stage, "gathered_parameters", &StagePlan::gathered_parameters);
  def_write_only(stage, "device", &StagePlan::device);
  def_write_only(stage, "has_fixed_chains", &StagePlan::has_fixed_chains);
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
    plan.finder = std::make_shared<SegmentFinderAdapter>(std::move(finder));
  });
}

}  // namespace

void bind_plan(py::module_& m) {
  bind_programs(m);
  bind_boundaries(m);
  bind_segments(m);
  bind_stage_plan(m);
  py::class_<Actions, std::shared_ptr<Actions>>(m, "Actions")
      .def(py::init(&make_actions), py::arg("stages"), py::arg("num_slots"), py::arg("groups"),
           py::arg("is_here") = std::vector<bool>(), py::arg("receives") = py::list());
  py::class_<Plan, std::shared_ptr<Plan>> plan(m, "Plan");
  plan.def(py::init(&from_keywords<Plan>));
  plan.def_property("stages", nullptr, [](Plan& self, const std::vector<std::shared_ptr<StagePlan>>& stages) {
    for (const auto& stage : stages) self.stages.push_back(*stage);
  });
  def_write_only(plan, "num_skips", &Plan::num_skips);
  def_write_only(plan, "forward", &Plan::forward);
  def_write_only(plan, "backward", &Plan::backward);
  def_write_only(plan, "step", &Plan::step);
  def_write_only(plan, "defers_weights", &Plan::defers_weights);
  def_write_only(plan, "skip_ends", &Plan::skip_ends);
  plan.def_property(
      "ties", nullptr,
      [](Plan& self, const std::vector<std::tuple<std::vector<std::pair<int32_t, int64_t>>,
                                                  std::vector<int32_t>, std::vector<int32_t>>>& ties) {
        for (const auto& [own, senders, receivers] : ties) self.ties.push_back({own, senders, receivers});
      });
  def_write_only(plan, "token", &Plan::token);
  def_write_only(plan, "given_skips", &Plan::given_skips);
  def_write_only(plan, "given_dims", &Plan::given_dims);
  def_write_only(plan, "num_threads", &Plan::num_threads);
  def_write_only(plan, "parameter_names", &Plan::parameter_names);
  def_write_only(plan, "inputs", &Plan::inputs);
  def_write_only(plan, "split_dims", &Plan::split_dims);
  def_write_only(plan, "cat_dim", &Plan::cat_dim);
  // pybind11's function wrapper takes the GIL to call and to destroy the Python function.
  def_write_only(plan, "check_outputs", &Plan::check_outputs);
  // Returns (begin, end, is_lowered) of each segment in the latest chain of a stage and micro-batch.
  plan.def("segments", [](const Plan& self, int32_t stage, int32_t microbatch) {
    std::vector<std::tuple<int64_t, int64_t, bool>> found;
    for (const auto& segment : self.stages.at(stage).chains.at(microbatch))
      found.emplace_back(segment->begin, segment->end, segment->is_lowered());
    return found;
  });
}

}  // namespace gpipe_fast
