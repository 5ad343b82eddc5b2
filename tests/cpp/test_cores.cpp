// Tests that Cores moves threads that share a core apart and then restores their affinity masks; without torch and
// under sanitizers.
#include "engine/cores.h"
#include "expect.h"

#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#ifdef __linux__
#include <sched.h>
#endif

using namespace gpipe_fast;

namespace {

using Ints = std::vector<int>;

void test_spread_separates_and_balances_threads() {
  // One core.
  CHECK((spread_threads({0, 0, 0}, {0}) == Ints{0, 0, 0}));
  // Separates neighbours and balances the cores.
  CHECK((spread_threads({1, 1, 1, 1}, {0, 1}) == Ints{1, 0, 1, 0}));
  CHECK((spread_threads({0, 1, 2, 0, 0, 0}, {0, 1, 2}) == Ints{0, 1, 2, 0, 1, 2}));
  // Leaves well-placed threads on their cores.
  CHECK((spread_threads({5, 9, 5}, {3, 5, 9, 11}) == Ints{5, 9, 3}));
  // Moves threads away from a core that is no longer allowed.
  CHECK((spread_threads({7, 4}, {3, 4}) == Ints{3, 4}));
}

#ifdef __linux__

cpu_set_t mask_of_this_thread() {
  cpu_set_t mask;
  CHECK(sched_getaffinity(0, sizeof(mask), &mask) == 0);
  return mask;
}

// Runs `body` on a new thread, because `body` changes its thread's affinity mask.
template <class Body>
void in_thread(const Body& body) {
  std::thread thread(body);
  thread.join();
}

void pin_to(int core) {
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(core, &one);
  CHECK(sched_setaffinity(0, sizeof(one), &one) == 0);
}

// Pins the calling thread to one core and leaves a run from there.
void leave_from(Cores& cores, int thread, int core) {
  in_thread([&] {
    cores.enter(thread);  // does nothing before the first run
    pin_to(core);
    cores.leave(thread);
  });
}

// Runs two threads on the same core, then returns whether the next run moves the second thread to another core.
bool separates_threads(int core, const cpu_set_t& mask) {
  Cores cores(2);
  cores.plan_moves();
  for (int thread : {0, 1}) leave_from(cores, thread, core);
  cores.plan_moves();
  bool moved = false;
  in_thread([&] {
    pin_to(core);
    CHECK(sched_setaffinity(0, sizeof(mask), &mask) == 0);
    cores.enter(1);
    moved = sched_getcpu() != core;
    const cpu_set_t after = mask_of_this_thread();
    CHECK(CPU_EQUAL(&after, &mask));
    cores.leave(1);
  });
  in_thread([&] {
    pin_to(core);
    cores.enter(0);  // stays on its core
    CHECK(sched_getcpu() == core);
  });
  return moved;
}

// A thread is not moved to a core that its affinity mask excludes.
void test_external_affinity_mask_is_respected(int core) {
  Cores cores(2);
  for (int thread : {0, 1}) leave_from(cores, thread, core);
  cores.plan_moves();
  in_thread([&] {
    pin_to(core);
    cores.enter(1);
    CHECK(sched_getcpu() == core);
    const cpu_set_t mask = mask_of_this_thread();
    CHECK(CPU_COUNT(&mask) == 1);
  });
}

#endif

}  // namespace

int main() {
  test_spread_separates_and_balances_threads();
#ifdef __linux__
  const cpu_set_t mask = mask_of_this_thread();
  const int core = sched_getcpu();
  if (CPU_COUNT(&mask) > 1) {
    // The kernel may move a thread, too, so some attempts fail.
    int moved = 0;
    for (int i = 0; i < 100; ++i) moved += separates_threads(core, mask);
    CHECK(moved > 75);
  }
  test_external_affinity_mask_is_respected(core);
#endif
  std::printf("0 failed\n");
}
