#include "devices.h"

#include "graphs.h"
#include "log.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <sstream>
#include <utility>

namespace fake_cuda {
namespace {

thread_local cudaError_t last_error = cudaSuccess;
std::atomic<bool> sticky_error{false};

bool reports_peer_access(int device, int other) {
  const char* given = std::getenv("FAKE_CUDA_PEERS");
  const std::string all = given == nullptr ? "unplugged" : given;
  const std::string pair = std::to_string(device) + "-" + std::to_string(other);
  return device != other && (all == "unplugged" || all.find(pair) != std::string::npos);
}

bool peer_access_fails() {
  const char* given = std::getenv("FAKE_CUDA_PEERS");
  return given != nullptr && std::string(given) == "unplugged";
}

// Ten times the compute capability: of FAKE_CUDA_CAPABILITIES, such as "90 75", for the first devices; else 90.
int compute_capability(int device) {
  const char* given = std::getenv("FAKE_CUDA_CAPABILITIES");
  std::istringstream words(given == nullptr ? "" : given);
  int found = 90;
  for (int index = 0, word = 0; index <= device && words >> word; ++index)
    found = index == device ? word : 90;
  return found;
}

std::set<std::pair<int, int>>& enabled_peers() {
  static auto* const found = new std::set<std::pair<int, int>>;
  return *found;
}

// Returns whether a device has as many peers as a system without NVSwitch allows (CUDA Programming Guide, section
// "Peer-to-Peer Memory Access"), not counting `other`.
bool has_all_peers(int device, int other) {
  const char* given = std::getenv("FAKE_CUDA_MAX_PEERS");
  const size_t limit = given != nullptr ? std::strtoull(given, nullptr, 10) : 8;
  std::set<int> peers;
  for (const auto& [one, another] : enabled_peers()) {
    if (one == device) peers.insert(another);
    if (another == device) peers.insert(one);
  }
  peers.erase(other);
  return peers.size() >= limit;
}

}  // namespace

size_t memory_bytes() {
  static const size_t bytes = [] {
    const char* given = std::getenv("FAKE_CUDA_MEMORY");
    return given != nullptr ? std::strtoull(given, nullptr, 10) : size_t{1} << 40;
  }();
  return bytes;
}

int num_devices() {
  static const int number = [] {
    const char* given = std::getenv("FAKE_CUDA_DEVICES");
    return given != nullptr ? std::atoi(given) : 4;
  }();
  return number;
}

thread_local int current_device = 0;
thread_local bool has_context = false;

bool copies_arrive_wrong(int source, int target) {
  const char* given = std::getenv("FAKE_CUDA_WRONG_COPIES");
  const std::string pair = std::to_string(source) + "-" + std::to_string(target);
  if (given == nullptr || std::string(given).find(pair) == std::string::npos) return false;
  const std::lock_guard<std::mutex> lock(mutex);
  return enabled_peers().count({source, target}) > 0;  // otherwise the driver copies through the host
}

void set_sticky_error() { sticky_error = true; }
bool has_sticky_error() { return sticky_error; }

cudaError_t fail(cudaError_t error) {
  last_error = error;
  return error;
}

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = num_devices();
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  RETURN_IF_STICKY_ERROR()

  if (device < 0 || device >= num_devices()) {
    return fail(cudaErrorInvalidDevice);
  }
  current_device = device;
  has_context = true;
  return cudaSuccess;
}
int fake_cuda_has_context() { return has_context ? 1 : 0; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int device) {
  std::memset(found, 0, sizeof(*found));
  const int capability = compute_capability(device);
  std::snprintf(found->name, sizeof(found->name), "Fake GPU");
  found->totalGlobalMem = memory_bytes();
  found->major = capability / 10;
  found->minor = capability % 10;
  found->multiProcessorCount = 132;
  found->maxThreadsPerMultiProcessor = 2048;
  found->maxThreadsPerBlock = 1024;
  found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
  found->maxThreadsDim[2] = 64;
  found->maxGridSize[0] = 2147483647;
  found->maxGridSize[1] = found->maxGridSize[2] = 65535;
  found->warpSize = 32;
  found->regsPerBlock = found->regsPerMultiprocessor = 65536;
  found->sharedMemPerBlock = 49152;
  found->sharedMemPerMultiprocessor = 233472;
  found->sharedMemPerBlockOptin = 232448;
  found->l2CacheSize = 50 << 20;
  found->unifiedAddressing = 1;
  found->pciBusID = device;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  static const std::map<cudaDeviceAttr, int> values = {{cudaDevAttrComputeCapabilityMajor, 9},
                                                       {cudaDevAttrMultiProcessorCount, 132},
                                                       {cudaDevAttrWarpSize, 32},
                                                       {cudaDevAttrMaxThreadsPerBlock, 1024},
                                                       {cudaDevAttrMaxSharedMemoryPerBlockOptin, 232448},
                                                       {cudaDevAttrUnifiedAddressing, 1}};
  const auto found = values.find(attribute);
  *value = found == values.end() ? 0 : found->second;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  std::snprintf(text, static_cast<size_t>(length), "0000:%02x:00.0", device);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int other) {
  RETURN_IF_STICKY_ERROR()

  *can = reports_peer_access(device, other) ? 1 : 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int other, unsigned int) {
  RETURN_IF_STICKY_ERROR()

  if (peer_access_fails() || !reports_peer_access(current_device, other)) {
    return fail(cudaErrorPeerAccessUnsupported);
  }
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (enabled_peers().count({current_device, other}) > 0) {
      return fail(cudaErrorPeerAccessAlreadyEnabled);
    }
    if (has_all_peers(current_device, other) || has_all_peers(other, current_device)) {
      return fail(cudaErrorTooManyPeers);
    }
    enabled_peers().insert({current_device, other});
  }
  write("peer\t%d\t%d", current_device, other);
  return cudaSuccess;
}
// Errors.

cudaError_t cudaGetLastError() {
  RETURN_IF_STICKY_ERROR()
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() { return has_sticky_error() ? cudaErrorIllegalAddress : last_error; }

}  // extern "C"

}  // namespace fake_cuda
