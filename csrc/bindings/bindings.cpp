// The Python module gpipe_fast._C: its build information, and the classes and functions of the other binding files.
#include "bindings/bindings.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/version.h>

#include <map>
#include <string>

#ifdef GPIPE_FAST_CUDA
#include <cuda_runtime_api.h>
#endif

namespace gpipe_fast {
namespace {

#define GPIPE_QUOTE_EXPANDED(x) #x
#define GPIPE_QUOTE(x) GPIPE_QUOTE_EXPANDED(x)

bool built_with_cuda() {
#ifdef GPIPE_FAST_CUDA
  return true;
#else
  return false;
#endif
}

// Returns the versions that this binary was built against; "none" for a component that it was built without.
std::map<std::string, std::string> build_info() {
  return {
      {"torch", TORCH_VERSION},
      {"compiler", __VERSION__},
#ifdef GPIPE_FAST_CUDA
      {"cuda", std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10)},
      {"cuda_archs", GPIPE_QUOTE(GPIPE_FAST_CUDA_ARCHS)},
#else
      {"cuda", "none"},
      {"cuda_archs", "none"},
#endif
  };
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("built_with_cuda", &built_with_cuda, "Returns whether this extension was built with CUDA kernels.");
  m.def("build_info", &build_info, "Returns the torch, CUDA, GPU architectures and compiler of the build.");
  bind_program(m);
  bind_plan(m);
  bind_pipeline(m);
  bind_snapshot(m);
  bind_backward(m);
}

}  // namespace gpipe_fast
