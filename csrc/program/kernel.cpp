#include "program/kernel.h"

#include "check.h"

#include <map>

namespace gpipe_fast {
namespace {

std::map<c10::DeviceType, KernelBackend>& backends() {
  static std::map<c10::DeviceType, KernelBackend> registered;
  return registered;
}

}  // namespace

std::shared_ptr<Kernel> load_kernel(const KernelImage& image, c10::Device device) {
  const auto found = backends().find(device.type());
  GPIPE_CHECK_ARG(found != backends().end(), "this build of gpipe_fast loads no kernels on ", device.type(),
                  " devices, got kernel ", image.name, " for ", device);
  GPIPE_CHECK_ARG(image.num_threads > 0 && image.num_ctas > 0 && image.shared_bytes >= 0, "kernel ",
                  image.name, " needs a thread, a CTA per cluster and no negative shared memory, got ",
                  image.num_threads, " threads, ", image.num_ctas, " CTAs and ", image.shared_bytes,
                  " bytes");
  return found->second.load(image, device);
}

bool is_capturing(c10::Device device) {
  const auto found = backends().find(device.type());
  return found != backends().end() && found->second.is_capturing(device);
}

KernelBackendRegistration::KernelBackendRegistration(c10::DeviceType type, KernelBackend backend) {
  backends().emplace(type, backend);
}

}  // namespace gpipe_fast
