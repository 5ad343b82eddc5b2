"""What each stage saves of each micro-batch, so that a step fits into a number of bytes for each device.

From recomputing everything on, the stages of a device climb the ladders of their graphs
(gpipe_fast/lower/ladder.py) in small steps: one more rung for one class of micro-batches, first where a byte
saves most time. Micro-batches that are kept at different times are in one class, because they share the
bytes::

    4 micro-batches, of which the stage keeps 2 at a time      step   m0  m1  m2  m3
                                                                  0    0   0   0   0   rung of each
                                                                  1    0   1   0   1
                                                                  2    1   1   1   1
                                                                  3    1   2   1   2

More steps never recompute more, so a step of the schedule never takes longer. How many of them fit is found
by tries, whose plans are lowered, and counted as `GPipe.memory` does.

If something has to be recomputed, only few boundary tensors may wait between stages. A fast stage then waits
for a slower one during the step instead of at its end, and the limit need not hold what would wait.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from gpipe_fast.lower.alias import source_of
from gpipe_fast.lower.checkpoint import FULL_RECOMPUTE, NO_RECOMPUTE, Checkpoint, SavedFraction
from gpipe_fast.lower.ladder import Ladder, bytes_of, is_backward
from gpipe_fast.lower.operator_times import nanoseconds
from gpipe_fast.runtime.compiled import CompiledStage
from gpipe_fast.runtime.module_warnings import InPython
from gpipe_fast.runtime.plan import planned_schedule
from gpipe_fast.runtime.planner import Call, Planner, why_in_python
from gpipe_fast.runtime.stage import Stage
from gpipe_fast.runtime.stage_memory import StageBytes, spec_bytes, stage_bytes
from gpipe_fast.schedule import Action, Kind, Schedule, Simulation
from gpipe_fast.schedule.cuts import LayerNeeds, Rung
from gpipe_fast.trace.joint_graph import JointGraph
from gpipe_fast.trace.tensor_metadata import AnyTensor
from gpipe_fast.trace.traceability import Untraceable

# How many plans are tried, and the share of a limit that one may leave unused without another try.
_MAX_TRIES, _UNUSED_SHARE = 8, 0.01
# How many boundary tensors may wait on a connection. One is enough if all actions take equally long.
_SLOTS = 2
# What messages call the fields of `StageBytes`.
_NAMES = {"boundary": "boundary tensors", "saved": "saved tensors", "waiting": "tensors that wait"}
_NAMES["under_way"] = "boundary tensors under way"
Limits = Mapping[torch.device, float]
_Rows = Sequence[Sequence[int]]  # for each stage, the rung of each micro-batch


class Choice(NamedTuple):
    """What to save so that a call fits into the memory.

    Attributes:
        checkpoint: what each stage saves of each micro-batch.
        nanoseconds: the simulated time of a step.
        slots: how many boundary tensors may wait on a connection; None for as many as the schedule allows.
        bytes: what each stage needs.
    """

    checkpoint: Checkpoint
    nanoseconds: float
    slots: int | None
    bytes: Sequence[StageBytes] = ()

    def applied_to(self, call: Call) -> Call:
        """Returns the call with this choice in place of its own."""
        return replace(call, checkpoint=self.checkpoint, slots=self.slots)

    def by_device(self, stages: Sequence[Stage]) -> Mapping[torch.device, int]:
        """Returns the sums of what the stages of each device need."""
        found = defaultdict[torch.device, int](int)
        for own, stage in zip(self.bytes, stages, strict=True):
            found[stage.device] += own.total
        return found


class LimitError(ValueError):
    """A limit within which no step fits."""


def choice_within(planner: Planner, call: Call, limits: Limits) -> Choice:
    """Returns what to save in a call with gradients, so that it fits into the memory of each device.

    Counted are parameters, buffers, gradients, and everything of the micro-batches. The state of an optimizer
    is not.

    Args:
        planner: traces the stages.
        call: the call; its own checkpoint policy is not read.
        limits: the bytes for each device.

    Raises:
        LimitError: even if everything is recomputed, a step needs more; the message says how much, for what.
        RuntimeError: a layer cannot be traced.
    """
    key = call.key(), tuple(limits.items())
    known = planner.within.lookup(key)
    if known is None:
        known = planner.within[key] = _Climb(planner, call).choice_within(limits)
    return known


def layer_needs(planner: Planner, call: Call) -> list[LayerNeeds]:
    """Returns what each layer costs, given a planner in which it is a stage of its own.

    Raises:
        RuntimeError: a layer cannot be traced.
    """
    climb = _Climb(planner, call)
    found = []
    for number, (stage, own) in enumerate(zip(planner.stages, climb.compiled[0], strict=True)):
        alone = replace(call, checkpoint=Checkpoint(((NO_RECOMPUTE,),)))
        (needed,) = stage_bytes([stage], [[pipeline[number]] for pipeline in climb.compiled], alone)
        boundary, outputs = (spec_bytes(each.tensors, stage.device) for each in (own.inputs, own.outputs))
        found.append(
            LayerNeeds(
                *climb.times[number],
                climb.rungs[number],
                boundary if stage.first_layer else 0,  # the first one's are parts of the caller's
                outputs,
                needed.parameters + needed.buffers + needed.gradients,
                needed.intermediates,
            )
        )
    return found


def relative_sizes(call: Call) -> list[float]:
    """Returns the size of each micro-batch of a call, relative to the largest."""
    found = [sum(math.prod(spec.shape) for spec in each.tensors) for each in call.microbatches]
    return [own / max(1, *found) for own in found]


class _Step(NamedTuple):
    """One more rung for some micro-batches of a stage; `saved` are the bytes that all of them save more."""

    stage: int
    rung: int
    microbatches: Sequence[int]
    saved: float


class _Climb:
    """The ladders of the stages of a call.

    Attributes:
        compiled: the compiled stages for the first micro-batch, and for the last.
        rungs: the ladder of each stage, for the first micro-batch.
        times: the nanoseconds of each stage's forward of it, and of its backward without recomputation.
    """

    def __init__(self, planner: Planner, call: Call) -> None:
        self._planner, self._stages, self._call = planner, planner.stages, call
        self._number = len(call.microbatches)
        compiled = _compiled(planner, call)
        self.compiled = [pipeline for m, pipeline in enumerate(compiled) if m in (0, self._number - 1)]
        graphs = [own.traced.joint for own in compiled[0]]
        self.rungs, self.times = list(map(_rungs, graphs)), list(map(_times, graphs))
        self._sizes = relative_sizes(call)

    def choice_within(self, limits: Limits) -> Choice:
        """Returns the fastest of a few choices whose plans fit."""
        top = [[len(own) - 1] * self._number for own in self.rungs]
        everything_saved = self._choice(top, None)
        if all(everything_saved.by_device(self._stages)[device] <= size for device, size in limits.items()):
            return everything_saved
        found = self._choice([[0] * self._number for _ in self.rungs], _SLOTS)
        searches = {}
        for device, limit in limits.items():
            stages = [i for i, stage in enumerate(self._stages) if stage.device == device]
            least, most = (each.by_device(self._stages)[device] for each in (found, everything_saved))
            if least > limit:
                raise _limit_error(device, limit, {i: found.bytes[i] for i in stages})
            searches[device] = _Search(self._steps(stages), limit, least, most)
        for _ in range(_MAX_TRIES):
            rows = [[0] * self._number for _ in self.rungs]
            for search in searches.values():
                for step in search.steps[: search.next]:
                    for m in step.microbatches:
                        rows[step.stage][m] = step.rung
            choice = self._choice(rows, _SLOTS)
            needed = choice.by_device(self._stages)
            if all(needed[device] <= limit for device, limit in limits.items()):
                found = choice
            for device, search in searches.items():
                search.note(needed[device])
            if all(search.is_done for search in searches.values()):
                break
        return found

    def _choice(self, rows: _Rows, slots: int | None) -> Choice:
        fractions = (
            tuple(_fraction(rungs, rung) for rung in row) for rungs, row in zip(self.rungs, rows, strict=True)
        )
        choice = Choice(Checkpoint(tuple(fractions)), self._time_of(rows), slots)
        call = choice.applied_to(self._call)
        return choice._replace(bytes=stage_bytes(self._stages, _compiled(self._planner, call), call))

    def _steps(self, stages: Sequence[int]) -> list[_Step]:
        """Returns the steps of the stages of a device: first those that save most time for their bytes."""
        found: list[tuple[float, _Step]] = []
        kept = Simulation.of(self._schedule([[True] * self._number for _ in self.rungs])).kept
        for stage in stages:
            gain = float("inf")
            for rung, (before, after) in enumerate(pairwise(self.rungs[stage]), 1):
                saved = after.saved - before.saved
                # Never before the rung below.
                gain = min(gain, (before.recompute - after.recompute) / saved) if saved else gain
                for first in range(kept[stage]):
                    own = range(first, self._number, kept[stage])
                    found.append((-gain, _Step(stage, rung, own, saved * len(own))))
        return [step for _, step in sorted(found, key=operator.itemgetter(0))]

    def _schedule(self, recomputed: Sequence[Sequence[object]]) -> Schedule:
        fractions = [[FULL_RECOMPUTE if each else NO_RECOMPUTE for each in row] for row in recomputed]
        return planned_schedule(self._stages, fractions, True, self._call.order, _SLOTS)

    def _time_of(self, rows: _Rows) -> float:
        """Returns the simulated time of a step."""
        again = [[own[rung].recompute for rung in row] for own, row in zip(self.rungs, rows, strict=True)]
        schedule = self._schedule(again)
        recomputes = {(a.stage, a.microbatch) for row in schedule.stages for a in row if a.kind is Kind.R}

        def seconds(action: Action) -> float:
            stage, kind, m = action
            (forward, backward), recompute = self.times[stage], again[stage][m]
            # Without an R, a backward recomputes what it needs.
            late = 0.0 if (stage, m) in recomputes else recompute
            time = {
                Kind.F: forward,
                Kind.R: recompute,
                Kind.B: backward + late,
                Kind.I: backward / 2 + late,
                Kind.W: backward / 2,
            }
            return time.get(kind, 0.0) * self._sizes[m]

        return Simulation.of(schedule, seconds).time


class _Search:
    """The search for the number of steps that fit into the limit of a device.

    Attributes:
        steps: the steps.
        next: the number of them to try next; the most that are known to fit if `is_done`.
    """

    def __init__(self, steps: Sequence[_Step], limit: float, least: float, most: float) -> None:
        self.steps, self._limit = steps, limit
        self._saved = [*accumulate((step.saved for step in steps), initial=0.0)]
        # The most steps that fit, and the least that do not, as far as known, with what they need.
        self._low, self._high = (0, least), (len(steps) + (most <= limit), most)
        self.next = 0
        self._choose()

    def note(self, needed: float) -> None:
        """Notes what the next number of steps needs, and chooses another one."""
        if needed <= self._limit:
            self._low = self.next, needed
        else:
            self._high = self.next, needed
        self._choose()

    @property
    def is_done(self) -> bool:
        """Whether no other number is worth a try."""
        return self.next == self._low[0]

    def _choose(self) -> None:
        """Chooses the number that just fits if what is needed grows like what is saved."""
        (low, least), (high, most) = self._low, self._high
        unused = self._limit - least
        if high - low <= 1 or unused <= _UNUSED_SHARE * self._limit:
            self.next = low
            return
        last = self._saved[min(high, len(self.steps))]
        saved = self._saved[low] + (last - self._saved[low]) * unused / max(1.0, most - least)
        self.next = min(max(low + 1, bisect_right(self._saved, saved) - 1), high - 1)


def _compiled(planner: Planner, call: Call) -> Sequence[Sequence[CompiledStage]]:
    if planner.backend == "eager":
        why = InPython("every layer", "backend='eager' or a global module hook demands it")
    else:
        try:
            return planner.compile(call)
        except Untraceable as error:
            why = why_in_python(error, planner.stages)
    raise RuntimeError(
        f"memory was passed, but {why.where} runs in Python, and what it needs is not known: {why.reason}; "
        "mend that, or pass checkpoint instead of memory"
    )


def _rungs(joint: JointGraph) -> list[Rung]:
    """Returns the rungs of a graph's ladder, with the bytes that are saved on each."""
    value_of = {node.name: node.meta.get("val") for node in joint.module.graph.nodes}

    def size(names: Sequence[str]) -> int:
        return sum(bytes_of(value_of[name]) for name in names)

    rungs = Ladder.of(joint).rungs
    saved = accumulate(size(rung.added) - size(rung.dropped) for rung in rungs)
    return [Rung(own, rung.recompute) for own, rung in zip(saved, rungs, strict=True)]


def _times(joint: JointGraph) -> tuple[int, int]:
    """Returns the nanoseconds of a graph's forward and of its backward."""
    times = Counter[bool]()
    for node in joint.module.graph.nodes:
        computes = node.op == "call_function" and node.target is not operator.getitem
        has_value = isinstance(node.meta.get("val"), (AnyTensor, tuple, list))
        if computes and has_value and source_of(node).base is node:
            times[is_backward(node)] += nanoseconds(node)
    return times[False], times[True]


def _fraction(rungs: Sequence[Rung], rung: int) -> SavedFraction:
    """Returns a saved fraction whose furthest rung is this one: half way to the next one that saves more."""
    saved = rungs[rung].saved
    if saved == rungs[-1].saved:
        return NO_RECOMPUTE
    if rung == 0 == saved:
        return FULL_RECOMPUTE
    following = next(own.saved for own in rungs[rung:] if own.saved > saved)
    return (saved + following) / 2 / rungs[-1].saved


def _limit_error(device: torch.device, limit: float, needed: Mapping[int, StageBytes]) -> LimitError:
    texts = []
    for stage, own in needed.items():
        named = own._asdict().items()
        parts = [f"{_mib(size)} of {_NAMES.get(name, name)}" for name, size in named if size]
        texts.append(f"stage {stage}: {', '.join(parts)}")
    total = sum(own.total for own in needed.values())
    return LimitError(
        f"memory is {_mib(limit, math.floor)} on {device}, but at least {_mib(total, math.ceil)} is needed "
        f"if everything is recomputed ({'; '.join(texts)}); "
        "pass at least that, use more chunks, or a balance with fewer layers on this device"
    )


def _mib(size: float, rounded: Callable[[float], int] = round) -> str:
    if size < 2**17:
        return f"{rounded(size):,} bytes"
    return f"{rounded(size / 2**20 * 10) / 10:.1f} MiB"
