// A backward in the calling thread, for traces on the devices of fake tensors, which the machine need not have.
#include "bindings/bindings.h"

#include <pybind11/stl.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/extension.h>

#include <optional>
#include <queue>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace gpipe_fast {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

// Autograd's engine, without its streams, queues and threads: it asks CUDA for the streams of a device, which fails
// if there is none. Runs nodes in the engine's order, with their hooks, in the calling thread.
class Backward {
 public:
  // The results are the gradients of `inputs`; undefined where the outputs do not depend on an input.
  variable_list run(const variable_list& outputs, const variable_list& gradients,
                    const variable_list& inputs) {
    at::AutoGradMode no_grad(false);
    results_.resize(inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (Node* node = node_of(inputs[i])) wanted_[node].emplace_back(inputs[i].output_nr(), i);
    }
    for (const auto& output : outputs) find(torch::autograd::impl::gradient_edge(output).function.get());
    for (size_t i = 0; i < outputs.size(); ++i) {
      const auto edge = torch::autograd::impl::gradient_edge(outputs[i]);
      if (is_needed(edge.function.get())) add(edge.function.get(), edge.input_nr, gradients[i]);
    }
    for (const auto& output : outputs) {
      Node* node = torch::autograd::impl::gradient_edge(output).function.get();
      if (is_needed(node) && missing_[node] == 0 && queued_.insert(node).second) ready_.push(node);
    }
    while (!ready_.empty()) {
      Node* node = ready_.top();
      ready_.pop();
      evaluate(*node);
    }
    return results_;
  }

 private:
  struct Later {
    bool operator()(Node* a, Node* b) const { return a->sequence_nr() < b->sequence_nr(); }
  };

  static Node* node_of(const at::Tensor& tensor) {
    if (tensor.grad_fn()) return tensor.grad_fn().get();
    return torch::autograd::impl::try_get_grad_accumulator(tensor).get();
  }

  bool is_needed(Node* node) const {
    const auto found = leads_.find(node);
    return found != leads_.end() && found->second;
  }

  // Finds which nodes behind `root` lead to an input, and how many such nodes each of them waits for.
  void find(Node* root) {
    std::vector<std::pair<Node*, size_t>> path;
    const auto enter = [&](Node* node) {
      if (node != nullptr && leads_.emplace(node, wanted_.count(node) != 0).second)
        path.emplace_back(node, 0);
    };
    enter(root);
    while (!path.empty()) {
      auto& [node, next] = path.back();
      if (next < node->next_edges().size()) {
        enter(node->next_edge(next++).function.get());
        continue;
      }
      for (const auto& edge : node->next_edges()) {
        if (is_needed(edge.function.get())) leads_[node] = true;
      }
      for (const auto& edge : node->next_edges()) {
        if (is_needed(edge.function.get())) ++missing_[edge.function.get()];
      }
      path.pop_back();
    }
  }

  void add(Node* node, uint32_t index, at::Tensor gradient) {
    auto& buffer = buffers_[node];
    buffer.resize(node->num_inputs());
    if (gradient.defined()) buffer[index] = buffer[index].defined() ? buffer[index] + gradient : gradient;
  }

  void evaluate(Node& node) {
    variable_list received = std::move(buffers_[&node]);
    received.resize(node.num_inputs());
    for (const auto& hook : node.tensor_pre_hooks()) received = (*hook)(received);
    for (const auto& [index, result] : wanted_[&node]) results_[result] = received[index];
    bool continues = false;
    for (const auto& edge : node.next_edges()) continues |= is_needed(edge.function.get());
    if (!continues) return;
    for (const auto& hook : node.pre_hooks()) received = (*hook)(received);
    variable_list results = node(variable_list(received));
    torch::autograd::validate_outputs(
        node.next_edges(), results, [&](const std::string& message) { return node.name() + ": " + message; });
    for (const auto& hook : node.post_hooks()) results = (*hook)(results, received);
    for (size_t i = 0; i < results.size(); ++i) {
      const auto& edge = node.next_edge(i);
      Node* next = edge.function.get();
      if (!is_needed(next)) continue;
      add(next, edge.input_nr, std::move(results[i]));
      if (--missing_[next] == 0 && queued_.insert(next).second) ready_.push(next);
    }
  }

  std::unordered_map<Node*, std::vector<std::pair<uint32_t, size_t>>>
      wanted_;                             // by node, its input and the result
  std::unordered_map<Node*, bool> leads_;  // whether a node leads to an input
  std::unordered_map<Node*, size_t> missing_;
  std::unordered_map<Node*, variable_list> buffers_;
  std::unordered_set<Node*> queued_;
  std::priority_queue<Node*, std::vector<Node*>, Later> ready_;
  variable_list results_;
};

std::vector<std::optional<at::Tensor>> run_backward(const variable_list& outputs,
                                                    const std::vector<std::optional<at::Tensor>>& gradients,
                                                    const variable_list& inputs) {
  TORCH_CHECK(outputs.size() == gradients.size(), "got ", outputs.size(), " outputs and ", gradients.size(),
              " gradients; pass a gradient or None for each output");
  const pybind11::gil_scoped_release released;
  variable_list given;
  for (const auto& gradient : gradients) given.push_back(gradient.value_or(at::Tensor()));
  std::vector<std::optional<at::Tensor>> results;
  for (auto& result : Backward().run(outputs, given, inputs)) {
    results.push_back(result.defined() ? std::make_optional(std::move(result)) : std::nullopt);
  }
  return results;
}

}  // namespace

void bind_backward(pybind11::module_& m) {
  m.def(
      "run_backward", &run_backward, pybind11::arg("outputs"), pybind11::arg("gradients"),
      pybind11::arg("inputs"),
      "Returns the gradients of inputs, like torch.autograd.grad; works for devices that the machine lacks.");
}

}  // namespace gpipe_fast
