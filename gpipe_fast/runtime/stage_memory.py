"""The memory that each stage needs for a plan, from shapes and from the programs' own offsets."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from gpipe_fast._extension import ActiveRuns, alignment_of
from gpipe_fast.layers.quantized import stored_tensors
from gpipe_fast.layers.sharded import is_gathered, local_tensor
from gpipe_fast.lower.checkpoint import SavedFraction
from gpipe_fast.lower.operator_memory import temporary_bytes
from gpipe_fast.lower.program import ProgramIR, StorageKind
from gpipe_fast.lower.steps import AdoptAsAccumulator, Release, values_written
from gpipe_fast.runtime.compiled import CompiledStage, LoweredStage
from gpipe_fast.runtime.plan import needs_backward, planned_schedule
from gpipe_fast.runtime.planner import Call
from gpipe_fast.runtime.stage import BoundarySpec, Stage, TensorSpec
from gpipe_fast.schedule import Kind, Schedule
from gpipe_fast.schedule.memory import Change, Event, Moment, moments, peak_of
from gpipe_fast.strides import span
from gpipe_fast.trace.joint_graph import GraphPort, GraphRole, parameters_of

_BLOCK = 512  # bytes; kMinBlockSize in c10/cuda/CUDACachingAllocator.cpp
_Actions = Set[tuple[int, Kind]]  # of a stage, all of a kind


class StageBytes(NamedTuple):
    """What a stage needs, in bytes, at the moment of a step at which it needs most.

    Attributes:
        parameters: its parameters.
        buffers: its buffers.
        gradients: the gradients of its parameters; none before its first backward.
        boundary: the inputs of the micro-batches that it keeps, or that wait for it.
        saved: other tensors that are kept for backwards.
        intermediates: the scratch memory of the running program, and what it allocates beside it. On the CPU,
            the scratch memory stays.
        under_way: outputs, and gradients of inputs and outputs, until they are sent or used.
        waiting: what is needed in addition in the worst order that the schedule allows: tensors arrive early
            and wait, and other stages fetch tensors of skip connections late.
    """

    parameters: int
    buffers: int
    gradients: int
    boundary: int
    saved: int
    intermediates: int
    under_way: int
    waiting: int

    @property
    def total(self) -> int:
        """The sum."""
        return sum(self)


class _Sizes(NamedTuple):
    """The bytes of a micro-batch in a stage.

    Tensors that cross have dicts by connection: a skip connection's number, or, for what goes from a stage to
    the next one, a negative number (see `_plain`).

    Attributes:
        inputs: what arrives.
        outputs: what it sends or stashes, without what is saved or `placed`.
        tangents: the gradients of outputs, which arrive.
        gradients: the gradients of inputs, which it sends, or which wait to be fetched.
        saved: what its forward saves.
        buffers: the part of `saved` that is in buffers which the forward writes.
        read_buffers: the part of `buffers` that the backward reads.
        held: what is kept in addition between the two halves of its backward.
        unread: the share of its inputs, of what is saved and of the gradients that arrive which is freed
            between them.
        result: its plain outputs, which the caller gets from the last stage, without those that are `placed`.
        placed: the outputs that are written into the memory of the whole mini-batch's output.
        scratch: the scratch memory that stays between runs of its programs.
        forward: the most that its forward allocates at a time.
        freed: what its backward frees of what is saved, while it runs.
        backwards: the programs' own changes in R, B, I and W, each for a later micro-batch and for the first,
            which makes the gradients of parameters.
    """

    inputs: dict[int, int]
    outputs: dict[int, int]
    tangents: dict[int, int]
    gradients: dict[int, int]
    saved: int
    buffers: int
    read_buffers: int
    held: int
    unread: tuple[float, float, float]
    result: int
    placed: int
    scratch: int
    forward: int
    freed: int
    backwards: dict[tuple[Kind, bool], list[Change]]


def _plain(index: int) -> int:
    """Returns the connection from a stage to the next one."""
    return -index - 2


def stage_bytes(
    stages: Sequence[Stage], compiled: Sequence[Sequence[CompiledStage]], call: Call
) -> list[StageBytes]:
    """Returns what each stage needs.

    Args:
        stages: the stages; those of an absent device do.
        compiled: the stages as they are compiled for the first micro-batch and, last, for the last one.
        call: the call that they are compiled for.
    """
    number = len(call.microbatches)
    training = needs_backward(stages, call.microbatches[0], compiled)
    is_step = training and call.order is not None
    schedule = planned_schedule(stages, call.saved_fractions, training, call.order, call.slots)
    defers = is_step and schedule.defers_weights
    is_joined = not is_step and call.inputs.dims.outputs == 0
    aligned = [frozenset[int]()] * (len(stages) - 1) + [_aligned(compiled[0][-1], is_joined)]
    sizes_of = cache(_sizes)  # nearly all micro-batches are alike
    sizes = [
        [
            sizes_of(i, compiled[0 if m < number - 1 else -1][i], own[m], defers, aligned[i])
            for m in range(number)
        ]
        for i, own in enumerate(call.saved_fractions)
    ]
    if not training:
        sizes = [[own._replace(saved=own.saved - own.buffers) for own in row] for row in sizes]
    joined = [action.microbatch for action in schedule.stages[-1] if action.kind is Kind.F][-1]
    found = []
    for index, own in enumerate(stages):
        parameters = parameters_of(own.layers)
        reached = {parameters[i] for i in compiled[0][index].parameters_with_gradients()}
        gradients = gradient_bytes(own, reached)
        changes = [_changes(stages, row, index, gradients) for row in zip(*sizes, strict=True)]
        _add_whole(changes, changes[joined], sizes, index, is_step)
        scratch = max(each.scratch for each in sizes[index])
        fixed = StageBytes(parameter_bytes(own), buffer_bytes(own), 0, 0, 0, scratch, 0, 0)._asdict()
        least, most = (
            [StageBytes(*map(int, peak_of(walk, changes, fixed).values())) for walk in walks]
            for walks in _extremes(stages, schedule, index, holds=not defers)
        )
        end = min(least, key=lambda each: each.total)
        found.append(end._replace(waiting=max(each.total for each in most) - end.total))
    return found


def _extremes(
    stages: Sequence[Stage], schedule: Schedule, index: int, holds: bool
) -> tuple[list[list[Moment]], list[list[Moment]]]:
    """Returns the `moments` of orders in some of which a stage needs least, and of others, most.

    A stage needs least if others fetch from it early and send to it late. Both are not always possible, since
    a stage that sends a gradient early has fetched what it pops. So several choices are compared. It needs
    most if what it has copied to another device stays until it sends the next tensor.
    """
    own, last, nothing = stages[index], len(stages) - 1, frozenset[tuple[int, Kind]]()
    popping = [s for s, other in enumerate(stages) if set(other.pops) & set(own.stashes)]
    stashing = [s for s, other in enumerate(stages) if set(other.stashes) & set(own.pops)]
    pops = frozenset((s, Kind.F) for s in popping)
    stashes = frozenset((s, kind) for s in stashing for kind in (Kind.B, Kind.I))
    sent, returned = frozenset({(index - 1, Kind.SEND_F)}), frozenset({(index + 1, Kind.SEND_B)})
    receivers = {Kind.SEND_F: stages[min(index + 1, last)], Kind.SEND_B: stages[max(index - 1, 0)]}
    copied = {kind for kind, other in receivers.items() if other.device != own.device}

    def walk(early: _Actions, late: _Actions, waiting: Set[Kind]) -> list[Moment]:
        order = schedule.order_around(index, lambda a: a[:2] in early, lambda a: a[:2] in late)
        return moments(order, index, waiting, holds)

    fetches = dict.fromkeys((nothing, pops, stashes, pops | stashes))
    sends = (nothing, sent, returned, sent | returned) if pops or stashes else (sent | returned,)
    return [walk(early, sent | returned, set()) for early in fetches], [
        walk(early, nothing, copied) for early in sends
    ]


def parameter_bytes(stage: Stage) -> int:
    """Returns the bytes of a stage's parameters, and of what quantized ones consist of.

    Of a parameter whose rows are gathered, its rows here and the whole count.
    """
    parameters = parameters_of(stage.layers)
    stored = [part.nbytes for part in {part for p in parameters for part in stored_tensors(p)}]
    stored += [p.numel() * p.itemsize for p in parameters if is_gathered(p)]
    return sum(block_bytes(size, stage.device) for size in stored)


def buffer_bytes(stage: Stage) -> int:
    """Returns the bytes of a stage's buffers."""
    buffers = {b for layer in stage.layers for b in layer.buffers()}
    return sum(block_bytes(b.nbytes, stage.device) for b in buffers)


def gradient_bytes(stage: Stage, parameters: Iterable[Tensor]) -> int:
    """Returns the bytes of the gradients of these parameters, as a stage accumulates them.

    Of a sharded parameter, this process may have all of the gradient, as a term of a sum; of a gathered one,
    it has.
    """
    dtype, every = stage.options.grad_dtype, parameters_of(stage.layers)
    parts = {id(every[index]): math.prod(part.shape) for index, part in stage.sharded_gradients.items()}
    parts |= {id(p): p.numel() for p in every if is_gathered(p)}
    numbers = ((p, parts.get(id(p), local_tensor(p.detach()).numel())) for p in parameters)
    return sum(block_bytes(n * (dtype or p.dtype).itemsize, stage.device) for p, n in numbers)


def block_bytes(size: int, device: torch.device) -> int:
    """Returns the bytes that PyTorch's allocator takes for a tensor: on a GPU, a multiple of 512."""
    return -(-size // _BLOCK) * _BLOCK if device.type == "cuda" else size


def _changes(
    stages: Sequence[Stage], row: Sequence[_Sizes], index: int, gradients: int
) -> dict[Event, list[Change]]:
    """Returns what a micro-batch changes on a stage.

    Args:
        stages: the stages.
        row: the bytes of the micro-batch in each stage.
        index: the stage.
        gradients: the bytes of the gradients of the stage's parameters.
    """
    own, found = row[index], defaultdict[Event, list[Change]](list)
    kept = {"boundary": 0, "saved": own.saved, "under_way": 0}

    def add(place: int, kind: Kind, part: str, size: int) -> None:
        found[place, kind, False].append(Change(part, size))

    for other, theirs in enumerate(row):
        place, copies = other - index, stages[other].device != stages[index].device
        for n in own.inputs.keys() & theirs.outputs:
            size = (own.inputs if copies else theirs.outputs)[n]
            add(*((-1, Kind.SEND_F) if n < 0 else (0, Kind.F)), "boundary", size)
            kept["boundary"] += size
            for end in [(0, Kind.SEND_B)] if n < 0 else [(place, Kind.B), (place, Kind.I)]:
                add(*end, "under_way", -own.gradients[n])
        for n in own.outputs.keys() & theirs.inputs:
            add(*((0, Kind.SEND_F) if n < 0 else (place, Kind.F)), "under_way", -own.outputs[n])
            add(*((1, Kind.SEND_B) if n < 0 else (0, Kind.RECV_B)), "under_way", own.tangents[n])
            kept["under_way"] += own.tangents[n]
    found[0, Kind.F, False] += [
        Change("intermediates", 0, own.forward),
        Change("saved", own.saved),
        Change("under_way", sum(own.outputs.values())),
    ]
    unread = {part: round(share * kept[part]) for part, share in zip(kept, own.unread, strict=True)}
    made = [Change("under_way", sum(own.gradients.values()))]
    # What the programs have freed is not freed again; frees come first, so that no sum exceeds what is there.
    whole = [*(Change(part, -size) for part, size in kept.items()), Change("saved", own.freed)]
    early = [Change("saved", own.held), *made, *(Change(part, -size) for part, size in unread.items())]
    late = [*whole, *(Change(part, size) for part, size in unread.items()), Change("saved", -own.held)]
    after = {Kind.R: [], Kind.B: made + whole, Kind.I: early, Kind.W: late}
    for (kind, is_first), changes in own.backwards.items():
        summed = [Change("gradients", gradients)] if is_first and kind in (Kind.B, Kind.W) else []
        found[0, kind, is_first] = [*changes, *summed, *after[kind]]
    return found


def _add_whole(
    changes: Sequence[dict[Event, list[Change]]],
    joined: dict[Event, list[Change]],
    sizes: Sequence[Sequence[_Sizes]],
    index: int,
    is_step: bool,
) -> None:
    """Adds what a stage changes for the whole mini-batch, in its first forward and after the last one.

    The last one is in the changes `joined`. The last stage then concatenates its outputs, and frees them; the
    caller has the result. Outside of a step, the module's buffers take the latest values.
    """
    own, last = sizes[index], len(sizes) - 1
    first, end = changes[0][0, Kind.F, False], joined[last - index, Kind.F, False]
    first.insert(0, Change("under_way", sum(each.placed for each in own)))
    # A micro-batch keeps the buffers that it reads: copies of the module's, or what the one before has
    # written. So the latest ones come in addition.
    first.append(Change("saved", own[0].buffers))
    if not is_step:
        end.append(Change("under_way", sum(each.result for each in own if index == last)))
        end.append(Change("saved", own[-1].read_buffers - own[-1].buffers))
    end.append(Change("under_way", -sum(each.outputs.get(_plain(last), 0) for each in own)))


def _aligned(compiled: CompiledStage, is_joined: bool) -> frozenset[int]:
    """Returns the outputs that are joined and whose micro-batches are aligned, as slices must be."""
    alignment = alignment_of(compiled.stage.device)
    specs = compiled.outputs.tensors if is_joined else ()
    sizes = [span(spec.shape, spec.strides) * spec.dtype.itemsize for spec in specs]
    return frozenset(i for i, size in enumerate(sizes) if size % alignment == 0)


def _sizes(
    index: int, compiled: CompiledStage, fraction: SavedFraction, defers: bool, aligned: frozenset[int]
) -> _Sizes:
    lowered, device = compiled.traced.lower(fraction, defers), compiled.stage.device
    forward, backward = lowered.forward, lowered.backward
    programs = [each for each in (forward, backward, lowered.weights) if each is not None]
    plain, popped = compiled.inputs.split_skips()
    out, stashed = compiled.outputs.split_skips()
    pops, stashes = (
        zip(compiled.stage.pops, popped, strict=True),
        zip(compiled.stage.stashes, stashed, strict=True),
    )
    takes = [_plain(index - 1), *(n for n, spec in pops if spec is not None)]
    sends = [_plain(index), *(n for n, spec in stashes if spec is not None)]
    written = _results(forward, GraphRole.BUFFER)
    saved = _results(forward, GraphRole.SAVED) | written
    ports = zip(forward.outputs, forward.placeable(), strict=True)
    joined = {p.index for p, can_place in ports if can_place and p.role is GraphRole.OUTPUT} & aligned
    placed = _results(forward, GraphRole.OUTPUT, joined)
    freed = {} if lowered.weights is not None else _freed(lowered, device)
    arriving = compiled.traced.ports.of(GraphRole.TANGENT)  # strided as the next stage computes them
    tangents = [
        spec_bytes([TensorSpec.of(arriving[i], True)], device) if i in arriving else 0
        for i in range(len(compiled.outputs.tensors))
    ]
    inputs = [plain.tensors, *([spec] for spec in popped if spec is not None)]
    outputs = _result_bytes(forward, GraphRole.OUTPUT, compiled.outputs, device, saved | placed)
    gradients = _result_bytes(backward, GraphRole.INPUT_GRADIENT, compiled.inputs, device)
    return _Sizes(
        {n: spec_bytes(specs, device) for n, specs in zip(takes, inputs, strict=True)},
        dict(zip(sends, outputs, strict=True)),
        dict(zip(sends, [sum(tangents[: out.num_plain]), *tangents[out.num_plain :]], strict=True)),
        dict(zip(takes, gradients, strict=True)),
        _value_bytes(forward, saved, device),
        _value_bytes(forward, written, device),
        _value_bytes(forward, written & _results(forward, GraphRole.SAVED), device),
        0 if backward is None else _value_bytes(backward, _results(backward, GraphRole.HELD), device),
        _unread(lowered, device),
        spec_bytes([spec for i, spec in enumerate(out.tensors) if i not in joined], device),
        _value_bytes(forward, placed, device),
        # On the CPU, it stays between runs: see Arena in csrc/program/program.h.
        max(each.arena_bytes for each in programs) if device.type == "cpu" else 0,
        max(most for most, _ in _course(forward, False, device, placed=placed)),
        sum(freed.values()),
        {
            (kind, is_first): part
            for is_first in (False, True)
            for kind, part in _backward_changes(lowered, is_first, device, freed).items()
        },
    )


def _backward_changes(
    lowered: LoweredStage, is_first: bool, device: torch.device, freed: Mapping[int, int]
) -> dict[Kind, list[Change]]:
    """Returns the changes by a backward and by its halves: two programs, or the parts of one."""
    program = lowered.backward
    if program is None:
        return {}

    def run(left: int, most: int) -> Change:
        return Change("intermediates", left, most)

    (early, opened), results, rest = _course(program, is_first, device, freed)
    begin, whole = run(opened, early), run(-opened, max(results[0], rest[0]) - opened)
    if lowered.weights is not None:
        late, *parts = _course(lowered.weights, is_first, device)
        weights = run(-late[1], max(most for most, _ in parts) - late[1])
        return {Kind.R: [begin], Kind.I: [whole], Kind.W: [run(late[1], late[0]), weights]}
    released = {step.value for step in program.steps[: program.parts[1]] if isinstance(step, Release)}
    first, every = sum(size for value, size in freed.items() if value in released), sum(freed.values())
    returned = _value_bytes(program, _results(program, GraphRole.INPUT_GRADIENT), device)
    stays = results[1] + first - returned
    return {
        Kind.R: [begin],
        Kind.B: [whole, Change("saved", -every)],
        Kind.I: [run(-opened, results[0] - opened), Change("saved", -first), run(stays, stays)],
        Kind.W: [run(-stays, rest[0] + first - returned - stays), Change("saved", first - every)],
    }


def _unread(lowered: LoweredStage, device: torch.device) -> tuple[float, float, float]:
    """Returns the share of inputs, of what is saved and of gradients that only B reads, and W does not."""
    first, second = lowered.backward, lowered.weights
    if first is None or second is None:
        return 0.0, 0.0, 0.0

    def share(role: GraphRole) -> float:
        read, later = _input_bytes(first, role, device), _input_bytes(second, role, device)
        every = {**_input_bytes(lowered.forward, role, device), **read, **later}
        return sum(size for port, size in every.items() if port not in later) / (sum(every.values()) or 1)

    return share(GraphRole.INPUT), share(GraphRole.SAVED), share(GraphRole.TANGENT)


def _input_bytes(program: ProgramIR, role: GraphRole, device: torch.device) -> dict[int, int]:
    """Returns the bytes of the inputs of a role, by index."""
    return {
        port.index: _value_bytes(program, [i], device) for port, i in _inputs(program) if port.role is role
    }


def _inputs(program: ProgramIR) -> Iterable[tuple[GraphPort, int]]:
    """Returns the inputs of a program, and their values."""
    values = (i for i, value in enumerate(program.values) if value.storage is StorageKind.INPUT)
    return zip(program.inputs, values, strict=True)


def _results(program: ProgramIR, role: GraphRole, indices: Container[int] | None = None) -> set[int]:
    """Returns the values in whose memory the results of a role are, unless they are the program's inputs.

    Args:
        program: the program.
        role: the role.
        indices: only results whose port has one of these indices.
    """
    found = set()
    for port, index in zip(program.outputs, program.results, strict=True):
        base = program.base_of(index)
        is_own = program.values[base].storage in (StorageKind.FRESH, StorageKind.RESULT)
        if is_own and port.role is role and (indices is None or port.index in indices):
            found.add(base)
    return found


def _result_bytes(
    program: ProgramIR | None,
    role: GraphRole,
    boundary: BoundarySpec,
    device: torch.device,
    counted: Set[int] = frozenset(),
) -> list[int]:
    """Returns the bytes of the plain results of a role, and of the results of each skip connection.

    A skip connection's tensors are freed last, so memory that they share with plain results is theirs.

    Args:
        program: the program; None if there are no results.
        role: outputs, or gradients of inputs.
        boundary: the specs of the outputs or of the inputs.
        device: the device of the stage.
        counted: values that are counted elsewhere.
    """
    if program is None:
        return [0] * (1 + sum(boundary.skips))
    found = [_results(program, role, {i}) - counted for i in range(len(boundary.tensors))]
    plain, skips = found[: boundary.num_plain], found[boundary.num_plain :]
    every = [set[int]().union(*plain).difference(*skips), *skips]
    return [_value_bytes(program, own, device) for own in every]


def _freed(lowered: LoweredStage, device: torch.device) -> dict[int, int]:
    """Returns, for saved tensors that the backward frees while it runs, by its value, their bytes.

    Those are the saved tensors whose memory nothing else refers to after the forward.
    """
    forward, backward = lowered.forward, lowered.backward
    if backward is None:
        return {}
    ports = zip(forward.outputs, forward.results, strict=True)
    base_of = {port.index: forward.base_of(i) for port, i in ports if port.role is GraphRole.SAVED}
    users = Counter(base_of.values())
    own = _results(forward, GraphRole.SAVED) - _results(forward, GraphRole.OUTPUT)
    own -= _results(forward, GraphRole.BUFFER)
    released = {step.value for step in backward.steps if isinstance(step, Release)}
    return {
        i: _value_bytes(forward, [base], device)
        for port, i in _inputs(backward)
        if port.role is GraphRole.SAVED and i in released and port.index in base_of
        for base in [base_of[port.index]]
        if base in own and users[base] == 1
    }


def _course(
    program: ProgramIR,
    is_first: bool,
    device: torch.device,
    freed: Mapping[int, int] = MappingProxyType({}),
    placed: Set[int] = frozenset(),
) -> list[tuple[int, int]]:
    """Returns the most that each part of a run needs at a time, and what it needs at the part's end.

    Args:
        program: the program.
        is_first: whether the run makes the gradients of parameters; later ones add to them.
        device: the device of the stage.
        freed: the bytes of the saved tensors that it frees. Until a gradient arrives, others own them, too.
        placed: the values whose memory it is given.
    """
    now = most = 0 if device.type == "cpu" else block_bytes(program.arena_bytes, device)
    found = []
    live = dict.fromkeys(placed, 0)
    early, owed = program.parts[0], 0
    allocated = {StorageKind.FRESH, StorageKind.RESULT} | ({StorageKind.ACCUMULATOR} if is_first else set())
    skipped = ActiveRuns.LATER if is_first else ActiveRuns.FIRST
    for position, step in enumerate(program.steps):
        if position in program.parts:
            found.append((most, now))
            now -= owed if position == early else 0
            most = now
            found += [(most, now)] * (program.parts.count(position) - 1)
        if isinstance(step, Release):
            now -= live.pop(step.value, 0)
            owed += freed.get(step.value, 0) if position < early else 0
            now -= freed.get(step.value, 0) if position >= early else 0
            continue
        if isinstance(step, AdoptAsAccumulator) and is_first:
            live.pop(step.value, None)  # stays
            continue
        if getattr(step, "when", None) is skipped:
            continue
        for index in values_written(step):
            if program.values[index].storage in allocated and index not in live:
                live[index] = _value_bytes(program, [index], device)
                now += live[index]
        most = max(most, now + temporary_bytes(step, program.values, device))
    return [*found, (most, now), (now, now), (now, now)][:3]


def _value_bytes(program: ProgramIR, indices: Iterable[int], device: torch.device) -> int:
    values = (program.values[index] for index in indices)
    return sum(block_bytes(span(v.sizes, v.strides) * v.dtype.itemsize, device) for v in values)


def spec_bytes(specs: Iterable[TensorSpec], device: torch.device) -> int:
    """Returns the bytes of tensors with these specs on a device."""
    return sum(block_bytes(span(x.shape, x.strides) * x.dtype.itemsize, device) for x in specs)
