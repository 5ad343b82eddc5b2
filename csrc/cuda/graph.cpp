// CUDA graphs, created by stream capture.
//
// The capture mode is relaxed: the capture begins on one stream and includes the other given streams,
// whichever threads enqueue work on them; other threads are unrestricted. Allocations on these streams,
// including cuBLAS workspaces, come from a private pool of PyTorch's allocator that only the graphs use.
//
// The allocator frees no cached blocks during a capture, so the cache is emptied beforehand, as in
// torch.cuda.graph. It must not be emptied while another thread captures.
//
// cuBLAS workspaces (32 MiB for each thread and stream on Hopper) are freed before the cache is emptied, and again
// after a capture: a captured one must be in the pool, where other graphs may reuse its memory.
#include "device/graph.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/ops/alias.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>

// Versions of PyTorch without this function can only free the workspaces of all streams. Not in gpipe_fast, where it
// would hide PyTorch's.
namespace gpipe_fast_earlier_versions {
[[maybe_unused]] static void clearCublasWorkspacesForStream(...) { at::cuda::clearCublasWorkspaces(); }
}  // namespace gpipe_fast_earlier_versions

namespace gpipe_fast {
namespace {

namespace CUDACachingAllocator = c10::cuda::CUDACachingAllocator;
using Devices = std::set<c10::DeviceIndex>;

cudaStream_t cuda_stream(const Stream& stream) {
  return c10::cuda::CUDAStream(stream.torch_stream()).stream();
}

Devices devices_of(const std::vector<Stream>& streams) {
  Devices devices;
  for (const Stream& stream : streams) devices.insert(stream.device().index());
  return devices;
}

void free_cublas_workspaces(const std::vector<Stream>& streams) {
  using namespace at::cuda;
  using namespace gpipe_fast_earlier_versions;
  for (const Stream& stream : streams) clearCublasWorkspacesForStream(cuda_stream(stream));
}

int64_t free_bytes(const Devices& devices) {
  int64_t bytes = 0;
  for (c10::DeviceIndex device : devices) {
    const c10::cuda::CUDAGuard guard(device);
    size_t available = 0, total = 0;
    C10_CUDA_CHECK(cudaMemGetInfo(&available, &total));
    bytes += static_cast<int64_t>(available);
  }
  return bytes;
}

// A guard that routes allocations on the given streams to a pool. It releases the pool at the end, unless
// keep() was called.
class PoolGuard {
 public:
  PoolGuard(const Devices& devices, c10::MempoolId_t pool, const std::vector<Stream>& streams)
      : devices_(devices), pool_(pool), streams_(streams) {
    std::vector<cudaStream_t> streams_of_capture;
    for (const Stream& stream : streams) streams_of_capture.push_back(cuda_stream(stream));
    for (c10::DeviceIndex device : devices_) {
      CUDACachingAllocator::beginAllocateToPool(device, pool_, [streams_of_capture](cudaStream_t stream) {
        return std::find(streams_of_capture.begin(), streams_of_capture.end(), stream) !=
               streams_of_capture.end();
      });
    }
  }
  ~PoolGuard() {
    free_cublas_workspaces(streams_);
    for (c10::DeviceIndex device : devices_) {
      CUDACachingAllocator::endAllocateToPool(device, pool_);
      if (!kept_) CUDACachingAllocator::releasePool(device, pool_);
    }
  }
  PoolGuard(const PoolGuard&) = delete;
  PoolGuard& operator=(const PoolGuard&) = delete;

  void keep() { kept_ = true; }

 private:
  const Devices devices_;
  const c10::MempoolId_t pool_;
  const std::vector<Stream>& streams_;
  bool kept_ = false;
};

// From about version 2.12 on, PyTorch's allocator must be notified of a capture. Earlier versions infer a
// capture from a pool being in use.
template <class Allocator>
auto mark_capture_begin(Allocator& allocator, c10::DeviceIndex device, int)
    -> decltype(allocator.markCaptureBegin(device)) {
  allocator.markCaptureBegin(device);
}
template <class Allocator>
void mark_capture_begin(Allocator&, c10::DeviceIndex, long) {}

template <class Allocator>
auto mark_capture_end(Allocator& allocator, c10::DeviceIndex device, int)
    -> decltype(allocator.markCaptureEnd(device)) {
  allocator.markCaptureEnd(device);
}
template <class Allocator>
void mark_capture_end(Allocator&, c10::DeviceIndex, long) {}

// A capture in progress. The destructor ends it if end() was not called.
class CaptureGuard {
 public:
  CaptureGuard(const Devices& devices, const std::vector<Stream>& streams)
      : devices_(devices), streams_(streams) {
    C10_CUDA_CHECK(cudaStreamBeginCapture(cuda_stream(streams_.front()), cudaStreamCaptureModeRelaxed));
    for (c10::DeviceIndex device : devices_) mark_capture_begin(allocator(), device, 0);
    try {
      const StreamEvent begin(streams_.front());
      for (const Stream& stream : streams_) stream.wait(begin);
    } catch (...) {
      abort_capture();
      throw;
    }
  }
  ~CaptureGuard() {
    if (!ended_) abort_capture();
  }
  CaptureGuard(const CaptureGuard&) = delete;
  CaptureGuard& operator=(const CaptureGuard&) = delete;

  cudaGraph_t end() {
    for (const Stream& stream : streams_) streams_.front().wait(StreamEvent(stream));
    cudaGraph_t graph = nullptr;
    C10_CUDA_CHECK(end_capture(graph));
    return graph;
  }

 private:
  static CUDACachingAllocator::CUDAAllocator& allocator() { return *CUDACachingAllocator::get(); }
  cudaError_t end_capture(cudaGraph_t& graph) {
    ended_ = true;
    const cudaError_t error = cudaStreamEndCapture(cuda_stream(streams_.front()), &graph);
    for (c10::DeviceIndex device : devices_) mark_capture_end(allocator(), device, 0);
    return error;
  }
  void abort_capture() {
    cudaGraph_t graph = nullptr;
    (void)end_capture(graph);  // its error only repeats that the capture failed
    if (graph != nullptr) (void)cudaGraphDestroy(graph);
    (void)cudaGetLastError();
  }

  const Devices& devices_;
  const std::vector<Stream>& streams_;
  bool ended_ = false;
};

class CudaGraph final : public Graph {
 public:
  CudaGraph(cudaGraph_t graph, Devices devices, std::shared_ptr<const c10::MempoolId_t> pool)
      : devices_(std::move(devices)), pool_(std::move(pool)) {
    size_t nodes = 0;
    cudaError_t error = cudaGraphGetNodes(graph, nullptr, &nodes);
    if (error == cudaSuccess) error = cudaGraphInstantiate(&graph_exec_, graph, 0);
    (void)cudaGraphDestroy(graph);
    C10_CUDA_CHECK(error);
    nodes_ = static_cast<int64_t>(nodes);
  }
  ~CudaGraph() override {
    try {
      last_replay_.synchronize();  // its memory may be reused afterwards
    } catch (const std::exception&) {
      // The device has failed, so no work runs there any more.
    }
    (void)cudaGraphExecDestroy(graph_exec_);
    (void)cudaGetLastError();
    for (c10::DeviceIndex device : devices_) CUDACachingAllocator::releasePool(device, *pool_);
  }

  void replay(const Stream& stream) override {
    const c10::cuda::CUDAGuard guard(stream.device());
    C10_CUDA_CHECK(cudaGraphLaunch(graph_exec_, cuda_stream(stream)));
    last_replay_ = StreamEvent(stream);
  }
  int64_t num_nodes() const override { return nodes_; }
  int64_t bytes() const override { return bytes_; }
  void set_bytes(int64_t bytes) { bytes_ = bytes; }

 private:
  const Devices devices_;
  const std::shared_ptr<const c10::MempoolId_t> pool_;
  cudaGraphExec_t graph_exec_ = nullptr;
  int64_t nodes_ = 0;
  int64_t bytes_ = 0;
  StreamEvent last_replay_;
};

// The address ranges that PyTorch's allocator has obtained from the devices for a pool.
class PoolSegments {
 public:
  explicit PoolSegments(const c10::MempoolId_t& pool) {
    for (const auto& segment : CUDACachingAllocator::snapshot(pool, /*include_traces=*/false).segments) {
      if (segment.owner_private_pool_id == pool)
        ends_.emplace(segment.address, segment.address + segment.total_size);
    }
  }
  bool contain(const void* pointer) const {
    const auto address = reinterpret_cast<size_t>(pointer);
    auto after = ends_.upper_bound(address);
    return after != ends_.begin() && address < (--after)->second;
  }

 private:
  std::map<size_t, size_t> ends_;  // end address by start address
};

// The mutex is never destroyed, because a thread may still be capturing when the process exits.
std::mutex& capture_mutex() {
  static auto* const made = new std::mutex;
  return *made;
}

class CudaGraphMaker final : public GraphMaker {
 public:
  std::string obstacle() const override {
    // PyTorch checks only that the variable is set, whatever its value.
    if (std::getenv("PYTORCH_NO_CUDA_MEMORY_CACHING") != nullptr || !CUDACachingAllocator::isEnabled())
      return "CUDA graphs need PyTorch's caching allocator, but caching is disabled "
             "(PYTORCH_NO_CUDA_MEMORY_CACHING is set, or caching was switched off)";
    const std::string name = CUDACachingAllocator::get()->name();
    if (name == "native") return {};
    return "the CUDA allocator is '" + name +
           "', but CUDA graphs can be captured only with PyTorch's native allocator";
  }

  void free_cached_memory(const std::vector<Stream>& streams) override {
    const std::lock_guard<std::mutex> one_at_a_time(capture_mutex());
    free_cublas_workspaces(streams);
    CUDACachingAllocator::emptyCache();
  }

  std::shared_ptr<Graph> capture(const std::vector<Stream>& streams,
                                 const std::function<void()>& body) override {
    const Devices devices = devices_of(streams);
    const std::lock_guard<std::mutex> one_at_a_time(capture_mutex());
    const int64_t free_before = free_bytes(devices);
    const Stream::Guard current(streams.front());
    // PyTorch discards a pool that nothing uses any more, so a new one is needed then.
    std::shared_ptr<const c10::MempoolId_t> pool = pool_.lock();
    if (!pool) pool = std::make_shared<c10::MempoolId_t>(at::cuda::graph_pool_handle());
    PoolGuard pool_guard(devices, *pool, streams);
    cudaGraph_t captured = nullptr;
    {
      CaptureGuard capture_guard(devices, streams);
      body();
      captured = capture_guard.end();
    }
    auto graph = std::make_shared<CudaGraph>(captured, devices, pool);
    pool_ = pool;
    pool_guard.keep();
    graph->set_bytes(std::max<int64_t>(free_before - free_bytes(devices), 0));
    return graph;
  }

  Alias alias() const override {
    const std::shared_ptr<const c10::MempoolId_t> pool = pool_.lock();
    if (!pool) return [](const at::Tensor& tensor) { return tensor; };
    return [segments = PoolSegments(*pool)](const at::Tensor& tensor) {
      if (!tensor.defined() || !segments.contain(tensor.storage().data())) return tensor;
      c10::DataPtr place(tensor.storage().mutable_data(), tensor.device());
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      const at::Tensor found = at::alias(tensor);
      found.unsafeGetTensorImpl()->set_allow_tensor_metadata_change(true);
      found.unsafeGetTensorImpl()->set_storage_keep_dtype(
          c10::Storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(place)));
      return found;
    };
  }

 private:
  std::weak_ptr<const c10::MempoolId_t> pool_;  // the pool of the living graphs; expired if there are none
};

const GraphMakerRegistration registration([]() -> std::unique_ptr<GraphMaker> {
  return std::make_unique<CudaGraphMaker>();
});

}  // namespace
}  // namespace gpipe_fast
