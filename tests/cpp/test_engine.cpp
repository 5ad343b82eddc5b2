// Tests the engine under random schedules, delays, failures and interruptions; without torch and under sanitizers.
//
//   test_engine [rounds] [seed]
#include "checked_runs.h"
#include "engine/engine.h"
#include "engine/slots.h"
#include "engine/waiter.h"
#include "numbers.h"
#include "random_actions.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

using namespace gpipe_fast;

namespace {

void test_random_schedules(int rounds, Random& random) {
  for (int done = 0; done < rounds;) {
    Engine engine(1 + random_below(random, 6));
    if (random() % 2) engine.interrupt();  // has no effect on later runs
    for (int i = 0; i < 10 && done < rounds; ++i, ++done) {
      if (random() % 4 == 0) engine.record(random_below(random, 100));
      const uint32_t what = random() % 16;
      if (what == 0) check_throwing_poll(random, engine);
      if (what >= 1 && what < 4) check_interrupted_run(random, engine);
      if (what >= 4 && what < 9) check_failing_run(random, engine);
      check_complete_run(random, engine);
    }
  }
}

// Checks that no wake-up is lost between the check of the condition and the sleep.
void test_waiter_loses_no_wake_up(Random& random) {
  Waiter waiters[2];
  std::atomic<int> turn{0};
  const auto take_turns = [&](int self, uint32_t seed) {
    Random own(seed);
    for (int i = 0; i < 5000; ++i) {
      const auto begin = std::chrono::steady_clock::now();
      CHECK(waiters[self].wait_for([&] { return turn.load() == self; }, std::chrono::seconds(20)));
      CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(10));
      for (volatile uint32_t spent = own() % 8192; spent > 0;) spent = spent - 1;
      turn.store(1 - self);
      waiters[1 - self].wake();
    }
  };
  std::thread other(take_turns, 1, random());
  take_turns(0, random());
  other.join();
}

// Checks that `Cancelled` is a failure if the action that throws it was not cancelled.
void test_stopped_without_cancellation_is_a_failure() {
  struct Stopping final : Work {
    void run(const Action& action, CancellationToken&) override {
      if (action.stage == 0) throw Cancelled();
    }
  } work;
  Random random(0);
  const Actions actions = ScheduleGenerator({2, 2, 1}, true, true).generate(random);
  Engine engine(2);
  const auto failure = engine.run(actions, work);
  CHECK(failure && failure->action.rank == actions.of(0).front().rank &&
        describe(failure->error) == "Cancelled");
}

// The forwards of stage 1 of 3, whose neighbours are in other processes: the worker of stage 0 receives its inputs.
Actions actions_of_own_stage(int32_t num_microbatches) {
  std::vector<std::vector<Action>> stages(3);
  int64_t rank = 0;
  for (int32_t m = 0; m < num_microbatches; ++m) {
    stages[0].push_back({ActionKind::send_forward, 0, m, rank++});
    for (ActionKind kind : {ActionKind::recv_forward, ActionKind::forward, ActionKind::send_forward})
      stages[1].push_back({kind, 1, m, rank++});
  }
  return Actions(std::move(stages), num_microbatches, {}, /*is_here=*/{false, true, false});
}

// Checks that sends to another process have no slots, and that a wait for another process learns of a cancellation.
void test_stages_in_other_processes() {
  struct Exchange final : Work {
    void run(const Action& action, CancellationToken&) override {
      if (action.name() == failing) throw std::runtime_error("failed");
      if (action.name() == never_received) {
        while (cancelled_from.load() > action.rank) sleep_us(100);
        throw Cancelled();
      }
      ++ran;
    }
    void cancel_from(int64_t rank) override { cancelled_from = std::min<int64_t>(cancelled_from, rank); }
    std::string failing, never_received;
    std::atomic<int> ran{0};
    std::atomic<int64_t> cancelled_from{INT64_MAX};
  };
  constexpr int32_t kMicrobatches = 20;
  const Actions actions = actions_of_own_stage(kMicrobatches);
  CHECK(actions.leaves_process(actions.of(1)[2]) && !actions.leaves_process(actions.of(0)[0]));
  Engine engine(3);
  for (int run = 0; run < 20; ++run) {
    Exchange complete;
    CHECK(!engine.run(actions, complete) && complete.ran == 4 * kMicrobatches);
    CHECK(complete.cancelled_from == INT64_MAX);
    Exchange failing;
    failing.failing = "1F3";
    failing.never_received = "0SEND_F7";
    const auto failure = engine.run(actions, failing);
    CHECK(failure && failure->action.name() == "1F3" && failing.cancelled_from == failure->action.rank);
    Exchange interrupted;
    interrupted.never_received = "0SEND_F0";
    bool thrown = false;
    try {
      (void)engine.run(actions, interrupted, [] { throw_for_rank(0); });
    } catch (const std::runtime_error&) {
      thrown = true;
    }
    CHECK(thrown && interrupted.ran == 0 && interrupted.cancelled_from == Cancellation::kEverything);
  }
}

// Checks the latest events, in time order: for each action its wait, if it has one, then the action itself.
void test_latest_events_are_recorded_in_order(Random& random) {
  const Shape shape{3, 4, 2};
  const Actions actions = ScheduleGenerator(shape, true, true).generate(random);
  Engine engine(shape.num_stages);
  for (size_t kept : {0, 1, 7, 1000}) {
    engine.record(static_cast<int64_t>(kept));
    for (int run = 0; run < 2; ++run) {
      NumberWork number_work(shape, actions.num_slots(), random);
      CHECK(!engine.run(actions, number_work));
    }
    const auto events = engine.events();
    for (int32_t k = 0; k < shape.num_stages; ++k) {
      std::vector<std::pair<int64_t, bool>> expected;
      for (int run = 0; run < 2; ++run) {
        for (const Action& action : actions.of(k)) {
          const bool waits = action.kind != ActionKind::forward && action.kind != ActionKind::backward;
          if (waits) expected.emplace_back(action.rank, true);
          expected.emplace_back(action.rank, false);
        }
      }
      CHECK(events[k].size() == std::min(kept, expected.size()));
      int64_t last = 0;
      for (size_t i = 0; i < events[k].size(); ++i) {
        const Event& event = events[k][i];
        const size_t at = expected.size() - events[k].size() + i;
        CHECK(std::make_pair(event.action.rank, event.is_wait) == expected[at]);
        CHECK(event.action.stage == k && last <= event.begin && event.begin <= event.end);
        last = event.end;
      }
    }
  }
}

size_t num_threads() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return std::distance(begin(tasks), end(tasks));
}
// Waits, because a joined thread stays in /proc for a moment.
void check_num_threads(size_t expected) {
  for (int i = 0; i < 10000 && num_threads() != expected; ++i) sleep_us(1000);
  CHECK(num_threads() == expected);
}

void test_destroyed_engines_leave_no_threads(Random& random) {
  std::thread([] {}).join();  // a sanitizer may start a background thread with the first thread
  sleep_us(10000);
  const size_t before = num_threads();
  for (int i = 0; i < 200; ++i) {
    Engine unused(1 + i % 6);
    Engine engine(1 + i % 6);
    check_complete_run(random, engine);
  }
  check_num_threads(before);
}

template <class Call>
std::string error_message(const Call& call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

void test_invalid_arguments_throw() {
  using Stages = std::vector<std::vector<Action>>;
  constexpr ActionKind F = ActionKind::forward, SF = ActionKind::send_forward, RF = ActionKind::recv_forward,
                       SB = ActionKind::send_backward, RB = ActionKind::recv_backward;
  const std::tuple<Stages, int64_t, std::string> cases[] = {
      {{}, 1, "a pipeline must have at least one stage, got none"},
      {{{}}, 0, "at least one slot is required, got 0"},
      {{{{F, 1, 0, 0}}, {}}, 1, "1F0 is listed among the actions of stage 0"},
      {{{{F, 0, 0, 3}, {F, 0, 1, 3}}}, 1, "0F1 has rank 3, which must exceed 3"},
      {{{{F, 0, 0, 3}}, {{F, 1, 0, 3}}}, 1, "1F0 has the rank of another action: 3"},
      {{{}, {{RF, 1, 0, 0}}}, 1, "stage 0 sends 0 tensors to stage 1, which receives 1"},
      {{{{SB, 0, 0, 0}}}, 1, "stage 0 sends 1 tensors to stage -1, which receives 0"},
      {{{{RB, 0, 0, 0}}, {{SB, 1, 0, 1}}}, 1, "0RECV_B0 ranks before 1SEND_B0"},
      {{{{SF, 0, 0, 0}, {SF, 0, 1, 1}}, {{RF, 1, 1, 2}, {RF, 1, 0, 3}}},
       2,
       "1RECV_F1 would receive from 0SEND_F0, but a connection keeps its order"},
      {{{{SF, 0, 0, 0}, {SF, 0, 1, 1}}, {{RF, 1, 0, 2}, {RF, 1, 1, 3}}},
       1,
       "0SEND_F1 ranks before a slot is free: of 1 slots, the next one is freed by 1RECV_F0"},
  };
  for (const auto& [stages, num_slots, message] : cases) {
    CHECK(error_message([&, &stages = stages, &num_slots = num_slots] { Actions(stages, num_slots); }) ==
          message);
  }
  CHECK(error_message([] { Actions({{}, {}}, 1, {0}); }) == "there are 2 stages, but groups of 1");
  CHECK(error_message([] { Actions({{}, {}}, 1, {0, 2}); }) == "stage 1 cannot be in group 2");
  CHECK(error_message([] { Engine(0); }) == "an engine must have at least one stage, got 0");
  CHECK(error_message([] { Engine(1).record(-1); }) == "cannot keep -1 events");
  struct Nothing final : Work {
    void run(const Action&, CancellationToken&) override {}
  } nothing;
  Engine engine(2);
  CHECK(error_message([&] { (void)engine.run(Actions({{}}, 1), nothing); }) ==
        "the engine has 2 stages, but received actions for 1");
  CHECK(!engine.run(Actions({{}, {{F, 1, 0, 0}}}, 1), nothing));
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 300;
  Random random(argc > 2 ? std::atoi(argv[2]) : 0);
  test_invalid_arguments_throw();
  test_waiter_loses_no_wake_up(random);
  test_stopped_without_cancellation_is_a_failure();
  test_stages_in_other_processes();
  test_latest_events_are_recorded_in_order(random);
  test_destroyed_engines_leave_no_threads(random);
  test_random_schedules(rounds, random);
  std::printf("%d rounds passed, 0 failed\n", rounds);
}
