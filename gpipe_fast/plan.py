"""A plan: what every stage runs, for every micro-batch of one signature, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from gpipe_fast import _extension
from gpipe_fast.compile import CompiledStage
from gpipe_fast.schedule import Schedule, fill_drain
from gpipe_fast.split import NO_RECOMPUTE
from gpipe_fast.structure import ONE_TENSOR, Structure
from gpipe_fast.trace import buffers_of, parameters_of

# Boundary activations that may wait on an edge where none is kept for a backward anyway.
_SLOTS_IN_INFERENCE = 4


@dataclass(frozen=True)
class Plan:
    """A mini-batch's work, ready to run.

    Attributes:
        native: what the C++ pipeline runs.
        schedule: the order it runs in.
        draws: whether any operator is random.
        structure: how what the module returns is nested; None for a single tensor.
    """

    native: _extension.Plan
    schedule: Schedule
    draws: bool
    structure: Structure | None


# Of which outputs a gradient comes, to the plan whose backward takes just those.
Instead = Callable[[Sequence[bool]], _extension.Plan]


def make_plan(
    pipelines: Sequence[Sequence[CompiledStage]],
    budgets: Sequence[float],
    num_threads: int,
    replicated: Sequence[bool],
    differentiable: Sequence[bool],
    expected: Sequence[bool],
    instead: Instead | None = None,
) -> Plan:
    """Lays out a mini-batch.

    Args:
        pipelines: the compiled stages that each micro-batch runs through.
        budgets: for each micro-batch, the share of activations that it saves (see ``split``).
        num_threads: intra-op threads of each stage; what the stages were compiled with.
        replicated: which inputs every micro-batch gets as a whole.
        differentiable: which outputs can take a gradient.
        expected: to which outputs one comes, as the stages were compiled.
        instead: makes the plan for a backward to which others come.

    Raises:
        ValueError: two stages share a buffer, and one of them writes it.
    """
    _refuse_shared_writes(pipelines[0])
    stages = [stage.stage for stage in pipelines[0]]
    layers = [layer for stage in stages for layer in stage.layers]
    parameters, buffers = _numbered(parameters_of(layers)), _numbered(buffers_of(layers))
    training = any(differentiable)
    schedule = fill_drain(
        len(stages),
        len(pipelines),
        slots=None if training else _SLOTS_IN_INFERENCE,
        backward=training,
        recomputed=[m for m, budget in enumerate(budgets) if budget < NO_RECOMPUTE],
    )
    native = _extension.Plan(
        [
            _extension.StagePlan(
                stage.first_layer,
                [parameters[id(p)] for p in parameters_of(stage.layers)],
                [buffers[id(b)] for b in buffers_of(stage.layers)],
                [p[index].run_pass(budget) for p, budget in zip(pipelines, budgets, strict=True)],
            )
            for index, stage in enumerate(stages)
        ],
        _native(schedule.forward_part() if training else schedule),
        _native(schedule.backward_part()) if training else None,
        num_threads,
        replicated,
        differentiable,
        expected,
        instead,
    )
    draws = any(stage.draws() for stage in pipelines[0])
    structure = pipelines[0][-1].outputs.structure
    return Plan(native, schedule, draws, None if structure == ONE_TENSOR else structure)


def _refuse_shared_writes(stages: Sequence[CompiledStage]) -> None:
    for writer, stage in enumerate(stages):
        for buffer in stage.written_buffers():
            for other, neighbour in enumerate(stages):
                if other != writer and any(b is buffer for b in buffers_of(neighbour.stage.layers)):
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
