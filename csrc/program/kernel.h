// Kernels: compiled functions that are loaded from their images (cubins), and that a program launches.
#pragma once

#include <c10/core/Device.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>

namespace gpipe_fast {

// Number of blocks in each dimension. A kernel with clusters launches num_ctas times as many in the first dimension.
using Grid = std::array<int64_t, 3>;

// What a kernel is loaded from, as the compiler returned it.
struct KernelImage {
  std::string bytes;
  std::string name;
  int64_t num_threads;   // per block
  int64_t num_ctas;      // blocks per cluster
  int64_t shared_bytes;  // dynamic shared memory per block
  bool cooperative;
  bool launch_pdl;  // programmatic dependent launch: may begin before the previous kernel of the stream ends

  bool operator<(const KernelImage& other) const { return key() < other.key(); }

 private:
  std::tuple<const std::string&, const std::string&, int64_t, int64_t, int64_t, bool, bool> key() const {
    return {name, bytes, num_threads, num_ctas, shared_bytes, cooperative, launch_pdl};
  }
};

// A kernel that is loaded on one device. Any thread may launch it.
class Kernel {
 public:
  virtual ~Kernel() = default;
  virtual const std::string& name() const = 0;
  virtual c10::Device device() const = 0;
  virtual int64_t num_ctas() const = 0;
  // Enqueues the kernel on the calling thread's current stream of its device. `arguments` are the addresses of the
  // parameters' values, as many and as large as the image declares, which are copied; no dimension of the grid may be
  // 0. Needs no GIL, allocates nothing, and can be captured in a graph.
  virtual void launch(const Grid& grid, void** arguments) const = 0;
};

// Returns the kernel of an image, ready to be launched on a device. Equal images are loaded once per device, and stay
// loaded as long as the process lives, because graphs and enqueued launches refer to them.
std::shared_ptr<Kernel> load_kernel(const KernelImage& image, c10::Device device);

// Returns whether the calling thread's current stream of a device is being captured in a graph.
bool is_capturing(c10::Device device);

// The implementation for one type of device. The CUDA part of the extension constructs a registration.
struct KernelBackend {
  std::shared_ptr<Kernel> (*load)(const KernelImage& image, c10::Device device);
  bool (*is_capturing)(c10::Device device);
};
struct KernelBackendRegistration {
  KernelBackendRegistration(c10::DeviceType type, KernelBackend backend);
};

}  // namespace gpipe_fast
