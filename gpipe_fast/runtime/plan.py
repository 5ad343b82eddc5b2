"""Plans: the segments and actions of every stage, for all micro-batches of one signature."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypedDict

import torch
from torch import Tensor

from gpipe_fast import _extension
from gpipe_fast.devices import elsewhere
from gpipe_fast.layers.batchnorm import Statistics, statistics_of
from gpipe_fast.layers.structure import Dims
from gpipe_fast.layers.title import title
from gpipe_fast.lower.checkpoint import Share, recomputes
from gpipe_fast.runtime.compiled import CompiledStage
from gpipe_fast.runtime.stage import Boundary, Spec, Stage, form_of
from gpipe_fast.schedule import Schedule, fill_drain
from gpipe_fast.trace.trace import buffers_of, parameters_of

# Slots of an edge in inference, where no backward keeps the boundary activations of all micro-batches alive.
_SLOTS_IN_INFERENCE = 4


class Handed(NamedTuple):
    """The specs of a stage's outputs for one micro-batch: boundary tensors, and stashed skip tensors."""

    tensors: tuple[Spec, ...]
    skips: dict[int, Spec | None]

    @classmethod
    def by(cls, compiled: CompiledStage) -> Handed:
        """Returns the specs of a compiled stage's outputs."""
        plain, stashed = compiled.outputs.apart()
        return cls(plain.tensors, dict(zip(compiled.stage.stashes, stashed, strict=True)))


@dataclass(frozen=True)
class Plan:
    """A mini-batch's work, ready to run.

    Attributes:
        native: the plan that the C++ pipeline runs.
        schedule: the schedule of its actions.
        draws: whether any operator draws random numbers; None if known only at run time.
        handed: the stages' outputs for the first micro-batch, and for the last, which alone may differ; None
            if known only at run time.
    """

    native: _extension.Plan
    schedule: Schedule
    draws: bool | None
    handed: Sequence[Sequence[Handed]] | None


# By skip connection, the stashed tensor or None, and whether the tensor needs a gradient.
Stashed = Sequence[tuple[Tensor | None, bool]]


class Finder(Protocol):
    """The interface by which C++ finds a stage's segments at run time."""

    def find(
        self, layer: int, microbatch: int, boundary: _extension.Boundary, stashed: Stashed
    ) -> _extension.Segment:
        """Returns the segment that runs `layer` for these boundary tensors and stashed skip tensors."""

    def stand_in(self, origin: Any, tangents: Sequence[Tensor | None]) -> _extension.Segment:
        """Returns a segment, which recomputes everything, for gradients that `origin`'s segment rejects."""


CheckOutputs = Callable[[Sequence[_extension.Boundary]], None]


def make_plan(
    stages: Sequence[Stage],
    finders: Sequence[Finder],
    inputs: Boundary,
    shares: Sequence[Share],
    num_threads: int,
    dims: Dims,
    known: Sequence[Sequence[CompiledStage]] | None,
    check_outputs: CheckOutputs | None = None,
) -> Plan:
    """Makes the plan of a mini-batch.

    Args:
        stages: the stages of the pipeline.
        finders: the segment finder of each stage.
        inputs: the specs of the first stage's inputs.
        shares: for each micro-batch, the fraction of activations that it saves.
        num_threads: intra-op threads of each stage; the count that the stages were compiled with.
        dims: the dimensions along which inputs are cut and outputs are joined.
        known: the compiled stages of each micro-batch; None if the boundary tensors between stages are known
            only at run time.
        check_outputs: raises unless the micro-batches' outputs can be joined; None if already checked.

    Raises:
        RuntimeError: a stage that is not lowered shares a parameter with a stage on another device.
        ValueError: two stages share a buffer, and one of them could write it.
    """
    if known is None:
        _refuse_replicas(stages)
    _refuse_shared_writes(stages, _written(stages, known))
    training = _needs_backward(stages, inputs, known)
    schedule, forward, backward = _actions(len(stages), shares, training)
    native = _extension.Plan(
        stages=[
            _extension.StagePlan(**own, chains=chains, known=known is not None, finder=finder)
            for own, chains, finder in zip(
                _described(stages), _chains(stages, shares, known), finders, strict=True
            )
        ],
        num_skips=len(stages[0].skips),
        forward=forward,
        backward=backward,
        num_threads=num_threads,
        inputs=form_of(inputs),
        cut_along=dims.inputs,
        join_along=dims.outputs,
        check_outputs=check_outputs,
    )
    if known is None:
        return Plan(native, schedule, None, None)
    handed = [[Handed.by(stage) for stage in pipeline] for pipeline in (known[0], known[-1])]
    return Plan(native, schedule, any(stage.draws() for stage in known[0]), handed)


def _chains(
    stages: Sequence[Stage], shares: Sequence[Share], known: Sequence[Sequence[CompiledStage]] | None
) -> list[list[list[_extension.Segment]]]:
    """Returns the chain of segments of each stage, by micro-batch."""
    if known is None:
        return [[[] for _ in shares] for _ in stages]
    return [
        [[pipeline[index].segment(share)] for pipeline, share in zip(known, shares, strict=True)]
        for index in range(len(stages))
    ]


def _needs_backward(
    stages: Sequence[Stage], inputs: Boundary, known: Sequence[Sequence[CompiledStage]] | None
) -> bool:
    if known is not None:
        return any(spec.requires_grad for spec in known[0][-1].outputs.tensors)
    needed = [spec.requires_grad for spec in inputs.tensors]
    needed += [p.requires_grad for stage in stages for p in parameters_of(stage.layers)]
    return torch.is_grad_enabled() and any(needed)


def _written(
    stages: Sequence[Stage], known: Sequence[Sequence[CompiledStage]] | None
) -> dict[int, list[Tensor]]:
    """Returns, by stage, the buffers that its forward may write; if not compiled, all in training."""
    if known is not None:
        return {i: stage.written_buffers() for i, stage in enumerate(known[0])}
    writing = any(layer.training for stage in stages for layer in stage.layers)
    return {i: buffers_of(stage.layers) for i, stage in enumerate(stages)} if writing else {}


def _refuse_replicas(stages: Sequence[Stage]) -> None:
    for stage in stages:
        if _replicas(stage):
            raise RuntimeError(
                f"layers {stage.first_layer} to {stage.first_layer + len(stage.layers) - 1} share a "
                f"parameter with layers on another device, but are on {stage.device}: all layers must run "
                "as C++ programs for that, but one runs in Python; keep the layers that share it in one stage"
            )


class _Described(TypedDict):
    """Arguments of the C++ StagePlan besides its segments; parameters and buffers by index in the model."""

    num_layers: int
    parameters: list[int]
    buffers: list[int]
    replicas: list[int]
    device: torch.device
    statistics: list[Statistics]


def _described(stages: Sequence[Stage]) -> list[_Described]:
    layers = [layer for stage in stages for layer in stage.layers]
    parameters, buffers = _numbered(parameters_of(layers)), _numbered(buffers_of(layers))
    return [
        {
            "num_layers": len(stage.layers),
            "parameters": [parameters[id(p)] for p in parameters_of(stage.layers)],
            "buffers": [buffers[id(b)] for b in buffers_of(stage.layers)],
            "replicas": _replicas(stage),
            "device": stage.device,
            "statistics": statistics_of(stage.layers, buffers_of(stage.layers)) if stage.deferred else [],
        }
        for stage in stages
    ]


def _replicas(stage: Stage) -> list[int]:
    """Returns the indices of the stage's parameters that another stage owns, on another device."""
    return [i for i, p in enumerate(parameters_of(stage.layers)) if is_elsewhere(p, stage)]


def check_placed(stages: Sequence[Stage]) -> None:
    """Checks that every parameter and buffer is on the device of a stage that holds it.

    Raises:
        ValueError: a tensor is not; the message names it.
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
                        f"in stage {index} on {stage.device}; move the whole layer to that device"
                    )


def is_elsewhere(parameter: Tensor, stage: Stage) -> bool:
    """Returns whether a parameter is on another device, so that the stage computes with a copy."""
    return elsewhere(parameter.device, stage.device)


def _actions(
    num_stages: int, shares: Sequence[Share], training: bool
) -> tuple[Schedule, _extension.Actions, _extension.Actions | None]:
    """Returns the schedule, and its forward and backward parts for C++; None for no backward."""
    schedule = fill_drain(
        num_stages,
        len(shares),
        slots=None if training else _SLOTS_IN_INFERENCE,
        backward=training,
        recomputed=[m for m, share in enumerate(shares) if recomputes(share)],
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
                        "uses, too, and both run concurrently; keep the layers that share it in one stage"
                    )


def _numbered(tensors: Sequence[Tensor]) -> dict[int, int]:
    return {id(tensor): number for number, tensor in enumerate(tensors)}


def _native(schedule: Schedule) -> _extension.Actions:
    ranks = {action: rank for rank, action in enumerate(schedule.order())}
    return _extension.Actions(
        [[(a.kind.value, a.microbatch, ranks[a]) for a in stage] for stage in schedule.stages], schedule.slots
    )
