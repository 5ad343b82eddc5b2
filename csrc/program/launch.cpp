#include "program/launch.h"

#include "check.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

namespace gpipe_fast {
namespace {

// The number of bytes by which the addresses of an aligned launch are divisible.
constexpr std::uintptr_t kAlignment = 16;
constexpr size_t kNumScratchPointers = 2;

class Launch final : public Operator {
 public:
  Launch(std::shared_ptr<Kernel> aligned, std::shared_ptr<Kernel> unaligned, const Grid& grid,
         const std::vector<LaunchArgument>& arguments, const std::vector<int64_t>& aligned_positions)
      : aligned_(std::move(aligned)), unaligned_(std::move(unaligned)), grid_(grid) {
    values_.assign(arguments.size() + kNumScratchPointers, 0);
    for (uint64_t& value : values_) addresses_.push_back(&value);
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (const auto* tensor = std::get_if<at::Tensor*>(&arguments[i])) {
        const bool aligned = std::find(aligned_positions.begin(), aligned_positions.end(),
                                       static_cast<int64_t>(i)) != aligned_positions.end();
        tensors_.push_back({*tensor, i, aligned});
      } else {
        const std::string& number = std::get<std::string>(arguments[i]);
        GPIPE_CHECK_ARG(number.size() <= sizeof(uint64_t), "argument ", i, " of kernel ", aligned_->name(),
                        " has at most ", sizeof(uint64_t), " bytes, got ", number.size());
        std::memcpy(&values_[i], number.data(), number.size());
      }
    }
  }

  void call(std::vector<at::Tensor>&, CancellationToken*) override {
    if (std::find(grid_.begin(), grid_.end(), 0) != grid_.end()) return;
    std::uintptr_t aligned_addresses = 0;
    for (const auto& [tensor, position, aligned] : tensors_) {
      GPIPE_CHECK(tensor->device() == aligned_->device(), "argument ", position, " of kernel ",
                  aligned_->name(), " is on ", tensor->device(), ", but the kernel on ", aligned_->device());
      const auto address = reinterpret_cast<std::uintptr_t>(tensor->mutable_data_ptr());
      values_[position] = address;
      if (aligned) aligned_addresses |= address;
    }
    const Kernel& kernel = aligned_addresses % kAlignment == 0 ? *aligned_ : *unaligned_;
    kernel.launch(grid_, addresses_.data());
  }

 private:
  struct TensorArgument {
    at::Tensor* tensor;
    size_t position;
    bool aligned;  // the aligned kernel needs it to be
  };

  const std::shared_ptr<Kernel> aligned_, unaligned_;
  const Grid grid_;
  std::vector<TensorArgument> tensors_;
  std::vector<uint64_t> values_;  // the parameters, each at the beginning of 8 bytes
  std::vector<void*> addresses_;  // of the values
};

class CheckUntilDone final : public Operator {
 public:
  CheckUntilDone(Check check, std::vector<at::Tensor*> inputs, std::vector<at::Tensor*> outputs)
      : check_(std::move(check)), inputs_(std::move(inputs)), outputs_(std::move(outputs)) {}

  void call(std::vector<at::Tensor>&, CancellationToken*) override {
    if (!check_ || is_capturing(outputs_.front()->device())) return;
    if (check_(aliases(inputs_), aliases(outputs_))) check_ = nullptr;
  }

 private:
  // Aliases, because the program points its own tensors elsewhere.
  static std::vector<at::Tensor> aliases(const std::vector<at::Tensor*>& tensors) {
    std::vector<at::Tensor> found;
    for (const at::Tensor* tensor : tensors) found.push_back(tensor->detach());
    return found;
  }

  Check check_;  // empty once it is done
  const std::vector<at::Tensor*> inputs_, outputs_;
};

void check_grid(const Kernel& kernel, const Grid& grid) {
  const int64_t max_blocks[] = {std::numeric_limits<int32_t>::max() / kernel.num_ctas(), 65535, 65535};
  for (size_t i = 0; i < grid.size(); ++i) {
    GPIPE_CHECK_ARG(0 <= grid[i] && grid[i] <= max_blocks[i], "dimension ", i, " of the grid of kernel ",
                    kernel.name(), " must be between 0 and ", max_blocks[i], ", got ", grid[i]);
  }
}

}  // namespace

std::unique_ptr<Operator> make_launch(std::shared_ptr<Kernel> aligned, std::shared_ptr<Kernel> unaligned,
                                      const Grid& grid, const std::vector<LaunchArgument>& arguments,
                                      const std::vector<int64_t>& aligned_positions) {
  GPIPE_CHECK_ARG(aligned->device() == unaligned->device(),
                  "the kernels of a launch must be on one device, got ", aligned->device(), " and ",
                  unaligned->device());
  for (const Kernel* kernel : {aligned.get(), unaligned.get()}) check_grid(*kernel, grid);
  return std::make_unique<Launch>(std::move(aligned), std::move(unaligned), grid, arguments,
                                  aligned_positions);
}

std::unique_ptr<Operator> make_check(Check check, std::vector<at::Tensor*> inputs,
                                     std::vector<at::Tensor*> outputs) {
  GPIPE_CHECK_ARG(!outputs.empty(), "a check needs an output, got none");
  return std::make_unique<CheckUntilDone>(std::move(check), std::move(inputs), std::move(outputs));
}

}  // namespace gpipe_fast
