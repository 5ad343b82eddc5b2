// Per-stage state of one mini-batch. The stage's worker uses it while a run is in progress.
#pragma once

#include "pipeline/boundary.h"
#include "pipeline/segment.h"
#include "program/program.h"
#include "transport/channels.h"

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace gpipe_fast {

class PythonLayers;

// A backward that has started and has not finished.
struct StartedBackward {
  StartedBackward(Program& program, Tensors& gradients, bool first) : run(program, gradients, first) {}
  // Accumulates into separate gradients, which are added to the stage's at the end.
  StartedBackward(Program& program, size_t num_parameters)
      : separate(num_parameters), run(program, separate, true) {}

  Tensors separate;
  Tensors boundary;  // boundary gradients that it reads and returns; see `free_shared`
  Program::Run run;
};

// State of a running forward.
struct ForwardState {
  Tensors buffers;                  // as of the latest micro-batch
  std::vector<Tensors> statistics;  // previous running statistics, by `StagePlan::statistics`
  // Snapshots of the state of layers in Python, made before they ran.
  std::vector<std::pair<std::shared_ptr<PythonLayers>, PythonObject>> snapshots;
};

// State of a running backward.
struct BackwardState {
  Tensors gradients;
  std::set<int64_t> from_python;  // indices of gradients from Python, whose memory may be shared
  std::unique_ptr<StartedBackward> open;
};

// The tensors that are on their way here from another process.
using Arrivals = std::vector<std::shared_ptr<Channels::Arrival>>;

// A skip tensor, or the gradient of one, on its way here.
struct ArrivingSkip {
  int64_t index = 0;                  // of the skip connection
  std::optional<Layout> layout = {};  // nullopt for None
  bool needs_gradient = false;
  at::Tensor tensor = {};
  Arrivals arrivals = {};
};

// A stage's state of one micro-batch. The neighbouring stages' workers write `received` and `tangents`.
struct MicroBatchState {
  Boundary received;  // boundary activation that enters the stage, until F
  Boundary outputs;   // boundary activation that leaves it, from F to SEND_F
  std::vector<SegmentContext> contexts;
  Tensors tangents;         // boundary gradient that enters the stage, until B
  Tensors input_gradients;  // boundary gradient that leaves it, from B to SEND_B
  StreamEvent copy_done;    // completes when the latest sent tensors have arrived
  // From other processes: `received` and `tangents` while they are on their way; nullopt before. What the stage pops,
  // until F, and the gradients of what it stashed, until B.
  std::optional<Arrivals> arriving_inputs, arriving_gradients;
  std::vector<ArrivingSkip> arriving_skips, arriving_skip_gradients;
};

struct StageState {
  struct BufferVersion {
    int64_t version;
    const void* data;
  };

  int32_t index = 0;
  at::Device device = at::kCPU;
  bool needs_backward = false;          // a backward may follow
  bool retains_graph = false;           // another backward may follow this one
  std::function<int64_t()> key;         // draws the mini-batch's random key
  at::Tensor keys;                      // one row for each segment that needs a key, if the chains are known
  std::vector<int64_t> first_key_rows;  // by micro-batch: its first row in `keys`
  Tensors parameters;
  std::map<int64_t, at::Tensor> originals;  // originals of the replicated parameters, by position
  Tensors module_buffers;
  std::vector<bool> reached;  // by parameter: whether an output depends on it; others get no gradient
  std::map<size_t, BufferVersion> buffer_versions;  // module buffers that a backward may read, by index
  std::set<int64_t> new_versions;  // buffers whose version the forward's operators increment in eager mode
  ForwardState forward;
  BackwardState backward;
  std::vector<MicroBatchState> microbatch_states;  // by micro-batch
  int64_t latest_rank = -1;                        // of the latest action that has run

  // Writes a buffer's latest value to the module's own.
  void write_buffer(int64_t index);
  // Binds a program to the parameters, once per run, on the stage's stream. Holds the program, because a new one could
  // be allocated at the address of a freed one.
  //
  // A parameter is cast by the first program of a run that reads it in another dtype, and the run's other programs
  // share the cast. A backward casts again, so that between forward and backward the casts need no memory.
  void bind(const std::shared_ptr<Program>& program);
  // Releases the programs and the casts. Call between runs.
  void release_programs();
  const ParameterCasts& parameter_casts() const { return parameter_casts_; }

 private:
  std::set<std::shared_ptr<Program>> bound_;
  ParameterCasts parameter_casts_;  // of the current run
};

}  // namespace gpipe_fast
