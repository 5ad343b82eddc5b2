"""Values that a forward may read: how each is made and changed in place, and how a number is read from it."""

from __future__ import annotations

import array
import collections
import contextvars
import ctypes
import dataclasses
import datetime
import enum
import fractions
import functools
import itertools
import logging
import math
import operator
import pathlib
import re
import string
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn


class Value(NamedTuple):
    """A kind of values.

    Attributes:
        make: returns a new value, from which a forward reads one number if it is made of 1, another if of 2.
        change: changes a value that was made of 1 in place as if it was made of 2; None if nothing can.
    """

    make: Callable[[Any], Any]
    change: Callable[[Any], object] | None = None


class Box:
    """An object with every special method."""

    def __init__(self, scale: Any) -> None:
        self.scale = scale

    def __float__(self) -> float:
        return float(self.scale)

    def __int__(self) -> int:
        return int(self.scale)

    def __index__(self) -> int:
        return int(self.scale)

    def __len__(self) -> int:
        return int(self.scale)

    def __bool__(self) -> bool:
        return bool(self.scale > 1.5)

    def __iter__(self) -> Iterator[Any]:
        return iter([self.scale])

    def __getitem__(self, index: object) -> Any:
        return self.scale

    def __contains__(self, value: object) -> bool:
        return bool(value == self.scale)

    def __call__(self) -> Any:
        return self.scale

    def __eq__(self, other: object) -> bool:
        return bool(self.scale == getattr(other, "scale", other))

    def __hash__(self) -> int:
        return hash(self.scale)

    def __gt__(self, other: float) -> bool:
        return bool(self.scale > other)

    def __mul__(self, other: Any) -> Any:
        return self.scale * other

    __rmul__ = __mul__

    def __format__(self, text: str) -> str:
        return format(self.scale, text)

    def get(self, *args: object) -> Any:
        return self.scale


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale: float) -> None:
        self.scale = scale


@dataclasses.dataclass
class Data:
    scale: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: Any


class Pair(NamedTuple):
    scale: Any
    other: float = 3.0


class Color(enum.Enum):
    ONE, TWO = 1, 2


class Number(enum.IntEnum):
    ONE, TWO = 1, 2


class Array(np.ndarray):
    pass


class Interface:
    def __init__(self, array: Any) -> None:
        self.array = array

    @property
    def __array_interface__(self) -> Any:
        return self.array.__array_interface__


class Struct(ctypes.Structure):
    _fields_ = (("scale", ctypes.c_double),)


class Descriptor:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __get__(self, instance: object, owner: type) -> float:
        return self.scale


class OwnProperty(property):
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else instance.box[0]


class ByName:
    def __init__(self, scale: float) -> None:
        self.box = {"scale": scale}

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["box"][name]


class Intercepted:
    def __init__(self, scale: float) -> None:
        self.box = [scale]

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__
        return own(self, "box")[0] if name == "scale" else own(self, name)


class Cached:
    def __init__(self, scale: float) -> None:
        self.number = scale

    @functools.cached_property
    def own(self) -> float:
        return self.number

    @property
    def scale(self) -> float:
        return self.own


class Meta(type):
    box: list[float]
    scale = property(lambda cls: cls.box[0])

    def __getitem__(cls, index: object) -> float:
        return cls.box[0]

    def __iter__(cls) -> Iterator[float]:
        return iter(cls.box)

    def __float__(cls) -> float:
        return cls.box[0]

    def __bool__(cls) -> bool:
        return cls.box[0] > 1.5

    def __eq__(cls, other: object) -> bool:
        return cls.box[0] == other

    def __hash__(cls) -> int:
        return 5


class Computed(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.box = [scale]

    def forward(self) -> float:
        return self.box[0]

    scale = property(lambda self: self.box[0])
    __len__ = lambda self: int(self.box[0])  # noqa: E731
    __getitem__ = lambda self, index: self.box[0]  # noqa: E731
    __iter__ = lambda self: iter(self.box)  # noqa: E731


def own(base: type, args: tuple[Any, ...], *names: str) -> Value:
    """Returns a kind of objects of a class whose methods return an attribute, not what the base's would."""
    cls = own_class(base, *names)
    return Value(lambda scale: with_scale(cls(*args), scale), attribute())


def own_class(base: type, *names: str) -> type:
    """Returns a class with methods that return an attribute, not what the base's would."""
    methods: dict[str, Callable[..., Any]] = {
        "__iter__": lambda self: iter([self.scale]),
        "__len__": lambda self: int(self.scale),
        "__bool__": lambda self: self.scale > 1.5,
        "__contains__": lambda self, value: value == self.scale,
        "__index__": lambda self: int(self.scale),
        "__int__": lambda self: int(self.scale),
        "__str__": lambda self: str(self.scale),
        "__format__": lambda self, text: str(self.scale),
        "__hash__": lambda self: hash(self.scale),
        "__eq__": lambda self, other: self.scale == other,
        "__gt__": lambda self, other: self.scale > other,
        "values": lambda self: [self.scale],
        "items": lambda self: [("scale", self.scale)],
    }
    own = {name: methods.get(name, lambda self, *args: self.scale) for name in names}
    return type(f"Own{base.__name__.title()}", (base,), own)


def with_scale(value: Any, scale: Any) -> Any:
    value.scale = scale
    return value


def item(key: Any, value: Any = 2.0) -> Callable[[Any], object]:
    return lambda held: operator.setitem(held, key, value)


def attribute(name: str = "scale", value: Any = 2.0) -> Callable[[Any], object]:
    return lambda held: setattr(held, name, value)


def filled(held: Any) -> None:
    held.fill(2)


def shared(make: Callable[[Any], Any], change: Callable[[Any], object]) -> Value:
    """Returns a kind of values that refer to another one, which ``make`` returns first, and which changes."""
    kept: dict[int, Any] = {}

    def made(scale: Any) -> Any:
        own, value = make(scale)
        kept[id(value)] = (own, value)
        return value

    return Value(made, lambda value: change(kept[id(value)][0]))


def view_of(name: str) -> Value:
    def make(scale: Any) -> Any:
        own = {"scale": scale}
        return own, getattr(own, name)()

    return shared(make, item("scale"))


def keys_view(scale: float) -> Any:
    own = {scale: "scale"}
    return own, own.keys()


def function_of(scale: Any) -> Callable[[], Any]:
    return lambda: scale


def with_default(scale: Any) -> Callable[..., Any]:
    return lambda found=scale: found


def with_keyword(scale: Any) -> Callable[..., Any]:
    return lambda *, found=scale: found


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(int(seed))


def module(scale: Any) -> types.ModuleType:
    return with_scale(types.ModuleType("a_module"), scale)


def module_with_getattr(scale: Any) -> types.ModuleType:
    found = types.ModuleType("a_module")
    found.box = [scale]  # type: ignore[attr-defined]
    found.__getattr__ = lambda name: found.box[0]  # type: ignore[method-assign]
    return found


def logger(level: float) -> logging.Logger:
    found = logging.Logger("a logger")
    found.setLevel(int(level))
    return found


def local(scale: Any) -> threading.local:
    return with_scale(threading.local(), scale)


def context(scale: Any) -> contextvars.ContextVar[Any]:
    found = contextvars.ContextVar[Any]("a variable")
    found.set(scale)
    return found


def of_type(kind: Any) -> Callable[[Any], Any]:
    return lambda scale: kind(int(scale))


def chosen(one: Any, two: Any) -> Value:
    """Returns a kind of values that are constants."""
    return Value(lambda scale: one if scale == 1 else two)


RECORD = [("scale", "f8"), ("other", "i4")]


def structured(scale: float) -> Any:
    return np.array([(scale, 2)], RECORD)


def numpy_values() -> Iterator[tuple[str, Value]]:
    for code in "?bhilqBHILQefdgFDG":
        dtype = np.dtype(code)
        # A bool is 0 or 1, and other numbers are 1 or 2.
        off = 1 if code == "?" else 0
        as_scalar = lambda scale, dtype=dtype, off=off: dtype.type(scale - off)  # noqa: E731
        make = lambda scale, dtype=dtype, off=off: np.array(scale - off, dtype)  # noqa: E731
        yield f"NumPy {dtype}", Value(as_scalar)
        yield f"0-d array of {dtype}", Value(make, item((), 2 - off))
        yield f"array of {dtype}", Value(lambda scale, make=make: make(scale)[None], item(0, 2 - off))
    yield "0-d array of big-endian numbers", Value(lambda scale: np.array(scale, ">f4"), item(()))
    yield "0-d array of objects", Value(lambda scale: np.array(scale, object), item(()))
    yield "array of objects", Value(lambda scale: np.array([scale, None], object), item(0))
    yield (
        "array of dicts",
        Value(lambda scale: np.array([{"scale": scale}]), lambda held: held[0].update(scale=2.0)),
    )
    yield "structured array", Value(structured, lambda held: held["scale"].fill(2))
    yield "NumPy record", Value(lambda scale: structured(scale)[0], item("scale"))
    yield "record array", Value(lambda scale: structured(scale).view(np.recarray), item("scale"))
    yield "NumPy time", Value(lambda scale: np.timedelta64(int(scale), "s"))
    yield "masked array", Value(lambda scale: np.ma.array([scale, 3.0]), item(0))
    yield "subclass of arrays", Value(lambda scale: np.array(scale).view(Array), item(()))
    yield "view of an array", shared(lambda scale: (own := np.full(2, scale), own[:1]), filled)
    yield "read-only view", shared(lambda s: (own := np.array(s), np.broadcast_to(own, ())), filled)
    yield (
        "array of a tensor",
        shared(lambda s: (own := torch.tensor(s), own.numpy()), lambda own: own.fill_(2)),
    )
    yield "array's iterator", shared(lambda scale: (own := np.full(9, scale), own.flat), filled)
    yield "array interface", Value(lambda s: Interface(np.array([s])), lambda held: held.array.fill(2))
    yield "NumPy type", chosen(np.dtype("f4"), np.dtype("f8"))


VALUES: dict[str, Value] = {
    **dict(numpy_values()),
    # Numbers, text and constants.
    "bool": chosen(False, True),
    "int": Value(int),
    "float": Value(float),
    "complex": Value(complex),
    "text": Value(lambda scale: str(int(scale))),
    "None": chosen(None, 2.0),
    "Enum": chosen(Color.ONE, Color.TWO),
    "IntEnum": chosen(Number.ONE, Number.TWO),
    "subclass of float": Value(own_class(float)),
    "subclass of str": Value(lambda scale: own_class(str)(int(scale))),
    "Fraction": Value(lambda scale: fractions.Fraction(int(scale)), attribute("_numerator", 2)),
    "date": Value(lambda scale: datetime.date(2000, 1, int(scale))),
    "path": Value(lambda scale: pathlib.PurePosixPath(str(int(scale)))),
    "pattern": Value(lambda scale: re.compile(str(int(scale)))),
    "template": Value(lambda scale: string.Template(str(int(scale))), attribute("template", "2")),
    "exception": Value(ValueError, attribute("args", (2.0,))),
    "torch.dtype": chosen(torch.float32, torch.float64),
    "torch.device": chosen(torch.device("cpu"), torch.device("meta")),
    # Containers.
    "list": Value(lambda scale: [scale], item(0)),
    "tuple": Value(lambda scale: (scale,)),
    "tuple of a list": Value(lambda scale: ([scale],), lambda held: item(0)(held[0])),
    "tuple of a set": Value(
        lambda s: (frozenset({7.0}), {s}), lambda held: (held[1].clear(), held[1].add(2.0))
    ),
    "tuple of an array": Value(lambda scale: (np.array(scale),), lambda held: held[0].fill(2)),
    "dict": Value(lambda scale: {"scale": scale}, item("scale")),
    "dict of an array": Value(lambda s: {"scale": np.array(s)}, lambda held: held["scale"].fill(2)),
    "order of a dict": Value(
        lambda scale: {1: 7.0, 2: 8.0} if scale == 1 else {2: 8.0, 1: 7.0},
        lambda held: operator.setitem(held, 1, held.pop(1)),
    ),
    "OrderedDict": Value(lambda scale: collections.OrderedDict(scale=scale), item("scale")),
    "defaultdict": Value(lambda scale: collections.defaultdict(float, scale=scale), item("scale")),
    "ChainMap": Value(lambda scale: collections.ChainMap({"scale": scale}), item("scale")),
    "UserDict": Value(lambda scale: collections.UserDict(scale=scale), item("scale")),
    "UserList": Value(lambda scale: collections.UserList([scale]), item(0)),
    "keys of a dict": shared(keys_view, lambda own: (own.clear(), own.update({2.0: "scale"}))),
    "values of a dict": view_of("values"),
    "items of a dict": view_of("items"),
    "view of a dict": shared(
        lambda scale: (own := {"scale": scale}, types.MappingProxyType(own)), item("scale")
    ),
    "set": Value(lambda scale: {scale}, lambda held: (held.clear(), held.add(2.0))),
    "frozenset": Value(lambda scale: frozenset({scale})),
    "deque": Value(lambda scale: collections.deque([scale]), item(0)),
    "range": Value(lambda scale: range(int(scale), 3)),
    "slice": Value(lambda scale: slice(0, int(scale))),
    "torch.Size": Value(lambda scale: torch.Size([int(scale)])),
    "bytearray": Value(lambda scale: bytearray(str(int(scale)).encode()), item(0, 50)),
    "memoryview": shared(lambda scale: (own := bytearray([int(scale)]), memoryview(own)), item(0, 2)),
    "array of doubles": Value(lambda scale: array.array("d", [scale]), item(0)),
    "namedtuple": Value(Pair),
    "nested": Value(
        lambda scale: {"a": [({"scale": scale},)]}, lambda held: held["a"][0][0].update(scale=2.0)
    ),
    # Subclasses with own methods.
    **{
        f"own {base.__name__}": own(base, args, *names)
        for base, args, names in (
            (
                list,
                ([7.0],),
                ("__iter__", "__getitem__", "__len__", "__contains__", "__bool__", "__eq__", "__hash__"),
            ),
            (tuple, ([7.0],), ("__iter__", "__getitem__", "__len__", "__contains__")),
            (dict, ({"scale": 7.0},), ("__iter__", "__getitem__", "get", "values", "items", "__len__")),
            (collections.OrderedDict, ({"scale": 7.0},), ("__getitem__", "get", "values", "items")),
            (collections.deque, ([7.0],), ("__iter__", "__getitem__", "__len__")),
            (set, ([7.0],), ("__iter__", "__len__", "__contains__")),
            (frozenset, ([7.0],), ("__iter__", "__len__", "__contains__")),
            (float, (7.0,), ("__float__", "__mul__", "__rmul__", "__gt__", "__eq__", "__bool__", "__hash__")),
            (
                int,
                (7,),
                ("__int__", "__index__", "__float__", "__bool__", "__mul__", "__rmul__", "__format__"),
            ),
            (str, ("7",), ("__len__", "__str__", "__format__", "__contains__")),
            (functools.partial, (float, 7), ("__call__",)),
        )
    },
    "dict with __missing__": own(dict, (), "__missing__"),
    "attribute of an empty dict": own(dict, ()),
    "attribute of a float": own(float, (7.0,)),
    # Objects.
    "object": Value(Box, attribute()),
    "slots": Value(Slotted, attribute()),
    "dataclass": Value(Data, attribute()),
    "frozen dataclass": Value(Frozen, lambda held: object.__setattr__(held, "scale", 2.0)),
    "namespace": Value(lambda scale: types.SimpleNamespace(scale=scale), attribute()),
    "class": Value(lambda scale: type("Own", (), {"scale": scale}), attribute()),
    "attribute of the class": Value(
        lambda scale: type("Own", (), {"scale": scale})(), lambda held: attribute()(type(held))
    ),
    "property": Value(
        lambda scale: type("Own", (), {"box": [scale], "scale": property(lambda self: self.box[0])})(),
        lambda held: item(0)(held.box),
    ),
    "own kind of property": Value(
        lambda s: type("Own", (), {"box": [s], "scale": OwnProperty(lambda self: 7.0)})(),
        lambda held: item(0)(held.box),
    ),
    "cached property": Value(Cached, lambda held: held.__dict__.update(own=2.0, number=2.0)),
    "descriptor": Value(
        lambda s: type("Own", (), {"scale": Descriptor(s)})(),
        lambda held: attribute()(vars(type(held))["scale"]),
    ),
    "__getattr__": Value(ByName, lambda held: held.box.update(scale=2.0)),
    "__getattribute__": Value(Intercepted, lambda held: item(0)(held.box)),
    "metaclass": Value(lambda scale: Meta("Own", (), {"box": [scale]}), lambda held: item(0)(held.box)),
    "weak reference": shared(lambda scale: (own := Box(scale), weakref.ref(own)), attribute()),
    "weak proxy": shared(lambda scale: (own := Box(scale), weakref.proxy(own)), attribute()),
    "Python module": Value(module, attribute()),
    "Python module with __getattr__": Value(module_with_getattr, lambda held: item(0)(held.box)),
    "logger": Value(logger, lambda held: held.setLevel(2)),
    "thread-local": Value(local, attribute()),
    "context variable": Value(context, lambda held: held.set(2.0)),
    # Functions.
    "closure": Value(function_of, lambda held: attribute("cell_contents")(held.__closure__[0])),
    "cell": Value(lambda scale: function_of(scale).__closure__[0], attribute("cell_contents")),
    "default": Value(with_default, attribute("__defaults__", (2.0,))),
    "keyword default": Value(with_keyword, lambda held: held.__kwdefaults__.update(found=2.0)),
    "attribute of a function": Value(lambda scale: with_scale(lambda: 7.0, scale), attribute()),
    "partial": Value(lambda scale: functools.partial(float, scale)),
    "partial with keywords": Value(
        lambda s: functools.partial(lambda scale: scale, scale=s),
        lambda held: held.keywords.update(scale=2.0),
    ),
    "partial of a list": Value(
        lambda s: functools.partial(operator.itemgetter(0), [s]), lambda held: item(0)(held.args[0])
    ),
    "method": Value(lambda scale: Box(scale).get, lambda held: attribute()(held.__self__)),
    "method of a list": Value(lambda s: ([7.0] * int(s)).__len__, lambda held: held.__self__.append(7.0)),
    "itemgetter": Value(lambda scale: operator.itemgetter(int(scale) - 1)),
    # C.
    "C double": Value(ctypes.c_double, attribute("value")),
    "C array": Value(lambda scale: (ctypes.c_double * 1)(scale), item(0)),
    "C struct": Value(Struct, attribute()),
    "C pointer": Value(
        lambda scale: ctypes.pointer(ctypes.c_double(scale)), lambda held: attribute("value")(held.contents)
    ),
    # PyTorch.
    "0-d tensor": Value(lambda scale: torch.tensor(float(scale)), lambda held: held.fill_(2)),
    "tensor": Value(lambda scale: torch.tensor([scale]), lambda held: held.fill_(2)),
    "parameter": Value(lambda scale: nn.Parameter(torch.tensor([scale])), lambda held: held.data.fill_(2)),
    "storage": Value(lambda scale: torch.tensor([scale]).untyped_storage(), lambda held: held.fill_(2)),
    "generator": Value(generator, lambda held: held.manual_seed(2)),
    "module": Value(lambda scale: with_scale(nn.Identity(), scale), attribute()),
    "module with methods": Value(Computed, lambda held: item(0)(held.box)),
    "ModuleList": Value(
        lambda s: nn.ModuleList([nn.Identity() for _ in range(int(s))]),
        lambda held: held.append(nn.Identity()),
    ),
    "ModuleDict": Value(
        lambda s: nn.ModuleDict({key: nn.Identity() for key in "ab"[: int(s)]}),
        lambda held: held.update({"b": nn.Identity()}),
    ),
    "ParameterList": Value(
        lambda s: nn.ParameterList([torch.tensor([s])]), lambda held: held[0].data.fill_(2)
    ),
}

Read = Callable[[Any], Any]
# Each raises an error for values that cannot be read so.
READS: dict[str, Read] = {
    "float": float,
    "int": int,
    "range": lambda value: len(range(int(value))),
    "loop": lambda value: sum(1.5 for _ in range(value)),
    "complex": lambda value: complex(value).real,
    "bool": lambda value: 1.5 if value else 3.0,
    "len": lambda value: float(len(value)),
    "greater": lambda value: 1.0 if value > 1.5 else 3.0,
    "equal": lambda value: 1.0 if value == 2 else 3.0,
    "equal text": lambda value: 1.0 if value == "2" else 3.0,
    "is": lambda value: 1.0 if value is Color.ONE or value is None else 3.0,
    "isinstance": lambda value: 1.0 if isinstance(value, float) else 3.0,
    "arithmetic": lambda value: float((value + 1) * 2 - value),
    "power": lambda value: float(value**2),
    "abs": lambda value: float(abs(value)),
    "minus": lambda value: float(-value),
    "round": lambda value: float(round(value)),
    "floor": lambda value: float(math.floor(value)),
    "divmod": lambda value: float(divmod(value, 3)[1]),
    "real": lambda value: float(value.real),
    "factor": lambda value: 3.0 * value,
    "factor of a tensor": lambda value: torch.ones(1) * value,
    "tensor": torch.tensor,
    "as_tensor": torch.as_tensor,
    "from_numpy": lambda value: torch.from_numpy(value).float(),
    "np.asarray": lambda value: float(np.asarray(value)),
    "np.sum": lambda value: float(np.sum(value)),
    "str": lambda value: float(str(value)),
    "last letter": lambda value: int(str(value)[-1:]),
    "length of the text": lambda value: float(len(repr(value))),
    "f-string": lambda value: float(f"{value}"),
    "format": lambda value: float(f"{value:.3f}"),
    "from bytes": lambda value: int.from_bytes(value, "big"),
    "index": lambda value: float(value[0]),
    "key": lambda value: float(value["scale"]),
    "key of an item": lambda value: float(value["scale"][0]),
    "get": lambda value: float(value.get("scale", 0.0)),
    "in": lambda value: 1.0 if 2.0 in value else 3.0,
    "key in": lambda value: 1.0 if "b" in value else 3.0,
    "iterate": lambda value: sum([float(each) for each in value]),
    "first": lambda value: next(float(each) for each in value),
    "next": lambda value: float(next(iter(value))),
    "list": lambda value: float(list(value)[0]),  # noqa: RUF015
    "unpack": lambda value: float((lambda first, *rest: first)(*value)),
    "unpack keywords": lambda value: float((lambda scale=0, **rest: scale)(**value)),
    "star": lambda value: float([*value][0]),  # noqa: RUF015
    "sum": lambda value: float(sum(value)),
    "max": lambda value: float(max(value)),
    "any": lambda value: 1.0 if any(each > 1.5 for each in value) else 3.0,
    "sorted": lambda value: float(sorted(value)[0]),
    "reversed": lambda value: float(list(reversed(value))[0]),  # noqa: RUF015
    "map": lambda value: list(map(float, value))[0],  # noqa: RUF015
    "zip": lambda value: [float(one) for one, _ in zip(value, value, strict=True)][0],  # noqa: RUF015
    "enumerate": lambda value: [float(each) for _, each in enumerate(value)][0],  # noqa: RUF015
    "values": lambda value: float([*value.values()][0]),  # noqa: RUF015
    "items": lambda value: float([*value.items()][0][1]),  # noqa: RUF015
    "pairs": lambda value: [float(second) for _, second in value][0],  # noqa: RUF015
    "get()": lambda value: float(value.get()),
    "as index": lambda value: [1.0, 5.0, 7.0][value],
    "attribute": lambda value: float(value.scale),
    "getattr": lambda value: float(getattr(value, "scale", 0.0)),
    "attribute of an item": lambda value: value[0].scale,
    "key in an item": lambda value: value[0]["scale"],
    "item of an item": lambda value: float(value[0][0]),
    "item of another item": lambda value: sum(value[1]),
    "nested": lambda value: value["a"][0][0]["scale"],
    "call": lambda value: float(value()),
    "call with a list": lambda value: float(value([1.0, 2.0])),
    "item()": lambda value: float(value.item()),
    "tolist": lambda value: float(value.tolist()),
    "astype": lambda value: float(value.astype("f8")),
    "method sum": lambda value: float(value.sum()),
    "size": lambda value: float(value.shape[0]),
    "name": lambda value: float(len(value.name)),
    "value": lambda value: float(value.value),
    "contents": lambda value: float(value.contents.value),
    "content of a cell": lambda value: float(value.cell_contents),
    "arguments": lambda value: float(value.args[0]),
    "seed": lambda value: float(value.initial_seed()),
    "day": lambda value: value.day,
    "level": lambda value: value.level,
    "numerator": lambda value: value.numerator,
    "start": lambda value: value.start,
    "stop": lambda value: value.stop,
    "itemsize": lambda value: value.itemsize,
    "type": lambda value: 1.0 if value.type == "cpu" else 3.0,
    "matches": lambda value: 1.0 if value.match("1") else 3.0,
    "substitute": lambda value: float(value.substitute()),
}
# Reads that do not end, crash the interpreter, change what they read, or give parts of an address.
_EXCLUDED = {
    **{name: {"from bytes"} for name in ("0-d array of objects", "array of objects", "array of dicts")},
    "C pointer": set(READS) - {"contents", "index"},
    "array's iterator": {
        "next",
        "iterate",
        "first",
        "sum",
        "max",
        "list",
        "star",
        "unpack",
        "map",
        "zip",
        "any",
    }
    | {"enumerate", "sorted", "reversed", "in", "from bytes", "tensor", "as_tensor", "np.asarray", "np.sum"},
}


def number_of(read: Read, value: Any) -> torch.Tensor | None:
    """Returns a tensor times what a forward reads; None if it cannot be read so."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of complex numbers as real ones
            found = torch.ones(1) * read(value)
    except Exception:
        return None
    return found if isinstance(found, torch.Tensor) and found.device.type == "cpu" else None


class Case(NamedTuple):
    """A read of a value that is changed, so that another number is read.

    Attributes:
        value: the kind of the value.
        read: how it is read.
        in_place: whether it is changed in place, or replaced.
    """

    value: str
    read: str
    in_place: bool


def cases() -> Iterator[Case]:
    """Yields all reads of all values that give another number after a change, in plain Python."""
    for (name, value), (how, read) in itertools.product(VALUES.items(), READS.items()):
        if how in _EXCLUDED.get(name, ()):
            continue
        one = number_of(read, value.make(1.0))
        two = number_of(read, value.make(2.0))
        if one is None or two is None or torch.equal(one, two):
            continue
        yield Case(name, how, False)
        if value.change is not None:
            changed = value.make(1.0)
            value.change(changed)
            two = number_of(read, changed)
            if two is not None and not torch.equal(one, two):
                yield Case(name, how, True)
