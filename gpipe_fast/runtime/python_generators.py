"""Python's and NumPy's random generators in layers that are recomputed: the recompute draws the same numbers.

PyTorch's random operators draw by key (`gpipe_fast.randomness`), but ``random`` and ``numpy.random`` have one
state for all threads. So layers that draw from them hold a lock while they run, and a recompute restores the
state that the forward began with::

    stage 0    forward  |--draws--|                                     recompute  |--same--|
    stage 1                        |--draws--|   recompute  |--same--|
                       state:  s0          s1         s2    back to s1, then s2    back to s0, then s2
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any, ClassVar, TypeVar

from torch import nn

from gpipe_fast.runtime.undo import run_and_undo
from gpipe_fast.trace import python_values
from gpipe_fast.trace.python_reads import readable_names
from gpipe_fast.trace.python_values import ValueKind, value_kind

# The maximum number of values searched for generators, breadth-first from the layers.
_MAX_SEARCHED_VALUES = 5_000

_Result = TypeVar("_Result")

_generator_lock = threading.RLock()
os.register_at_fork(after_in_child=_generator_lock._at_fork_reinit)  # type: ignore[attr-defined]


@dataclass
class GeneratorUse:
    """The generator states that a recompute needs from its forward.

    Attributes:
        before: the generators' states when the forward began.
        after: the generators' states when the forward ended.
        repeatable: whether a recompute can draw the same numbers. False if the forward drew without the lock,
            so that other threads may have drawn at the same time.
    """

    before: Sequence[object] = ()
    after: Sequence[object] = ()
    repeatable: bool = True


class PythonGenerators:
    """The generators that layers can draw from: the global generators, and the layers' own."""

    # By layer, whether any run drew random numbers; a layer without an entry has not run yet.
    _has_drawn: ClassVar[weakref.WeakKeyDictionary[nn.Module, bool]] = weakref.WeakKeyDictionary()

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        """Searches the layers for generators."""
        self._layers = layers
        self._own_generators, self._can_draw = _generators_of(layers)

    @contextlib.contextmanager
    def forward(self, recomputed: bool) -> Iterator[GeneratorUse]:
        """Wraps a forward of the layers; ``recomputed`` says whether the backward will recompute it."""
        has_drawn = [self._has_drawn.get(layer) for layer in self._layers]
        exclusive = self._can_draw and (any(has_drawn) or (recomputed and None in has_drawn))
        with _generator_lock if exclusive else contextlib.nullcontext():
            if not recomputed or not self._can_draw:
                yield GeneratorUse()
                return
            generators = self._generators()
            generator_use = GeneratorUse([_state_of(generator) for generator in generators])
            yield generator_use
            generator_use.after = [_state_of(generator) for generator in generators]
        generator_use.repeatable = exclusive or generator_use.before == generator_use.after
        for layer in self._layers:
            self._has_drawn[layer] = (
                self._has_drawn.get(layer, False) or generator_use.before != generator_use.after
            )

    def recompute(self, generator_use: GeneratorUse, name: str, run: Callable[[], _Result]) -> _Result:
        """Returns what ``run`` returns, the recompute of layers called ``name``, with the forward's states.

        Afterwards, the generators have their current states again.

        Raises:
            RuntimeError: the recompute drew different numbers than the forward.
        """
        if generator_use.before == generator_use.after:  # nothing drawn, or no states recorded
            return run()

        def run_from_before() -> tuple[_Result, list[object]]:
            _restore(generators, generator_use.before)
            result = run()
            return result, [_state_of(generator) for generator in generators[: len(generator_use.after)]]

        with _generator_lock:
            generators = self._generators()
            current = [_state_of(generator) for generator in generators]
            result, states = run_and_undo(run_from_before, lambda: _restore(generators, current))
        if states != generator_use.after:
            raise RuntimeError(
                f"{name} drew different random numbers when the backward recomputed it: another thread draws "
                "from the same Python or NumPy generator; draw with torch, or use checkpoint='never'"
            )
        return result

    def _generators(self) -> list[Any]:
        """Returns Python's global generator, the layers' own, and last NumPy's global one if it is loaded."""
        numpy = sys.modules.get("numpy.random")
        all_generators = [random._inst, *self._own_generators]
        return all_generators if numpy is None else [*all_generators, numpy.mtrand._rand]


def _state_of(generator: Any) -> object:
    """Returns a generator's state as a comparable value."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    return pickle.dumps(python_values.generator_state(generator))


def _restore(generators: Sequence[Any], states: Sequence[Any]) -> None:
    # NumPy may have been loaded since the states were taken; its generator comes last.
    for generator, state in zip(generators, states, strict=False):
        if isinstance(generator, random.Random):
            generator.setstate(state)
        else:
            python_values.set_state(generator, pickle.loads(state))


def _generators_of(layers: Sequence[nn.Module]) -> tuple[list[Any], bool]:
    """Returns the generators that layers can reach, except the global ones, and whether the layers can draw.

    Layers that neither reach a generator nor name a module of random functions cannot draw. Most layers
    therefore need no comparison of states, and are not blamed for what other threads draw.
    """
    found: dict[int, Any] = {}
    can_draw = False
    seen: set[int] = set()
    pending: deque[Any] = deque(layers)
    while pending and len(seen) < _MAX_SEARCHED_VALUES:
        value = pending.popleft()
        kind = value_kind(value)
        if kind is ValueKind.IMMUTABLE or id(value) in seen:
            continue
        seen.add(id(value))
        owner = getattr(value, "__self__", value)  # random.random is a method
        if isinstance(owner, random.Random) or value_kind(owner) is ValueKind.GENERATOR:
            found[id(owner)] = owner
        can_draw = can_draw or _is_random_module(value)
        pending.extend(python_values.referents_of(value))
        if isinstance(value, FunctionType) and not python_values.is_assumed_constant(value.__module__):
            pending.extend(_named_values(value))
    can_draw = can_draw or bool(found) or bool(pending)
    found.pop(id(random._inst), None)
    return [one for one in found.values() if not isinstance(one, random.SystemRandom)], can_draw


def _named_values(function: FunctionType) -> list[Any]:
    """Returns the values of globals and modules that a function names, and of names in those modules."""
    names = [readable_names(code) for code in _nested_code(function.__code__)]
    used = dict.fromkeys(name for each in names for name in each.globals)
    values = [function.__globals__[name] for name in used if name in function.__globals__]
    values += [sys.modules[name] for each in names for name in each.imports if name in sys.modules]
    attributes = frozenset[str]().union(*(each.attributes for each in names))
    for module in [value for value in values if isinstance(value, ModuleType)]:
        if not python_values.is_assumed_constant(module.__name__):
            values += [vars(module)[name] for name in sorted(attributes & vars(module).keys())]
    return values


def _nested_code(code: CodeType) -> Iterator[CodeType]:
    """Yields the code of a function, and of the functions, lambdas and generator expressions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested_code(constant)


def _is_random_module(value: object) -> bool:
    """Returns whether a value is a module of random functions, or a function of such a module."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return (
        python_values.root_package(name) in ("random", "secrets", "numpy")
        and value_kind(value) is not ValueKind.CLASS
    )
