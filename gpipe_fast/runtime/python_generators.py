"""Python's and NumPy's random generators: a micro-batch that draws from them is not recomputed.

PyTorch's random operators draw by key (`gpipe_fast.randomness`), and a recompute repeats the draws. The draws
of ``random`` and ``numpy.random`` cannot be repeated, because all threads share one state. Layers that draw
are not repeatable (`gpipe_fast.trace.repeatable`), except modules that ask for their phase. For these, the
states before and after a forward tell whether it, or another thread meanwhile, has drawn.
"""

from __future__ import annotations

import enum
import gc
import pickle
import random
import sys
from collections import deque
from collections.abc import Collection, Iterable
from types import FrameType, FunctionType, ModuleType, TracebackType
from typing import Any

from torch import nn

from gpipe_fast.trace.repeatable import nested_code

# The maximum number of values searched for generators.
_MAX_VALUES = 50_000
_LIBRARIES = (sys.stdlib_module_names - {"__main__"}) | {"torch", "numpy", "triton", "gpipe_fast"}
_ATOMIC = (bool, int, float, complex, str, bytes, type(None), enum.Enum)


class PythonGenerators:
    """The generators that modules can draw from: those in their reach, and global ones of packages in it.

    In a large program, modules reach more values than are searched: the nearest are, breadth-first, and the
    global generators count as in reach.
    """

    def __init__(self, modules: Collection[nn.Module]) -> None:
        """Searches the modules for generators."""
        self._modules = modules
        found = _reachable(modules)
        is_complete = len(found) < _MAX_VALUES
        self._found = [value for value in found if _is_generator(value)]
        packages = {value.__name__.partition(".")[0] for value in found if isinstance(value, ModuleType)}
        if "random" in packages or not is_complete:
            self._found.append(random._inst)
        if "numpy" in packages or (not is_complete and "numpy.random" in sys.modules):
            self._found.append(sys.modules["numpy"].random.mtrand._rand)

    def states(self) -> dict[int, object]:
        """Returns the generators' states as comparable values; takes 10 to 30 µs per generator."""
        replaceable = [v for module in self._modules for v in vars(module).values() if _is_generator(v)]
        return {id(generator): _state_of(generator) for generator in (*self._found, *replaceable)}


def _is_generator(value: object) -> bool:
    numpy = sys.modules.get("numpy.random")
    of_numpy = () if numpy is None else (numpy.Generator, numpy.RandomState)
    return isinstance(value, (random.Random, *of_numpy)) and not isinstance(value, random.SystemRandom)


def _state_of(generator: Any) -> object:
    if isinstance(generator, random.Random):
        return generator.getstate()
    # The global RandomState of NumPy hides its bit generator.
    bits = getattr(generator, "bit_generator", None)
    return pickle.dumps(generator.get_state() if bits is None else bits.state)


def _reachable(roots: Iterable[object]) -> Collection[Any]:
    """Returns the values that some values can reach by attributes, elements, closures and named variables."""
    found: dict[int, Any] = {}
    pending = deque(roots)
    while pending and len(found) < _MAX_VALUES:
        value = pending.popleft()
        if not isinstance(value, _ATOMIC) and id(value) not in found:
            found[id(value)] = value
            pending += _referents(value)
    return found.values()


def _referents(value: Any) -> Iterable[object]:
    """Returns what a value refers to; functions, classes and Python modules of libraries refer to nothing."""
    if isinstance(value, (FrameType, TracebackType)):  # of an exception that was raised: all variables
        return ()
    if not isinstance(value, (FunctionType, type, ModuleType)):
        return gc.get_referents(value)
    name = value.__name__ if isinstance(value, ModuleType) else value.__module__
    if isinstance(name, str) and name.partition(".")[0] in _LIBRARIES:
        return ()
    if isinstance(value, FunctionType):
        names = [name for code in nested_code(value.__code__) for name in code.co_names]
        variables = [table.get(name) for name in names for table in (value.__globals__, sys.modules)]
        return (value.__defaults__, value.__kwdefaults__, value.__closure__, value.__dict__, *variables)
    return (*getattr(value, "__bases__", ()), *vars(value).values())
