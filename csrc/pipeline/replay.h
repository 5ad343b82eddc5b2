// Replays: plans whose runs are captured as graphs, one for the forward and one for the backward, over all devices.
//
// A plan's first mini-batches run as they are, by which libraries choose their algorithms and make their handles. Then
// the engine runs once more while the streams are captured, and from then on a run is one call:
//
//   caller    x ───────┐                                             ┌── cat ── y
//   stage 0         copy in ── graph: [ 0F0 0F1 ..  1F0 1F1 .. ] ────┘
//
// What is inside has fixed addresses: copies of the inputs, all that is kept for the backward, and gradients, which
// are copied out. Both are captured before one is replayed, and then own nothing: all graphs of a pipeline share memory,
// so that several plans need what the largest one needs. So one mini-batch at a time is in flight in this memory, from
// its forward to its backward; others that come between run as they are. A backward frees what it has read, so one that
// retains it runs as it is too.
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

// What is known of a plan's graphs.
struct ReplayReport {
  bool forward = false, backward = false;  // whether they are captured
  int64_t num_nodes = 0;
  int64_t bytes = 0;        // of the devices' memory, beside what earlier captures had taken
  int64_t replays = 0;      // mini-batches whose forward was one call
  int64_t as_they_are = 0;  // the others
  std::string obstacle;     // why it cannot be captured, if so
  std::string setback;      // why its capture was postponed; empty if it was not
};

// Of one pipeline, whose runs take turns. What a mini-batch's run needs, the caller brings:
struct RunOf {
  MiniBatch& minibatch;
  const Tensors& tensors;                                   // inputs, or gradients of outputs
  size_t stage;                                             // on whose device they are
  std::function<std::vector<Tensors>(const Tensors&)> cut;  // by micro-batch
  bool retain = false;                                      // of a backward: another can come
};

class Replays {
 public:
  // Runs actions by the engine; without polling.
  using Engine = std::function<void(const Actions&, MiniBatch&)>;
  using Make = std::function<std::shared_ptr<MiniBatch>()>;

  Replays(std::shared_ptr<const Transport> transport, Engine engine);
  ~Replays();

  // By a graph, captured now if it is time, with another mini-batch of the plan; after begin_forward. The outputs by
  // micro-batch, which stay until the next replay; null if this one has to run as it is.
  const std::vector<Boundary>* forward(const std::shared_ptr<MiniBatch>& minibatch, const RunOf& run,
                                       const Make& another);
  // Whether there is a graph for what comes, which then needs nothing by micro-batch.
  bool has_forward(const Plan& plan) const;
  bool has_backward(const RunOf& run) const;
  // By a graph, after begin_backward; false if it has to run as it is.
  bool backward(const RunOf& run);

  // Before and after a run as it is.
  void before_run();
  void after_forward(const std::shared_ptr<const Plan>& plan);
  void after_backward(const RunOf& run);
  // Callers have put work on their streams that reads what a replay made.
  void after_use(const std::vector<Stream>& callers);

  // Frees all graphs, because memory has run out elsewhere; they are captured again after more mini-batches. Returns false
  // if there are none, or if a mini-batch is in flight.
  bool can_let_go() const;
  bool let_go();

  void forget();
  std::vector<ReplayReport> reports() const;

 private:
  struct Entry;
  // How far a plan is on its way to a graph of its forward.
  enum class State {
    refused,   // it cannot be captured
    cold,      // it has to run as it is some more times
    warm,      // it is time to capture it
    captured,  // its graph can be replayed
  };
  Entry& entry_of(const std::shared_ptr<const Plan>& plan);
  static State state_of(Entry& entry, const MiniBatch& minibatch);
  const std::vector<Boundary>* replay_forward(Entry& entry, const std::shared_ptr<MiniBatch>& minibatch,
                                              const RunOf& run);
  void capture_both(Entry& entry, const RunOf& run, const Make& another);
  void capture_forward(Entry& entry, const RunOf& run, const Make& another);
  void capture_backward(Entry& entry);
  // Whether a mini-batch is between a forward that was replayed and its backward.
  bool in_flight() const;
  bool serves(const Entry& entry, const MiniBatch& minibatch) const;
  Tensors own_copies(const RunOf& run);
  template <class Body>
  std::shared_ptr<Graph> capture(Entry& entry, const Body& body);
  // Around a replay: what comes before it, to which inputs are copied; what comes after.
  void begin(const RunOf& run, const Tensors& into);
  void end(const MiniBatch& minibatch);
  // Beside a graph: on its stream, or where that is another device's, on a stage's, before and after what is on it.
  template <class Body>
  void beside(size_t stage, const Body& body);
  const Stream& origin() const { return streams_.front(); }

  const std::shared_ptr<const Transport> transport_;
  const Engine engine_;
  const std::vector<Stream> streams_;
  std::unique_ptr<GraphMaker> maker_;
  std::list<Entry> entries_;                     // the latest used first
  bool mixed_ = true;                            // something has run as it is since the last replay
  std::optional<Moment> replayed_;               // the last, if not
  std::vector<std::pair<Stream, Moment>> used_;  // see after_use
  std::weak_ptr<const MiniBatch> latest_;        // that was replayed
};

}  // namespace gpipe_fast
