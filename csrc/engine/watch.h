// Cancellation token: how a running action learns that it should stop.
#pragma once

#include <exception>
#include <string>

namespace gpipe_fast {

// Thrown to end a cancelled action. It is not a failure.
struct Stopped : std::exception {
  const char* what() const noexcept override { return "cancelled"; }
};

// The cancellation token of one action. A program checks it between its operators.
class Watch {
 public:
  // Throws `Stopped` once the action is cancelled.
  virtual void look() = 0;
  // Called by an action that is about to fail: `place` names, for the error message, the part that failed.
  virtual void blame(const std::string& place) = 0;

 protected:
  ~Watch() = default;
};

}  // namespace gpipe_fast
