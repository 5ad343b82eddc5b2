"""Plans: the segments and actions of every stage, for all micro-batches of one signature."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from gpipe_fast import _extension
from gpipe_fast._extension import BoundaryForm
from gpipe_fast.devices import devices_differ
from gpipe_fast.layers.batchnorm import statistics_indices
from gpipe_fast.layers.sharded import is_gathered
from gpipe_fast.layers.structure import ONE_TENSOR, BatchDims, Structure, layer_title
from gpipe_fast.lower.checkpoint import SavedFraction, has_recompute
from gpipe_fast.runtime.cache import ACTION_BYTES, PLAN_BYTES
from gpipe_fast.runtime.compiled import CompiledStage
from gpipe_fast.runtime.stage import BoundarySpec, Stage, form_of, given_skips
from gpipe_fast.schedule import Action, Kind, Schedule, ScheduleChoice, fill_drain, schedule_for
from gpipe_fast.schedule.unbuffered import check_unbuffered
from gpipe_fast.strides import share_memory
from gpipe_fast.trace.joint_graph import buffers_of, parameters_of

if TYPE_CHECKING:
    from gpipe_fast.runtime.planner import Call
    from gpipe_fast.runtime.segments import SegmentSearch

# Slots of a connection in inference, where no backward keeps boundary activations of all micro-batches alive.
_SLOTS_IN_INFERENCE = 4
# Half precision is not among them: the losses of micro-batches are added up in float32.
_DTYPES_OF_LOSSES = (torch.float32, torch.float64)


class StepOrder(NamedTuple):
    """How a step runs forwards and backwards.

    Attributes:
        schedule: the schedule, as for `schedule_for`.
        given_dims: the dimension along which each given skip tensor is split; None if it is not.
    """

    schedule: ScheduleChoice
    given_dims: tuple[int | None, ...]


@dataclass(frozen=True)
class PlannedCall:
    """A mini-batch's work, ready to run.

    Attributes:
        native: the plan that the C++ pipeline runs.
        schedule: the schedule of its actions.
        compiled: the compiled stages for the first micro-batch, and for the last; None if not compiled.
        obstacle: why the plan is valid for one call only; empty if it is not.
        failed_stage: the stage whose trace failed, which is the obstacle; None if none failed.
        is_step: whether forwards and backwards are one run.
    """

    native: _extension.Plan
    schedule: Schedule
    compiled: Sequence[Sequence[CompiledStage]] | None
    obstacle: str = ""
    failed_stage: int | None = None
    is_step: bool = False

    @cached_property
    def draws(self) -> bool | None:
        """Whether any operator draws random numbers; None if known only at run time."""
        return None if self.compiled is None else any(s.traced.ports.draws for s in self.compiled[0])

    @cached_property
    def num_bytes(self) -> int:
        """An estimate of the bytes of the plan, without its programs."""
        return PLAN_BYTES + ACTION_BYTES * sum(map(len, self.schedule.stages))

    def possible_losses(self, stage: Stage) -> list[Tensor]:
        """Returns uninitialized tensors like the first output of the last layer: the loss of a step.

        There are several if its dtype is known only at run time: one for each dtype that it may have.

        Args:
            stage: the last stage.

        Raises:
            ValueError: nothing requires a gradient.
        """
        if not self.is_step:
            raise ValueError(
                "a step computes gradients, but the loss depends on no parameter and no input that requires "
                "one; call model.evaluate, or compute the loss from the output without detach()"
            )
        if self.compiled is None:
            return [torch.empty(1, dtype=dtype, device=stage.device) for dtype in _DTYPES_OF_LOSSES]
        return [self.compiled[0][-1].outputs.tensors[0].example()]

    def compiled_stages(self) -> list[CompiledStage]:
        """Returns the compiled stages of all micro-batches, each once."""
        return list(dict.fromkeys(stage for pipeline in self.compiled or () for stage in pipeline))


# By skip connection, the stashed tensor or None, and whether the tensor needs a gradient.
Stashed = Sequence[tuple[Tensor | None, bool]]


def make_plan(
    stages: Sequence[Stage],
    finders: Sequence[SegmentSearch],
    call: Call,
    known: Sequence[Sequence[CompiledStage]] | None,
) -> PlannedCall:
    """Makes the plan of a mini-batch.

    Args:
        stages: the stages of the pipeline.
        finders: by which C++ finds the segments of each stage at run time.
        call: the call.
        known: the compiled stages of each micro-batch; None if the boundary tensors between stages are known
            only at run time.

    Raises:
        TypeError: the last layer returns no tensor.
        RuntimeError: the outputs of micro-batches cannot be concatenated; or a stage that is not lowered
            shares a parameter with a stage on another device.
        ValueError: two stages share a buffer, and one of them could write it.
    """
    dims, order, saved_fractions = call.inputs.dims, call.order, call.saved_fractions
    inputs, _ = call.microbatches[0].split_skips()
    lengths = [_num_samples(dims, each) for each in call.microbatches]
    check_outputs = partial(_check_outputs, dims, lengths, order is not None)
    if known is None:
        _check_no_replicas(stages)
    else:
        check_outputs([(p[-1].outputs.structure, [s.shape for s in p[-1].outputs.tensors]) for p in known])
    own_stages = own_stages_of(stages)
    _check_shared_buffers(stages, known)
    training = needs_backward(stages, inputs, known)
    is_step = order is not None and training
    schedule = planned_schedule(stages, saved_fractions, training, order, call.slots)
    defers = is_step and schedule.defers_weights
    actions = partial(_extension_actions, stages)
    native = _extension.Plan(
        stages=_stage_plans(stages, finders, saved_fractions, known, defers),
        num_skips=len(stages[-1].skips),
        forward=None if order is not None else actions(schedule.forward_part() if training else schedule),
        backward=actions(schedule.backward_part()) if order is None and training else None,
        step=None if order is None else actions(schedule),
        defers_weights=defers,
        skip_ends=_skip_ends(stages),
        ties=[] if own_stages is None or known is None else _ties(stages, known, own_stages),
        token=BoundaryForm(ONE_TENSOR, [training], []) if stages[-1].options.is_remote else None,
        given_skips=given_skips(stages),
        given_dims=() if order is None else order.given_dims,
        num_threads=call.threads,
        parameter_names=_parameter_names(stages),
        inputs=form_of(inputs),
        split_dims=dims.inputs,
        cat_dim=dims.outputs,
        check_outputs=None
        if known is not None
        else lambda found: check_outputs([(m.form.structure, [t.shape for t in m.tensors]) for m in found]),
    )
    plan = PlannedCall(native, schedule, known and (known[0], known[-1]), is_step=is_step)
    for stage in plan.compiled_stages():
        stage.traced.drop_graph()
    return plan


def unfused_layers(compiled: Sequence[CompiledStage]) -> list[str]:
    """Returns the names of layers whose attention with dropout runs without a fused kernel on a GPU."""
    return [
        f"stage {index}, {layer_title(each.stage.first_layer + layer, each.stage.layers[layer])}"
        for index, each in enumerate(compiled)
        for layer in each.traced.ports.joint.unfused_layers
    ]


def _num_samples(dims: BatchDims, microbatch: BoundarySpec) -> int:
    """Returns the number of samples of a micro-batch."""
    specs = zip(microbatch.split_skips()[0].tensors, dims.inputs, strict=True)
    return next(spec.shape[dim] for spec, dim in specs if dim is not None)


def needs_backward(
    stages: Sequence[Stage], inputs: BoundarySpec, known: Sequence[Sequence[CompiledStage]] | None
) -> bool:
    """Returns whether a mini-batch has backwards, as far as is known before it runs."""
    if known is not None:
        return any(spec.requires_grad for spec in known[0][-1].outputs.tensors)
    needed = [spec.requires_grad for spec in inputs.tensors]
    needed += [p.requires_grad for stage in stages for p in parameters_of(stage.layers)]
    return torch.is_grad_enabled() and any(needed)


def _check_no_replicas(stages: Sequence[Stage]) -> None:
    for stage in stages:
        if _replicated_parameters(stage):
            raise RuntimeError(
                f"layers {stage.first_layer} to {stage.first_layer + len(stage.layers) - 1} share a "
                f"parameter with layers on another device, but are on {stage.device}: all layers must run "
                "as C++ programs for that, but one runs in Python; keep the layers that share it in one stage"
            )


def _stage_plans(
    stages: Sequence[Stage],
    finders: Sequence[SegmentSearch],
    saved_fractions: Sequence[Sequence[SavedFraction]],
    known: Sequence[Sequence[CompiledStage]] | None,
    defers_weights: bool,
) -> list[_extension.StagePlan]:
    """Returns the C++ plans of stages, with parameters and buffers by index in the model."""

    def chains(index: int) -> list[list[_extension.Segment]]:
        """Returns the chain of segments of a stage for each micro-batch."""
        if known is None or stages[index].options.is_remote:
            return [[] for _ in saved_fractions[index]]
        each = zip(known, saved_fractions[index], strict=True)
        return [[pipeline[index].segment(fraction, defers_weights)] for pipeline, fraction in each]

    layers = [layer for stage in stages for layer in stage.layers]
    parameters, buffers = _index_by_id(parameters_of(layers)), _index_by_id(buffers_of(layers))
    return [
        _extension.StagePlan(
            num_layers=len(stage.layers),
            parameters=[parameters[id(p)] for p in parameters_of(own)],
            buffers=[buffers[id(b)] for b in buffers_of(own)],
            replicated_parameters=_replicated_parameters(stage) if own else [],
            gathered_parameters=[i for i, p in enumerate(parameters_of(own)) if is_gathered(p)],
            device=stage.device,
            statistics=statistics_indices(own, buffers_of(own)) if stage.options.deferred else [],
            chains=chains(index),
            has_fixed_chains=known is not None,
            finder=finder,
        )
        for index, (stage, finder) in enumerate(zip(stages, finders, strict=True))
        for own in [[] if stage.options.is_remote else stage.layers]
    ]


def _parameter_names(stages: Sequence[Stage]) -> list[str]:
    """Returns the name of each parameter of the model, with its layer, for messages."""
    names: dict[int, str] = {}
    for stage in stages:
        for number, layer in enumerate(stage.layers, stage.first_layer):
            for name, parameter in layer.named_parameters():
                names.setdefault(id(parameter), f"{name!r} of {layer_title(number, layer)}")
    return list(names.values())


def _replicated_parameters(stage: Stage) -> list[int]:
    """Returns the indices of the stage's parameters that another stage owns, on another device."""
    return [i for i, p in enumerate(parameters_of(stage.layers)) if is_replica(p, stage)]


def check_placed(stages: Sequence[Stage]) -> None:
    """Checks that every parameter and buffer has data, on the device of a stage that holds it.

    Raises:
        RuntimeError: a tensor is on the meta device; the message names the tensor.
        ValueError: a tensor is on another device; the message names the tensor.
    """
    placed = {
        id(tensor)
        for stage in stages
        for layer in stage.layers
        for tensor in (*layer.parameters(), *layer.buffers())
        if not is_replica(tensor, stage)
    }
    for index, stage in enumerate(stages):
        for number, layer in enumerate([] if stage.options.is_remote else stage.layers, stage.first_layer):
            for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
                if tensor.is_meta:
                    raise RuntimeError(
                        f"{layer_title(number, layer)} has {name!r} on the meta device, without data; "
                        "call model.load_weights(source) before the model, or pass device='cuda' to memory, "
                        "which needs no data"
                    )
                if id(tensor) not in placed:
                    raise ValueError(
                        f"{layer_title(number, layer)} has {name!r} on {tensor.device}, but runs "
                        f"in stage {index} on {stage.device}; move the whole layer to that device"
                    )


def is_replica(parameter: Tensor, stage: Stage) -> bool:
    """Returns whether a parameter is on another device, so that the stage computes with a copy."""
    return devices_differ(parameter.device, stage.device)


def planned_schedule(
    stages: Sequence[Stage],
    saved_fractions: Sequence[Sequence[SavedFraction]],
    training: bool,
    order: StepOrder | None,
    slots: int | None = None,
) -> Schedule:
    """Returns the schedule of a mini-batch; without gradients, it has forwards only.

    Args:
        stages: the stages.
        saved_fractions: for each stage, the fraction of activations that each micro-batch saves.
        training: whether there are backwards.
        order: the order of forwards and backwards of a step; None if the caller runs them apart.
        slots: how many boundary tensors may wait on a connection, if the schedule has more slots.

    Raises:
        TypeError: as for `schedule_for`.
        ValueError: as for `schedule_for`; or stages are in different processes, and could deadlock.
    """
    size = len(stages), len(saved_fractions[0])
    if not training:
        return fill_drain(*size, slots=_SLOTS_IN_INFERENCE, backward=False)
    recomputed = [
        (stage, m)
        for stage, own in enumerate(saved_fractions)
        for m, fraction in enumerate(own)
        if has_recompute(fraction)
    ]
    if order is None:
        found = fill_drain(*size, recomputed=recomputed)
    else:
        own_stages = own_stages_of(stages)
        num_ranks = None if own_stages is None else len(stages) // len(own_stages)
        num_devices = num_ranks or len({stage.device for stage in stages})
        found = schedule_for(order.schedule, *size, num_devices=num_devices, recomputed=recomputed)
        if num_ranks is not None:
            check_unbuffered(found, [ends for ends in _skip_ends(stages) if min(ends) >= 0], num_ranks)
    return found if slots is None else found.with_fewer_slots(slots)


def _check_shared_buffers(stages: Sequence[Stage], known: Sequence[Sequence[CompiledStage]] | None) -> None:
    """Checks that no stage of this process uses a buffer that the forward of another one may write.

    If stages are not compiled, each may write all of its buffers in training. The tensors to which layers
    merely refer are known of compiled ones.
    """
    is_training = any(layer.training for stage in stages for layer in stage.layers)
    written: dict[int, list[Tensor]] = {}
    used: dict[int, list[Tensor]] = {}
    for index, stage in enumerate(stages):
        buffers = buffers_of(stage.layers)
        if known is None:
            written[index], used[index] = buffers if is_training else [], buffers
        elif not stage.options.is_remote:
            compiled = known[0][index]
            written[index] = compiled.written_buffers()
            used[index] = [*buffers, *compiled.traced.constants()]
    for writer, own in written.items():
        for buffer in own:
            for other, tensors in used.items():
                if other != writer and any(t is buffer or share_memory(t, buffer) for t in tensors):
                    raise ValueError(
                        f"stage {writer} writes a buffer of shape {list(buffer.shape)} that stage {other} "
                        "uses, too, and both run concurrently; keep the layers that share it in one stage"
                    )


def _index_by_id(tensors: Sequence[Tensor]) -> dict[int, int]:
    return {id(tensor): number for number, tensor in enumerate(tensors)}


def _extension_actions(stages: Sequence[Stage], schedule: Schedule) -> _extension.Actions:
    """Returns the actions for C++.

    Stages that are not here but in other processes have only the sends to stages that are.
    """
    here = [not stage.options.is_remote for stage in stages]
    position = {action: i for i, action in enumerate(schedule.order())}
    actions = [
        [(a.kind.value, a.microbatch, position[a]) for a in row if _runs_here(a, here)]
        for row in schedule.stages
    ]
    # The worker of a stage elsewhere receives on its own, whatever the others of its rank do.
    groups = [schedule.rank_of[stage] if is_here else stage for stage, is_here in enumerate(here)]
    receives: list[tuple[int, str, int, int, int]] = []
    # The stages here receive. They take turns, so that they begin all transfers and collectives in one order.
    if stages[0].options.by_nccl:
        first = here.index(True)
        groups = [first if is_here else stage for stage, is_here in enumerate(here)]
        receives = _receives(position, here, _skip_ends(stages))
    return _extension.Actions(actions, schedule.slots, groups, [] if all(here) else here, receives)


def _receives(
    position: Mapping[Action, int], here: Sequence[bool], skip_ends: Sequence[tuple[int, int]]
) -> list[tuple[int, str, int, int, int]]:
    """Returns what stages elsewhere send to stages here: the fields of the C++ Receive, in order of rank."""
    num_stages = len(here)
    receivers: dict[tuple[int, Kind], set[int]] = {
        **{(stage, Kind.SEND_F): {stage + 1} for stage in range(num_stages - 1)},
        **{(stage, Kind.SEND_B): {stage - 1} for stage in range(1, num_stages)},
    }
    for first, last in skip_ends:
        if 0 <= first < last:
            receivers[first, Kind.SEND_F].add(last)
            receivers[last, Kind.SEND_B].add(first)
    return [
        (rank, action.kind.value, action.stage, receiver, action.microbatch)
        for action, rank in position.items()
        if action.kind in (Kind.SEND_F, Kind.SEND_B) and not here[action.stage]
        for receiver in sorted(receivers[action.stage, action.kind], key=lambda r: abs(r - action.stage))
        if here[receiver]
    ]


def _runs_here(action: Action, here: Sequence[bool]) -> bool:
    """Returns whether this process runs an action, or the receiving end of it."""
    receivers = {Kind.SEND_F: action.stage + 1, Kind.SEND_B: action.stage - 1}
    return here[action.stage] or (action.kind in receivers and here[receivers[action.kind]])


def own_stages_of(stages: Sequence[Stage]) -> list[int] | None:
    """Returns the stages of this process, if there are other processes; None if all stages are here."""
    own = [index for index, stage in enumerate(stages) if not stage.options.is_remote]
    return None if len(own) == len(stages) else own


def _ties(
    stages: Sequence[Stage], known: Sequence[Sequence[CompiledStage]], own_stages: Sequence[int]
) -> list[tuple[list[tuple[int, int]], list[int], list[int]]]:
    """Returns the parameters whose gradients are summed over processes, as in the C++ Tie."""
    found = []
    num_ranks = len(stages) // len(own_stages)
    for tie in stages[0].options.ties:
        uses = [(stage, i) for stage, i in tie if i in known[0][stage].parameters_with_gradients()]
        own = [use for use in uses if use[0] in own_stages]
        elsewhere = [stage for stage, _ in uses if stage not in own_stages]
        if own and elsewhere:
            first_of_ranks = {stage % num_ranks: stage for stage in reversed(elsewhere)}
            found.append((own, elsewhere, sorted(first_of_ranks.values())))
    return found


def _skip_ends(stages: Sequence[Stage]) -> list[tuple[int, int]]:
    """Returns, by skip connection, the stage that stashes it, -1 if the caller gives it, and the one that
    pops it.
    """
    found = [(-1, -1) for _ in stages[-1].skips]
    for index, stage in enumerate(stages):
        for number in stage.stashes:
            found[number] = index, found[number][1]
        for number in stage.pops:
            found[number] = found[number][0], index
    return found


def _check_outputs(
    dims: BatchDims,
    lengths: Sequence[int],
    is_step: bool,
    microbatches: Sequence[tuple[Structure, Sequence[Sequence[int]]]],
) -> None:
    """Checks that outputs can be concatenated; ``lengths`` are the micro-batches' samples.

    The first output of a step is the loss.
    """
    dim = dims.outputs
    others = sorted({d for d in dims.inputs if d is not None} - {dim})
    structure, shapes = microbatches[0]
    for other, _ in microbatches:
        if other != structure:
            raise RuntimeError(
                "the last layer's return value differs between micro-batches in more than its tensors: "
                f"{structure} and {other}; return equal constants and the same nesting for every micro-batch"
            )
    if not shapes:
        value = structure.build([])
        raise TypeError(
            f"expected Tensor, but the last layer returned {reprlib.repr(value)} of type "
            f"{type(value).__name__}, which contains no tensor to concatenate; return a tensor, or tuples, "
            "lists and dicts of tensors, which may also contain None, bools, numbers and strings"
        )
    for index, shape in enumerate(shapes):
        if not len(shape):
            raise RuntimeError(
                f"output {index} of the last layer is 0-dimensional, so the micro-batches' outputs cannot be "
                f"concatenated; return a tensor whose {'first ' if dim == 0 else ''}dimension "
                f"{'' if dim == 0 else f'{dim} '}is the batch"
            )
    for index in range(is_step, len(shapes)):
        of_output = [(each[index], length) for (_, each), length in zip(microbatches, lengths, strict=True)]
        if dim or others:  # along dimension 0, an output's length may differ from its input's, as in a loop
            _check_batched(index, of_output, dim)
        for elsewhere in others if index > is_step else []:  # the first output is as the first input
            _check_unambiguous(index, of_output, dim, elsewhere)


def _check_batched(index: int, of_output: Sequence[tuple[Sequence[int], int]], dim: int) -> None:
    for shape, length in of_output:
        if not _is_batched(shape, dim, length):
            raise RuntimeError(
                f"output {index} of the last layer has shape {list(shape)} for a micro-batch of {length}, so "
                f"its batch is not in dimension {dim}, along which outputs are concatenated (batch_dim); "
                "return a tensor whose batch is in that dimension"
            )


def _check_unambiguous(
    index: int, of_output: Sequence[tuple[Sequence[int], int]], dim: int, other: int
) -> None:
    """Checks that an output's batch cannot be in another dimension, that of another input."""
    shape, length = of_output[0]
    if (dim - other) % len(shape) and all(_is_batched(shape, other, length) for shape, length in of_output):
        raise RuntimeError(
            f"output {index} of the last layer has shape {list(shape)} for a micro-batch of {length}, so its "
            f"batch may be in dimension {dim}, along which outputs are concatenated, or in {other}; pass "
            "inputs whose batch is in the same dimension, so that batch_dim is one number"
        )


def _is_batched(shape: Sequence[int], dim: int, length: int) -> bool:
    return -len(shape) <= dim < len(shape) and shape[dim] == length
