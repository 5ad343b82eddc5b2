// The graph cache: plans whose runs are captured as graphs, one forward and one backward graph across all devices.
//
// A plan's first mini-batches run uncaptured, so that libraries choose their algorithms and create their handles.
// Then the engine runs once more while the streams are captured, one action at a time. From then on a run is one graph
// launch:
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
//
// A capture pays only if the host takes about as long to enqueue a run as the device to execute it: otherwise the
// launches hide behind the device's work, and a graph only costs memory and copies. Both times of the uncaptured runs
// are compared. And it pays only if it is replayed. If all places of the cache are taken, a plan takes the place of the least
// recently replayed one only after several mini-batches during which that one was not replayed.
#pragma once

#include "device/graph.h"
#include "pipeline/captured.h"
#include "pipeline/graph_report.h"
#include "pipeline/minibatch.h"

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace gpipe_fast {

// One mini-batch's forward or backward, as the graph cache sees it.
struct GraphRun {
  MiniBatch& minibatch;
  const Tensors& tensors;  // inputs of the forward, or gradients of outputs
  size_t stage;            // the stage whose device holds the tensors
  std::function<std::vector<Tensors>(const Tensors&)> split_tensors;  // splits them by micro-batch
  bool retain = false;                                                // another backward may follow this one
};

// When GraphCache captures a plan.
enum class Capture : uint8_t { never, where_it_pays, always };

// Times one run: on the host, from construction to stop(), and on a device, between the work that a stream has then.
class RunTimer {
 public:
  explicit RunTimer(const Stream& stream);
  void stop();
  // Returns whether the device took, or still takes, clearly longer than the host.
  bool launches_hide() const;

 private:
  Stream stream_;
  StreamEvent begin_, end_;
  std::chrono::steady_clock::time_point host_begin_;
  std::chrono::nanoseconds host_{};
};

// The graph cache of one pipeline. Not thread safe: the pipeline serializes its runs.
class GraphCache {
 public:
  // Runs actions on the engine, without polling.
  using Engine = std::function<void(const Actions&, Work&)>;
  using MakeMiniBatch = std::function<std::shared_ptr<MiniBatch>()>;

  GraphCache(std::shared_ptr<const Transport> transport, Engine engine);
  ~GraphCache();

  // Sets when later runs are captured; with `never`, do not call the functions below.
  void set_capture(Capture capture) { capture_when_ = capture; }
  // Replays the forward graph; if the plan is warm, captures it first, with a second mini-batch of the plan. Call
  // after begin_forward(). Returns the outputs by micro-batch, valid until the next replay; null if this mini-batch
  // must run uncaptured.
  const std::vector<Boundary>* forward(const std::shared_ptr<MiniBatch>& minibatch, const GraphRun& run,
                                       const MakeMiniBatch& make_other);
  // Both return whether there is a graph for a run, so that its tensors need not be split by micro-batch.
  bool has_forward(const Plan& plan) const;
  bool has_backward(const GraphRun& run) const;
  // Replays the backward graph. Call after begin_backward(). Returns false if this mini-batch must run uncaptured.
  bool backward(const GraphRun& run);

  // Call before and after an uncaptured run.
  void before_run();
  void after_forward(const std::shared_ptr<const Plan>& plan, std::optional<RunTimer> timer);
  void after_backward(const GraphRun& run, std::optional<RunTimer> timer);
  // Call after the callers have enqueued work that reads the results of a replay.
  void after_use(const std::vector<Stream>& caller_streams);

  // free_graphs() frees all graphs, because memory ran out in an uncaptured run; they are captured again after more
  // mini-batches. Both return false if there are no graphs, or if a mini-batch is in flight.
  bool can_free_graphs() const;
  bool free_graphs();

  // Frees all graphs and removes their plans.
  void clear();
  std::vector<GraphReport> reports() const;

 private:
  struct Entry;
  enum class State;
  Entry& entry_of(const std::shared_ptr<const Plan>& plan);
  State state_of(Entry& entry, const MiniBatch& minibatch) const;
  // Returns whether a warm plan may be captured now; if another plan must make room for it, drops that one's graphs.
  bool make_room_for(Entry& entry);
  void remove_dead_entries();
  const std::vector<Boundary>* replay_forward(Entry& entry, const std::shared_ptr<MiniBatch>& minibatch,
                                              const GraphRun& run);
  void capture_both(Entry& entry, const GraphRun& run, const MakeMiniBatch& make_other);
  void capture_forward(Entry& entry, const GraphRun& run, const MakeMiniBatch& make_other);
  void capture_backward(Entry& entry);
  // Returns whether a mini-batch is between its replayed forward and its backward.
  bool in_flight() const;
  // Returns whether the entry's graph ran the forward of this mini-batch.
  bool ran_forward_of(const Entry& entry, const MiniBatch& minibatch) const;
  Tensors copy_tensors(const GraphRun& run);
  template <class Body>
  std::shared_ptr<Graph> capture(Entry& entry, const Body& body);
  // Call around a replay. begin() waits for earlier work and copies the run's tensors to `into`; end() makes the
  // callers wait for the replay.
  void begin(const GraphRun& run, const Tensors& into);
  void end(const MiniBatch& minibatch);
  // Runs `body` on the graphs' stream; for a stage on another device, on the stage's stream instead, ordered after
  // the earlier and before the later work of the graphs' stream.
  template <class Body>
  void on_stage_stream(size_t stage, const Body& body);
  const Stream& graph_stream() const { return streams_.front(); }

  const std::shared_ptr<const Transport> transport_;
  const Engine engine_;
  const std::vector<Stream> streams_;
  std::unique_ptr<GraphMaker> maker_;
  std::list<Entry> entries_;  // one for each living plan
  Capture capture_when_ = Capture::where_it_pays;
  int64_t num_forwards_ = 0;                // forwards so far, replayed and uncaptured
  bool ran_uncaptured_ = true;              // an uncaptured run or a capture has followed the last replay
  std::optional<StreamEvent> last_replay_;  // the last replay's event, unless an uncaptured run has followed
  std::vector<std::pair<Stream, StreamEvent>> caller_events_;  // see after_use
  std::weak_ptr<const MiniBatch> last_replayed_;  // the last mini-batch whose forward was replayed
};

}  // namespace gpipe_fast
