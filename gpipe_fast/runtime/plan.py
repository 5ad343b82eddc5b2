"""A plan: what every stage runs, for every micro-batch of one signature, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gpipe_fast import _extension
from gpipe_fast.devices import elsewhere
from gpipe_fast.layers.batchnorm import Statistics, statistics_of
from gpipe_fast.layers.structure import Dims
from gpipe_fast.layers.title import title
from gpipe_fast.lower.split import NO_RECOMPUTE
from gpipe_fast.runtime.compile import CompiledStage
from gpipe_fast.runtime.stage import Boundary, Spec, Stage, form_of
from gpipe_fast.schedule import Schedule, fill_drain
from gpipe_fast.trace.trace import buffers_of, parameters_of

# Boundary activations that may wait on an edge where none is kept for a backward anyway.
_SLOTS_IN_INFERENCE = 4


class Handed(NamedTuple):
    """What a stage hands on of one micro-batch: to the next, and of each skip connection that leaves it."""

    tensors: tuple[Spec, ...]
    skips: dict[int, Spec | None]

    @classmethod
    def by(cls, compiled: CompiledStage) -> Handed:
        """What a compiled stage does."""
        plain, stashed = compiled.outputs.apart()
        return cls(plain.tensors, dict(zip(compiled.stage.stashes, stashed, strict=True)))


@dataclass(frozen=True)
class Plan:
    """A mini-batch's work, ready to run.

    Attributes:
        native: what the C++ pipeline runs.
        schedule: the order it runs in.
        draws: whether any operator is random; None if that shows when it runs.
        handed: what the stages hand on, of the first micro-batch and of the last, which alone can differ;
            None if that shows when it runs.
    """

    native: _extension.Plan
    schedule: Schedule
    draws: bool | None
    handed: Sequence[Sequence[Handed]] | None


# Of which outputs a gradient comes, to the plan whose backward takes just those.
Instead = Callable[[Sequence[bool]], _extension.Plan]


def make_plan(
    pipelines: Sequence[Sequence[CompiledStage]],
    budgets: Sequence[float],
    num_threads: int,
    dims: Dims,
    expected: Sequence[bool],
    instead: Instead | None = None,
) -> Plan:
    """Lays out a mini-batch.

    Args:
        pipelines: the compiled stages that each micro-batch runs through.
        budgets: for each micro-batch, the share of activations that it saves (see ``split``).
        num_threads: intra-op threads of each stage; what the stages were compiled with.
        dims: along which inputs are cut, and outputs joined.
        expected: to which outputs a gradient comes, as the stages were compiled.
        instead: makes the plan for a backward to which others come.

    Raises:
        ValueError: two stages share a buffer, and one of them writes it.
    """
    stages = [compiled.stage for compiled in pipelines[0]]
    _refuse_shared_writes(stages, {i: s.written_buffers() for i, s in enumerate(pipelines[0])})
    training = any(spec.requires_grad for spec in pipelines[0][-1].outputs.tensors)
    schedule, forward, backward = _actions(len(stages), budgets, training)
    chains = [
        [[p[index].segment(budget)] for p, budget in zip(pipelines, budgets, strict=True)]
        for index in range(len(stages))
    ]
    native = _extension.Plan(
        [
            _extension.StagePlan(*own, of_stage)
            for own, of_stage in zip(_positions(stages), chains, strict=True)
        ],
        len(stages[0].skips),
        forward,
        backward,
        num_threads,
        form_of(pipelines[0][0].inputs),
        dims.inputs,
        dims.outputs,
        expected,
        instead,
        None,
    )
    handed = [[Handed.by(stage) for stage in p] for p in (pipelines[0], pipelines[-1])]
    return Plan(native, schedule, any(stage.draws() for stage in pipelines[0]), handed)


# Of each skip connection what is stashed now, if that is a tensor, and whether it needs a gradient.
Stashed = Sequence[tuple[Tensor | None, bool]]


class Finder(Protocol):
    """Finds a stage's segments while they run."""

    def find(
        self, layer: int, microbatch: int, boundary: _extension.Boundary, stashed: Stashed
    ) -> _extension.Segment:
        """The segment for what comes to a layer, and what is stashed of each skip connection."""

    def instead(self, origin: Any, microbatch: int, tangents: Sequence[Tensor | None]) -> _extension.Segment:
        """The one for the gradients that came to the outputs of another; it recomputes everything."""


def make_late_plan(
    stages: Sequence[Stage],
    finders: Sequence[Finder],
    inputs: Boundary,
    budgets: Sequence[float],
    num_threads: int,
    dims: Dims,
    check_outputs: Callable[[Sequence[_extension.Boundary]], None],
) -> Plan:
    """Lays out a mini-batch of which it shows only while it runs what crosses from stage to stage.

    Args:
        stages: of the pipeline.
        finders: of each stage.
        inputs: what reaches the first stage.
        budgets: for each micro-batch, the share of activations that it saves (see ``split``).
        num_threads: intra-op threads of each stage.
        dims: along which inputs are cut, and outputs joined.
        check_outputs: raises unless the micro-batches' outputs can be joined.

    Raises:
        RuntimeError: a stage shares a parameter with one on another device.
        ValueError: two stages share a buffer, and one of them could write it.
    """
    for stage in stages:
        if _replicas(stage):
            raise RuntimeError(
                f"layers {stage.first_layer} to {stage.first_layer + len(stage.layers) - 1} share a "
                f"parameter with layers on another device than their own, {stage.device}: only lowered ones "
                "can, and here a layer runs in Python; keep the layers that share it in one stage"
            )
    # In training all buffers may be written, for all that is known.
    writing = any(layer.training for stage in stages for layer in stage.layers)
    _refuse_shared_writes(stages, {i: buffers_of(s.layers) for i, s in enumerate(stages)} if writing else {})
    needed = [spec.requires_grad for spec in inputs.tensors]
    needed += [p.requires_grad for stage in stages for p in parameters_of(stage.layers)]
    training = torch.is_grad_enabled() and any(needed)
    schedule, forward, backward = _actions(len(stages), budgets, training)
    unknown: list[list[_extension.Segment]] = [[]] * len(budgets)
    native = _extension.Plan(
        [
            _extension.StagePlan(*own, unknown, finder.find, finder.instead)
            for own, finder in zip(_positions(stages), finders, strict=True)
        ],
        len(stages[0].skips),
        forward,
        backward,
        num_threads,
        form_of(inputs),
        dims.inputs,
        dims.outputs,
        None,
        None,
        check_outputs,
    )
    return Plan(native, schedule, None, None)


_Of = tuple[int, list[int], list[int], list[int], torch.device, list[Statistics]]


def _positions(stages: Sequence[Stage]) -> list[_Of]:
    """What a plan has of each stage beside its segments.

    Its number of layers; where its parameters and buffers are among all; which of the parameters it has
    copies of, and where; which of the buffers are statistics.
    """
    layers = [layer for stage in stages for layer in stage.layers]
    parameters, buffers = _numbered(parameters_of(layers)), _numbered(buffers_of(layers))
    return [
        (
            len(stage.layers),
            [parameters[id(p)] for p in parameters_of(stage.layers)],
            [buffers[id(b)] for b in buffers_of(stage.layers)],
            _replicas(stage),
            stage.device,
            statistics_of(stage.layers, buffers_of(stage.layers)) if stage.deferred else [],
        )
        for stage in stages
    ]


def _replicas(stage: Stage) -> list[int]:
    """The parameters that are on the device of another stage, which has them too."""
    return [i for i, p in enumerate(parameters_of(stage.layers)) if is_elsewhere(p, stage)]


def check_placed(stages: Sequence[Stage]) -> None:
    """Refuses parameters and buffers that are not on the device of a stage that has them.

    Raises:
        ValueError: there is one; the message names it.
    """
    at_home = {
        id(tensor)
        for stage in stages
        for layer in stage.layers
        for tensor in (*layer.parameters(), *layer.buffers())
        if not is_elsewhere(tensor, stage)
    }
    for index, stage in enumerate(stages):
        for number, layer in enumerate(stage.layers, stage.first_layer):
            for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
                if id(tensor) not in at_home and not tensor.is_meta:
                    raise ValueError(
                        f"{title(number, layer)} has {name!r} on {tensor.device}, but runs "
                        f"in stage {index} on {stage.device}; move it there, all of it"
                    )


def is_elsewhere(parameter: Tensor, stage: Stage) -> bool:
    """Whether a stage computes with a copy of a parameter."""
    return elsewhere(parameter.device, stage.device)


def _actions(
    num_stages: int, budgets: Sequence[float], training: bool
) -> tuple[Schedule, _extension.Actions, _extension.Actions | None]:
    schedule = fill_drain(
        num_stages,
        len(budgets),
        slots=None if training else _SLOTS_IN_INFERENCE,
        backward=training,
        recomputed=[m for m, budget in enumerate(budgets) if budget < NO_RECOMPUTE],
    )
    forward = _native(schedule.forward_part() if training else schedule)
    return schedule, forward, _native(schedule.backward_part()) if training else None


def _refuse_shared_writes(stages: Sequence[Stage], written: Mapping[int, Sequence[Tensor]]) -> None:
    for writer, buffers in written.items():
        for buffer in buffers:
            for other, stage in enumerate(stages):
                if other != writer and any(b is buffer for b in buffers_of(stage.layers)):
                    raise ValueError(
                        f"stage {writer} writes a buffer of shape {list(buffer.shape)} that stage {other} "
                        "has too, and both run at once; keep the layers that share it in one stage"
                    )


def _numbered(tensors: Sequence[Tensor]) -> dict[int, int]:
    return {id(tensor): number for number, tensor in enumerate(tensors)}


def _native(schedule: Schedule) -> _extension.Actions:
    ranks = {action: rank for rank, action in enumerate(schedule.order())}
    return _extension.Actions(
        [[(a.kind.value, a.microbatch, ranks[a]) for a in stage] for stage in schedule.stages], schedule.slots
    )
