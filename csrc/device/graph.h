// Graphs: work on the streams of several devices, captured once and then launched as a whole by one call.
#pragma once

#include "device/stream.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace gpipe_fast {

class Graph {
 public:
  virtual ~Graph() = default;
  // Launches the graph on `stream`: it runs after the work already enqueued there and before any later work.
  virtual void replay(const Stream& stream) = 0;
  virtual int64_t num_nodes() const = 0;
  // Returns the device memory that capturing took, in bytes, summed over the devices.
  virtual int64_t bytes() const = 0;
};

// Captures graphs that share one private memory pool. A capture may reuse memory that an earlier capture freed. So
// while a result that a replay left in this memory is still to be read, no other graph may be replayed.
class GraphMaker {
 public:
  virtual ~GraphMaker() = default;
  // Returns the reason why nothing can be captured in this process; empty if capture is possible.
  virtual std::string obstacle() const = 0;
  // Frees cached memory, which a capture cannot do. Call before the captures of a plan.
  virtual void free_cached_memory(const std::vector<Stream>& streams) = 0;
  // Captures, without running it, the work that `body` and the threads it waits for enqueue, one thread at a time;
  // `streams` must list every stream they use. Allocations on these streams come from the graphs' pool, which keeps its
  // memory while any of the graphs lives. Rethrows exceptions of `body`, and throws if an operation cannot be
  // captured; either way no stream is left capturing.
  virtual std::shared_ptr<Graph> capture(const std::vector<Stream>& streams,
                                         const std::function<void()>& body) = 0;
  // Returns a function that maps a tensor in the graphs' memory, as allocated at the time of this call, to a
  // non-owning alias, and any other tensor to itself. An alias does not prevent later captures from reusing
  // the memory; it is valid until one of those is replayed.
  using Alias = std::function<at::Tensor(const at::Tensor&)>;
  virtual Alias alias() const = 0;
};

// Returns null if the extension was built without CUDA.
std::unique_ptr<GraphMaker> make_graph_maker();
// Registers the implementation. The CUDA part of the extension constructs one.
struct GraphMakerRegistration {
  explicit GraphMakerRegistration(std::unique_ptr<GraphMaker> (*make)());
};

}  // namespace gpipe_fast
