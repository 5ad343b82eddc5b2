// Python objects owned by C++, and the workers that are running Python.
#pragma once

#include "pipeline/boundary.h"

#include <pybind11/pybind11.h>

#include <set>
#include <utility>

namespace gpipe_fast {

// Returns an owning handle of a Python object, which may be copied and destroyed without the GIL. A handle that is
// destroyed after the interpreter's exit leaks the object.
inline PythonObject wrap_object(pybind11::object value) {
  return PythonObject(value.release().ptr(), [](void* handle) {
    if (!Py_IsInitialized()) return;
    const pybind11::gil_scoped_acquire gil;
    Py_XDECREF(static_cast<PyObject*>(handle));
  });
}

// Returns the Python object of a handle. Requires the GIL.
inline pybind11::object unwrap_object(const PythonObject& handle) {
  return pybind11::reinterpret_borrow<pybind11::object>(static_cast<PyObject*>(handle.get()));
}

// The workers of one pipeline that are running layers in Python. Requires the GIL.
class PythonWorkers {
 public:
  // Holds the GIL for the calling worker and registers the worker.
  class Scope {
   public:
    explicit Scope(PythonWorkers& workers) : workers_(workers), thread_(PyThread_get_thread_ident()) {
      workers_.threads_.insert(thread_);
    }
    ~Scope() { workers_.threads_.erase(thread_); }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    const pybind11::gil_scoped_acquire gil_;
    PythonWorkers& workers_;
    const unsigned long thread_;  // Python's thread identifier
  };

  // Raises KeyboardInterrupt in every registered worker.
  void interrupt() const {
    for (unsigned long thread : threads_) PyThreadState_SetAsyncExc(thread, PyExc_KeyboardInterrupt);
  }

 private:
  std::set<unsigned long> threads_;
};

}  // namespace gpipe_fast
