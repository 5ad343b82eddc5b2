"""A program as data: its values and steps, and the construction of the C++ object."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from gpipe_fast._extension import Arena, Kernel, Layout
from gpipe_fast._extension import Program as NativeProgram
from gpipe_fast._extension import Value as NativeValue
from gpipe_fast.lower.launch import KernelLaunch
from gpipe_fast.lower.steps import (
    Accumulate,
    AccumulateAll,
    AdoptAsAccumulator,
    Allocate,
    Call,
    Check,
    Launch,
    Ref,
    Release,
    Step,
)
from gpipe_fast.strides import NO_BITS, Bits, contiguous
from gpipe_fast.torch_private.operators import OpOverload
from gpipe_fast.trace.collectives import group_position
from gpipe_fast.trace.joint_graph import GraphPort

# Loads a launch's kernel: for pointers that are divisible by 16, and for any pointers.
LoadKernel = Callable[[KernelLaunch], tuple[Kernel, Kernel]]
OwnGroup = Callable[[str], str]


class StorageKind(str, Enum):
    """The kind of memory that holds a value (csrc/program/program.h draws it)."""

    INPUT = "input"
    PARAMETER = "parameter"
    PARAMETER_CAST = "parameter_cast"
    CONSTANT = "constant"
    ACCUMULATOR = "accumulator"
    ARENA = "arena"
    FRESH = "fresh"
    RESULT = "result"
    VIEW = "view"


@dataclass(frozen=True)
class Value:
    """One tensor of a program.

    Attributes:
        name: the value's name in the graph.
        storage: the kind of memory that holds the value.
        sizes: in elements.
        strides: in elements.
        dtype: the dtype of the elements.
        index: the index of the parameter, also of a parameter's cast or accumulator; the offset in bytes of
            an arena value; the base of a view; for an input, 1 if its dtype is checked at run time only,
            because an operator of another program returned it, and else 0.
        offset: the offset of a view from its base, in elements.
        constant: the tensor of a constant.
        bits: whether the elements are conjugated, and negated, when they are read.
    """

    name: str
    storage: StorageKind
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    index: int = 0
    offset: int = 0
    constant: Tensor | None = None
    bits: Bits = NO_BITS


@dataclass
class ProgramIR:
    """A lowered graph.

    Attributes:
        inputs: the ports of the arguments of ``run``, in order; parameters are bound separately.
        outputs: the ports of the results of ``run``, in order.
        gradients: indices of the parameters whose gradients the program accumulates.
        values: the program's tensors.
        steps: the steps, in order.
        results: indices of the returned values.
        arena_bytes: the size of the scratch memory that the program needs.
        parts: the number of steps before the first step that reads a boundary gradient, and the number of
            steps after which all results are computed.
    """

    inputs: tuple[GraphPort, ...] = ()
    outputs: tuple[GraphPort, ...] = ()
    gradients: tuple[int, ...] = ()
    values: list[Value] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    results: list[int] = field(default_factory=list)
    arena_bytes: int = 0
    parts: tuple[int, int] = (0, 0)

    @property
    def num_values(self) -> int:
        """The number of the program's tensors."""
        return len(self.values)

    def constant_bytes(self) -> int:
        """Returns the bytes of the program's constants."""
        return sum(value.constant.nbytes for value in self.values if value.constant is not None)

    def written(self) -> ProgramIR:
        """Returns the program itself; see `SizedProgram.written`."""
        return self

    def collectives(self) -> list[str]:
        """Returns what the program exchanges with other processes, in order, without names of groups."""
        found = []
        for step in self.steps:
            position = group_position(step.op) if isinstance(step, Call) else None
            if position is None or not isinstance(step, Call):
                continue
            given = self.values[step.arguments[0].value]
            shared = "all_to_all_single" not in step.op.name()  # else each process has its own sizes
            known = [*step.arguments[1:position], str(given.dtype), given.sizes] if shared else []
            found.append(f"{step.op._schema.name} {known} {step.when.name}")
        return found

    def placeable(self) -> list[bool]:
        """Returns, for each result, whether a run can write it into memory that it is given.

        The run has to allocate the result's memory in a step, and to use it for nothing else that it returns:
        the caller may change such a result in place, and a backward must not notice.
        """
        return are_whole(self.allocated_results(), self.values.__getitem__)

    def allocated_results(self) -> list[tuple[int, int] | None]:
        """Returns each result and its base, the value in whose memory it is; None if others are in it, too,
        or if it is not allocated in a step.
        """
        bases = [*map(self.base_of, self.results)]
        allocated = {step.value for step in self.steps if isinstance(step, Allocate)}
        return [
            (result, base) if base in allocated and bases.count(base) == 1 else None
            for base, result in zip(bases, self.results, strict=True)
        ]

    def base_of(self, index: int) -> int:
        """Returns the base of a value: the value that a view views, or else the value itself."""
        value = self.values[index]
        return value.index if value.storage is StorageKind.VIEW else index

    def build(
        self,
        arena: Arena,
        device: torch.device,
        *,
        lowered_for: torch.device | None = None,
        parameters: Sequence[int] | None = None,
        titles: Sequence[str] = (),
        load_kernel: LoadKernel | None = None,
        own_group: OwnGroup | None = None,
    ) -> NativeProgram:
        """Builds the C++ program. Not thread-safe: programs that share an arena must run one at a time.

        Args:
            arena: scratch memory, shared by the programs of one stage.
            device: the device of all values.
            lowered_for: the device that operators name where this one is meant; by default, the same.
            parameters: maps a parameter's index in this program to its index in the list that is bound at
                run time; by default the two indices are equal.
            titles: the names of the layers in error messages; by default errors name no layer.
            load_kernel: loads the kernels on the device; None if the program launches none.
            own_group: returns the stage's own process group in place of one that a collective names, by name;
                None to leave them.
        """
        native = NativeProgram(arena, device)
        layouts: dict[Any, Layout] = {}
        for value in self.values:
            indices = parameters if value.storage in _INDEXED_BY_PARAMETER else None
            key = (value.sizes, value.strides, value.dtype, value.bits)
            layout = layouts.get(key) or layouts.setdefault(key, Layout(*key))
            at = value.index if indices is None else indices[value.index]
            _ADD_VALUE[value.storage](native, value, layout, at)
        current: int | None = None
        for step, layer in zip(self.steps, _layers_of(self.steps), strict=True):
            if titles and layer is not None and layer != current:
                native.set_layer(titles[layer])
                current = layer
            _add_step(native, step, load_kernel, device, lowered_for, own_group)
        native.set_outputs(self.results)
        native.set_placeable(self.placeable())
        native.set_arena_bytes(self.arena_bytes)
        native.set_parts(*self.parts)
        return native


def _layers_of(steps: Sequence[Step]) -> list[int | None]:
    """Returns the layer of each step, or None.

    A step without a layer gets the layer of the call before it; an allocation gets the layer of the call
    after it, which it serves.
    """
    layers: list[int | None] = []
    latest: int | None = None
    for index, step in enumerate(steps):
        if isinstance(step, (Call, Launch)):
            latest = latest if step.layer is None else step.layer
        elif isinstance(step, Allocate):
            following = next((s.layer for s in steps[index:] if isinstance(s, (Call, Launch))), None)
            latest = latest if following is None else following
        layers.append(latest)
    return layers


def are_whole(pairs: Sequence[tuple[int, int] | None], value_at: Callable[[int], Value]) -> list[bool]:
    """Returns, for pairs of a result and its base, whether it is all of it, in the order of the memory."""
    found = [(value_at(pair[0]), value_at(pair[1])) if pair else None for pair in pairs]
    return [
        both is not None
        and all(x.strides == contiguous(x.sizes) and x.bits == NO_BITS for x in both)
        and math.prod(both[0].sizes) == math.prod(both[1].sizes)
        for both in found
    ]


_INDEXED_BY_PARAMETER = frozenset(
    {StorageKind.PARAMETER, StorageKind.PARAMETER_CAST, StorageKind.ACCUMULATOR}
)

# By the kind of memory, adds a value to a C++ program, given its index in the program's parameters.
_ADD_VALUE: dict[StorageKind, Callable[[NativeProgram, Value, Layout, int], object]] = {
    StorageKind.INPUT: lambda native, value, layout, at: native.add_input(layout, bool(value.index)),
    StorageKind.PARAMETER: lambda native, value, layout, at: native.add_parameter(at, layout),
    StorageKind.PARAMETER_CAST: lambda native, value, layout, at: native.add_parameter_cast(at, layout),
    StorageKind.CONSTANT: lambda native, value, layout, at: native.add_constant(_constant(value)),
    StorageKind.ACCUMULATOR: lambda native, value, layout, at: native.add_accumulator(at, layout),
    StorageKind.ARENA: lambda native, value, layout, at: native.add_arena(value.index, layout),
    StorageKind.FRESH: lambda native, value, layout, at: native.add_fresh(layout),
    StorageKind.RESULT: lambda native, value, layout, at: native.add_result(layout),
    StorageKind.VIEW: lambda native, value, layout, at: native.add_view(value.index, value.offset, layout),
}


def _constant(value: Value) -> Tensor:
    assert value.constant is not None
    return value.constant


@functools.cache
def _name_of(op: OpOverload[Any, Any]) -> tuple[str, str]:
    return op._schema.name, op._schema.overload_name


def _add_step(
    native: NativeProgram,
    step: Step,
    load_kernel: LoadKernel | None,
    device: torch.device,
    lowered_for: torch.device | None,
    own_group: OwnGroup | None,
) -> None:
    match step:
        case Call(op, _, results, when):
            arguments = step.native_arguments
            if lowered_for not in (None, device):
                is_it = [isinstance(a, torch.device) and a == lowered_for for a in arguments]
                arguments = [device if i else a for i, a in zip(is_it, arguments, strict=True)]
            position = group_position(op)
            if position is not None and own_group is not None:
                arguments = [*arguments]
                arguments[position] = own_group(arguments[position])
            native.add_operator(
                *_name_of(op),
                arguments,
                None if results is None else list(results),
                when,
            )
        case Launch(launch, launch_arguments, when):
            assert load_kernel is not None
            packed = [
                NativeValue(a.value) if isinstance(a, Ref) else launch.pack(i, a)
                for i, a in enumerate(launch_arguments)
            ]
            native.add_launch(*load_kernel(launch), launch.grid, packed, launch.aligned, when)
        case Check(function, checked, written):
            native.add_check(function, [NativeValue(v) for v in checked], [NativeValue(v) for v in written])
        case Allocate(value_index, when):
            native.add_allocate(value_index, when)
        case Accumulate(accumulator, value_index, when):
            native.add_accumulate(accumulator, value_index, when)
        case AccumulateAll(accumulators, value_indices, when):
            native.add_accumulate_all(accumulators, value_indices, when)
        case AdoptAsAccumulator(accumulator, value_index):
            native.add_adopt(accumulator, value_index)
        case Release(value_index):
            native.add_release(value_index)
