// Guards on Python state: a snapshot checks whether any state that programs were traced from has changed.
#include "bindings/bindings.h"
#include "program/program.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <unordered_set>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace gpipe_fast {
namespace {

// A record of Python objects. The check compares objects by identity. The snapshot owns references to all recorded
// objects, so that no address is reused for another object.
class Snapshot {
 public:
  Snapshot() = default;
  ~Snapshot() { clear(); }
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;

  // Records the modules themselves, in order.
  void set_roots(const py::iterable& modules) {
    for (py::handle module : modules) {
      roots_.push_back(module.ptr());
      retain(module.ptr());
    }
  }
  // Records an object's class and `__dict__`; with `items`, also all items of the `__dict__`.
  void add_attributes(py::handle object, bool items) {
    if (!retain_if_new(object)) return;
    types_.push_back({object.ptr(), Py_TYPE(object.ptr())});
    PyObject* dict = PyObject_GenericGetDict(object.ptr(), nullptr);
    if (dict == nullptr) throw py::error_already_set();
    references_.push_back(dict);
    attributes_.push_back({object.ptr(), dict});
    if (items) add_container(py::reinterpret_borrow<py::dict>(dict));
  }
  // Records all items of a dict.
  void add_container(const py::dict& dict) {
    if (retain_if_new(dict)) dicts_.push_back(record(dict.ptr()));
  }
  // Records some items of a dict, or their absence; with `count`, also the size of the dict.
  void add_dict_items(const py::dict& dict, const py::iterable& keys, bool count) {
    retain(dict.ptr());
    DictItems items{dict.ptr(), count ? PyDict_Size(dict.ptr()) : -1, {}};
    for (py::handle key : keys) {
      retain(key.ptr());
      PyObject* value = item_of(dict.ptr(), key.ptr());
      if (value != nullptr) retain(value);
      items.found.emplace_back(key.ptr(), value);
    }
    items_.push_back(std::move(items));
  }
  // Records the attributes of a class, without those of its bases.
  void add_class(const py::type& type) {
    if (!retain_if_new(type)) return;
    auto* object = reinterpret_cast<PyTypeObject*>(type.ptr());
    Dict recorded = record(dict_of(object).ptr());
    const auto filled = [](const auto& item) { return is_filled_by_python(item.first); };
    recorded.items.erase(std::remove_if(recorded.items.begin(), recorded.items.end(), filled),
                         recorded.items.end());
    retain(object->tp_mro);
    classes_.push_back({object, version_of(object), object->tp_mro, std::move(recorded.items)});
  }
  // Records a tensor's class, TensorImpl, layout, device and requires_grad. `torch.utils.swap_tensors`
  // exchanges the TensorImpl; a counted reference to it would make that an error.
  void add_tensor(py::handle object) {
    if (!retain_if_new(object)) return;
    types_.push_back({object.ptr(), Py_TYPE(object.ptr())});
    const at::Tensor& tensor = THPVariable_Unpack(object.ptr());
    if (tensor.layout() != at::kStrided || tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) {
      valid_ = false;  // for example a lazy module's parameter
      return;
    }
    tensors_.push_back({object.ptr(), tensor.unsafeGetTensorImpl(), Layout::of(tensor), tensor.device(),
                        tensor.requires_grad()});
  }

  // Returns whether `modules` are the roots and no recorded state has changed. Takes microseconds.
  bool unchanged(const py::iterable& modules) const {
    size_t count = 0;
    for (py::handle module : modules) {
      if (count >= roots_.size() || roots_[count++] != module.ptr()) return false;
    }
    return count == roots_.size() && valid_ && all_same(types_) && all_same(attributes_) &&
           all_same(dicts_) && all_same(tensors_) && all_same(items_) && all_same(classes_);
  }

  int traverse(visitproc visit, void* arg) const {
    for (PyObject* object : references_) Py_VISIT(object);
    return 0;
  }
  void clear() {
    valid_ = false;
    for (PyObject* object : std::exchange(references_, {})) Py_DECREF(object);
  }

 private:
  struct TypeRecord {
    PyObject* object;
    PyTypeObject* type;
    bool same() const { return Py_TYPE(object) == type; }
  };
  struct Attributes {
    PyObject* object;
    PyObject* dict;
    bool same() const {
      const auto found = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(object, nullptr));
      return found.ptr() == dict;
    }
  };
  struct Dict {
    PyObject* dict;
    std::vector<std::pair<PyObject*, PyObject*>> items;
    bool same() const {
      if (PyDict_Size(dict) != static_cast<Py_ssize_t>(items.size())) return false;
      PyObject *key, *value;
      Py_ssize_t position = 0;
      for (const auto& item : items) {
        if (!PyDict_Next(dict, &position, &key, &value) || item != std::pair(key, value)) return false;
      }
      return true;
    }
  };
  struct Tensor {
    PyObject* object;
    const c10::TensorImpl* impl;
    Layout layout;
    at::Device device;
    bool requires_grad;
    bool same() const {
      const at::Tensor& tensor = THPVariable_Unpack(object);
      return tensor.unsafeGetTensorImpl() == impl && layout.matches(tensor) && tensor.device() == device &&
             tensor.requires_grad() == requires_grad;
    }
  };
  struct DictItems {
    PyObject* dict;
    Py_ssize_t size;                                     // -1 if not recorded
    std::vector<std::pair<PyObject*, PyObject*>> found;  // null if absent
    bool same() const {
      if (size >= 0 && PyDict_Size(dict) != size) return false;
      for (const auto& [key, value] : found) {
        if (item_of(dict, key) != value) return false;
      }
      return true;
    }
  };
  struct Class {
    PyTypeObject* type;
    // Python assigns a new version when the class or a base changes; 0 if unassigned.
    mutable unsigned int version;
    PyObject* bases;                                     // the class's method resolution order
    std::vector<std::pair<PyObject*, PyObject*>> items;  // without those that Python fills in by itself
    bool same() const {
      if (version != 0 && type->tp_version_tag == version) return true;
      if (type->tp_mro != bases) return false;
      const py::object dict = dict_of(type);
      PyObject *key, *value;
      Py_ssize_t position = 0;
      auto item = items.begin();
      while (PyDict_Next(dict.ptr(), &position, &key, &value)) {
        if (item != items.end() && *item == std::pair(key, value)) {
          ++item;
        } else if (!is_filled_by_python(key)) {
          return false;
        }
      }
      if (item != items.end()) return false;
      version = version_of(type);
      return true;
    }
  };

  template <class Recorded>
  static bool all_same(const std::vector<Recorded>& recorded) {
    for (const Recorded& one : recorded) {
      if (!one.same()) return false;
    }
    return true;
  }

  void retain(PyObject* object) {
    Py_INCREF(object);
    references_.push_back(object);
  }
  bool retain_if_new(py::handle object) {
    if (!seen_.insert(object.ptr()).second) return false;
    retain(object.ptr());
    return true;
  }

  Dict record(PyObject* dict) {
    Dict recorded{dict, {}};
    PyObject *key, *value;
    Py_ssize_t position = 0;
    while (PyDict_Next(dict, &position, &key, &value)) {
      recorded.items.emplace_back(key, value);
      retain(key);
      retain(value);
    }
    return recorded;
  }

  // Returns a borrowed reference; null if the key is absent.
  static PyObject* item_of(PyObject* dict, PyObject* key) {
    PyObject* value = PyDict_GetItemWithError(dict, key);
    if (value == nullptr && PyErr_Occurred()) throw py::error_already_set();
    return value;
  }

  // Returns whether Python adds an item to a class when an object is copied, or when annotations are read.
  static bool is_filled_by_python(PyObject* key) {
    return PyUnicode_CompareWithASCIIString(key, "__slotnames__") == 0 ||
           PyUnicode_CompareWithASCIIString(key, "__annotations__") == 0;
  }

  static py::object dict_of(PyTypeObject* type) {
#if PY_VERSION_HEX >= 0x030C0000
    return py::reinterpret_steal<py::object>(PyType_GetDict(type));
#else
    return py::reinterpret_borrow<py::object>(type->tp_dict);
#endif
  }

  // Returns the class's version tag. The attribute lookup makes Python assign a tag to a class that has none.
  static unsigned int version_of(PyTypeObject* type) {
    const auto name = py::reinterpret_steal<py::object>(
        PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__init__"));
    if (!name) PyErr_Clear();
    return type->tp_version_tag;
  }

  std::vector<PyObject*> roots_;
  std::vector<PyObject*> references_;
  std::vector<TypeRecord> types_;
  std::vector<Attributes> attributes_;
  std::vector<Dict> dicts_;
  std::vector<Tensor> tensors_;
  std::vector<DictItems> items_;
  std::vector<Class> classes_;
  std::unordered_set<PyObject*> seen_;
  bool valid_ = true;
};

// Adds garbage collection to the Python type: a layer can refer to an owner of the snapshot, which makes a cycle.
void enable_garbage_collection(PyHeapTypeObject* heap_type) {
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
  py::class_<Snapshot>(m, "Snapshot", py::custom_type_setup(&enable_garbage_collection))
      .def(py::init<>())
      .def("set_roots", &Snapshot::set_roots, py::arg("modules"))
      .def("add_attributes", &Snapshot::add_attributes, py::arg("object"), py::arg("items"))
      .def("add_container", &Snapshot::add_container, py::arg("dict"))
      .def("add_dict_items", &Snapshot::add_dict_items, py::arg("dict"), py::arg("keys"), py::arg("count"))
      .def("add_class", &Snapshot::add_class, py::arg("type"))
      .def("add_tensor", &Snapshot::add_tensor, py::arg("tensor"))
      .def("unchanged", &Snapshot::unchanged, py::arg("modules"));
}

}  // namespace gpipe_fast
