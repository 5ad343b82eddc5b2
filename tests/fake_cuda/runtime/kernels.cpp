// Libraries of kernels, and their launches.
//
// A launch copies its arguments, as the driver does. If a runner is registered for the image, the launch runs it:
// now, later as deferred work, or at every launch of the graph that captures it. Otherwise the launch is only logged.
// tests/fake_cuda/interpreter.py has the runner.
#include "cubin.h"
#include "deferred.h"
#include "devices.h"
#include "graphs.h"
#include "log.h"
#include "streams.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace fake_cuda {
namespace {

constexpr size_t kDefaultSharedBytes = 49152, kMaxSharedBytes = 232448;
constexpr unsigned kMaxBlockThreads = 1024, kMaxGridYZ = 65535, kMaxGridX = 2147483647;
constexpr unsigned kCapability = 90;  // cudaGetDeviceProperties returns the same

struct Library {
  Cubin cubin;
  int64_t image;  // equal images have equal numbers
  std::atomic<bool> loaded{true};
};

struct Kernel {
  std::shared_ptr<Library> library;
  std::string name;
  const CubinKernel* info;
  std::map<int, size_t> max_shared_bytes;  // by device, as set by the caller
  std::set<int> devices;                   // devices on which the kernel was queried or launched

  size_t shared_limit(int device) const {
    const auto found = max_shared_bytes.find(device);
    return found == max_shared_bytes.end() ? kDefaultSharedBytes : found->second;
  }
};

// The description of one launch that a runner receives; interpreter.py has the same structure.
struct LaunchRecord {
  int64_t image;
  const char* name;
  unsigned grid[3];
  int num_parameters;
  const Parameter* parameters;
  const void* arguments;
  cudaStream_t traced;  // the stream for which the runner reports accesses; null for none
};
using Runner = int (*)(const LaunchRecord*);  // returns 0, or another number after an error

std::atomic<Runner> runner{nullptr};

// These tables are guarded by `mutex`.

std::map<std::string, int64_t>& image_numbers() {
  static auto* const found = new std::map<std::string, int64_t>;
  return *found;
}
std::set<int64_t>& runnable_images() {
  static auto* const found = new std::set<int64_t>;
  return *found;
}
std::map<const void*, std::shared_ptr<Kernel>>& kernels() {
  static auto* const found = new std::map<const void*, std::shared_ptr<Kernel>>;
  return *found;
}

int64_t image_number(const std::string& image) {
  return image_numbers().try_emplace(image, static_cast<int64_t>(image_numbers().size())).first->second;
}

// Returns the kernel of a library; null for a function that is compiled into a program.
std::shared_ptr<Kernel> kernel_of(const void* handle) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = kernels().find(handle);
  return found == kernels().end() ? nullptr : found->second;
}

bool is_runnable(const Kernel& kernel) {
  const std::lock_guard<std::mutex> lock(mutex);
  return runner != nullptr && runnable_images().count(kernel.library->image) != 0;
}

// A launch with a copy of its arguments.
struct Launch {
  std::shared_ptr<Kernel> kernel;
  dim3 grid;
  std::vector<char> arguments;

  void run(cudaStream_t traced) const {
    const Runner run = runner;
    if (!kernel->library->loaded || run == nullptr) {
      set_sticky_error();  // the code was unloaded before the launch ran
      return;
    }
    const std::vector<Parameter>& parameters = kernel->info->parameters;
    const LaunchRecord record{kernel->library->image,
                              kernel->name.c_str(),
                              {grid.x, grid.y, grid.z},
                              static_cast<int>(parameters.size()),
                              parameters.data(),
                              arguments.data(),
                              traced};
    if (run(&record) != 0) {
      set_sticky_error();
    }
  }
};

std::vector<char> copy_arguments(const CubinKernel& kernel, void** given) {
  std::vector<char> copy;
  for (size_t i = 0; i < kernel.parameters.size(); ++i) {
    const Parameter place = kernel.parameters[i];
    copy.resize(std::max<size_t>(copy.size(), place.offset + place.size));
    std::memcpy(copy.data() + place.offset, given[i], place.size);
  }
  return copy;
}

size_t product(dim3 size) { return size_t{size.x} * size.y * size.z; }

cudaError_t check_limits(const cudaLaunchConfig_t& config) {
  const dim3 grid = config.gridDim;
  const size_t threads = product(config.blockDim);
  const bool valid = product(grid) > 0 && grid.x <= kMaxGridX && grid.y <= kMaxGridYZ &&
                     grid.z <= kMaxGridYZ && threads > 0 && threads <= kMaxBlockThreads &&
                     config.blockDim.z <= 64;
  return valid ? cudaSuccess : cudaErrorInvalidConfiguration;
}

cudaError_t check_kernel_limits(const Kernel& kernel, const cudaLaunchConfig_t& config) {
  const size_t threads = product(config.blockDim);
  const bool valid = (kernel.info->block_threads == 0 || threads == kernel.info->block_threads) &&
                     config.dynamicSmemBytes <= kernel.shared_limit(current_device);
  return valid ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t launch_kernel(const std::shared_ptr<Kernel>& kernel, const cudaLaunchConfig_t& config,
                          void** arguments) {
  if (const cudaError_t error = check_kernel_limits(*kernel, config); error != cudaSuccess) {
    return fail(error);
  }
  const std::shared_ptr<Capture> capture = stream_of(config.stream)->capture;
  if (kernel->devices.count(current_device) == 0 && capture) {
    return invalidate(*capture, cudaErrorStreamCaptureUnsupported);  // loading may wait for the device
  }
  kernel->devices.insert(current_device);
  if (!is_runnable(*kernel)) {
    return enqueue(config.stream, "kernel", kernel->name);
  }
  const auto launch = std::make_shared<const Launch>(
      Launch{kernel, config.gridDim, copy_arguments(*kernel->info, arguments)});
  // Only the first run reports its accesses: they are nodes of a captured graph.
  const bool traced = !deferring() && (capture || is_logging());
  const auto trace = std::make_shared<cudaStream_t>(traced ? stream_of(config.stream) : nullptr);
  const cudaError_t done =
      enqueue(config.stream, "kernel", kernel->name + "\trun", [launch, trace] { launch->run(*trace); });
  *trace = nullptr;
  return done;
}

cudaError_t launch(const void* handle, const cudaLaunchConfig_t& config, void** arguments) {
  if (const cudaError_t error = check_limits(config); error != cudaSuccess) {
    return fail(error);
  }
  const std::shared_ptr<Kernel> kernel = kernel_of(handle);
  return kernel ? launch_kernel(kernel, config, arguments)
                : enqueue(config.stream, "kernel", text("%p", handle));
}

cudaError_t set_attribute(Kernel& kernel, cudaFuncAttribute attribute, int value, int device) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) {
    return cudaSuccess;
  }
  if (value < 0 || static_cast<size_t>(value) > kMaxSharedBytes) {
    return fail(cudaErrorInvalidValue);
  }
  kernel.max_shared_bytes[device] = static_cast<size_t>(value);
  return cudaSuccess;
}

}  // namespace

extern "C" {

// Registers the function that runs kernels; null ends that, after all enqueued work is done.
void fake_cuda_set_runner(Runner run) {
  if (run == nullptr && deferring()) {
    complete_everything();
  }
  runner = run;
}
// Makes the runner run the kernels of an image. Returns the image's number, or -1 if it is not a cubin.
int64_t fake_cuda_make_runnable(const void* image) {
  const std::optional<Cubin> cubin = Cubin::read(image);
  if (!cubin) {
    return -1;
  }
  const std::lock_guard<std::mutex> lock(mutex);
  const int64_t number = image_number(cubin->bytes());
  runnable_images().insert(number);
  return number;
}

cudaError_t cudaLibraryLoadData(cudaLibrary_t* library, const void* code, cudaJitOption*, void**,
                                unsigned int, cudaLibraryOption*, void**, unsigned int) {
  RETURN_IF_STICKY_ERROR()

  std::optional<Cubin> cubin = Cubin::read(code);
  if (!cubin) {
    return fail(cudaErrorInvalidKernelImage);
  }
  if (cubin->capability() != kCapability) {
    return fail(cudaErrorNoKernelImageForDevice);
  }
  write("mark\tlibrary");
  const std::lock_guard<std::mutex> lock(mutex);
  const int64_t image = image_number(cubin->bytes());
  *library =
      reinterpret_cast<cudaLibrary_t>(new std::shared_ptr<Library>(new Library{std::move(*cubin), image}));
  return cudaSuccess;
}
cudaError_t cudaLibraryUnload(cudaLibrary_t library) {
  RETURN_IF_STICKY_ERROR()

  const std::unique_ptr<std::shared_ptr<Library>> own(reinterpret_cast<std::shared_ptr<Library>*>(library));
  (*own)->loaded = false;
  const std::lock_guard<std::mutex> lock(mutex);
  for (auto each = kernels().begin(); each != kernels().end();) {
    each = each->second->library == *own ? kernels().erase(each) : std::next(each);
  }
  return cudaSuccess;
}
cudaError_t cudaLibraryGetKernel(cudaKernel_t* kernel, cudaLibrary_t library, const char* name) {
  RETURN_IF_STICKY_ERROR()

  const std::shared_ptr<Library>& own = *reinterpret_cast<std::shared_ptr<Library>*>(library);
  const auto info = own->cubin.kernels().find(name);
  if (info == own->cubin.kernels().end()) {
    return fail(cudaErrorSymbolNotFound);
  }
  const std::shared_ptr<Kernel> found(new Kernel{own, name, &info->second, {}, {}});
  const std::lock_guard<std::mutex> lock(mutex);
  kernels()[found.get()] = found;
  *kernel = reinterpret_cast<cudaKernel_t>(found.get());
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void* handle) {
  RETURN_IF_STICKY_ERROR()

  std::memset(found, 0, sizeof(*found));
  found->maxThreadsPerBlock = kMaxBlockThreads;
  if (const std::shared_ptr<Kernel> kernel = kernel_of(handle)) {
    if (is_unloadable(current_device)) {
      return fail(cudaErrorNoKernelImageForDevice);
    }
    const std::lock_guard<std::mutex> lock(mutex);
    kernel->devices.insert(current_device);
    found->binaryVersion = kCapability;
    found->maxDynamicSharedSizeBytes = static_cast<int>(kernel->shared_limit(current_device));
  }
  return cudaSuccess;
}
// Needs the driver of CUDA 12.4, while programs that are built with CUDA 12.8 run with older ones.
cudaError_t cudaFuncGetParamInfo(const void*, size_t, size_t*, size_t*) {
  return fail(cudaErrorCallRequiresNewerDriver);
}
cudaError_t cudaFuncSetAttribute(const void* handle, cudaFuncAttribute attribute, int value) {
  RETURN_IF_STICKY_ERROR()

  const std::shared_ptr<Kernel> kernel = kernel_of(handle);
  return kernel ? set_attribute(*kernel, attribute, value, current_device) : cudaSuccess;
}
cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t handle, cudaFuncAttribute attribute, int value,
                                            int device) {
  RETURN_IF_STICKY_ERROR()

  const std::shared_ptr<Kernel> kernel = kernel_of(handle);
  return kernel ? set_attribute(*kernel, attribute, value, device) : fail(cudaErrorInvalidResourceHandle);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** arguments) {
  RETURN_IF_STICKY_ERROR()
  RETURN_IF_NOT_CURRENT(config->stream)

  return launch(kernel, *config, arguments);
}
cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** arguments, size_t shared_bytes,
                             cudaStream_t stream) {
  const cudaLaunchConfig_t config{grid, block, shared_bytes, stream, nullptr, 0};
  return cudaLaunchKernelExC(&config, kernel, arguments);
}
// The name that newer headers use.
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                               size_t shared_bytes, cudaStream_t stream) {
  return cudaLaunchKernel(kernel, grid, block, arguments, shared_bytes, stream);
}

}  // extern "C"

}  // namespace fake_cuda
