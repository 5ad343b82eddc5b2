#include "pipeline/autograd.h"

#include "check.h"
#include "pipeline/pipeline.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace gpipe_fast {
namespace {

using torch::autograd::variable_list;

// A tensor and its version when the forward read it. Not a SavedVariable, because that calls the hooks on saved
// tensors, and these tensors are only checked, not saved.
struct InputVersion {
  explicit InputVersion(const at::Tensor& tensor)
      : tensor(tensor.tensor_data()), version(tensor.is_inference() ? 0 : tensor._version()) {}
  bool changed() const { return !tensor.is_inference() && tensor._version() != version; }

  at::Tensor tensor;
  int64_t version;
};

class GPipeBackward final : public torch::autograd::Node {
 public:
  GPipeBackward(const Tensors& inputs, const Tensors& parameters, std::shared_ptr<Pipeline> pipeline,
                std::shared_ptr<MiniBatch> minibatch, PartLengths sizes, std::vector<bool> differentiable)
      : num_inputs_(inputs.size()),
        differentiable_(std::move(differentiable)),
        pipeline_(std::move(pipeline)),
        sizes_(std::move(sizes)),
        minibatch_(std::move(minibatch)) {
    for (const at::Tensor& input : inputs) input_versions_.emplace_back(input);
    for (const at::Tensor& parameter : parameters) input_versions_.emplace_back(parameter);
  }

  variable_list apply(variable_list&& gradients) override {
    TORCH_CHECK(
        !at::GradMode::is_enabled(),
        "a pipeline's backward cannot be differentiated (create_graph=True); for second derivatives call "
        "the plain layers: torch.nn.Sequential(*model), or model.plain() of from_model");
    const c10::DispatchKeySet batched{c10::DispatchKey::Batched, c10::DispatchKey::FuncTorchBatched};
    for (const at::Tensor& gradient : gradients) {
      TORCH_CHECK(
          !gradient.defined() || !gradient.key_set().has_any(batched),
          "vmap (is_grads_batched=True, vectorize=True) cannot look into a GPipe, whose layers run in "
          "C++; call the backward once for each gradient");
    }
    const std::shared_ptr<MiniBatch> minibatch = checked_minibatch();
    variable_list result(num_outputs());
    // PyTorch passes gradients only for outputs that can need one.
    Tensors output_gradients(sizes_.size());
    bool any = false;
    for (size_t i = 0, next = 0; i < output_gradients.size(); ++i) {
      if (!differentiable_[i]) continue;
      output_gradients[i] = std::move(gradients[next++]);
      any = any || output_gradients[i].defined();
    }
    if (!any) return result;
    const bool retain = torch::autograd::get_current_graph_task_keep_graph();
    Pipeline::Gradients found = pipeline_->backward(*minibatch, output_gradients, sizes_, retain);
    std::move(found.inputs.begin(), found.inputs.end(), result.begin());
    std::move(found.parameters.begin(), found.parameters.end(), result.begin() + num_inputs_);
    if (torch::autograd::AnomalyMode::is_enabled() && torch::autograd::AnomalyMode::should_check_nan()) {
      check_for_nan(result);
    }
    return result;
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(state_mutex_);
    minibatch_.reset();
    input_versions_.clear();
  }

  std::string name() const override { return "GPipeBackward"; }

  int64_t kept_bytes() {
    const std::lock_guard<std::mutex> lock(state_mutex_);
    return minibatch_ ? minibatch_->kept_bytes() : 0;
  }

 private:
  // PyTorch would name this node alone, and no layer.
  void check_for_nan(const variable_list& gradients) const {
    for (size_t i = 0; i < gradients.size(); ++i) {
      TORCH_CHECK(!gradients[i].defined() || !gradients[i].isnan().any().item<bool>(), "the gradient of ",
                  name_of_input(i),
                  " has NaN, and detect_anomaly sees no layer of a pipeline; to find the layer, call the "
                  "plain layers "
                  "under detect_anomaly: torch.nn.Sequential(*model), or model.plain() of from_model");
    }
  }

  std::string name_of_input(size_t index) const {
    if (index < num_inputs_) return "input " + std::to_string(index);
    index -= num_inputs_;
    const std::vector<std::string>& names = minibatch_->plan()->parameter_names;
    return "parameter " + (index < names.size() ? names[index] : std::to_string(index));
  }

  // Returns the mini-batch. Throws if it was freed, or if an input or a parameter was changed in place.
  std::shared_ptr<MiniBatch> checked_minibatch() {
    const std::lock_guard<std::mutex> lock(state_mutex_);
    TORCH_CHECK(minibatch_ != nullptr, torch::autograd::ERR_BACKWARD_TWICE);
    for (size_t i = 0; i < input_versions_.size(); ++i) {
      const InputVersion& input = input_versions_[i];
      TORCH_CHECK(
          !input.changed(),
          "one of the variables needed for gradient computation has been modified by an inplace operation: ",
          name_of_input(i), " [", input.tensor.toString(), " ", input.tensor.sizes(), "] is at version ",
          input.tensor._version(), "; expected version ", input.version, " instead");
    }
    return minibatch_;
  }

  const size_t num_inputs_;
  const std::vector<bool> differentiable_;  // which outputs can need a gradient
  const std::shared_ptr<Pipeline> pipeline_;
  const PartLengths sizes_;
  std::mutex state_mutex_;  // guards the two fields below: several threads may run a backward
  std::shared_ptr<MiniBatch> minibatch_;
  std::vector<InputVersion> input_versions_;
};

// PyTorch's pointer type for nodes: std::shared_ptr; an intrusive pointer from 2.14 on.
using NodePointer = std::decay_t<decltype(std::declval<const at::Tensor&>().grad_fn())>;

template <class Pointer, class... Arguments>
Pointer make_node(Arguments&&... arguments) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
    return std::make_shared<GPipeBackward>(std::forward<Arguments>(arguments)...);
  } else {
    return c10::make_intrusive<GPipeBackward>(std::forward<Arguments>(arguments)...);
  }
}

}  // namespace

void connect_to_graph(const Boundary& outputs, const Tensors& inputs, const Tensors& parameters,
                      std::shared_ptr<Pipeline> pipeline, std::shared_ptr<MiniBatch> minibatch,
                      PartLengths sizes) {
  const std::vector<bool>& differentiable = outputs.form->needs_gradient;
  const bool any = std::find(differentiable.begin(), differentiable.end(), true) != differentiable.end();
  if (!any || !torch::autograd::compute_requires_grad(inputs, parameters)) return;
  torch::autograd::edge_list edges = torch::autograd::collect_next_edges(inputs, parameters);
  const std::vector<bool> reached = minibatch->reached();
  for (size_t i = 0; i < reached.size(); ++i) {
    if (!reached[i]) edges[inputs.size() + i] = {};
  }
  auto node = make_node<NodePointer>(inputs, parameters, std::move(pipeline), std::move(minibatch),
                                     std::move(sizes), differentiable);
  node->set_next_edges(std::move(edges));
  for (size_t i = 0; i < differentiable.size(); ++i) {
    if (differentiable[i]) torch::autograd::set_history(outputs.tensors[i], node);
  }
}

int64_t kept_bytes(const at::Tensor& output) {
  auto* node = dynamic_cast<GPipeBackward*>(output.grad_fn().get());
  return node != nullptr ? node->kept_bytes() : 0;
}

}  // namespace gpipe_fast
