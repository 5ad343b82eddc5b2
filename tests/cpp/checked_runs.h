// One run of the engine under a random schedule, which is checked: complete, failing or interrupted.
#pragma once

#include "engine/engine.h"
#include "expect.h"
#include "numbers.h"
#include "random_actions.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>
#include <thread>
#include <vector>

namespace gpipe_fast {

inline Shape draw_shape(Random& random, int32_t num_stages) {
  const int32_t num_groups = random() % 2 ? 1 + random_below(random, num_stages) : 0;
  return {num_stages, 1 + random_below(random, 8), 1 + random_below(random, 4), num_groups};
}

// Checks a run without failures; sometimes as two runs that share data, like the forward and backward of a step.
inline void check_complete_run(Random& random, Engine& engine) {
  const Shape shape = draw_shape(random, engine.num_stages());
  std::vector<Actions> runs;
  if (random() % 2) {
    runs.push_back(ScheduleGenerator(shape, true, true).generate(random));
  } else {
    runs.push_back(ScheduleGenerator(shape, true, false).generate(random));
    runs.push_back(ScheduleGenerator(shape, false, true).generate(random));
  }
  NumberWork number_work(shape, std::max(runs.front().num_slots(), runs.back().num_slots()), random);
  std::vector<const Actions*> pointers;
  for (const Actions& actions : runs) {
    CHECK(!engine.run(actions, number_work));
    pointers.push_back(&actions);
  }
  number_work.check_order(pointers, true);
}

// Checks that a failing run returns the failure of lowest rank, whatever the timing.
inline void check_failing_run(Random& random, Engine& engine) {
  const Shape shape = draw_shape(random, engine.num_stages());
  const Actions actions = ScheduleGenerator(shape, true, random() % 4 != 0).generate(random);
  int64_t total = 0;
  for (int32_t k = 0; k < shape.num_stages; ++k) total += static_cast<int64_t>(actions.of(k).size());
  PlannedFailures planned;
  if (random() % 4 == 0) planned.failing_before_walk = random_below(random, shape.num_stages);
  if (random() % 4 == 0) planned.failing_after_walk = random_below(random, shape.num_stages);
  for (int i = random_below(random, 4); i >= 0; --i)
    planned.failing_ranks.insert(random_below(random, total));
  const auto [rank, what] = planned.first(actions);
  // The failure cancels an endless action of higher rank.
  if (random() % 2) planned.endless_rank = rank + 1 + random_below(random, total);
  NumberWork number_work(shape, actions.num_slots(), random, planned);
  const std::optional<Failure> failure = engine.run(actions, number_work);
  CHECK(failure);
  CHECK(failure->action.rank == rank);
  CHECK(describe(failure->error) == what);
  number_work.check_order({&actions}, false);
}

// Checks that an exception from `poll` cancels an endless action.
inline void check_throwing_poll(Random& random, Engine& engine) {
  const Shape shape = draw_shape(random, engine.num_stages());
  const Actions actions = ScheduleGenerator(shape, true, true).generate(random);
  const auto& list = actions.of(random_below(random, shape.num_stages));
  PlannedFailures planned;
  planned.endless_rank = list[random() % list.size()].rank;
  NumberWork number_work(shape, actions.num_slots(), random, planned);
  const std::thread::id caller = std::this_thread::get_id();
  const int throwing = 1 + random_below(random, 2);
  int polled = 0;
  bool thrown = false;
  try {
    (void)engine.run(actions, number_work, [&] {
      CHECK(std::this_thread::get_id() == caller);
      if (++polled == throwing) throw NonStandardError{-7};
    });
  } catch (const NonStandardError& e) {
    thrown = e.rank == -7;
  }
  CHECK(thrown && polled == throwing);
  number_work.check_order({&actions}, false);
}

// Checks that a run throws `Cancelled`, fails or completes if it is interrupted at a random moment, possibly before its
// begin or after its end.
inline void check_interrupted_run(Random& random, Engine& engine) {
  const Shape shape = draw_shape(random, engine.num_stages());
  const Actions actions = ScheduleGenerator(shape, true, true).generate(random);
  PlannedFailures planned;
  if (random() % 2) planned.endless_rank = actions.of(0).back().rank;
  if (random() % 4 == 0) planned.failing_ranks.insert(0);
  NumberWork number_work(shape, actions.num_slots(), random, planned);
  std::atomic<bool> over{false};
  std::thread other([&, seed = random()] {
    Random own(seed);
    for (sleep_us(random_below(own, 1000)); !over; sleep_us(random_below(own, 1000))) engine.interrupt();
  });
  bool stopped = false;
  std::optional<Failure> failure;
  try {
    failure = engine.run(actions, number_work);
  } catch (const Cancelled&) {
    stopped = true;
  }
  over = true;
  other.join();
  CHECK(stopped || failure || planned.endless_rank < 0);
  CHECK(!failure || describe(failure->error) == expected_description(0));
  number_work.check_order({&actions}, !stopped && !failure);
}

}  // namespace gpipe_fast
