// How a running action learns that it should stop.
#pragma once

#include <exception>

namespace gpipe_fast {

// Ends a cancelled action; never a failure.
struct Stopped : std::exception {
  const char* what() const noexcept override { return "stopped"; }
};

// Asked between the operators of a program.
class Watch {
 public:
  // Throws Stopped once the action is cancelled.
  virtual void look() = 0;

 protected:
  ~Watch() = default;
};

}  // namespace gpipe_fast
