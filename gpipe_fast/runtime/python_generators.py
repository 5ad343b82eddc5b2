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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, TypeVar

from torch import nn

from gpipe_fast.runtime.reachable import reachable, root_package
from gpipe_fast.runtime.undo import run_and_undo

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
    # The global RandomState of NumPy hides its bit generator.
    bits = getattr(generator, "bit_generator", None)
    return pickle.dumps(generator.get_state() if bits is None else bits.state)


def _restore(generators: Sequence[Any], states: Sequence[Any]) -> None:
    # NumPy may have been loaded since the states were taken; its generator comes last.
    for generator, state in zip(generators, states, strict=False):
        if isinstance(generator, random.Random):
            generator.setstate(state)
        elif hasattr(generator, "bit_generator"):
            generator.bit_generator.state = pickle.loads(state)
        else:
            generator.set_state(pickle.loads(state))


def _generators_of(layers: Sequence[nn.Module]) -> tuple[list[Any], bool]:
    """Returns the generators that layers can reach, except the global ones, and whether the layers can draw.

    Layers that neither reach a generator nor name a module of random functions cannot draw. Most layers
    therefore need no comparison of states, and are not blamed for what other threads draw.
    """
    values, complete = reachable(layers, _MAX_SEARCHED_VALUES)
    generators = [value for value in values if _is_generator(value)]
    can_draw = not complete or bool(generators) or any(map(_is_random_module, values))
    return [
        one for one in generators if one is not random._inst and not isinstance(one, random.SystemRandom)
    ], can_draw


def _is_generator(value: object) -> bool:
    numpy = sys.modules.get("numpy.random")
    of_numpy = () if numpy is None else (numpy.Generator, numpy.RandomState)
    return isinstance(value, (random.Random, *of_numpy))


def _is_random_module(value: object) -> bool:
    """Returns whether a value is a module of random functions, or a function of such a module."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return root_package(name) in ("random", "secrets", "numpy") and not isinstance(value, type)
