// The graph report: the state of a plan's graphs, for users.
#pragma once

#include <cstdint>
#include <string>

namespace gpipe_fast {

struct GraphReport {
  bool forward = false, backward = false;  // whether they are captured
  int64_t num_nodes = 0;
  int64_t bytes = 0;       // device memory, in addition to that of earlier captures
  int64_t replays = 0;     // mini-batches whose forward was replayed
  int64_t uncaptured = 0;  // mini-batches whose forward ran uncaptured
  std::string obstacle;    // why it cannot be captured; empty if it can
  std::string postponed;   // why its capture was postponed; empty if it was not
};

}  // namespace gpipe_fast
