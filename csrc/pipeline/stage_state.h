// What a stage has of one mini-batch. Used by the stage's worker while it runs.
#pragma once

#include "pipeline/boundary.h"
#include "pipeline/segment.h"
#include "program/program.h"

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

namespace gpipe_fast {

class PythonLayers;

// A backward of which a part is still to come.
struct OpenBackward {
  OpenBackward(Program& program, Tensors& gradients, bool first) : run(program, gradients, first) {}
  // Into gradients of its own, which are then added.
  OpenBackward(Program& program, size_t num_parameters) : apart(num_parameters), run(program, apart, true) {}

  Tensors apart;
  Program::Run run;
};

// What a forward has under way.
struct ForwardState {
  Tensors buffers;                  // as the latest micro-batch left them
  std::vector<Tensors> statistics;  // what running statistics were, by `StagePlan::statistics`
  // The state of layers in Python, as of the mini-batch's begin.
  std::vector<std::pair<std::shared_ptr<PythonLayers>, Opaque>> noted;
};

// What a backward has under way.
struct BackwardState {
  Tensors gradients;
  std::set<int64_t> foreign;  // gradients that came from Python, whose memory may be shared
  std::unique_ptr<OpenBackward> open;
};

// What a stage holds of one micro-batch. `arrived` and `tangents` are written by its neighbours' workers.
struct Cell {
  Boundary arrived;  // until F
  Boundary outputs;  // from F to SEND_F
  std::vector<Link> links;
  Tensors tangents;         // boundary gradient, until B
  Tensors input_gradients;  // boundary gradient, from B to SEND_B
  Moment there;             // when what was sent here last has come
};

struct StageState {
  struct Noted {
    int64_t version;
    const void* data;
  };

  int32_t index = 0;
  at::Device device = at::kCPU;
  bool keeps = false;               // a backward can come
  bool retains = false;             // another one can come after this
  std::function<int64_t()> key;     // draws the mini-batch's
  at::Tensor keys;                  // a row for each segment that draws, where all are known before
  std::vector<int64_t> first_keys;  // of each micro-batch, which row is its first
  Tensors parameters;
  std::map<int64_t, at::Tensor> homes;  // the originals of those that are replicas
  Tensors module_buffers;
  std::vector<bool> reached;              // the parameters that outputs depend on: others get no gradient
  std::map<size_t, Noted> noted_buffers;  // the module's own that a backward can read, by index
  ForwardState forward;
  BackwardState backward;
  std::vector<Cell> cells;  // by micro-batch

  // Points a program at the parameters, once in a run. It is held, since another could be made where one was freed.
  void bind(const std::shared_ptr<Program>& program);
  void release_programs() { bound_.clear(); }

 private:
  std::set<std::shared_ptr<Program>> bound_;
};

}  // namespace gpipe_fast
