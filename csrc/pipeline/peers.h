// Peers: the other processes of a pipeline, whose runs succeed or fail together with those of this process.
#pragma once

#include <cstdint>
#include <string>

namespace gpipe_fast {

// Every process makes the same runs, in the same order. All calls are made by the thread that waits for the run.
class Peers {
 public:
  virtual ~Peers() = default;
  // Begins the backward of the mini-batch whose forward was the run `forward`. Throws if another process runs something
  // else.
  virtual void begin_backward(int64_t forward) = 0;
  // Called during a run, about every 20 ms. Throws if another process has failed.
  virtual void poll() = 0;
  // Ends a run that succeeded here: waits for the other processes. Throws if one of them failed. Returns the number of
  // the run.
  virtual int64_t succeed() = 0;
  // Ends a run that failed here, and tells the others why. Throws if another process failed first.
  virtual void fail(const std::string& error) = 0;
};

}  // namespace gpipe_fast
