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
// A link is what a segment keeps. Nearly always a stage is one segment.
//
// What a layer stashes for a later one lies with the micro-batch. Whoever pops it comes after a chain of sends that begins
// after the stash, so it needs no slot of its own.
#pragma once

#include "engine/engine.h"
#include "pipeline/plan.h"
#include "pipeline/stage_state.h"
#include "pipeline/surroundings.h"
#include "transport/transport.h"

#include <ATen/core/Tensor.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace gpipe_fast {

// begin_forward, the engine's run of the forward actions, end_forward; then the same for the backward. Needs no GIL, but
// for layers in Python.
class MiniBatch final : public Work {
 public:
  // `parameters` and `buffers` are the whole module's, which the plan's stages index. `key` draws the key of what is
  // random, always the same, when there is something.
  MiniBatch(std::shared_ptr<const Plan> plan, std::shared_ptr<const Transport> transport,
            const Tensors& parameters, const Tensors& buffers, const std::function<int64_t()>& key);

  // On the stages' streams, before the forward's run: draws keys; copies parameters that live on other stages' devices.
  void draw();
  void replicate();

  // The first stage's boundary inputs, by micro-batch. Workers take over the calling thread's surroundings.
  void begin_forward(std::vector<Tensors> microbatches);
  // After the run, once: the last stage's outputs, by micro-batch.
  std::vector<Boundary> take_outputs();
  // Writes the buffers, which autograd notices.
  void end_forward();

  // Gradients of the last stage's outputs, by micro-batch. Throws if a buffer that it reads was changed in place since.
  // Tensors kept by the forward are dropped as the backward goes, unless `retain`: only then there can be another.
  void begin_backward(std::vector<Tensors> microbatches, bool retain);
  struct Gradients {
    std::vector<Tensors> inputs;  // by micro-batch; undefined where none is due
    Tensors parameters;           // of the whole module; undefined where none is due
  };
  // Adds up what several stages have of one parameter, and rounds what was added up in more precision than its
  // parameter's. `callers`: the streams of the calling thread.
  Gradients end_backward(const std::vector<Stream>& callers);

  // After a backward that retained, as if it had not.
  void release();

  // After a failed run: drops what was under way. What the forward kept stays only for a backward that retains.
  void abandon();

  // Bytes kept for the backward now: boundary inputs, saved tensors, and buffers of each micro-batch; storage
  // that several share counts once.
  int64_t kept_bytes() const;
  // What a stage holds, in words, and how it could hold less: for the message of an error, before `abandon`.
  std::string memory_of(int32_t stage) const;

  // Of the whole module's parameters, those that outputs of the forward depend on: others get no gradient.
  std::vector<bool> reached() const;
  // Whether all gradients of the latest backward came as they were expected.
  bool as_expected() const { return as_expected_; }
  // Whether a backward can come.
  bool kept() const { return kept_; }
  const std::shared_ptr<const Plan>& plan() const { return plan_; }
  // The streams of the thread that called the forward.
  const std::vector<Stream>& callers() const { return callers_; }

  void enter(int32_t stage, const std::function<void()>& walk) override;
  void run(const Action& action, Watch& watch) override;

 private:
  friend class CapturedMiniBatch;

  enum class Phase { idle, forward, backward };

  // Of a stage whose segments are all known before: a row for each that draws; undefined if none does.
  at::Tensor draw_keys(size_t stage);
  Stream stream_on(at::Device device) const;
  at::Tensor key_of(const Action& action, int64_t first_layer) const;
  void note_buffers();
  void restore_noted();
  void round(Tensors& gradients, const std::vector<Stream>& callers) const;
  void send(Tensors& tensors, int32_t sender, int32_t receiver, Way way, Cell& there) const;
  // Skip connections on another device's stream are brought to the stage's; what it puts there itself is marked.
  void fetch(const std::vector<int64_t>& numbers, Skips& skips, int32_t stage) const;
  void put_down(const std::vector<int64_t>& numbers, Skips& skips, int32_t stage) const;
  void forward(const Action& action, Watch& watch);
  void backward(const Action& action, Watch& watch);
  void backward_inputs(const Action& action, bool whole, Watch& watch);
  Tensors backward_of(const Visit& visit, Tensors tangents, bool whole);

  std::shared_ptr<const Plan> plan_;
  std::shared_ptr<const Transport> transport_;
  std::vector<Stream> callers_;
  size_t num_parameters_;
  std::shared_ptr<const void> memory_owner_;  // of graphs whose memory has its tensors
  std::vector<StageState> stages_;
  std::vector<Skips> skips_;  // by micro-batch
  Phase phase_ = Phase::idle;
  bool kept_ = false;
  bool gradients_on_callers_ = false;  // not on the stages' streams
  std::atomic<bool> as_expected_ = true;
  std::optional<Surroundings> surroundings_;
};

}  // namespace gpipe_fast
