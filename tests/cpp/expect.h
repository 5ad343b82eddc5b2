// The check macro of the C++ tests.
#pragma once

#include <cstdio>
#include <cstdlib>

// Exits the process at once, because other threads may be running, with which destructors would race.
#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::_Exit(1);                                                       \
    }                                                                      \
  } while (false)
