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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, ClassVar

from torch import nn

from gpipe_fast.trace import kinds
from gpipe_fast.trace.kinds import Kind, kind_of
from gpipe_fast.trace.reads import names_of

# The maximum number of values searched for generators, breadth-first from the layers.
_MOST = 5_000

_drawing = threading.RLock()
os.register_at_fork(after_in_child=_drawing._at_fork_reinit)  # type: ignore[attr-defined]


@dataclass
class Drawn:
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


class Draws:
    """The generators that layers can draw from: the global generators, and the layers' own."""

    # By layer, whether any run drew random numbers; a layer without an entry has not run yet.
    _drew: ClassVar[weakref.WeakKeyDictionary[nn.Module, bool]] = weakref.WeakKeyDictionary()

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        """Searches the layers for generators."""
        self._layers = layers
        self._held, self._can_draw = _generators_of(layers)

    @contextlib.contextmanager
    def forward(self, repeated: bool) -> Iterator[Drawn]:
        """Wraps a forward of the layers; ``repeated`` means that the backward will recompute it."""
        drew = [self._drew.get(layer) for layer in self._layers]
        alone = self._can_draw and (any(drew) or (repeated and None in drew))
        with _drawing if alone else contextlib.nullcontext():
            if not repeated or not self._can_draw:
                yield Drawn()
                return
            generators = self._generators()
            drawn = Drawn([_state_of(generator) for generator in generators])
            yield drawn
            drawn.after = [_state_of(generator) for generator in generators]
        drawn.repeatable = alone or drawn.before == drawn.after
        for layer in self._layers:
            self._drew[layer] = self._drew.get(layer, False) or drawn.before != drawn.after

    @contextlib.contextmanager
    def repeated(self, drawn: Drawn, name: str) -> Iterator[None]:
        """Wraps the recompute of the layers called ``name``; the generators' states are restored after it.

        Raises:
            RuntimeError: the recompute drew different numbers than the forward.
        """
        if drawn.before == drawn.after:  # the forward drew nothing, or its states were not recorded
            yield
            return
        with _drawing:
            generators = self._generators()
            now = [_state_of(generator) for generator in generators]
            _restore(generators, drawn.before)
            try:
                yield
                same = [_state_of(generator) for generator in generators[: len(drawn.after)]] == drawn.after
            finally:
                _restore(generators, now)
        if not same:
            raise RuntimeError(
                f"{name} drew different random numbers when the backward recomputed it: another thread draws "
                "from the same Python or NumPy generator; draw with torch, or use checkpoint='never'"
            )

    def _generators(self) -> list[Any]:
        """Returns Python's global generator, the layers' own, and last NumPy's global one if it is loaded."""
        numpy = sys.modules.get("numpy.random")
        every = [random._inst, *self._held]
        return every if numpy is None else [*every, numpy.mtrand._rand]


def _state_of(generator: Any) -> object:
    """Returns a generator's state as a comparable value."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    return pickle.dumps(kinds.state_of(generator))


def _restore(generators: Sequence[Any], states: Sequence[Any]) -> None:
    # NumPy may have been loaded since the states were taken; its generator comes last.
    for generator, state in zip(generators, states, strict=False):
        if isinstance(generator, random.Random):
            generator.setstate(state)
        else:
            kinds.set_state(generator, pickle.loads(state))


def _generators_of(layers: Sequence[nn.Module]) -> tuple[list[Any], bool]:
    """Returns the generators that layers can reach, except the global ones, and whether the layers can draw.

    Layers that neither reach a generator nor name a module of random functions cannot draw. Most layers
    therefore need no comparison of states, and are not blamed for what other threads draw.
    """
    found: dict[int, Any] = {}
    can_draw = False
    seen: set[int] = set()
    pending: deque[Any] = deque(layers)
    while pending and len(seen) < _MOST:
        value = pending.popleft()
        kind = kind_of(value)
        if kind is Kind.PLAIN or id(value) in seen:
            continue
        seen.add(id(value))
        owner = getattr(value, "__self__", value)  # random.random is a method
        if isinstance(owner, random.Random) or kind_of(owner) is Kind.GENERATOR:
            found[id(owner)] = owner
        can_draw = can_draw or _draws(value)
        pending.extend(kinds.referred_to_by(value))
        if isinstance(value, FunctionType) and not kinds.is_fixed(value.__module__):
            pending.extend(_named_by(value))
    can_draw = can_draw or bool(found) or bool(pending)
    found.pop(id(random._inst), None)
    return [one for one in found.values() if not isinstance(one, random.SystemRandom)], can_draw


def _named_by(function: FunctionType) -> list[Any]:
    """Returns the values of globals and modules that a function names, and of names in those modules."""
    names = names_of(function.__code__)
    values = [function.__globals__[name] for name in names.globals if name in function.__globals__]
    values += [sys.modules[name] for name in names.imports if name in sys.modules]
    for module in [value for value in values if isinstance(value, ModuleType)]:
        if not kinds.is_fixed(module.__name__):
            values += [vars(module)[name] for name in sorted(names.attributes & vars(module).keys())]
    return values


def _draws(value: object) -> bool:
    """Returns whether a value is a module of random functions, or a function of such a module."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return kinds.root_package(name) in ("random", "secrets", "numpy") and kind_of(value) is not Kind.CLASS
