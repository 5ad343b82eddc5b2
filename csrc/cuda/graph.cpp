// Graphs of CUDA, by capture of streams.
//
// The capture is relaxed: it begins on one stream and takes in all others, whichever threads put work on them, and other
// threads may go on as they like. Allocations that are made on these streams come from a pool of PyTorch's allocator that
// is the graphs' own, cuBLAS's workspaces included.
//
// While a capture is under way that allocator frees none of its cached blocks, so the cache is emptied before, as
// torch.cuda.graph does it. It must not be emptied while another thread captures.
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

namespace gpipe_fast {
namespace {

namespace CUDACachingAllocator = c10::cuda::CUDACachingAllocator;
using Devices = std::set<c10::DeviceIndex>;

cudaStream_t raw(const Stream& stream) { return c10::cuda::CUDAStream(stream.whole()).stream(); }

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

// Routes allocations on streams to a pool, while it lives; `keep` says that the pool is still needed then.
class Allocating {
 public:
  Allocating(const Devices& devices, c10::MempoolId_t pool, const std::vector<Stream>& streams)
      : devices_(devices), pool_(pool) {
    std::vector<cudaStream_t> own;
    for (const Stream& stream : streams) own.push_back(raw(stream));
    // Workspaces that are there already somebody else may give back.
    at::cuda::clearCublasWorkspaces();
    for (c10::DeviceIndex device : devices_) {
      CUDACachingAllocator::beginAllocateToPool(device, pool_, [own](cudaStream_t stream) {
        return std::find(own.begin(), own.end(), stream) != own.end();
      });
    }
  }
  ~Allocating() {
    at::cuda::clearCublasWorkspaces();
    for (c10::DeviceIndex device : devices_) {
      CUDACachingAllocator::endAllocateToPool(device, pool_);
      if (!kept_) CUDACachingAllocator::releasePool(device, pool_);
    }
  }
  Allocating(const Allocating&) = delete;
  Allocating& operator=(const Allocating&) = delete;

  void keep() { kept_ = true; }

 private:
  const Devices devices_;
  const c10::MempoolId_t pool_;
  bool kept_ = false;
};

// From 2.12 or so on PyTorch's allocator wants to be told of a capture; before, that its pool is in use says so.
template <class Allocator>
auto tell_of_begin(Allocator& allocator, c10::DeviceIndex device, int)
    -> decltype(allocator.markCaptureBegin(device)) {
  allocator.markCaptureBegin(device);
}
template <class Allocator>
void tell_of_begin(Allocator&, c10::DeviceIndex, long) {}

template <class Allocator>
auto tell_of_end(Allocator& allocator, c10::DeviceIndex device, int)
    -> decltype(allocator.markCaptureEnd(device)) {
  allocator.markCaptureEnd(device);
}
template <class Allocator>
void tell_of_end(Allocator&, c10::DeviceIndex, long) {}

// A capture that has begun; ends it, whatever happens.
class Capturing {
 public:
  Capturing(const Devices& devices, const std::vector<Stream>& streams)
      : devices_(devices), streams_(streams) {
    C10_CUDA_CHECK(cudaStreamBeginCapture(raw(streams_.front()), cudaStreamCaptureModeRelaxed));
    for (c10::DeviceIndex device : devices_) tell_of_begin(allocator(), device, 0);
    try {
      const Moment begin(streams_.front());
      for (const Stream& stream : streams_) stream.wait(begin);
    } catch (...) {
      drop();
      throw;
    }
  }
  ~Capturing() {
    if (!ended_) drop();
  }
  Capturing(const Capturing&) = delete;
  Capturing& operator=(const Capturing&) = delete;

  cudaGraph_t end() {
    for (const Stream& stream : streams_) streams_.front().wait(Moment(stream));
    cudaGraph_t graph = nullptr;
    C10_CUDA_CHECK(stop(graph));
    return graph;
  }

 private:
  static CUDACachingAllocator::CUDAAllocator& allocator() { return *CUDACachingAllocator::get(); }
  cudaError_t stop(cudaGraph_t& graph) {
    ended_ = true;
    const cudaError_t error = cudaStreamEndCapture(raw(streams_.front()), &graph);
    for (c10::DeviceIndex device : devices_) tell_of_end(allocator(), device, 0);
    return error;
  }
  void drop() {
    cudaGraph_t graph = nullptr;
    (void)stop(graph);  // it says again that something went wrong
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
    if (error == cudaSuccess) error = cudaGraphInstantiate(&executable_, graph, 0);
    (void)cudaGraphDestroy(graph);
    C10_CUDA_CHECK(error);
    nodes_ = static_cast<int64_t>(nodes);
  }
  ~CudaGraph() override {
    try {
      last_.synchronize();  // its memory is somebody else's afterwards
    } catch (const std::exception&) {
      // The device failed: nothing runs there any more.
    }
    (void)cudaGraphExecDestroy(executable_);
    (void)cudaGetLastError();
    for (c10::DeviceIndex device : devices_) CUDACachingAllocator::releasePool(device, *pool_);
  }

  void replay(const Stream& stream) override {
    const c10::cuda::CUDAGuard guard(stream.device());
    C10_CUDA_CHECK(cudaGraphLaunch(executable_, raw(stream)));
    last_ = Moment(stream);
  }
  int64_t num_nodes() const override { return nodes_; }
  int64_t bytes() const override { return bytes_; }
  void set_bytes(int64_t bytes) { bytes_ = bytes; }

 private:
  const Devices devices_;
  const std::shared_ptr<const c10::MempoolId_t> pool_;
  cudaGraphExec_t executable_ = nullptr;
  int64_t nodes_ = 0;
  int64_t bytes_ = 0;
  Moment last_;
};

// Of a pool: what PyTorch's allocator has asked of its devices for it.
class Segments {
 public:
  explicit Segments(const c10::MempoolId_t& pool) {
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
  std::map<size_t, size_t> ends_;  // by where they begin
};

// Never destroyed: a thread may still capture while the process ends.
std::mutex& capture_mutex() {
  static auto* const made = new std::mutex;
  return *made;
}

class CudaGraphMaker final : public GraphMaker {
 public:
  std::string obstacle() const override {
    // The variable counts whatever its value is, as for PyTorch.
    if (std::getenv("PYTORCH_NO_CUDA_MEMORY_CACHING") != nullptr || !CUDACachingAllocator::isEnabled())
      return "a graph's memory must stay where it is, and PyTorch's allocator caches nothing "
             "(PYTORCH_NO_CUDA_MEMORY_CACHING is set, or it was switched off)";
    const std::string name = CUDACachingAllocator::get()->name();
    if (name == "native") return {};
    return "memory comes from the allocator '" + name +
           "', and only PyTorch's native one can be captured with";
  }

  std::shared_ptr<Graph> capture(const std::vector<Stream>& streams,
                                 const std::function<void()>& body) override {
    Devices devices;
    for (const Stream& stream : streams) devices.insert(stream.device().index());
    const std::lock_guard<std::mutex> one_at_a_time(capture_mutex());
    CUDACachingAllocator::emptyCache();
    const int64_t before = free_bytes(devices);
    const Stream::Current current(streams.front());
    // PyTorch takes a pool that nothing uses any more for gone.
    std::shared_ptr<const c10::MempoolId_t> pool = pool_.lock();
    if (!pool) pool = std::make_shared<c10::MempoolId_t>(at::cuda::graph_pool_handle());
    Allocating allocating(devices, *pool, streams);
    cudaGraph_t captured = nullptr;
    {
      Capturing capturing(devices, streams);
      body();
      captured = capturing.end();
    }
    auto graph = std::make_shared<CudaGraph>(captured, devices, pool);
    pool_ = pool;
    allocating.keep();
    graph->set_bytes(std::max<int64_t>(before - free_bytes(devices), 0));
    return graph;
  }

  Alias alias() const override {
    const std::shared_ptr<const c10::MempoolId_t> pool = pool_.lock();
    if (!pool) return [](const at::Tensor& tensor) { return tensor; };
    return [segments = Segments(*pool)](const at::Tensor& tensor) {
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
  std::weak_ptr<const c10::MempoolId_t> pool_;  // that of the graphs there are
};

const GraphMakerRegistration registration([]() -> std::unique_ptr<GraphMaker> {
  return std::make_unique<CudaGraphMaker>();
});

}  // namespace
}  // namespace gpipe_fast
