// Whether a tree of modules is as it was, found without asking Python: by the identity of every object in it.
#include "bindings/bindings.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/extension.h>

#include <unordered_set>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace gpipe_fast {
namespace {

// Everything that gpipe_fast.trace.fingerprint compares by value is followed; all else is one object and counts as changed
// when it is another one. Refers to all it has seen, so that no address comes to mean something else.
class Snapshot {
 public:
  explicit Snapshot(const py::iterable& modules) {
    for (py::handle module : modules) roots_.push_back(module.ptr());
    for (PyObject* module : roots_) {
      hold(module);
      follow(module);
    }
    seen_.clear();
  }
  ~Snapshot() { clear(); }
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;

  // Whether `modules` are the ones seen, and nothing about them has changed. Microseconds.
  bool unchanged(const py::iterable& modules) const {
    size_t count = 0;
    for (py::handle module : modules) {
      if (count >= roots_.size() || roots_[count++] != module.ptr()) return false;
    }
    if (count != roots_.size() || !complete_) return false;
    for (const Typed& typed : types_) {
      if (Py_TYPE(typed.object) != typed.type) return false;
    }
    for (const Attributes& attributes : attributes_) {
      const py::object found =
          py::reinterpret_steal<py::object>(PyObject_GenericGetDict(attributes.object, nullptr));
      if (found.ptr() != attributes.dict) return false;
    }
    for (const Container& container : containers_) {
      if (!same(container)) return false;
    }
    for (const Described& tensor : tensors_) {
      if (!same(tensor)) return false;
    }
    return true;
  }

  int traverse(visitproc visit, void* arg) const {
    for (PyObject* object : held_) Py_VISIT(object);
    return 0;
  }
  void clear() {
    complete_ = false;
    for (PyObject* object : std::exchange(held_, {})) Py_DECREF(object);
  }

 private:
  struct Typed {
    PyObject* object;
    PyTypeObject* type;
  };
  struct Attributes {
    PyObject* object;
    PyObject* dict;
  };
  struct Container {
    PyObject* object;
    std::vector<PyObject*> items;  // of a dict, keys and values in turn
  };
  struct Described {
    PyObject* object;
    std::vector<int64_t> sizes, strides;
    at::ScalarType dtype;
    at::Device device;
    bool requires_grad;
  };

  void hold(PyObject* object) {
    Py_INCREF(object);
    held_.push_back(object);
  }

  void follow(PyObject* object) {
    if (!seen_.insert(object).second) return;
    if (THPVariable_Check(object)) {
      describe(object);
    } else if (PyDict_Check(object) || PyList_Check(object) || PyAnySet_Check(object) ||
               PyTuple_Check(object)) {
      Container container{object, items_of(object)};
      for (PyObject* item : container.items) {
        hold(item);
        follow(item);
      }
      // A tuple cannot change, but what is in it can.
      if (!PyTuple_Check(object)) containers_.push_back(std::move(container));
    } else if (py::isinstance(object, module_type_) || is_dataclass(object)) {
      types_.push_back({object, Py_TYPE(object)});
      PyObject* dict = PyObject_GenericGetDict(object, nullptr);
      if (dict == nullptr) {  // a dataclass with slots
        PyErr_Clear();
        complete_ = false;
        return;
      }
      held_.push_back(dict);
      attributes_.push_back({object, dict});
      follow(dict);
    }
  }

  void describe(PyObject* object) {
    types_.push_back({object, Py_TYPE(object)});
    const at::Tensor& tensor = THPVariable_Unpack(object);
    if (tensor.layout() != at::kStrided || tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) {
      complete_ = false;  // lazy parameters are among these
      return;
    }
    tensors_.push_back({object, tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type(),
                        tensor.device(), tensor.requires_grad()});
  }

  static bool is_dataclass(PyObject* object) {
    return PyObject_HasAttrString(reinterpret_cast<PyObject*>(Py_TYPE(object)), "__dataclass_fields__") == 1;
  }

  static std::vector<PyObject*> items_of(PyObject* object) {
    std::vector<PyObject*> items;
    visit_items(object, [&](PyObject* item) {
      items.push_back(item);
      return true;
    });
    return items;
  }

  static bool same(const Container& container) {
    size_t index = 0;
    const bool equal = visit_items(container.object, [&](PyObject* item) {
      return index < container.items.size() && container.items[index++] == item;
    });
    return equal && index == container.items.size();
  }

  static bool same(const Described& seen) {
    const at::Tensor& tensor = THPVariable_Unpack(seen.object);
    return tensor.sizes() == seen.sizes && tensor.strides() == seen.strides &&
           tensor.scalar_type() == seen.dtype && tensor.device() == seen.device &&
           tensor.requires_grad() == seen.requires_grad;
  }

  // Until `visit` returns false; then false.
  template <class Visit>
  static bool visit_items(PyObject* object, const Visit& visit) {
    if (PyDict_Check(object)) {
      PyObject *key, *value;
      Py_ssize_t position = 0;
      while (PyDict_Next(object, &position, &key, &value)) {
        if (!visit(key) || !visit(value)) return false;
      }
      return true;
    }
    if (PyAnySet_Check(object)) {
      for (py::handle item : py::reinterpret_borrow<py::iterable>(object)) {
        if (!visit(item.ptr())) return false;
      }
      return true;
    }
    const Py_ssize_t size = PySequence_Fast_GET_SIZE(object);
    for (Py_ssize_t i = 0; i < size; ++i) {
      if (!visit(PySequence_Fast_GET_ITEM(object, i))) return false;
    }
    return true;
  }

  py::object module_type_ = py::module_::import("torch.nn").attr("Module");
  std::vector<PyObject*> roots_;
  std::vector<PyObject*> held_;
  std::vector<Typed> types_;
  std::vector<Attributes> attributes_;
  std::vector<Container> containers_;
  std::vector<Described> tensors_;
  std::unordered_set<PyObject*> seen_;
  bool complete_ = true;
};

// A layer may refer to whatever refers to the snapshot, so the garbage collector must see through it.
void collect(PyHeapTypeObject* heap_type) {
  PyTypeObject* type = &heap_type->ht_type;
  type->tp_flags |= Py_TPFLAGS_HAVE_GC;
  type->tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (!py::detail::is_holder_constructed(self)) return 0;
    return py::cast<const Snapshot&>(py::handle(self)).traverse(visit, arg);
  };
  type->tp_clear = [](PyObject* self) {
    if (py::detail::is_holder_constructed(self)) py::cast<Snapshot&>(py::handle(self)).clear();
    return 0;
  };
}

}  // namespace

void bind_snapshot(py::module_& m) {
  py::class_<Snapshot>(m, "Snapshot", py::custom_type_setup(&collect))
      .def(py::init<const py::iterable&>(), py::arg("modules"))
      .def("unchanged", &Snapshot::unchanged, py::arg("modules"));
}

}  // namespace gpipe_fast
