// A mini-batch between its forward and its backward: the work that the engine's actions do.
//
// Boundary tensors lie with the stage that receives them; a SEND puts them there:
//
//   stage 0, cell m   [ links ]   kept for 0Bm   tangents <-------+
//                       | 0Fm                       | 0Bm         | 1SEND_Bm
//                     outputs --+ 0SEND_Fm         ...   input_gradients
//                               |                                 | 1Bm
//   stage 1, cell m   arrived <-+ --1Fm--> [ links ]   kept for 1Bm
//
// A link is what a segment, a run of layers, keeps: inputs, buffers, saved tensors and key. Nearly always a stage is one.
//
// What a layer stashes for a later one lies with the micro-batch. Whoever pops it comes after a chain of sends that begins
// after the stash, so it needs no slot of its own.
#pragma once

#include "engine/engine.h"
#include "pipeline/plan.h"
#include "pipeline/surroundings.h"
#include "transport/transport.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace gpipe_fast {

// At a place that may not be there yet.
inline void put(Tensors& tensors, int64_t index, at::Tensor tensor) {
  if (static_cast<size_t>(index) >= tensors.size()) tensors.resize(index + 1);
  tensors[index] = std::move(tensor);
}

// begin_forward, the engine's run of the plan's forward actions, end_forward; then the same for the backward. Needs no
// GIL, but for layers that run in Python.
class MiniBatch final : public Work {
 public:
  // `parameters` and `buffers` are the whole module's, which the plan's stages index. `key` draws the key of what is
  // random, always the same, when there is something.
  MiniBatch(std::shared_ptr<const Plan> plan, std::shared_ptr<const Transport> transport,
            const Tensors& parameters, const Tensors& buffers, std::function<int64_t()> key);

  // On the stages' streams, before the forward's run: draws keys; copies parameters that live on other stages' devices.
  void draw();
  void replicate();

  // The first stage's boundary inputs, by micro-batch. Workers take over the calling thread's surroundings.
  void begin_forward(std::vector<Tensors> microbatches);
  // After the run, once: the last stage's outputs, by micro-batch.
  std::vector<Boundary> take_outputs();
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
  // Adds up what several stages have of one parameter, and rounds what was added up in more precision than its
  // parameter's. `callers`: the streams of the calling thread.
  Gradients end_backward(const std::vector<Stream>& callers);

  // After a failed run: drops what was under way. What the forward kept stays only for a backward that retains.
  void abandon();

  // Bytes kept for the backward now: boundary inputs, saved tensors, and buffers of each micro-batch; storage
  // that several share counts once.
  int64_t kept_bytes() const;
  // What a stage holds, in words, and how it could hold less: for the message of an error, before `abandon`.
  std::string memory_of(int32_t stage) const;

  // Where a graph computes a mini-batch, another one, `captured`, holds what has fixed addresses:
  //
  // It was run while the graph was captured, and is only looked at from then on.
  void freeze();
  // Whether both have the same parameters and buffers, at the same addresses.
  bool same_memory(const MiniBatch& captured) const;
  // This one's keys, in the other's place; on the calling thread's stream, as the last. Where a stage draws.
  bool draws(size_t stage) const { return stages_[stage].keys.defined(); }
  void draw_for(MiniBatch& captured, size_t stage);
  // After the graph, instead of a run: what the other holds is this one's; gradients of parameters are copied.
  void take_forward(const MiniBatch& captured);
  void take_backward(const MiniBatch& captured, size_t stage);
  // Memory of programs that the other's plan uses.
  std::vector<c10::Storage> arenas() const;

  // Whether a backward can come.
  bool kept() const { return kept_; }
  const std::shared_ptr<const Plan>& plan() const { return plan_; }
  // The streams of the thread that called the forward.
  const std::vector<Stream>& callers() const { return callers_; }
  size_t num_inputs() const { return num_inputs_; }

  void enter(int32_t stage, const std::function<void()>& walk) override;
  void run(const Action& action, Watch& watch) override;

 private:
  // What a segment keeps of one micro-batch from F to B.
  struct Link {
    std::shared_ptr<const Segment> segment;
    Tensors inputs;  // only what B reads; so the next three
    Tensors buffers;
    Tensors saved;
    at::Tensor key;
    Opaque kept;  // by layers in Python
    // Where there are skip connections: how what it took and what it returned was nested.
    std::shared_ptr<const Form> takes, returns;
  };
  // What one stage holds of one micro-batch. `arrived` and `tangents` are written by its neighbours' workers.
  struct Cell {
    Boundary arrived;  // until F
    Boundary outputs;  // from F to SEND_F
    std::vector<Link> links;
    Tensors tangents;         // boundary gradient, until B
    Tensors input_gradients;  // boundary gradient, from B to SEND_B
    Moment there;             // when what was sent here last has come
  };
  struct Noted {
    int64_t version;
    const void* data;
  };
  // A backward of which a part is still to come.
  struct Open {
    Open(Program& program, Tensors& gradients, bool first) : run(program, gradients, first) {}
    // Into gradients of its own, which are then added.
    Open(Program& program, size_t num_parameters) : apart(num_parameters), run(program, apart, true) {}

    Tensors apart;
    Program::Run run;
  };
  struct Stage {
    Tensors parameters;
    std::map<int64_t, at::Tensor> homes;  // the originals of those that are replicas
    at::Tensor keys;                      // see draw_keys
    std::vector<int64_t> first_keys;      // of each micro-batch, which row is its first
    // Bound to the parameters in this run. Held, since another program could be made where one was freed.
    std::vector<std::shared_ptr<Program>> bound;
    Tensors module_buffers;
    std::vector<const void*> buffer_addresses;
    Tensors buffers;                        // as the latest micro-batch left them
    std::vector<Tensors> statistics;        // what running statistics were, by `StagePlan::statistics`
    std::map<size_t, Noted> noted_buffers;  // the module's own that the backward reads, by index
    std::vector<std::pair<std::shared_ptr<PythonLayers>, Opaque>>
        noted;  // state, as of the mini-batch's begin
    Tensors gradients;
    std::set<int64_t> foreign;  // gradients that came from Python, whose memory may be shared
    std::optional<Open> open;
    std::vector<Cell> cells;  // by micro-batch
  };
  enum class Phase { idle, forward, backward };

  // Of a stage whose segments are all known before: a row for each that draws; undefined if none does.
  at::Tensor draw_keys(size_t stage);
  Stream stream_on(at::Device device) const;
  at::Tensor key_of(const Action& action, const Segment& segment, const Cell& cell) const;
  static void bind(Stage& stage, const std::shared_ptr<Program>& program);
  void note_buffers();
  void check_buffers() const;
  void restore_noted();
  static const at::Tensor& find(const Port& port, const Link& link, const Tensors& tangents);
  void round(Tensors& gradients, const std::vector<Stream>& callers) const;
  bool dynamic() const { return static_cast<bool>(plan_->check_outputs); }
  void send(Tensors& tensors, int32_t sender, int32_t receiver, Way way, Cell& there) const;
  // Skip connections on another device's stream are brought to the stage's; what it puts there itself is marked.
  void fetch(const std::vector<int64_t>& numbers, Skips& skips, int32_t stage) const;
  void put_down(const std::vector<int64_t>& numbers, Skips& skips, int32_t stage) const;
  void forward(const Action& action, Watch& watch);
  Boundary forward_lowered(const Action& action, Stage& stage, Link& link, Boundary inputs, Watch& watch);
  Boundary forward_in_python(const Action& action, Stage& stage, Link& link, const Boundary& inputs,
                             bool& writes_inputs);
  void keep_only(const Pass& pass, const Stage& stage, Link& link) const;
  // A backward, or the next part of one.
  void backward(const Action& action, Watch& watch);
  // Of one segment, from gradients of its outputs to those of its inputs; with `whole`, to its weights' too.
  Tensors backward_lowered(const Action& action, Stage& stage, Link& link, Tensors tangents, bool whole,
                           Watch& watch);
  Tensors backward_in_python(const Action& action, Stage& stage, Link& link, const Tensors& tangents);
  void open(const Pass& pass, Stage& stage, const Link& link, Watch& watch);
  static void finish(const Pass& pass, Stage& stage, Watch& watch);
  const Segment& segment_of_backward(const Action& action, const Link& link) const;

  std::shared_ptr<const Plan> plan_;           // the forward's
  std::shared_ptr<const Plan> backward_plan_;  // while a backward runs
  std::shared_ptr<const Transport> transport_;
  std::vector<Stream> callers_;
  std::function<int64_t()> key_;
  size_t num_parameters_;
  size_t num_inputs_ = 0;
  std::vector<Stage> stages_;
  std::vector<Skips> skips_;  // by micro-batch
  Phase phase_ = Phase::idle;
  bool kept_ = false;
  bool retain_ = false;
  std::optional<Surroundings> surroundings_;
};

}  // namespace gpipe_fast
