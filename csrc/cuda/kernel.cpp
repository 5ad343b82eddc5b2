// Kernels that the CUDA runtime loads from cubins.
//
// A library belongs to no device: its kernels are loaded on a device when they are first used there. That is done
// here, because a first use in a stream capture may fail.
#include "program/kernel.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>

#include <elf.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "check.h"

namespace gpipe_fast {
namespace {

// Earlier runtimes load no libraries.
#if CUDART_VERSION >= 12080

// Larger dynamic shared memory must be requested per kernel and device.
constexpr int64_t kDefaultSharedBytes = 48 << 10;
constexpr int64_t kMaxPortableCtas = 8;

std::string describe(const KernelImage& image) {
  return detail::concatenate("kernel ", image.name, " (", image.num_threads, " threads, ", image.num_ctas,
                             " CTAs per cluster, ", image.shared_bytes, " bytes of shared memory)");
}

// Throws if the bytes are no complete 64-bit ELF file. The runtime is not told how many there are, and reads as many as
// the file's header says.
void check_complete(const std::string& bytes) {
  Elf64_Ehdr header = {};
  const bool has_header = bytes.size() >= sizeof(header);
  if (has_header) std::memcpy(&header, bytes.data(), sizeof(header));
  const bool is_elf = has_header && std::memcmp(header.e_ident, ELFMAG, SELFMAG) == 0 &&
                      header.e_ident[EI_CLASS] == ELFCLASS64;
  const size_t sections_end = header.e_shoff + size_t{header.e_shentsize} * header.e_shnum;
  const size_t segments_end = header.e_phoff + size_t{header.e_phentsize} * header.e_phnum;
  TORCH_CHECK(is_elf && std::max(sections_end, segments_end) <= bytes.size(), "its ", bytes.size(),
              " bytes are no complete cubin");
}

class CudaKernel final : public Kernel {
 public:
  CudaKernel(const KernelImage& image, c10::Device device) : image_(image), device_(device) {
    image_.bytes.clear();  // the library has a copy
    check_complete(image.bytes);
    const c10::cuda::CUDAGuard guard(device);
    cudaLibrary_t library = nullptr;
    C10_CUDA_CHECK(
        cudaLibraryLoadData(&library, image.bytes.data(), nullptr, nullptr, 0, nullptr, nullptr, 0));
    try {
      load_from(library);
    } catch (...) {
      (void)cudaLibraryUnload(library);
      (void)cudaGetLastError();  // else a later call would report what unloading may have left
      throw;
    }
  }

  const std::string& name() const override { return image_.name; }
  c10::Device device() const override { return device_; }
  int64_t num_ctas() const override { return image_.num_ctas; }

  void launch(const Grid& grid, void** arguments) const override {
    const c10::cuda::CUDAGuard guard(device_);
    cudaLaunchAttribute attributes[4];
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(grid[0] * image_.num_ctas, grid[1], grid[2]);
    config.blockDim = dim3(image_.num_threads);
    config.dynamicSmemBytes = image_.shared_bytes;
    config.stream = c10::cuda::getCurrentCUDAStream(device_.index());
    config.attrs = attributes;
    config.numAttrs = set_attributes(attributes);
    try {
      C10_CUDA_CHECK(cudaLaunchKernelExC(&config, kernel_, arguments));
    } catch (c10::Error& error) {
      error.add_context(detail::concatenate("launching ", describe(image_), " on ", device_, " with grid (",
                                            grid[0], ", ", grid[1], ", ", grid[2], ")"));
      throw;
    }
  }

 private:
  void load_from(cudaLibrary_t library) {
    cudaKernel_t kernel = nullptr;
    C10_CUDA_CHECK(cudaLibraryGetKernel(&kernel, library, image_.name.c_str()));
    kernel_ = kernel;  // the runtime's functions accept it in place of a function of this program
    if (image_.shared_bytes > kDefaultSharedBytes) {
      C10_CUDA_CHECK(cudaFuncSetAttribute(kernel_, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          static_cast<int>(image_.shared_bytes)));
    }
    if (image_.num_ctas > kMaxPortableCtas)
      C10_CUDA_CHECK(cudaFuncSetAttribute(kernel_, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    cudaFuncAttributes found = {};
    C10_CUDA_CHECK(cudaFuncGetAttributes(&found, kernel_));
    TORCH_CHECK(image_.num_threads <= found.maxThreadsPerBlock, "its registers allow at most ",
                found.maxThreadsPerBlock, " threads");
  }

  unsigned int set_attributes(cudaLaunchAttribute* attributes) const {
    unsigned int count = 0;
    const auto add = [&](cudaLaunchAttributeID id) -> cudaLaunchAttributeValue& {
      attributes[count].id = id;
      return attributes[count++].val;
    };
    if (image_.launch_pdl)
      add(cudaLaunchAttributeProgrammaticStreamSerialization).programmaticStreamSerializationAllowed = 1;
    if (image_.cooperative) add(cudaLaunchAttributeCooperative).cooperative = 1;
    if (image_.num_ctas > 1) {
      auto& cluster = add(cudaLaunchAttributeClusterDimension).clusterDim;
      cluster = {static_cast<unsigned int>(image_.num_ctas), 1, 1};
      // As Triton launches clusters.
      add(cudaLaunchAttributeClusterSchedulingPolicyPreference).clusterSchedulingPolicyPreference =
          cudaClusterSchedulingPolicySpread;
    }
    return count;
  }

  KernelImage image_;  // without its bytes
  const c10::Device device_;
  const void* kernel_ = nullptr;
};

// The kernels that this process has loaded. Never destroyed, because a launch may still be running when the process
// exits.
class LoadedKernels {
 public:
  static LoadedKernels& of_process() {
    static auto* const made = new LoadedKernels;
    return *made;
  }

  std::shared_ptr<Kernel> get(const KernelImage& image, c10::Device device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& of_device = kernels_[device.index()];
    const auto found = of_device.find(image);
    if (found != of_device.end()) return found->second;
    return of_device.emplace(image, std::make_shared<CudaKernel>(image, device)).first->second;
  }

 private:
  std::mutex mutex_;
  std::map<c10::DeviceIndex, std::map<KernelImage, std::shared_ptr<Kernel>>> kernels_;
};

std::shared_ptr<Kernel> load(const KernelImage& image, c10::Device device) {
  if (!device.has_index()) device.set_index(c10::cuda::current_device());
  try {
    return LoadedKernels::of_process().get(image, device);
  } catch (c10::Error& error) {
    error.add_context(detail::concatenate("loading ", describe(image), " on ", device));
    throw;
  }
}

#else

std::shared_ptr<Kernel> load(const KernelImage& image, c10::Device device) {
  TORCH_CHECK(false, "kernels can be loaded if gpipe_fast is built with CUDA 12.8 or later, got kernel ",
              image.name, " for ", device, " and a build with version ", CUDART_VERSION,
              " of the CUDA runtime");
}

#endif

bool is_stream_capturing(c10::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(c10::cuda::getCurrentCUDAStream(device.index()), &status));
  return status != cudaStreamCaptureStatusNone;
}

const KernelBackendRegistration registration(c10::DeviceType::CUDA, {&load, &is_stream_capturing});

}  // namespace
}  // namespace gpipe_fast
