// What the C++ tests check with.
#pragma once

#include <cstdio>
#include <cstdlib>

// Other threads may run, so it ends the process at once, without running destructors beside them.
#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::_Exit(1);                                                       \
    }                                                                      \
  } while (false)
