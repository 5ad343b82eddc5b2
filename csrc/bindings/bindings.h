// The function of each binding file that adds its classes to the module. No other C++ code knows Python types.
#pragma once

#include <pybind11/pybind11.h>

namespace gpipe_fast {

void bind_program(pybind11::module_& m);
void bind_plan(pybind11::module_& m);
void bind_pipeline(pybind11::module_& m);
void bind_snapshot(pybind11::module_& m);
void bind_backward(pybind11::module_& m);

}  // namespace gpipe_fast
