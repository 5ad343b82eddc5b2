"""What each stage saves of each micro-batch, so that a step fits into a number of bytes for each device.

The stages are traced first. The ladders of their graphs (gpipe_fast/lower/ladder.py), the times of their
operators and the schedule are what gpipe_fast/schedule/budget.py chooses from. Programs are then lowered for
what was chosen, and the choice is made again with the scratch memory that they turn out to need. At last the
plan is made, and counted as `GPipe.memory` does; the choice is made once more with what it leaves, or lacks.

If something has to be recomputed, only few boundary tensors may wait between stages. A fast stage then waits
for a slower one during the step instead of at its end, and the limit need not hold what would wait.
"""

from __future__ import annotations

import math
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from torch import fx

from gpipe_fast.lower.alias import source_of
from gpipe_fast.lower.checkpoint import FULL_RECOMPUTE, NO_RECOMPUTE, Checkpoint, SavedFraction
from gpipe_fast.lower.ladder import Ladder, bytes_of, is_backward
from gpipe_fast.lower.operator_times import nanoseconds
from gpipe_fast.runtime.compile import CompilationFailure
from gpipe_fast.runtime.compiled import CompiledStage
from gpipe_fast.runtime.module_warnings import InPython
from gpipe_fast.runtime.plan import planned_schedule
from gpipe_fast.runtime.planner import Call, Choice, Planner, why_in_python
from gpipe_fast.runtime.stage_memory import (
    StageBytes,
    buffer_bytes,
    gradient_bytes,
    parameter_bytes,
    scratch_bytes,
    spec_bytes,
    stage_bytes,
)
from gpipe_fast.schedule import Schedule, ScheduleChoice, schedule_for
from gpipe_fast.schedule.budget import UNDER_WAY, Budget, Climb, Rung, StageCosts
from gpipe_fast.schedule.cuts import Partition, best_partitions
from gpipe_fast.trace.joint_graph import JointGraph, parameters_of
from gpipe_fast.trace.tensor_metadata import AnyTensor

# How often programs are lowered for a choice. After that, one is made among those that are lowered.
_MAX_ATTEMPTS = 8
# How often plans are counted, and the share of a limit that a plan may leave unused without another attempt.
_MAX_PLANS = 6
_UNUSED_SHARE = 0.01
# How many boundary tensors may wait on a connection. One is enough if all actions take equally long.
_SLOTS = 2
Limits = Mapping[torch.device, float]


def choice_within(planner: Planner, call: Call, limits: Limits) -> Choice:
    """Returns what to save in a call with gradients, so that it fits into the memory of each device.

    Counted are parameters, buffers, gradients, and everything of the micro-batches. The state of an optimizer
    is not.

    Args:
        planner: traces the stages.
        call: the call; its own checkpoint policy is not read.
        limits: the bytes for each device.

    Raises:
        ValueError: even if everything is recomputed, a step needs more; the message says how much, for what.
        RuntimeError: a layer cannot be traced.
    """
    key = call.key(), tuple(limits.items())
    known = planner.within.lookup(key)
    if known is not None:
        return known
    limited = _Limited(planner, call)
    found = limited.nothing_recomputed
    if min(limited.unused(found, limits).values()) < 0:
        limited.calibrate()
        found = limited.fastest(limits)
    planner.within[key] = found
    return found


def partitions_within(
    planner: Planner, call: Call, devices: Sequence[torch.device], schedule: ScheduleChoice
) -> Callable[[Limits], list[Partition]]:
    """Returns a function that returns the three fastest partitions that fit into limits, with what they save.

    They are chosen by the costs of single layers. The limits are as for `choice_within`, or infinite. The
    function raises a ValueError if no partition fits; the message says what is needed at least, for what.

    Args:
        planner: traces the layers, each of which is a stage of its own.
        call: as for `choice_within`.
        devices: the device of each stage of the partitions.
        schedule: the schedule of the partitions.

    Raises:
        RuntimeError: as for `choice_within`.
    """
    layers = _Limited(planner, call)
    number, num_devices = len(layers.sizes), len(set(devices))

    def with_recomputes(recomputed: frozenset[tuple[int, int]]) -> Schedule:
        found = schedule_for(schedule, len(devices), number, num_devices=num_devices, recomputed=recomputed)
        return found.with_fewer_slots(_SLOTS)

    return lambda limits: best_partitions(layers.layer_costs, devices, limits, layers.sizes, with_recomputes)


class _Limited:
    """The stages of a call, for which rungs are chosen.

    Attributes:
        sizes: the size of each micro-batch, relative to the largest.
    """

    def __init__(self, planner: Planner, call: Call) -> None:
        self._planner, self._stages, self._call = planner, planner.stages, call
        compiled = _compiled(planner, call)
        self._compiled = [pipeline for m, pipeline in enumerate(compiled) if m in (0, len(compiled) - 1)]
        self._number = len(call.microbatches)
        first = self._stages[0].device
        samples = [spec_bytes(call.microbatches[m].tensors, first) for m in range(self._number)]
        self.sizes = [own / max(1, *samples) for own in samples]
        self._defers = call.order is not None and self._schedule(frozenset()).defers_weights
        graphs = [own.traced.joint for own in compiled[0]]
        self._saved = [_saved_bytes(joint) for joint in graphs]
        # For each stage, the scratch memory of the rungs whose programs are lowered.
        self._scratch = [dict[int, int]() for _ in graphs]
        # For each stage, what the plans that were made need beside the costs, which are estimates.
        self._beside: list[float] = [0.0] * len(graphs)
        self._gradients = [
            gradient_bytes(own, {p for p in parameters_of(own.layers) if p.requires_grad})
            for own in self._stages
        ]
        for stage, saved in enumerate(self._saved):
            self._lower(stage, {0, len(saved) - 1})
        self._times = [self._costs_of(i, joint) for i, joint in enumerate(graphs)]

    @property
    def layer_costs(self) -> list[StageCosts]:
        """The costs of each stage, without what depends on the stages next to it."""
        return [replace(own, rungs=self._rungs(stage, own)) for stage, own in enumerate(self._times)]

    @property
    def costs(self) -> list[StageCosts]:
        """The costs of each stage, with the scratch memory of the rungs as far as it is known."""
        return [
            replace(own, fixed={**own.fixed, UNDER_WAY: beside})
            for own, beside in zip(self.layer_costs, self._beside, strict=True)
        ]

    @property
    def everything_recomputed(self) -> Choice:
        """The choice that needs least."""
        return self._same_everywhere(FULL_RECOMPUTE, [0] * len(self._stages), _SLOTS)

    @property
    def nothing_recomputed(self) -> Choice:
        """The choice that takes the least time."""
        return self._same_everywhere(NO_RECOMPUTE, [len(saved) - 1 for saved in self._saved], None)

    def _same_everywhere(self, fraction: SavedFraction, rungs: Sequence[int], slots: int | None) -> Choice:
        budget = Budget(self.costs, self.sizes, self._schedule)
        time = budget.time_of([[rung] * self._number for rung in rungs])
        return Choice(Checkpoint(((fraction,),) * len(rungs)), time, slots)

    def calibrate(self) -> None:
        """Corrects the costs so that recomputing everything needs what its plan needs."""
        needed = self._needed(self.everything_recomputed)
        least = Budget(self.costs, self.sizes, self._schedule).least()
        self._beside = [math.ceil(own.total - size) for own, size in zip(needed, least, strict=True)]

    def fastest(self, limits: Limits) -> Choice:
        """Returns the fastest of a few choices whose plans fit, as `choice_within`.

        `choose` estimates what a plan needs, and here the plan is counted. What it leaves of the limits is
        added to its estimate, or what it lacks is taken away, and the next choice may need so much. Between
        an estimate whose plan fits and one whose plan does not, that is their mean.
        """
        found = self.everything_recomputed
        given, enough, too_much = dict(limits), dict[torch.device, float](), dict[torch.device, float]()
        tried = set[Checkpoint]()
        for _ in range(_MAX_PLANS):
            choice, estimates = self.choose(given)
            if choice.checkpoint in tried:
                break
            tried.add(choice.checkpoint)
            unused = self.unused(choice, limits)
            fits = min(unused.values()) >= 0
            if fits and choice.nanoseconds < found.nanoseconds:
                found = choice
            if fits and all(left <= _UNUSED_SHARE * limits[device] for device, left in unused.items()):
                break
            for device, left in unused.items():
                if left < 0:
                    too_much[device] = min(estimates[device], too_much.get(device, math.inf))
                elif fits:
                    enough[device] = max(estimates[device], enough.get(device, 0.0))
                wanted = estimates[device] + left
                if device in too_much and device in enough:
                    wanted = (enough[device] + too_much[device]) / 2
                least = self._by_device(Budget(self.costs, self.sizes, self._schedule).least())
                given[device] = max(wanted, least[device])
        return found

    def _by_device(self, sizes: Iterable[float]) -> Mapping[torch.device, float]:
        """Returns the sums of what the stages of each device need."""
        found = defaultdict[torch.device, float](float)
        for size, stage in zip(sizes, self._stages, strict=True):
            found[stage.device] += size
        return found

    def choose(self, limits: Limits) -> tuple[Choice, Mapping[torch.device, float]]:
        """Returns the fastest choice that fits by estimates, as `choice_within`, and its estimated bytes."""
        for _ in range(_MAX_ATTEMPTS):
            climb = Budget(self.costs, self.sizes, self._schedule).choose(limits)
            unknown = [set(row) - self._scratch[stage].keys() for stage, row in enumerate(climb.rungs)]
            for stage, rungs in enumerate(unknown):
                self._lower(stage, rungs)
            if not any(unknown):
                break
        else:
            climb = self._known_choice(limits)
        return self._choice_of(climb), self._by_device(climb.bytes)

    def unused(self, choice: Choice, limits: Limits) -> dict[torch.device, float]:
        """Returns how many bytes of each device's limit a choice's plan leaves; negative if it exceeds it."""
        needed = self._by_device(own.total for own in self._needed(choice))
        return {device: limit - needed[device] for device, limit in limits.items()}

    def _needed(self, choice: Choice) -> list[StageBytes]:
        call = choice.applied_to(self._call)
        return stage_bytes(self._stages, _compiled(self._planner, call), call)

    def _known_choice(self, limits: Limits) -> Climb:
        """Returns the best choice among the rungs whose programs are lowered."""
        known = [sorted(own) for own in self._scratch]
        costs = [
            replace(own, rungs=tuple(own.rungs[rung] for rung in known[stage]))
            for stage, own in enumerate(self.costs)
        ]
        climb = Budget(costs, self.sizes, self._schedule).choose(limits)
        rungs = (tuple(known[stage][rung] for rung in row) for stage, row in enumerate(climb.rungs))
        return replace(climb, rungs=tuple(rungs))

    def _rungs(self, stage: int, costs: StageCosts) -> tuple[Rung, ...]:
        """Returns the rungs of a stage with the scratch memory of those that are lowered.

        That of the others is between that of the nearest ones, in proportion to what is saved.
        """
        saved, known = self._saved[stage], sorted(self._scratch[stage].items())
        found = []
        for number, rung in enumerate(costs.rungs):
            (low, first), (high, last) = next(
                pair for pair in pairwise([*known, known[-1]]) if number <= pair[1][0]
            )
            share = (saved[number] - saved[low]) / max(1, saved[high] - saved[low])
            found.append(replace(rung, scratch=first + share * (last - first)))
        return tuple(found)

    def _schedule(self, recomputed: frozenset[tuple[int, int]]) -> Schedule:
        fractions = [
            [FULL_RECOMPUTE if (stage, m) in recomputed else NO_RECOMPUTE for m in range(self._number)]
            for stage in range(len(self._stages))
        ]
        return planned_schedule(self._stages, fractions, True, self._call.order, _SLOTS)

    def _costs_of(self, index: int, joint: JointGraph) -> StageCosts:
        stage, own = self._stages[index], self._compiled[0][index]
        rungs = Ladder.of(joint).rungs
        times = Counter[bool]()
        for node in joint.module.graph.nodes:
            computes = node.op == "call_function" and node.target is not operator.getitem
            if computes and source_of(node).base is node:
                times[is_backward(node)] += _time_of(node)
        inputs, outputs = (spec_bytes(each.tensors, stage.device) for each in (own.inputs, own.outputs))
        is_first = stage.first_layer == 0  # its inputs are parts of the caller's
        return StageCosts(
            times[False],
            times[True],
            tuple(Rung(s, rung.recompute) for s, rung in zip(self._saved[index], rungs, strict=True)),
            0 if is_first else inputs,
            {
                "parameters": parameter_bytes(stage),
                "buffers": buffer_bytes(stage),
                "gradients": self._gradients[index],
            },
            stage.device,
            outputs,
            scratch_stays=stage.device.type == "cpu",
        )

    def _choice_of(self, climb: Climb) -> Choice:
        fractions = (
            tuple(_fraction(self._saved[stage], rung) for rung in row)
            for stage, row in enumerate(climb.rungs)
        )
        return Choice(Checkpoint(tuple(fractions)), climb.time, _SLOTS)

    def _lower(self, stage: int, rungs: Collection[int]) -> None:
        """Lowers the programs of some rungs of a stage, and notes their scratch memory."""
        for rung in rungs:
            found = []
            for pipeline in self._compiled:
                fraction = _fraction(self._saved[stage], rung)
                lowered = pipeline[stage].traced.lower(fraction, self._defers)
                found.append(scratch_bytes(lowered, self._gradients[stage], self._stages[stage].device))
            self._scratch[stage][rung] = max(found)


def _compiled(planner: Planner, call: Call) -> Sequence[Sequence[CompiledStage]]:
    if planner.backend == "eager":
        why = InPython("every layer", "backend='eager' or a global module hook demands it")
    else:
        found = planner.compile(call)
        if not isinstance(found, CompilationFailure):
            return found
        why = why_in_python(found, planner.stages)
    raise RuntimeError(
        f"memory was passed, but {why.where} runs in Python, and what it needs is not known: {why.reason}; "
        "mend that, or pass checkpoint instead of memory"
    )


def _saved_bytes(joint: JointGraph) -> list[int]:
    """Returns the bytes that are saved on each rung of the graph's ladder."""
    value_of = {node.name: node.meta.get("val") for node in joint.module.graph.nodes}

    def size(names: Sequence[str]) -> int:
        return sum(bytes_of(value_of[name]) for name in names)

    return list(accumulate(size(rung.added) - size(rung.dropped) for rung in Ladder.of(joint).rungs))


def _fraction(saved: Sequence[int], rung: int) -> SavedFraction:
    """Returns a saved fraction whose furthest rung is this one: half way to the next one that saves more."""
    if saved[rung] == saved[-1]:
        return NO_RECOMPUTE
    if rung == 0 == saved[rung]:
        return FULL_RECOMPUTE
    following = next(size for size in saved[rung:] if size > saved[rung])
    return (saved[rung] + following) / 2 / saved[-1]


def _time_of(node: fx.Node) -> int:
    return nanoseconds(node) if isinstance(node.meta.get("val"), (AnyTensor, tuple, list)) else 0
