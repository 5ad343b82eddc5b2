#include "pipeline/settings.h"

#include <ATen/Context.h>

#include <cstdint>
#include <functional>
#include <type_traits>
#include <vector>

namespace gpipe_fast {
namespace {

// Getters and setters of the settings that are on or off.
struct Flag {
  bool (at::Context::*get)() const;
  void (at::Context::*set)(bool);
};
constexpr Flag kFlags[] = {
    {&at::Context::userEnabledCuDNN, &at::Context::setUserEnabledCuDNN},
    {&at::Context::userEnabledFlashSDP, &at::Context::setSDPUseFlash},
    {&at::Context::userEnabledMemEfficientSDP, &at::Context::setSDPUseMemEfficient},
    {&at::Context::userEnabledMathSDP, &at::Context::setSDPUseMath},
    {&at::Context::userEnabledCuDNNSDP, &at::Context::setSDPUseCuDNN},
    {&at::Context::userEnabledOverrideableSDP, &at::Context::setSDPUseOverrideable},
    {&at::Context::allowFP16BF16ReductionMathSDP, &at::Context::setAllowFP16BF16ReductionMathSDP},
};

void add(std::string& to, bool flag) { to += flag ? '\1' : '\0'; }

void add(std::string& to, int64_t number) {
  to.append(reinterpret_cast<const char*>(&number), sizeof(number));
}

template <class Getter>
void add_if_readable(std::string& to, const Getter& getter) {
  try {
    add(to, static_cast<int64_t>(getter()));
  } catch (const c10::Error&) {
    add(to, int64_t{-1});  // this getter rejects how the setting was set
  }
}

// Adds the precision by backend and kind of operator, in PyTorch's order: {generic, cuda, mkldnn} and {all, conv,
// rnn, matmul}. The getter takes enumerations; in older releases it takes their names.
template <class Precision, class Backend, class Op>
void add_float32_precision(std::string& to, Precision (at::Context::*get)(Backend, Op) const) {
  static constexpr const char* kBackends[] = {"generic", "cuda", "mkldnn"};
  static constexpr const char* kOps[] = {"all", "conv", "rnn", "matmul"};
  for (int backend = 0; backend < 3; ++backend) {
    for (int op = 0; op < (backend == 0 ? 1 : 4); ++op) {
      add_if_readable(to, [&] {
        if constexpr (std::is_enum_v<Backend>)
          return static_cast<int64_t>(
              (at::globalContext().*get)(static_cast<Backend>(backend), static_cast<Op>(op)));
        else
          return static_cast<int64_t>(
              std::hash<std::string>()((at::globalContext().*get)(kBackends[backend], kOps[op])));
      });
    }
  }
}

}  // namespace

std::string operator_settings() {
  at::Context& context = at::globalContext();
  std::string found;
  for (const auto& [get, set] : kFlags) add(found, (context.*get)());
  for (const at::SDPBackend backend : context.sDPPriorityOrder())
    found += static_cast<char>(static_cast<int>(backend));
  return found;
}

void restore_operator_settings(const std::string& choices) {
  at::Context& context = at::globalContext();
  auto choice = choices.begin();
  for (const auto& [get, set] : kFlags) (context.*set)(*choice++ != 0);
  context.setSDPPriorityOrder(std::vector<int64_t>(choice, choices.end()));
}

std::string all_settings() { return operator_settings() + numeric_settings(); }

std::string numeric_settings() {
  const at::Context& context = at::globalContext();
  std::string found;
  for (const bool flag : {context.deterministicAlgorithms(), context.deterministicCuDNN(),
                          context.benchmarkCuDNN(), context.allowFP16AccumulationCuBLAS()})
    add(found, flag);
  add(found, int64_t{context.benchmarkLimitCuDNN()});
  add(found, static_cast<int64_t>(context.allowFP16ReductionCuBLAS()));
  add(found, static_cast<int64_t>(context.allowBF16ReductionCuBLAS()));
  add_if_readable(found, [] { return at::globalContext().blasPreferredBackend(); });
  add_if_readable(found, [&] { return context.float32MatmulPrecision(); });
  add_if_readable(found, [&] { return context.allowTF32CuDNN(); });
  add_float32_precision(found, &at::Context::float32Precision);
  return found;
}

}  // namespace gpipe_fast
