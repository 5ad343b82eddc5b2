"""The memory that each stage needs for a plan, from shapes and from the programs' own offsets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from gpipe_fast._extension import ActiveRuns
from gpipe_fast.lower.arena import ALIGNMENT, ALIGNMENTS
from gpipe_fast.lower.checkpoint import SavedFraction
from gpipe_fast.lower.operator_memory import temporary_bytes
from gpipe_fast.lower.program import ProgramIR, StorageKind
from gpipe_fast.lower.steps import AdoptAsAccumulator, Release, values_written
from gpipe_fast.runtime.compiled import CompiledStage, LoweredStage
from gpipe_fast.runtime.plan import needs_backward, planned_schedule
from gpipe_fast.runtime.planner import Call
from gpipe_fast.runtime.stage import BoundarySpec, Stage, TensorSpec
from gpipe_fast.schedule import Action, Kind, Schedule
from gpipe_fast.strides import span
from gpipe_fast.trace.joint_graph import GraphRole, parameters_of

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


class _BackwardSizes(NamedTuple):
    """The bytes of a backward or of a half of it, beside the gradients that it returns.

    Attributes:
        early: the most that it allocates at a time until it needs a gradient, less what it has freed. An R is
            this part.
        opened: what that part leaves allocated.
        most: the most that it allocates at a time afterwards, less what it has freed.
        stays: what it leaves allocated for the other half, which frees it: there, the number is negative.
        freed: what it frees of what is saved.
    """

    early: int = 0
    opened: int = 0
    most: int = 0
    stays: int = 0
    freed: int = 0


class _Sizes(NamedTuple):
    """The bytes of a micro-batch in a stage.

    Attributes:
        boundary: its plain inputs, as they arrive.
        popped: by skip connection, what it pops.
        saved: what its forward saves.
        buffers: the part of `saved` that is in buffers which the forward writes.
        read_buffers: the part of `buffers` that the backward reads.
        held: what is kept in addition between the two halves of its backward.
        unread: the share of its inputs, of what is saved and of the gradients that arrive which is freed
            between them.
        outputs: its plain outputs, without what is saved or stashed, too, or `placed`.
        result: its plain outputs, which the caller gets from the last stage, without those that are `placed`.
        placed: the outputs that are written into the memory of the whole mini-batch's output.
        stashed: by skip connection, what it stashes, without what is saved, too.
        tangents: the gradients of plain outputs, which arrive.
        stash_gradients: by skip connection, the gradient of what it stashed, which it fetches.
        gradients: the gradients of plain inputs, which it sends.
        pop_gradients: by skip connection, the gradient of what it popped, which waits to be fetched.
        scratch: the scratch memory that stays between runs of its programs.
        forward: the most that its forward allocates at a time.
        freed: what its backward frees of what is saved, while it runs.
        backwards: what its backward (B) or its halves (I, W) need, each for a later micro-batch and for the
            first, which makes the gradients of parameters.
    """

    boundary: int
    popped: dict[int, int]
    saved: int
    buffers: int
    read_buffers: int
    held: int
    unread: tuple[float, float, float]
    outputs: int
    result: int
    placed: int
    stashed: dict[int, int]
    tangents: int
    stash_gradients: dict[int, int]
    gradients: int
    pop_gradients: dict[int, int]
    scratch: int
    forward: int
    freed: int
    backwards: dict[tuple[Kind, bool], _BackwardSizes]


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
    aligned = _aligned(compiled[0][-1]) if not is_step and call.inputs.dims.outputs == 0 else frozenset[int]()
    sizes_of = cache(_sizes)  # nearly all micro-batches are alike
    sizes = [
        [
            sizes_of(
                compiled[0 if m < number - 1 else -1][i],
                own[m],
                defers,
                aligned if i == len(stages) - 1 else frozenset(),
            )
            for m in range(number)
        ]
        for i, own in enumerate(call.saved_fractions)
    ]
    if not training:
        sizes = [[own._replace(saved=own.saved - own.buffers) for own in row] for row in sizes]
    fixed = []
    for index, own in enumerate(stages):
        parameters = parameters_of(own.layers)
        reached = {parameters[i] for i in compiled[0][index].parameters_with_gradients()}
        scratch = max(each.scratch for each in sizes[index])
        sums = parameter_bytes(own), buffer_bytes(own), gradient_bytes(own, reached)
        fixed.append(StageBytes(*sums, boundary=0, saved=0, intermediates=scratch, under_way=0, waiting=0))
    found = []
    for index in range(len(stages)):
        ends = [
            [_Walk(stages, schedule, is_step, sizes, fixed, waiting).peak(index, *each) for each in choices]
            for waiting, choices in zip((False, True), _early_and_late(stages, index), strict=True)
        ]
        least = min(ends[0], key=lambda end: end.total)
        most = max(ends[1], key=lambda end: end.total)
        found.append(least._replace(waiting=most.total - least.total))
    return found


def _early_and_late(
    stages: Sequence[Stage], index: int
) -> tuple[list[tuple[_Actions, _Actions]], list[tuple[_Actions, _Actions]]]:
    """Returns which actions of other stages are early, and which late: when a stage needs least, and most.

    A stage needs least if others fetch from it early and send to it late. Both are not always possible, since
    a stage that sends a gradient early has fetched what it pops. So several choices are compared.
    """
    own = stages[index]
    popping = {s for s, other in enumerate(stages) if set(other.pops) & set(own.stashes)}
    stashing = {s for s, other in enumerate(stages) if set(other.stashes) & set(own.pops)}
    pops: _Actions = {(s, Kind.F) for s in popping}
    stashes: _Actions = {(s, kind) for s in stashing for kind in (Kind.B, Kind.I)}
    sent: _Actions = {(index - 1, Kind.SEND_F)}
    returned: _Actions = {(index + 1, Kind.SEND_B)}
    nothing, sends = frozenset[tuple[int, Kind]](), sent | returned
    if not popping and not stashing:
        return [(nothing, nothing)], [(sends, nothing)]
    least = [(early, sends) for early in (nothing, pops, stashes, pops | stashes)]
    return least, [(early, nothing) for early in (nothing, sent, returned, sends)]


def parameter_bytes(stage: Stage) -> int:
    """Returns the bytes of a stage's parameters."""
    return sum(block_bytes(p.nbytes, stage.device) for p in set(parameters_of(stage.layers)))


def buffer_bytes(stage: Stage) -> int:
    """Returns the bytes of a stage's buffers."""
    buffers = {b for layer in stage.layers for b in layer.buffers()}
    return sum(block_bytes(b.nbytes, stage.device) for b in buffers)


def gradient_bytes(stage: Stage, parameters: Iterable[Tensor]) -> int:
    """Returns the bytes of the gradients of these parameters, as a stage accumulates them."""
    dtype = stage.options.grad_dtype
    return sum(block_bytes(p.numel() * (dtype or p.dtype).itemsize, stage.device) for p in parameters)


def block_bytes(size: int, device: torch.device) -> int:
    """Returns the bytes that PyTorch's allocator takes for a tensor: on a GPU, a multiple of 512."""
    return -(-size // _BLOCK) * _BLOCK if device.type == "cuda" else size


class _Walk:
    """A walk over the actions of a schedule, which notes what stages need.

    Args:
        stages: the stages.
        schedule: the schedule.
        is_step: whether forwards and backwards are one run.
        sizes: for each stage, the bytes of each micro-batch.
        fixed: what each stage needs at all times; the gradients only from its first backward on.
        waiting: whether a tensor stays after its copy until the next one is sent; else it is freed at once.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        schedule: Schedule,
        is_step: bool,
        sizes: Sequence[Sequence[_Sizes]],
        fixed: Sequence[StageBytes],
        waiting: bool,
    ) -> None:
        self._stages, self._sizes = stages, sizes
        self._schedule, self._is_step = schedule, is_step
        self._gradients = [own.gradients for own in fixed]
        self._now = [own._replace(gradients=0) for own in fixed]
        self._most = list(self._now)
        self._stash_of = {number: s for s, own in enumerate(stages) for number in own.stashes}
        self._pop_of = {number: s for s, own in enumerate(stages) for number in own.pops}
        self._waiting = waiting
        self._sent: dict[tuple[int, Kind], int] = {}
        self._begun: set[int] = set()  # stages that have run an R, and not yet its B or I
        # For each stage between the halves of a backward: bytes of gradients that it has sent, and keeps.
        self._open: dict[int, int] = {}

    def peak(self, stage: int, early: _Actions, late: _Actions) -> StageBytes:
        """Returns what a stage needs when it needs most, if some actions of others are early or late."""
        order = self._schedule.order_around(stage, lambda a: a[:2] in early, lambda a: a[:2] in late)
        last = {(a.stage, a.microbatch): a for a in order if a.kind in (Kind.B, Kind.W)}
        forwards = 0
        for action in order:
            self._take(action)
            if last.get((action.stage, action.microbatch)) is action:
                self._end(*action)
            forwards += action.kind is Kind.F
            if action.kind is Kind.F and forwards == len(self._sizes) * len(self._sizes[0]):
                self._join()
        return self._most[stage]

    def _take(self, action: Action) -> None:
        stage, kind, m = action
        own = self._sizes[stage][m]
        if kind is Kind.F:
            for number in own.popped:
                before = self._stash_of.get(number, stage)
                self._add(before, under_way=-self._sizes[before][m].stashed.get(number, 0))
                self._add(stage, boundary=self._popped(stage, m, number))
            if m == 0:
                self._add(stage, under_way=sum(each.placed for each in self._sizes[stage]))
            self._add(stage, intermediates=own.forward)
            self._add(stage, intermediates=-own.forward)
            # A micro-batch keeps the buffers that it reads: copies of the module's, or what the one before
            # has written. So the latest ones come in addition.
            latest = own.buffers if m == 0 else 0
            self._add(stage, saved=own.saved + latest, under_way=own.outputs + sum(own.stashed.values()))
        elif kind is Kind.SEND_F:
            self._leave(stage, stage + 1, kind, own.outputs)
            copies = self._copies(stage, stage + 1)
            self._add(stage + 1, boundary=self._sizes[stage + 1][m].boundary if copies else own.outputs)
        elif kind is Kind.SEND_B:
            self._leave(stage, stage - 1, kind, own.gradients)
            self._add(stage - 1, under_way=self._sizes[stage - 1][m].tangents)
        elif kind is Kind.R:
            self._begin_backward(stage, self._backward_sizes(stage, m, Kind.I))
        elif kind in (Kind.B, Kind.I, Kind.W):
            part = self._backward_sizes(stage, m, kind)
            is_first = self._now[stage].gradients == 0
            if kind is not Kind.W:
                for number, size in own.stash_gradients.items():
                    after = self._pop_of.get(number, stage)
                    self._add(stage, under_way=size)
                    self._free_gradients(after, self._sizes[after][m].pop_gradients.get(number, 0))
            self._begin_backward(stage, part)
            self._begun.discard(stage)
            self._add(stage, intermediates=part.most - part.opened)
            self._add(stage, intermediates=part.stays - part.most, saved=-part.freed)
            if is_first and kind is not Kind.I:
                self._add(stage, gradients=self._gradients[stage])
            if kind is not Kind.W:
                self._add(stage, saved=own.held if kind is Kind.I else 0)
                self._add(stage, under_way=own.gradients + sum(own.pop_gradients.values()))
            if kind is Kind.I:
                self._free(stage, m, own.unread)
                if not (self._is_step and self._schedule.defers_weights):
                    self._open[stage] = 0
            else:
                self._free_gradients(stage, self._open.pop(stage, 0))

    def _backward_sizes(self, stage: int, m: int, kind: Kind) -> _BackwardSizes:
        is_first = self._now[stage].gradients == 0
        return self._sizes[stage][m].backwards.get((kind, is_first), _BackwardSizes())

    def _begin_backward(self, stage: int, part: _BackwardSizes) -> None:
        """Adds what a backward allocates before it needs a gradient, unless an R has done so."""
        if stage not in self._begun:
            self._add(stage, intermediates=part.early)
            self._add(stage, intermediates=part.opened - part.early)
            self._begun.add(stage)

    def _free(self, stage: int, m: int, shares: tuple[float, float, float]) -> None:
        """Frees a share of what a backward reads: inputs, saved tensors, gradients that have arrived."""
        own = self._sizes[stage][m]
        boundary = sum(self._popped(stage, m, number) for number in own.popped)
        if stage > 0:
            copies = self._copies(stage - 1, stage)
            boundary += own.boundary if copies else self._sizes[stage - 1][m].outputs
        received = own.tangents if stage < len(self._stages) - 1 else 0
        received += sum(own.stash_gradients.values())
        sizes = (
            round(share * size) for share, size in zip(shares, (boundary, own.saved, received), strict=True)
        )
        self._add(
            stage, **dict(zip(("boundary", "saved", "under_way"), (-size for size in sizes), strict=True))
        )

    def _end(self, stage: int, kind: Kind, m: int) -> None:
        """Frees what is kept until the end of a backward."""
        own = self._sizes[stage][m]
        boundary, saved, received = own.unread if kind is Kind.W else (0.0, 0.0, 0.0)
        freed = own.freed / max(1, own.saved)
        self._free(stage, m, (1 - boundary, 1 - saved - freed, 1 - received))
        self._add(stage, saved=-own.held)

    def _join(self) -> None:
        """Concatenates the outputs of the last stage, and frees them; the caller has the result.

        Outside of a step, the forward ends, and the module's buffers take the latest values.
        """
        if not self._is_step:
            self._add(-1, under_way=sum(own.result for own in self._sizes[-1]))
            for stage, sizes in enumerate(self._sizes):
                self._add(stage, saved=sizes[-1].read_buffers - sizes[-1].buffers)
        self._add(-1, under_way=-sum(own.outputs for own in self._sizes[-1]))

    def _leave(self, stage: int, receiver: int, kind: Kind, size: int) -> None:
        """Frees what a stage has sent."""
        key = stage, kind
        self._add(stage, under_way=-self._sent.get(key, 0))
        self._sent[key] = size if self._waiting and self._copies(stage, receiver) else 0
        if not self._sent[key]:
            self._free_gradients(stage, size)

    def _free_gradients(self, stage: int, size: int) -> None:
        """Frees gradients that a stage has sent; notes them between its I and W, which keep them."""
        if stage in self._open:
            self._open[stage] += size
        else:
            self._add(stage, under_way=-size)

    def _popped(self, stage: int, m: int, number: int) -> int:
        """Returns the bytes of what a stage pops: of its copy, if there is one."""
        before = self._stash_of.get(number, stage)
        own = self._sizes[stage][m].popped[number]
        return own if self._copies(before, stage) else self._sizes[before][m].stashed.get(number, 0)

    def _copies(self, stage: int, other: int) -> bool:
        return self._stages[stage].device != self._stages[other].device

    def _add(self, stage: int, **changes: int) -> None:
        before = self._now[stage]
        now = before._replace(**{name: getattr(before, name) + more for name, more in changes.items()})
        self._now[stage] = now
        self._most[stage] = max(self._most[stage], now, key=sum)


def scratch_bytes(lowered: LoweredStage, gradients: int, device: torch.device) -> int:
    """Returns the most that the programs of a stage need beside what they are given, save and return.

    Args:
        lowered: the programs.
        gradients: the bytes of the gradients of parameters, which do not count.
        device: the device of the stage.
    """
    programs = [each for each in (lowered.forward, lowered.backward, lowered.weights) if each is not None]
    roles = (GraphRole.SAVED, GraphRole.BUFFER, GraphRole.OUTPUT)
    results = set[int]().union(*(_results(lowered.forward, role) for role in roles))
    found = _peak(lowered.forward, False, device) - _value_bytes(lowered.forward, results, device)
    for each in programs[1:]:
        freed = _freed(lowered, device) if each is lowered.backward and lowered.weights is None else {}
        sizes = _peak(each, False, device, freed), _peak(each, True, device, freed) - gradients
        found = max(found, *sizes)
    return found + _staying_bytes(programs, device)


def _staying_bytes(programs: Iterable[ProgramIR], device: torch.device) -> int:
    """Returns the scratch memory that stays between runs: see Arena in csrc/program/program.h."""
    return max(program.arena_bytes for program in programs) if device.type == "cpu" else 0


def _aligned(compiled: CompiledStage) -> frozenset[int]:
    """Returns the outputs whose micro-batches are aligned, as slices of one tensor must be."""
    alignment = ALIGNMENTS.get(compiled.stage.device.type, ALIGNMENT)
    specs = compiled.outputs.tensors
    sizes = [span(spec.shape, spec.strides) * spec.dtype.itemsize for spec in specs]
    return frozenset(i for i, size in enumerate(sizes) if size % alignment == 0)


def _sizes(compiled: CompiledStage, fraction: SavedFraction, defers: bool, aligned: frozenset[int]) -> _Sizes:
    lowered, device = compiled.traced.lower(fraction, defers), compiled.stage.device
    forward, backward = lowered.forward, lowered.backward
    programs = [each for each in (forward, backward, lowered.weights) if each is not None]
    plain, popped = compiled.inputs.split_skips()
    out, stashed = compiled.outputs.split_skips()
    pops = [n for n, s in zip(compiled.stage.pops, popped, strict=True) if s is not None]
    stashes = [n for n, s in zip(compiled.stage.stashes, stashed, strict=True) if s is not None]
    written = _results(forward, GraphRole.BUFFER)
    saved = _results(forward, GraphRole.SAVED) | written
    ports = zip(forward.outputs, forward.placeable(), strict=True)
    joined = {p.index for p, can_place in ports if can_place and p.role is GraphRole.OUTPUT} & aligned
    placed = _results(forward, GraphRole.OUTPUT, joined)
    sent, stashed_bytes = _result_bytes(forward, GraphRole.OUTPUT, compiled.outputs, device, saved | placed)
    made, pop_gradients = _result_bytes(backward, GraphRole.INPUT_GRADIENT, compiled.inputs, device)
    freed = {} if lowered.weights is not None else _freed(lowered, device)
    arriving = compiled.traced.ports.of(GraphRole.TANGENT)  # strided as the next stage computes them
    tangents = [
        spec_bytes([TensorSpec.of(arriving[i], True)], device) if i in arriving else 0
        for i in range(len(compiled.outputs.tensors))
    ]
    return _Sizes(
        spec_bytes(plain.tensors, device),
        dict(zip(pops, (spec_bytes([spec], device) for spec in popped if spec is not None), strict=True)),
        _value_bytes(forward, saved, device),
        _value_bytes(forward, written, device),
        _value_bytes(forward, written & _results(forward, GraphRole.SAVED), device),
        0 if backward is None else _value_bytes(backward, _results(backward, GraphRole.HELD), device),
        _unread(lowered, device),
        sent,
        spec_bytes([spec for i, spec in enumerate(out.tensors) if i not in joined], device),
        _value_bytes(forward, placed, device),
        dict(zip(stashes, stashed_bytes, strict=True)),
        sum(tangents[: out.num_plain]),
        dict(zip(stashes, tangents[out.num_plain :], strict=True)),
        made,
        dict(zip(pops, pop_gradients, strict=True)),
        _staying_bytes(programs, device),
        _peak(forward, False, device, placed=placed),
        sum(freed.values()),
        {
            (kind, is_first): part
            for is_first in (False, True)
            for kind, part in _backward_sizes(lowered, is_first, device, freed).items()
        },
    )


def _backward_sizes(
    lowered: LoweredStage, is_first: bool, device: torch.device, freed: Mapping[int, int]
) -> dict[Kind, _BackwardSizes]:
    """Returns what a backward and its halves need: two programs, or the parts of one."""
    if lowered.backward is None:
        return {}
    if lowered.weights is not None:
        programs = {Kind.I: lowered.backward, Kind.W: lowered.weights}
        found = {}
        for kind, each in programs.items():
            early, results, rest = _course(each, is_first, device, {})
            found[kind] = _BackwardSizes(*early, max(results[0], rest[0]))
        return found
    program = lowered.backward
    early, results, rest = _course(program, is_first, device, freed)
    released = {step.value for step in program.steps[: program.parts[1]] if isinstance(step, Release)}
    first = sum(size for value, size in freed.items() if value in released)
    returned = _value_bytes(program, _results(program, GraphRole.INPUT_GRADIENT), device)
    stays = results[1] + first - returned
    every = sum(freed.values())
    return {
        Kind.B: _BackwardSizes(*early, max(results[0], rest[0]), 0, every),
        Kind.I: _BackwardSizes(*early, results[0], stays, first),
        Kind.W: _BackwardSizes(0, 0, rest[0] + first - returned - stays, -stays, every - first),
    }


def _unread(lowered: LoweredStage, device: torch.device) -> tuple[float, float, float]:
    """Returns the share of inputs, of what is saved and of gradients that only B reads, and W does not."""
    first, second = lowered.backward, lowered.weights
    if first is None or second is None:
        return 0.0, 0.0, 0.0
    shares = []
    for role in (GraphRole.INPUT, GraphRole.SAVED, GraphRole.TANGENT):
        read, later = _input_bytes(first, role, device), _input_bytes(second, role, device)
        every = {**_input_bytes(lowered.forward, role, device), **read, **later}
        shares.append(
            sum(size for port, size in every.items() if port not in later) / (sum(every.values()) or 1)
        )
    return shares[0], shares[1], shares[2]


def _input_bytes(program: ProgramIR, role: GraphRole, device: torch.device) -> dict[int, int]:
    """Returns the bytes of the inputs of a role, by index."""
    inputs = (i for i, value in enumerate(program.values) if value.storage is StorageKind.INPUT)
    pairs = zip(program.inputs, inputs, strict=True)
    return {port.index: _value_bytes(program, [i], device) for port, i in pairs if port.role is role}


def _results(program: ProgramIR, role: GraphRole, indices: Container[int] | None = None) -> set[int]:
    """Returns the values in whose memory the results of a role are, unless they are the program's inputs.

    Args:
        program: the program.
        role: the role.
        indices: only results whose port has one of these indices.
    """
    found = set()
    for port, index in zip(program.outputs, program.results, strict=True):
        value = program.values[index]
        base = value.index if value.storage is StorageKind.VIEW else index
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
) -> tuple[int, list[int]]:
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
        return 0, [0] * sum(boundary.skips)
    found = [_results(program, role, {i}) - counted for i in range(len(boundary.tensors))]
    plain, skips = found[: boundary.num_plain], found[boundary.num_plain :]
    shared = set[int]().union(*skips)
    return _value_bytes(program, set[int]().union(*plain) - shared, device), [
        _value_bytes(program, own, device) for own in skips
    ]


def _freed(lowered: LoweredStage, device: torch.device) -> dict[int, int]:
    """Returns, for saved tensors that the backward frees while it runs, by its value, their bytes.

    Those are the saved tensors whose memory nothing else refers to after the forward.
    """
    forward, backward = lowered.forward, lowered.backward
    if backward is None:
        return {}
    own = _results(forward, GraphRole.SAVED) - _results(forward, GraphRole.OUTPUT)
    own -= _results(forward, GraphRole.BUFFER)
    base_of = {}
    for port, index in zip(forward.outputs, forward.results, strict=True):
        value = forward.values[index]
        if port.role is GraphRole.SAVED:
            base_of[port.index] = value.index if value.storage is StorageKind.VIEW else index
    inputs = (i for i, value in enumerate(backward.values) if value.storage is StorageKind.INPUT)
    saved = {
        i: base_of.get(port.index)
        for i, port in zip(inputs, backward.inputs, strict=True)
        if port.role is GraphRole.SAVED
    }
    users = Counter(base_of.values())
    released = (step.value for step in backward.steps if isinstance(step, Release))
    bases = {i: saved[i] for i in released if i in saved}
    return {
        i: _value_bytes(forward, [base], device)
        for i, base in bases.items()
        if base is not None and base in own and users[base] == 1
    }


def _peak(
    program: ProgramIR,
    is_first: bool,
    device: torch.device,
    freed: Mapping[int, int] = MappingProxyType({}),
    placed: Set[int] = frozenset(),
) -> int:
    """Returns the most that a run of a program needs at a time, without scratch memory that stays.

    The arguments are those of `_course`.
    """
    return max(most for most, _ in _course(program, is_first, device, freed, placed))


def _course(
    program: ProgramIR,
    is_first: bool,
    device: torch.device,
    freed: Mapping[int, int],
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
