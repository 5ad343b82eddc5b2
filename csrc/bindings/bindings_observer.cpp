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
enum class CodeKind : uint8_t {
  opaque,         // PyTorch or this library; the layer is not responsible for what such code calls
  user,           // the user's code
  transparent,    // the standard library, attributed to its caller
  reported,       // transparent, but every call is reported instead of only the first
  import_system,  // Python's import system; code that an import runs is executed only once anyway
};

// A profile function (PyEval_SetProfile) for the thread that starts it, in C++ because tracing makes about a million
// calls. Replaces an active profile function until stop().
class Observer {
 public:
  // `classify(frame)` returns a CodeKind, which must be the same for all frames of one function.
  // `on_frame(frame)` is called before a user function, or a standard library function on behalf of user
  // code, runs for the first time (with CodeKind::reported: every time). `on_call(function)` is called before
  // such a function calls a function written in C; if it returns true, it is not called for that C function
  // again. An exception from on_frame or on_call propagates from the observed call.
  Observer(py::function classify, py::function on_frame, py::function on_call)
      : classify_(std::move(classify)), on_frame_(std::move(on_frame)), on_call_(std::move(on_call)) {}
  ~Observer() { clear(); }
  Observer(const Observer&) = delete;
  Observer& operator=(const Observer&) = delete;

  void start(PyObject* self) {
    const PyThreadState* thread = PyThreadState_Get();
    previous_function_ = thread->c_profilefunc;
    previous_argument_ = py::reinterpret_borrow<py::object>(thread->c_profileobj);
    PyEval_SetProfile(&Observer::profile_function, self);
  }

  // Between pause() and resume() calls are not observed and have no overhead.
  void pause() { PyEval_SetProfile(nullptr, nullptr); }
  void resume(PyObject* self) { PyEval_SetProfile(&Observer::profile_function, self); }

  void stop() {
    PyEval_SetProfile(previous_function_, previous_argument_.ptr());
    previous_argument_ = py::object();
    clear();
  }

 private:
  struct CodeInfo {
    CodeKind kind;
    bool reported = false;
  };

  static int profile_function(PyObject* self, PyFrameObject* frame, int event, PyObject* argument) {
    if (event != PyTrace_CALL && event != PyTrace_C_CALL && event != PyTrace_RETURN) return 0;
    try {
      auto& observer = py::cast<Observer&>(py::handle(self));
      if (event == PyTrace_C_CALL) {
        observer.call(frame, argument);
      } else if (event == PyTrace_CALL) {
        observer.enter(frame);
      } else if (observer.import_frame_ == frame) {
        observer.import_frame_ = nullptr;
      }
      return 0;
    } catch (py::error_already_set& error) {
      error.restore();
      return -1;
    }
  }

  void enter(PyFrameObject* frame) {
    CodeInfo& info = look_up(frame);
    if (import_frame_ != nullptr || info.kind == CodeKind::opaque) return;
    if (info.kind == CodeKind::import_system) {
      import_frame_ = frame;
      return;
    }
    if (info.reported && info.kind != CodeKind::reported) return;
    if (info.kind != CodeKind::user && !on_behalf_of_user(frame)) return;
    info.reported = true;
    on_frame_(py::handle(reinterpret_cast<PyObject*>(frame)));
  }

  void call(PyFrameObject* frame, PyObject* function) {
    if (import_frame_ != nullptr) return;
    const CodeKind kind = look_up(frame).kind;
    if (kind == CodeKind::opaque || kind == CodeKind::import_system) return;
    const void* definition = nullptr;
    if (PyCFunction_Check(function)) {
      definition = reinterpret_cast<PyCFunctionObject*>(function)->m_ml;
    } else if (Py_IS_TYPE(function, &PyMethodDescr_Type)) {
      definition = reinterpret_cast<PyMethodDescrObject*>(function)->d_method;
    }
    if (definition == nullptr || approved_.count(definition) != 0) return;
    if (kind != CodeKind::user && !on_behalf_of_user(frame)) return;
    if (on_call_(py::handle(function)).cast<bool>()) approved_.insert(definition);
  }

  CodeInfo& look_up(PyFrameObject* frame) {
    auto* code = reinterpret_cast<PyObject*>(PyFrame_GetCode(frame));  // a new reference
    const auto found = code_infos_.find(code);
    if (found != code_infos_.end()) {
      Py_DECREF(code);
      return found->second;
    }
    const py::handle handle(reinterpret_cast<PyObject*>(frame));
    CodeInfo info{static_cast<CodeKind>(classify_(handle).cast<int>())};
    return code_infos_.emplace(code, info).first->second;
  }

  bool on_behalf_of_user(PyFrameObject* frame) {
    py::object caller =
        py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(frame)));
    while (caller) {
      auto* caller_frame = reinterpret_cast<PyFrameObject*>(caller.ptr());
      const CodeKind kind = look_up(caller_frame).kind;
      if (kind != CodeKind::transparent && kind != CodeKind::reported) return kind == CodeKind::user;
      caller = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(caller_frame)));
    }
    return false;
  }

  void clear() {
    for (const auto& [code, info] : std::exchange(code_infos_, {})) Py_DECREF(code);
    import_frame_ = nullptr;
  }

  const py::function classify_, on_frame_, on_call_;
  std::unordered_map<PyObject*, CodeInfo> code_infos_;  // owns references to the code objects until stop()
  std::unordered_set<const void*> approved_;            // definitions of C functions that on_call approved
  const PyFrameObject* import_frame_ = nullptr;         // the frame of the outermost import in progress
  Py_tracefunc previous_function_ = nullptr;
  py::object previous_argument_;
};

}  // namespace

void bind_observer(py::module_& m) {
  py::class_<Observer>(m, "Observer")
      .def(py::init<py::function, py::function, py::function>(), py::arg("classify"), py::arg("on_frame"),
           py::arg("on_call"))
      .def("start", [](const py::object& self) { self.cast<Observer&>().start(self.ptr()); })
      .def("pause", &Observer::pause)
      .def("resume", [](const py::object& self) { self.cast<Observer&>().resume(self.ptr()); })
      .def("stop", &Observer::stop);
}

}  // namespace gpipe_fast
