// Graphs: work on the streams of several devices, captured once and then started as a whole, by one call.
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
  // All of it comes after what is on the stream, and before what will be.
  virtual void replay(const Stream& stream) = 0;
  virtual int64_t num_nodes() const = 0;
  // What its devices have less of since it is there.
  virtual int64_t bytes() const = 0;
};

// Graphs that share memory, which is theirs alone: what a capture frees, later captures allocate again. So while anything
// that a replay left in this memory is still to be read, no other graph may be replayed.
class GraphMaker {
 public:
  virtual ~GraphMaker() = default;
  // Why nothing can be captured in this process; empty if it can.
  virtual std::string obstacle() const = 0;
  // Captures what `body`, and threads that it waits for, put on streams, all of which are given; nothing of it is done.
  // What they allocate there comes from the graphs' memory. Throws what `body` throws, and where something cannot be
  // captured, and leaves no stream in a state of capture. The memory is not given back while any of the graphs lives.
  virtual std::shared_ptr<Graph> capture(const std::vector<Stream>& streams,
                                         const std::function<void()>& body) = 0;
  // Makes tensors in the same places that own nothing of the graphs' memory, as it is now; what lies elsewhere stays as it
  // is. They let other captures have the memory, and can be read until one of these is replayed.
  using Alias = std::function<at::Tensor(const at::Tensor&)>;
  virtual Alias alias() const = 0;
};

// Null where the extension was built without CUDA.
std::unique_ptr<GraphMaker> make_graph_maker();
// What the CUDA part brings.
struct GraphMakerRegistration {
  explicit GraphMakerRegistration(std::unique_ptr<GraphMaker> (*make)());
};

}  // namespace gpipe_fast
