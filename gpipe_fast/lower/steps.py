"""The steps of a program, and the values that each of them uses."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from gpipe_fast._extension import ActiveRuns
from gpipe_fast._extension import Value as NativeValue
from gpipe_fast.lower.launch import CheckFunction, KernelLaunch
from gpipe_fast.torch_private.operators import Argument, OpOverload


@dataclass(frozen=True)
class Ref:
    """A value as an argument of a call."""

    value: int


@dataclass(frozen=True)
class Call:
    """Calls an operator; ``results`` is None if the operator writes its results into arguments."""

    op: OpOverload[Any, Any]
    arguments: tuple[Any, ...]
    results: tuple[int | None, ...] | None
    when: ActiveRuns
    layer: int | None

    @functools.cached_property
    def native_arguments(self) -> list[Any]:
        """The arguments for C++. They are kept, because the programs of all sizes share most calls."""
        return [native(argument) for argument in self.arguments]


@dataclass(frozen=True)
class Launch:
    """Launches a kernel; ``arguments`` are its run-time arguments, numbers and values."""

    launch: KernelLaunch
    arguments: tuple[Ref | float, ...]
    when: ActiveRuns
    layer: int | None

    def written(self) -> tuple[int, ...]:
        """Returns the values that the kernel writes."""
        refs = (self.arguments[position] for position in self.launch.outputs)
        return tuple(ref.value for ref in refs if isinstance(ref, Ref))


@dataclass(frozen=True)
class Check:
    """Calls a function until it is done, with the tensors that kernels read and those that they wrote.

    The function may overwrite the latter.
    """

    function: CheckFunction
    inputs: tuple[int, ...]
    results: tuple[int, ...]


@dataclass(frozen=True)
class Allocate:
    """Allocates a fresh value or an accumulator, uninitialised."""

    value: int
    when: ActiveRuns


@dataclass(frozen=True)
class Accumulate:
    """accumulator += value."""

    accumulator: int
    value: int
    when: ActiveRuns


@dataclass(frozen=True)
class AccumulateAll:
    """accumulator += value for several pairs, in unspecified order."""

    accumulators: tuple[int, ...]
    values: tuple[int, ...]
    when: ActiveRuns


@dataclass(frozen=True)
class AdoptAsAccumulator:
    """Adopts a value's tensor as the accumulator, in the first run of a mini-batch."""

    accumulator: int
    value: int


@dataclass(frozen=True)
class Release:
    """Releases the memory of a value and its views."""

    value: int


Step = Call | Launch | Check | Allocate | Accumulate | AccumulateAll | AdoptAsAccumulator | Release


def native(argument: Any) -> Any:
    """Returns an argument with C++ values in place of references; it may be a nested list."""
    if isinstance(argument, Ref):
        return NativeValue(argument.value)
    if isinstance(argument, (list, tuple)):
        return [native(a) for a in argument]
    return argument


def is_written(argument: Argument) -> bool:
    """Returns whether the operator's schema says that the operator writes this argument."""
    return argument.alias_info is not None and argument.alias_info.is_write


def values_written(step: Step) -> list[int]:
    """Returns the values that a step writes, except accumulators that it adds to."""
    match step:
        case Call(op, arguments, None):
            schema = zip(arguments, op._schema.arguments, strict=True)
            return [r for argument, s in schema if is_written(s) for r in values_in(argument)]
        case Call(_, _, results):
            return [r for r in results or () if r is not None]
        case Launch():
            return list(step.written())
        case Check(_, _, results):  # overwrites wrong ones
            return list(results)
        case Allocate(value):
            return [value]
        case _:
            return []


def values_used(step: Step) -> list[int]:
    """Returns the values that a step reads or writes."""
    match step:
        case Call(_, arguments, results):
            return [*values_in(arguments), *(r for r in results or () if r is not None)]
        case Launch(_, arguments):
            return values_in(arguments)
        case Check(_, inputs, results):
            return [*inputs, *results]
        case Allocate(value) | Release(value):
            return [value]
        case Accumulate(accumulator, value) | AdoptAsAccumulator(accumulator, value):
            return [accumulator, value]
        case AccumulateAll(accumulators, values):
            return [*accumulators, *values]


def values_in(argument: Any) -> list[int]:
    """Returns the values in an argument, which may be a nested list."""
    if isinstance(argument, Ref):
        return [argument.value]
    if isinstance(argument, (list, tuple)):
        return [r for a in argument for r in values_in(a)]
    return []
