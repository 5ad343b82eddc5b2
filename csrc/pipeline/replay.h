// The graph cache: plans whose runs are captured as graphs, one forward and one backward graph across all devices.
//
// A plan's first mini-batches run uncaptured, so that libraries choose their algorithms and create their handles.
// Then the engine runs once more while the streams are captured. From then on a run is one graph launch:
//
//   caller    x ───────┐                                             ┌── cat ── y
//   stage 0         copy in ── graph: [ 0F0 0F1 ..  1F0 1F1 .. ] ────┘
//
// A graph's tensors have fixed addresses: copies of the inputs, all tensors kept for the backward, and the
// gradients, which are copied out. Both graphs are captured before either is replayed, and then own no memory: all
// graphs of a pipeline share one pool, so that several plans need only as much memory as the largest. Therefore
// only one mini-batch at a time is in flight in this memory, from its forward to its backward; the mini-batches in
// between run uncaptured. The captured backward reuses the memory of tensors that it has read, so a backward with
// `retain` runs uncaptured, too.
#pragma once

#include "device/graph.h"
#include "pipeline/captured.h"
#include "pipeline/minibatch.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace gpipe_fast {

// The state of a plan's graphs.
struct ReplayReport {
  bool forward = false, backward = false;  // whether they are captured
  int64_t num_nodes = 0;
  int64_t bytes = 0;        // device memory, in addition to that of earlier captures
  int64_t replays = 0;      // mini-batches whose forward was replayed
  int64_t as_they_are = 0;  // mini-batches whose forward ran uncaptured
  std::string obstacle;     // why it cannot be captured; empty if it can
  std::string setback;      // why its capture was postponed; empty if it was not
};

// One mini-batch's forward or backward, as the graph cache sees it.
struct RunOf {
  MiniBatch& minibatch;
  const Tensors& tensors;                                   // inputs of the forward, or gradients of outputs
  size_t stage;                                             // whose device holds the tensors
  std::function<std::vector<Tensors>(const Tensors&)> cut;  // splits them by micro-batch
  bool retain = false;                                      // another backward may follow this one
};

// The graph cache of one pipeline. Not thread safe: the pipeline serializes its runs.
class Replays {
 public:
  // Runs actions on the engine, without polling.
  using Engine = std::function<void(const Actions&, MiniBatch&)>;
  using Make = std::function<std::shared_ptr<MiniBatch>()>;

  Replays(std::shared_ptr<const Transport> transport, Engine engine);
  ~Replays();

  // Replays the forward graph; if the plan is warm, captures it first, with a second mini-batch of the plan. Call
  // after begin_forward(). Returns the outputs by micro-batch, valid until the next replay; null if this mini-batch
  // must run uncaptured.
  const std::vector<Boundary>* forward(const std::shared_ptr<MiniBatch>& minibatch, const RunOf& run,
                                       const Make& another);
  // Return whether there is a graph for a run, so that its tensors need not be split by micro-batch.
  bool has_forward(const Plan& plan) const;
  bool has_backward(const RunOf& run) const;
  // Replays the backward graph. Call after begin_backward(). Returns false if this mini-batch must run uncaptured.
  bool backward(const RunOf& run);

  // Call before and after an uncaptured run.
  void before_run();
  void after_forward(const std::shared_ptr<const Plan>& plan);
  void after_backward(const RunOf& run);
  // Call after the callers have enqueued work that reads the results of a replay.
  void after_use(const std::vector<Stream>& callers);

  // let_go() frees all graphs, because memory ran out in an uncaptured run; they are captured again after more
  // mini-batches. Both return false if there are no graphs, or if a mini-batch is in flight.
  bool can_let_go() const;
  bool let_go();

  // Frees all graphs and removes their plans.
  void forget();
  std::vector<ReplayReport> reports() const;

 private:
  struct Entry;
  // A plan's progress towards a captured forward.
  enum class State {
    refused,   // it cannot be captured
    cold,      // it must run uncaptured a few more times
    warm,      // the next run captures it
    captured,  // its graph can be replayed
  };
  Entry& entry_of(const std::shared_ptr<const Plan>& plan);
  static State state_of(Entry& entry, const MiniBatch& minibatch);
  const std::vector<Boundary>* replay_forward(Entry& entry, const std::shared_ptr<MiniBatch>& minibatch,
                                              const RunOf& run);
  void capture_both(Entry& entry, const RunOf& run, const Make& another);
  void capture_forward(Entry& entry, const RunOf& run, const Make& another);
  void capture_backward(Entry& entry);
  // Returns whether a mini-batch is between its replayed forward and its backward.
  bool in_flight() const;
  // Returns whether the entry's graph ran the forward of this mini-batch.
  bool serves(const Entry& entry, const MiniBatch& minibatch) const;
  Tensors own_copies(const RunOf& run);
  template <class Body>
  std::shared_ptr<Graph> capture(Entry& entry, const Body& body);
  // Call around a replay. begin() waits for earlier work and copies the run's tensors to `into`; end() makes the
  // callers wait for the replay.
  void begin(const RunOf& run, const Tensors& into);
  void end(const MiniBatch& minibatch);
  // Runs `body` on the graphs' stream; for a stage on another device, on the stage's stream instead, ordered after
  // the earlier and before the later work of the graphs' stream.
  template <class Body>
  void beside(size_t stage, const Body& body);
  const Stream& origin() const { return streams_.front(); }

  const std::shared_ptr<const Transport> transport_;
  const Engine engine_;
  const std::vector<Stream> streams_;
  std::unique_ptr<GraphMaker> maker_;
  std::list<Entry> entries_;        // most recently used first
  bool mixed_ = true;               // an uncaptured run or a capture has followed the last replay
  std::optional<Moment> replayed_;  // the last replay's event, unless an uncaptured run has followed
  std::vector<std::pair<Stream, Moment>> used_;  // see after_use
  std::weak_ptr<const MiniBatch> latest_;        // the last mini-batch whose forward was replayed
};

}  // namespace gpipe_fast
