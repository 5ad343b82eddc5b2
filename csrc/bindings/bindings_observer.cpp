// Observes Python while a layer is traced: which of the user's functions run, and which C functions they call.
#include "bindings/bindings.h"

#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace gpipe_fast {
namespace {

// Classifies the code of a Python frame.
enum class Code : uint8_t {
  opaque,       // PyTorch or this library; the layer is not responsible for what such code calls
  own,          // the user's code
  transparent,  // the standard library, attributed to its caller
  reported,     // transparent, but every call is reported instead of only the first
  importing,    // Python's import system; code that an import runs is executed only once anyway
};

// A profile function (PyEval_SetProfile) for the thread that starts it, in C++ because tracing makes about a million
// calls. Replaces an active profile function until stop().
class Observer {
 public:
  // `kind_of(frame)` returns a Code, which must be the same for all frames of one function. `on_frame(frame)` is called
  // before a user function, or a standard library function on behalf of user code, runs for the first time (with
  // Code::reported: every time).
  // `on_call(function)` is called before such a function calls a function written in C; if it returns true, it is not
  // called for that C function again. An exception from on_frame or on_call propagates from the observed call.
  Observer(py::function kind_of, py::function on_frame, py::function on_call)
      : kind_of_(std::move(kind_of)), on_frame_(std::move(on_frame)), on_call_(std::move(on_call)) {}
  ~Observer() { forget(); }
  Observer(const Observer&) = delete;
  Observer& operator=(const Observer&) = delete;

  void start(PyObject* self) {
    const PyThreadState* thread = PyThreadState_Get();
    before_ = thread->c_profilefunc;
    before_object_ = py::reinterpret_borrow<py::object>(thread->c_profileobj);
    PyEval_SetProfile(&Observer::notice, self);
  }

  // Between pause() and resume() calls are not observed and have no overhead.
  void pause() { PyEval_SetProfile(nullptr, nullptr); }
  void resume(PyObject* self) { PyEval_SetProfile(&Observer::notice, self); }

  void stop() {
    PyEval_SetProfile(before_, before_object_.ptr());
    before_object_ = py::object();
    forget();
  }

 private:
  struct Known {
    Code code;
    bool reported = false;
  };

  static int notice(PyObject* self, PyFrameObject* frame, int what, PyObject* argument) {
    if (what != PyTrace_CALL && what != PyTrace_C_CALL && what != PyTrace_RETURN) return 0;
    try {
      auto& observer = py::cast<Observer&>(py::handle(self));
      if (what == PyTrace_C_CALL) {
        observer.call(frame, argument);
      } else if (what == PyTrace_CALL) {
        observer.enter(frame);
      } else if (observer.importing_ == frame) {
        observer.importing_ = nullptr;
      }
      return 0;
    } catch (py::error_already_set& error) {
      error.restore();
      return -1;
    }
  }

  void enter(PyFrameObject* frame) {
    Known& known = look_up(frame);
    if (importing_ != nullptr || known.code == Code::opaque) return;
    if (known.code == Code::importing) {
      importing_ = frame;
      return;
    }
    if (known.reported && known.code != Code::reported) return;
    if (known.code != Code::own && !on_behalf_of_user(frame)) return;
    known.reported = true;
    on_frame_(py::handle(reinterpret_cast<PyObject*>(frame)));
  }

  void call(PyFrameObject* frame, PyObject* function) {
    if (importing_ != nullptr) return;
    const Code code = look_up(frame).code;
    if (code == Code::opaque || code == Code::importing) return;
    const void* definition = nullptr;
    if (PyCFunction_Check(function)) {
      definition = reinterpret_cast<PyCFunctionObject*>(function)->m_ml;
    } else if (Py_IS_TYPE(function, &PyMethodDescr_Type)) {
      definition = reinterpret_cast<PyMethodDescrObject*>(function)->d_method;
    }
    if (definition == nullptr || harmless_.count(definition) != 0) return;
    if (code != Code::own && !on_behalf_of_user(frame)) return;
    if (on_call_(py::handle(function)).cast<bool>()) harmless_.insert(definition);
  }

  Known& look_up(PyFrameObject* frame) {
    auto* code = reinterpret_cast<PyObject*>(PyFrame_GetCode(frame));  // a new reference
    const auto found = known_.find(code);
    if (found != known_.end()) {
      Py_DECREF(code);
      return found->second;
    }
    const py::handle handle(reinterpret_cast<PyObject*>(frame));
    Known known{static_cast<Code>(kind_of_(handle).cast<int>())};
    return known_.emplace(code, known).first->second;
  }

  bool on_behalf_of_user(PyFrameObject* frame) {
    py::object caller =
        py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(frame)));
    while (caller) {
      auto* now = reinterpret_cast<PyFrameObject*>(caller.ptr());
      const Code code = look_up(now).code;
      if (code != Code::transparent && code != Code::reported) return code == Code::own;
      caller = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(now)));
    }
    return false;
  }

  void forget() {
    for (const auto& [code, known] : std::exchange(known_, {})) Py_DECREF(code);
    importing_ = nullptr;
  }

  const py::function kind_of_, on_frame_, on_call_;
  std::unordered_map<PyObject*, Known> known_;  // owns references to the code objects until stop()
  std::unordered_set<const void*> harmless_;    // definitions of C functions that on_call approved
  const PyFrameObject* importing_ = nullptr;    // the frame of the outermost import in progress
  Py_tracefunc before_ = nullptr;
  py::object before_object_;
};

}  // namespace

void bind_observer(py::module_& m) {
  py::class_<Observer>(m, "Observer")
      .def(py::init<py::function, py::function, py::function>(), py::arg("kind_of"), py::arg("on_frame"),
           py::arg("on_call"))
      .def("start", [](const py::object& self) { self.cast<Observer&>().start(self.ptr()); })
      .def("pause", &Observer::pause)
      .def("resume", [](const py::object& self) { self.cast<Observer&>().resume(self.ptr()); })
      .def("stop", &Observer::stop);
}

}  // namespace gpipe_fast
