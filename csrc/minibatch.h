// A mini-batch between its forward and its backward: the work that the engine's actions do.
//
// Boundary tensors lie with the stage that receives them; a SEND puts them there:
//
//   stage 0, cell m   [ inputs | buffers | saved | key ]   kept for 0Bm   tangents <-------+
//                       | 0Fm                                                | 0Bm         | 1SEND_Bm
//                     outputs --+ 0SEND_Fm                                  ...   input_gradients
//                               |                                                          | 1Bm
//   stage 1, cell m   arrived <-+ --1Fm--> [ inputs | buffers | saved | key ]   kept for 1Bm
#pragma once

#include "engine.h"
#include "plan.h"
#include "surroundings.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

namespace gpipe_fast {

using Tensors = std::vector<at::Tensor>;

// begin_forward, the engine's run of the plan's forward actions, end_forward; then the same for the backward. Needs no
// GIL.
class MiniBatch final : public Work {
 public:
  // `parameters` and `buffers` are the whole module's, which the plan's stages index.
  MiniBatch(std::shared_ptr<const Plan> plan, const Tensors& parameters, const Tensors& buffers, int64_t key);

  // The first stage's boundary inputs, by micro-batch. Workers take over the calling thread's surroundings.
  void begin_forward(std::vector<Tensors> microbatches);
  // After the run, once: the last stage's outputs, by micro-batch.
  std::vector<Tensors> take_outputs();
  // Writes the buffers, which autograd notices.
  void end_forward();

  // Gradients of the last stage's outputs, by micro-batch: those that `plan` expects, which is the forward's or one that
  // stands in for it. Throws if a buffer that it reads was changed in place since. Tensors kept by the forward are
  // dropped as the backward goes, unless `retain`: only then there can be another.
  void begin_backward(std::shared_ptr<const Plan> plan, std::vector<Tensors> microbatches, bool retain);
  struct Gradients {
    std::vector<Tensors> inputs;  // by micro-batch; undefined where none is due
    Tensors parameters;           // of the whole module; undefined where none is due
  };
  Gradients end_backward();

  // After a failed run: drops what was under way. What the forward kept stays only for a backward that retains.
  void abandon();

  // Bytes kept for the backward now: boundary inputs, saved tensors, and buffers of each micro-batch; storage
  // that several share counts once.
  int64_t kept_bytes() const;

  const std::shared_ptr<const Plan>& plan() const { return plan_; }
  size_t num_inputs() const { return num_inputs_; }

  void enter(int32_t stage, const std::function<void()>& walk) override;
  void run(const Action& action, Watch& watch) override;

 private:
  // What one stage holds of one micro-batch. `arrived` and `tangents` are written by its neighbours' workers.
  struct Cell {
    Tensors arrived;  // boundary activation, until F
    Tensors outputs;  // boundary activation, from F to SEND_F
    Tensors inputs;   // from F to B, and only what B reads; so the next three
    Tensors buffers;
    Tensors saved;
    at::Tensor key;
    Tensors tangents;         // boundary gradient, until B
    Tensors input_gradients;  // boundary gradient, from B to SEND_B
  };
  struct Noted {
    int64_t version;
    const void* data;
  };
  struct Stage {
    Tensors parameters;
    Tensors module_buffers;
    Tensors buffers;                        // as the latest micro-batch left them
    std::map<size_t, Noted> noted_buffers;  // the module's own that the backward reads, by index
    Tensors gradients;
    bool has_gradients = false;
    std::optional<Program::Run> open;  // a backward of which a part is still to come
    std::vector<Cell> cells;           // by micro-batch
  };
  enum class Phase { idle, forward, backward };

  void bind(int32_t stage);
  void note_buffers();
  void check_buffers() const;
  static const at::Tensor& find(const Port& port, const Cell& cell);
  void forward(const Action& action, Watch& watch);
  void keep_only(const Pass& pass, const Stage& stage, Cell& cell) const;
  // A backward, or the next part of one.
  void backward(const Action& action, Watch& watch);
  void open(const PortedProgram& program, Stage& stage, const Cell& cell, Watch& watch);

  std::shared_ptr<const Plan> plan_;           // the forward's
  std::shared_ptr<const Plan> backward_plan_;  // while a backward runs
  int64_t key_;
  size_t num_parameters_;
  size_t num_inputs_ = 0;
  std::vector<Stage> stages_;
  Phase phase_ = Phase::idle;
  bool kept_ = false;
  bool retain_ = false;
  std::optional<Surroundings> surroundings_;
};

}  // namespace gpipe_fast
