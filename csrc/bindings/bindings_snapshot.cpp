// Guards on Python state: a snapshot checks whether any state that programs were traced from has changed.
#include "bindings/bindings.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstring>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace gpipe_fast {
namespace {

// A record of Python objects. gpipe_fast.trace.fingerprint records every object before it reads the object. The check
// compares objects by identity, and arrays by content. The snapshot owns references to all recorded objects, so that
// no address is reused for another object.
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
    if (items) add_container(dict);
  }
  // Records all items of a dict, list, set or deque.
  void add_container(py::handle object) {
    if (!retain_if_new(object)) return;
    Container container{object.ptr(), {}};
    visit_items(object.ptr(), [&](PyObject* item) {
      container.items.push_back(item);
      retain(item);
      return true;
    });
    containers_.push_back(std::move(container));
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
  // Records the content of a closure cell, which is a variable of an enclosing function.
  void add_cell(py::handle cell) {
    if (!retain_if_new(cell)) return;
    PyObject* content = PyCell_GET(cell.ptr());
    if (content != nullptr) retain(content);
    cells_.push_back({cell.ptr(), content});
  }
  // Records the attributes of a class, without those of its bases.
  void add_class(const py::type& type) {
    if (!retain_if_new(type)) return;
    auto* object = reinterpret_cast<PyTypeObject*>(type.ptr());
    const py::object dict = dict_of(object);
    Class recorded{object, 0, {type.ptr(), {}}};
    visit_items(dict.ptr(), [&](PyObject* item) {
      recorded.dict.items.push_back(item);
      retain(item);
      return true;
    });
    recorded.version = version_of(object);
    classes_.push_back(std::move(recorded));
  }
  // Records a tensor's class, shape, strides, dtype, device and requires_grad.
  void add_tensor(py::handle object) {
    if (!retain_if_new(object)) return;
    types_.push_back({object.ptr(), Py_TYPE(object.ptr())});
    const at::Tensor& tensor = THPVariable_Unpack(object.ptr());
    if (tensor.layout() != at::kStrided || tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) {
      valid_ = false;  // for example a lazy module's parameter
      return;
    }
    tensors_.push_back({object.ptr(), tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type(),
                        tensor.device(), tensor.requires_grad()});
  }
  // Records the bytes of an array.
  void add_array(py::handle object) {
    if (!retain_if_new(object)) return;
    arrays_.push_back({object.ptr(), bytes_of(object.ptr())});
  }
  // Records an attribute that is stored in a slot (`__slots__`) of its object.
  void add_slot(py::handle object, const py::str& name) {
    retain(object.ptr());
    retain(name.ptr());
    Slot slot{object.ptr(), name.ptr(), slot_of(object.ptr(), name.ptr()).release().ptr()};
    if (slot.value != nullptr) references_.push_back(slot.value);
    slots_.push_back(slot);
  }

  // Returns whether `modules` are the roots and no recorded state has changed. Takes microseconds.
  bool unchanged(const py::iterable& modules) const {
    size_t count = 0;
    for (py::handle module : modules) {
      if (count >= roots_.size() || roots_[count++] != module.ptr()) return false;
    }
    return count == roots_.size() && valid_ && all_same(types_) && all_same(attributes_) &&
           all_same(containers_) && all_same(tensors_) && all_same(items_) && all_same(cells_) &&
           all_same(classes_) && all_same(arrays_) && all_same(slots_);
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
  struct Container {
    PyObject* object;
    std::vector<PyObject*> items;  // for a dict, alternating keys and values
    bool same() const { return has_items(object); }
    bool has_items(PyObject* container) const {
      size_t index = 0;
      const bool equal = visit_items(
          container, [&](PyObject* item) { return index < items.size() && items[index++] == item; });
      return equal && index == items.size();
    }
  };
  struct Tensor {
    PyObject* object;
    std::vector<int64_t> sizes, strides;
    at::ScalarType dtype;
    at::Device device;
    bool requires_grad;
    bool same() const {
      const at::Tensor& tensor = THPVariable_Unpack(object);
      return tensor.sizes() == sizes && tensor.strides() == strides && tensor.scalar_type() == dtype &&
             tensor.device() == device && tensor.requires_grad() == requires_grad;
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
  struct Cell {
    PyObject* cell;
    PyObject* content;
    bool same() const { return PyCell_GET(cell) == content; }
  };
  struct Class {
    PyTypeObject* type;
    mutable unsigned int
        version;  // Python assigns a new one when the class or a base changes; 0 if unassigned
    Container dict;
    bool same() const {
      if (version != 0 && type->tp_version_tag == version) return true;
      if (!dict.has_items(dict_of(type).ptr())) return false;
      version = version_of(type);
      return true;
    }
  };
  struct Array {
    PyObject* object;
    std::string bytes;
    bool same() const { return bytes_of(object) == bytes; }
  };
  struct Slot {
    PyObject* object;
    PyObject* name;
    PyObject* value;
    bool same() const { return slot_of(object, name).ptr() == value; }
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

  // Returns a borrowed reference; null if the key is absent.
  static PyObject* item_of(PyObject* dict, PyObject* key) {
    PyObject* value = PyDict_GetItemWithError(dict, key);
    if (value == nullptr && PyErr_Occurred()) throw py::error_already_set();
    return value;
  }

  static py::object slot_of(PyObject* object, PyObject* name) {
    auto value = py::reinterpret_steal<py::object>(PyObject_GenericGetAttr(object, name));
    if (!value) PyErr_Clear();
    return value;
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

  static std::string bytes_of(PyObject* object) {
    Py_buffer view;
    if (PyObject_GetBuffer(object, &view, PyBUF_FULL_RO) != 0) throw py::error_already_set();
    std::string bytes(static_cast<size_t>(view.len), '\0');
    const int failed = PyBuffer_ToContiguous(bytes.data(), &view, view.len, 'C');
    PyBuffer_Release(&view);
    if (failed != 0) throw py::error_already_set();
    return bytes;
  }

  // Calls `visit` for each item until one call returns false. Returns false if one did.
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
    if (!PyList_Check(object) && !PyTuple_Check(object)) {
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

  std::vector<PyObject*> roots_;
  std::vector<PyObject*> references_;
  std::vector<TypeRecord> types_;
  std::vector<Attributes> attributes_;
  std::vector<Container> containers_;
  std::vector<Tensor> tensors_;
  std::vector<DictItems> items_;
  std::vector<Cell> cells_;
  std::vector<Class> classes_;
  std::vector<Array> arrays_;
  std::vector<Slot> slots_;
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
      .def("add_container", &Snapshot::add_container, py::arg("container"))
      .def("add_dict_items", &Snapshot::add_dict_items, py::arg("dict"), py::arg("keys"), py::arg("count"))
      .def("add_cell", &Snapshot::add_cell, py::arg("cell"))
      .def("add_class", &Snapshot::add_class, py::arg("type"))
      .def("add_tensor", &Snapshot::add_tensor, py::arg("tensor"))
      .def("add_array", &Snapshot::add_array, py::arg("array"))
      .def("add_slot", &Snapshot::add_slot, py::arg("object"), py::arg("name"))
      .def("unchanged", &Snapshot::unchanged, py::arg("modules"));
}

}  // namespace gpipe_fast
