// Collectives through the process groups of torch.distributed.
#include "program/collective.h"

#include "check.h"

#ifdef USE_C10D

#include "engine/engine.h"
#include "engine/waiter.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <map>
#include <numeric>
#include <thread>
#include <utility>

namespace gpipe_fast {
namespace {

using WorkPointer = c10::intrusive_ptr<c10d::Work>;

const std::map<std::string, c10d::ReduceOp::RedOpType> kReductions = {
    {"sum", c10d::ReduceOp::SUM}, {"avg", c10d::ReduceOp::AVG},  {"product", c10d::ReduceOp::PRODUCT},
    {"min", c10d::ReduceOp::MIN}, {"max", c10d::ReduceOp::MAX},  {"band", c10d::ReduceOp::BAND},
    {"bor", c10d::ReduceOp::BOR}, {"bxor", c10d::ReduceOp::BXOR}};

class Collective final : public Operator {
 public:
  Collective(const c10::OperatorHandle& op, std::vector<Argument> arguments)
      : op_(op), name_(op.operator_name().name), arguments_(std::move(arguments)) {
    name_.erase(0, name_.rfind(':') + 1);
  }

  void call(std::vector<at::Tensor>& results, CancellationToken* token) override {
    const at::Tensor& given = *std::get<at::Tensor*>(arguments_.front());
    if (given.is_complex()) {
      results.push_back(at::view_as_complex(exchange(at::view_as_real(given), token)));
    } else {
      results.push_back(exchange(given, token));
    }
  }

  std::unique_ptr<Operator> copy(const Moved& moved) const override {
    auto found = std::make_unique<Collective>(*this);
    found->arguments_.front() = moved(std::get<at::Tensor*>(arguments_.front()));
    return found;
  }
  c10::TypePtr argument_type(size_t position) const override {
    return op_.schema().arguments().at(position).type();
  }
  void set_constant(size_t position, c10::IValue value) override {
    arguments_.at(position) = std::move(value);
  }

 private:
  const c10::IValue& constant(size_t position) const {
    return std::get<c10::IValue>(arguments_.at(position));
  }

  at::Tensor exchange(const at::Tensor& given, CancellationToken* token) const {
    const std::string& group_name = constant(arguments_.size() - 1).toStringRef();
    const auto group = c10d::resolve_process_group(group_name);
    const bool in_place = name_ == "all_reduce" || name_ == "broadcast";
    // A thread of gloo may read its argument after a wait was cancelled, when other values have the program's memory.
    at::Tensor input =
        given.is_cpu() || in_place ? given.clone(at::MemoryFormat::Contiguous) : given.detach();
    at::Tensor output = input;
    const WorkPointer work = start(*group->getBackend(given.device().type()), input, output);
    if (given.is_cpu()) {
      wait(work, group, group_name, token);
    } else {
      work->wait();  // the current stream waits
    }
    if (name_ != "reduce_scatter_tensor" || !given.is_cpu()) return output;
    const int64_t rows = given.size(0) / group->getSize();
    return input.narrow(0, group->getRank() * rows, rows).clone();
  }

  WorkPointer start(c10d::Backend& backend, at::Tensor& input, at::Tensor& output) const {
    std::vector<at::Tensor> inputs{input}, outputs;
    const auto allocate = [&](int64_t rows) {
      std::vector<int64_t> shape = input.sizes().vec();
      if (shape.empty()) shape.emplace_back();
      shape.front() = rows;
      output = at::empty(shape, input.options());
      outputs = {output};
    };
    const int64_t rows = input.dim() == 0 ? 1 : input.size(0), size = backend.getSize();
    // Gloo scatters a sum in a work that cannot be polled; it also sums all of it.
    if (name_ == "all_reduce" || (name_ == "reduce_scatter_tensor" && input.is_cpu())) {
      c10d::AllreduceOptions options;
      options.reduceOp = kReductions.at(constant(1).toStringRef());
      return backend.allreduce(inputs, options);
    }
    if (name_ == "reduce_scatter_tensor") {
      allocate(rows / size);
      c10d::ReduceScatterOptions options;
      options.reduceOp = kReductions.at(constant(1).toStringRef());
      return backend.reduce_scatter_tensor_coalesced(outputs, inputs, options);
    }
    if (name_ == "all_gather_into_tensor") {
      allocate(rows * size);
      return backend.allgather_into_tensor_coalesced(outputs, inputs);
    }
    if (name_ == "all_to_all_single") {
      std::vector<int64_t> to = constant(1).toIntVector(), from = constant(2).toIntVector();
      allocate(std::accumulate(to.begin(), to.end(), int64_t{0}));
      return backend.alltoall_base(output, input, to, from);
    }
    c10d::BroadcastOptions options;
    options.rootRank = constant(1).toInt();
    return backend.broadcast(inputs, options);
  }

  void wait(const WorkPointer& work, c10::intrusive_ptr<c10d::ProcessGroup> group,
            const std::string& group_name, CancellationToken* token) const {
    const auto future = work->getFuture();
    const auto waiter = std::make_shared<Waiter>();
    future->addCallback([waiter](c10::ivalue::Future&) { waiter->wake(); });
    try {
      do {
        if (token != nullptr) token->check();
      } while (!waiter->wait_for([&] { return future->completed(); }, kPollInterval));
    } catch (...) {
      // A collective of gloo cannot be aborted, and a group that is destroyed waits for it. A thread does so instead of
      // those that drop the group.
      std::thread([future, group = std::move(group)] { future->wait(); }).detach();
      throw;
    }
    GPIPE_CHECK(!future->hasError(), name_, " of group ", group_name,
                " failed: ", future->tryRetrieveErrorMessage());
  }

  const c10::OperatorHandle op_;
  std::string name_;
  std::vector<Argument> arguments_;
};

}  // namespace

std::unique_ptr<Operator> make_collective(const c10::OperatorHandle& op, std::vector<Argument> arguments) {
  return std::make_unique<Collective>(op, std::move(arguments));
}

}  // namespace gpipe_fast

#else

namespace gpipe_fast {

std::unique_ptr<Operator> make_collective(const c10::OperatorHandle& op, std::vector<Argument> arguments) {
  return make_boxed(op, std::move(arguments), /*is_out_variant=*/false);  // there are none
}

}  // namespace gpipe_fast

#endif
