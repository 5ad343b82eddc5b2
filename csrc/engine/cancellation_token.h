// Cancellation token: how a running action learns that it should stop.
#pragma once

#include <exception>
#include <string>

namespace gpipe_fast {

// Thrown to end a cancelled action. It is not a failure.
struct Cancelled : std::exception {
  const char* what() const noexcept override { return "cancelled"; }
};

// The cancellation token of one action. A program checks it between its operators.
class CancellationToken {
 public:
  // Throws `Cancelled` once the action is cancelled.
  virtual void check() = 0;
  // Called by an action that is about to fail: `layer_title` names, for the error message, the part that failed.
  virtual void set_layer_title(const std::string& layer_title) = 0;

 protected:
  ~CancellationToken() = default;
};

}  // namespace gpipe_fast
