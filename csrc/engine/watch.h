// How a running action learns that it should stop.
#pragma once

#include <exception>
#include <string>

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
  // Told, by an action that fails, in which part of the work it did: a name for people.
  virtual void blame(const std::string& place) = 0;

 protected:
  ~Watch() = default;
};

}  // namespace gpipe_fast
