// Objects of Python's in C++, and the workers that run Python.
#pragma once

#include "pipeline/boundary.h"

#include <pybind11/pybind11.h>

#include <set>
#include <utility>

namespace gpipe_fast {

// An object of Python's for C++ to hold without the GIL. At the interpreter's end it is left alone.
inline Opaque opaque(pybind11::object value) {
  return Opaque(value.release().ptr(), [](void* held) {
    if (!Py_IsInitialized()) return;
    const pybind11::gil_scoped_acquire gil;
    Py_XDECREF(static_cast<PyObject*>(held));
  });
}

inline pybind11::object object(const Opaque& held) {
  return pybind11::reinterpret_borrow<pybind11::object>(static_cast<PyObject*>(held.get()));
}

// The workers of one pipeline that run layers in Python now. Used under the GIL.
class Interpreted {
 public:
  // Takes the GIL for a worker.
  class Here {
   public:
    explicit Here(Interpreted& all) : all_(all), thread_(PyThread_get_thread_ident()) {
      all_.threads_.insert(thread_);
    }
    ~Here() { all_.threads_.erase(thread_); }
    Here(const Here&) = delete;
    Here& operator=(const Here&) = delete;

   private:
    const pybind11::gil_scoped_acquire gil_;
    Interpreted& all_;
    const unsigned long thread_;  // Python's number for it
  };

  void interrupt() const {
    for (unsigned long thread : threads_) PyThreadState_SetAsyncExc(thread, PyExc_KeyboardInterrupt);
  }

 private:
  std::set<unsigned long> threads_;
};

}  // namespace gpipe_fast
