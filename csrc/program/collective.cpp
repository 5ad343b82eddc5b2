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
#include <memory>
#include <numeric>
#include <thread>
#include <utility>

namespace gpipe_fast {
namespace {

using Arguments = std::vector<c10::IValue>;
using GroupPointer = c10::intrusive_ptr<c10d::ProcessGroup>;
using WorkPointer = c10::intrusive_ptr<c10d::Work>;

const std::map<std::string, c10d::ReduceOp::RedOpType> kReductions = {
    {"sum", c10d::ReduceOp::SUM}, {"avg", c10d::ReduceOp::AVG},  {"product", c10d::ReduceOp::PRODUCT},
    {"min", c10d::ReduceOp::MIN}, {"max", c10d::ReduceOp::MAX},  {"band", c10d::ReduceOp::BAND},
    {"bor", c10d::ReduceOp::BOR}, {"bxor", c10d::ReduceOp::BXOR}};

// Starts a collective of `input`, and sets the output, where it is not the same tensor.
WorkPointer start(const std::string& name, const Arguments& arguments, c10d::Backend& backend,
                  at::Tensor& input, at::Tensor& output) {
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
  if (name == "all_reduce" || (name == "reduce_scatter_tensor" && input.is_cpu())) {
    c10d::AllreduceOptions options;
    options.reduceOp = kReductions.at(arguments[1].toStringRef());
    return backend.allreduce(inputs, options);
  }
  if (name == "reduce_scatter_tensor") {
    allocate(rows / size);
    c10d::ReduceScatterOptions options;
    options.reduceOp = kReductions.at(arguments[1].toStringRef());
    return backend.reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }
  if (name == "all_gather_into_tensor") {
    allocate(rows * size);
    return backend.allgather_into_tensor_coalesced(outputs, inputs);
  }
  if (name == "all_to_all_single") {
    std::vector<int64_t> to = arguments[1].toIntVector(), from = arguments[2].toIntVector();
    allocate(std::accumulate(to.begin(), to.end(), int64_t{0}));
    return backend.alltoall_base(output, input, to, from);
  }
  c10d::BroadcastOptions options;
  options.rootRank = arguments[1].toInt();
  return backend.broadcast(inputs, options);
}

void wait(const WorkPointer& work, const std::string& name, GroupPointer group, CancellationToken* token) {
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
  GPIPE_CHECK(!future->hasError(), name, " failed: ", future->tryRetrieveErrorMessage());
}

}  // namespace

at::Tensor run_collective(const std::string& name, const Arguments& arguments, CancellationToken* token) {
  const at::Tensor& tensor = arguments.front().toTensor();
  const at::Tensor given = tensor.is_complex() ? at::view_as_real(tensor) : tensor;
  const GroupPointer group = c10d::resolve_process_group(arguments.back().toStringRef());
  const bool in_place = name == "all_reduce" || name == "broadcast";
  // A thread of gloo may read its argument after a wait was cancelled, when other values have the program's memory.
  at::Tensor input =
      given.is_cpu() || in_place ? given.clone(at::MemoryFormat::Contiguous) : given.contiguous();
  at::Tensor output = input;
  const WorkPointer work = start(name, arguments, *group->getBackend(given.device().type()), input, output);
  if (given.is_cpu()) {
    wait(work, name, group, token);
  } else {
    // The group's stream waits for the current one, which now waits for it. So memory of the current stream that is
    // freed from here on is free, and the host waits for nothing.
    work->wait();
  }
  if (name == "reduce_scatter_tensor" && given.is_cpu()) {
    const int64_t rows = given.size(0) / group->getSize();
    output = input.narrow(0, group->getRank() * rows, rows).clone();
  }
  return tensor.is_complex() ? at::view_as_complex(output) : output;
}

}  // namespace gpipe_fast

#else

namespace gpipe_fast {

at::Tensor run_collective(const std::string& name, const std::vector<c10::IValue>&, CancellationToken*) {
  GPIPE_CHECK(false, name, ": this build of PyTorch has no torch.distributed");
  return {};
}

}  // namespace gpipe_fast

#endif
