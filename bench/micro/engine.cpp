// The engine's overhead: times steps of empty programs, alternating with bare hand-overs between two threads.
//
//   engine [rounds] [steps per sample]
//
// Every round prints a line per size: stages, micro-batches, and the microseconds of a step without recording, of a
// step with recording, of a step whose two runs begin with sleeping workers, and of one hand-over.
#include "engine/engine.h"

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

using namespace gpipe_fast;

namespace {

constexpr std::pair<int32_t, int32_t> kSizes[] = {{2, 8}, {2, 64}, {4, 8}, {4, 64}};

void check(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

// Returns the actions of every stage in one direction of fill-drain; backward begins with the last micro-batch.
Actions fill_drain(int32_t num_stages, int32_t num_microbatches, bool forward) {
  const ActionKind receive = forward ? ActionKind::recv_forward : ActionKind::recv_backward;
  const ActionKind compute = forward ? ActionKind::forward : ActionKind::backward;
  const ActionKind send = forward ? ActionKind::send_forward : ActionKind::send_backward;
  std::vector<std::vector<Action>> stages(num_stages);
  int64_t rank = 0;
  for (int32_t position = 0; position < num_stages; ++position) {
    const int32_t stage = forward ? position : num_stages - 1 - position;
    for (int32_t i = 0; i < num_microbatches; ++i) {
      const int32_t microbatch = forward ? i : num_microbatches - 1 - i;
      if (position > 0) stages[stage].push_back({receive, stage, microbatch, rank++});
      stages[stage].push_back({compute, stage, microbatch, rank++});
      if (position + 1 < num_stages) stages[stage].push_back({send, stage, microbatch, rank++});
    }
  }
  return Actions(std::move(stages), num_microbatches);
}

using Clock = std::chrono::steady_clock;

double microseconds_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
}

// Spins for 300 µs, like the caller's own work between two runs; meanwhile the workers fall asleep.
void spin() {
  for (const auto begin = Clock::now(); microseconds_since(begin) < 300;) {
  }
}

struct EmptyWork final : Work {
  void run(const Action&, CancellationToken&) override {}
};

struct Pipeline {
  Pipeline(int32_t num_stages, int32_t num_microbatches)
      : forward(fill_drain(num_stages, num_microbatches, true)),
        backward(fill_drain(num_stages, num_microbatches, false)),
        engine(num_stages) {}

  void run(const Actions& actions) {
    check(!engine.run(actions, empty_work), "a run of empty actions failed");
  }
  void step() {
    run(forward);
    run(backward);
  }
  // Returns the mean microseconds of a step whose two runs begin with sleeping workers.
  double time_from_sleep(int steps) {
    double total = 0;
    for (int i = 0; i < 2 * steps; ++i) {
      spin();
      const auto begin = Clock::now();
      run(i % 2 == 0 ? forward : backward);
      total += microseconds_since(begin);
    }
    return total / steps;
  }
  // Returns a bound on the events that a stage records in one step: actions and waits.
  int64_t events_per_stage() const {
    return 6 * static_cast<int64_t>(forward.of(0).size() + backward.of(0).size());
  }
  // Checks that every action ran once: in each stage the forward's, then the backward's, in their order.
  void check_order() const {
    const auto events = engine.events();
    for (int32_t stage = 0; stage < engine.num_stages(); ++stage) {
      size_t ran = 0;
      const auto &first = forward.of(stage), &second = backward.of(stage);
      for (const Event& event : events[stage]) {
        if (event.is_wait) continue;
        const size_t i = ran++ % (first.size() + second.size());
        const Action& expected = i < first.size() ? first[i] : second[i - first.size()];
        check(event.action.name() == expected.name(), "an action ran out of order");
      }
      check(ran == first.size() + second.size(), "not every action ran");
    }
  }

  Actions forward, backward;
  Engine engine;
  EmptyWork empty_work;
};

// The baseline: two threads that wake each other through one mutex and one condition variable.
class HandOver {
 public:
  HandOver() : partner_([this] { serve(); }) {}
  ~HandOver() {
    pass(kStop);
    partner_.join();
  }
  void round_trip() {
    pass(kPartner);
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return turn_ == kCaller; });
  }

 private:
  enum Turn { kCaller, kPartner, kStop };

  void pass(Turn turn) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      turn_ = turn;
    }
    changed_.notify_one();
  }
  void serve() {
    for (;;) {
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return turn_ != kCaller; });
        if (turn_ == kStop) return;
      }
      pass(kCaller);
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  Turn turn_ = kCaller;
  std::thread partner_;
};

// Returns the mean microseconds of a call. Warms up with the same number of calls, so that threads are awake and the
// kernel has placed them on cores.
template <class Call>
double time(int calls, const Call& call) {
  for (int i = 0; i < calls; ++i) call();
  const auto begin = Clock::now();
  for (int i = 0; i < calls; ++i) call();
  return microseconds_since(begin) / calls;
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 200;
  const int steps = argc > 2 ? std::atoi(argv[2]) : 20;
  std::vector<std::unique_ptr<Pipeline>> pipelines;
  for (const auto& [num_stages, num_microbatches] : kSizes) {
    Pipeline& pipeline = *pipelines.emplace_back(std::make_unique<Pipeline>(num_stages, num_microbatches));
    pipeline.engine.record(pipeline.events_per_stage());
    pipeline.step();
    pipeline.check_order();
  }
  HandOver hand_over;
  for (int round = 0; round < rounds; ++round) {
    for (size_t i = 0; i < pipelines.size(); ++i) {
      Pipeline& pipeline = *pipelines[i];
      pipeline.engine.record(0);
      const double off = time(steps, [&] { pipeline.step(); });
      pipeline.engine.record(pipeline.events_per_stage());
      const double on = time(steps, [&] { pipeline.step(); });
      pipeline.engine.record(0);
      const double from_sleep = pipeline.time_from_sleep(steps);
      const double round_trip_us = time(10 * steps, [&] { hand_over.round_trip(); });
      std::printf("%d %d %.4f %.4f %.4f %.4f\n", kSizes[i].first, kSizes[i].second, off, on, from_sleep,
                  round_trip_us / 2);
    }
  }
}
