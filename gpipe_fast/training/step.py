"""Steps: runs of the layers and a loss, and the losses that they give."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from gpipe_fast.layers.structure import Inputs
from gpipe_fast.runtime.plan import StepOrder
from gpipe_fast.runtime.processes import Processes
from gpipe_fast.runtime.runner import Runner, StepInputs
from gpipe_fast.runtime.stage import TRACING_LOCK
from gpipe_fast.training.loss_graph import MAX_MEASURES
from gpipe_fast.training.losses import (
    Loss,
    Normalizer,
    check_normalizer,
    check_target,
    key_of,
    loss_layer,
    loss_of,
    shape_of_loss,
)

# The maximum number of losses for which programs are kept.
_MAX_LOSSES = 4


@dataclass(frozen=True)
class Objective:
    """What a step computes from the output of the last layer.

    Attributes:
        loss: the loss.
        target: what the loss is computed with besides the output.
        keeps_output: whether the output is returned, too.
    """

    loss: Loss
    target: Any = None
    keeps_output: bool = False

    @classmethod
    def checked(
        cls,
        loss_fn: Any,
        target: Any,
        normalizer: Normalizer,
        combines: str,
        keeps_output: bool,
        method: str,
        processes: Processes,
    ) -> Objective:
        """Returns the objective for arguments as of `GPipe.step`.

        Args:
            loss_fn: as for `GPipe.step`.
            target: as for `GPipe.step`.
            normalizer: as for `GPipe.step`.
            combines: the argument ``loss`` of `GPipe.step`.
            keeps_output: as above.
            method: the name of the called method.
            processes: the processes of the pipeline.

        Raises:
            TypeError: the loss is not a function, or has no target.
            ValueError: the normalizer is 0 or not finite, or a loss does not fit it.
        """
        if not processes.is_mesh:  # else only the processes with the last stage need the target
            check_target(loss_fn, target, method)
        if processes.num_replicas == 1:  # else one replica may have no targets
            check_normalizer(normalizer)
        return cls(loss_of(loss_fn, normalizer, combines), target, keeps_output)


def run_step(
    runner: Runner,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    training: bool,
    objective: Objective,
    scaler: GradScaler | None = None,
    asked: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Losses, Any]:
    """Runs a step without its update; if gradients are disabled, the forward and the loss alone.

    Args:
        runner: the runner of the layers.
        args: as for `Runner.call`.
        kwargs: as for `Runner.call`.
        training: as for `Runner.call`.
        objective: what to compute from the output.
        scaler: multiplies the loss before its backward; None for 1.
        asked: as for `StepInputs`.

    Returns:
        The losses, divided; and the output, or None.
    """
    if not runner.layers:
        raise ValueError("the model has no layers, so it has no loss; pass some to GPipe")
    loss, processes = objective.loss, runner.processes
    targets = targets_of(runner, objective.target)
    inputs = runner.checked_inputs(args, kwargs)
    longer, given = with_loss(runner, inputs, training, objective, targets)
    target = objective.target
    if targets is not None:
        target = targets.structure.build(targets.tensors)  # without marks of what is not split
    divisor = 1.0 if loss.divisor is None else checked_divisor(loss.divisor(target))
    offer = None
    if processes.is_mesh and processes.has_last_stage:
        divisor = divisor if loss.divisor is None else processes.sum_of_counts(divisor)

        def offer(outputs: Sequence[Tensor]) -> None:
            processes.offer_losses(losses_of(outputs[0], divisor))

    shape = shape_of_loss(runner.output_dim)
    given = replace(given, divisor=divisor, shape=shape, scaler=scaler, offer=offer, asked=asked)
    found = longer.run(inputs, training, given)
    parts, output = found if objective.keeps_output and processes.has_last_stage else (found, None)
    if torch.is_grad_enabled():  # the gradients are there; nothing reads these ones
        torch.autograd.backward(parts, torch.ones_like(parts))
    own = losses_of(parts, divisor) if processes.has_last_stage else ()
    return Losses.of(own, processes), output


def targets_of(runner: Runner, target: Any) -> Inputs | None:
    """Returns the target of a step as tensors, of which each is split like the outputs."""
    return None if target is None else Inputs.of((target,), {}, runner.output_dim)


def with_loss(
    runner: Runner, inputs: Inputs, training: bool, objective: Objective, targets: Inputs | None
) -> tuple[Runner, StepInputs]:
    """Returns the runner of the layers and the loss, and what a step gives it of the target.

    First measures the balance, if it is not measured yet, and warns of what a call warns of.
    """
    schedule = runner.settings.schedule
    runner.choose_balance(inputs, training, schedule)
    with TRACING_LOCK:
        runner.follow_changes()
    runner.forget_old_graphs()
    runner.warn(inputs, training)
    loss, dim, device = objective.loss, runner.output_dim, runner.placement.devices[-1]
    if (
        runner.processes.num_replicas == 1
        and min(runner.chunks_of(inputs.batch_size), inputs.batch_size) <= 1
    ):
        loss = loss._replace(combines="sum")  # of one micro-batch, which is the mini-batch
    given, dims = given_of(targets, inputs.batch_size, device)
    structure = None if targets is None else targets.structure
    kinds = tuple((tensor.dtype, tensor.dim(), d) for tensor, d in zip(given, dims, strict=True))
    own_key = key_of(loss.function)
    key = own_key, loss.combines, structure, kinds, objective.keeps_output, dim
    known = runner.with_losses.pop(key, None)
    # What the former function reads may have changed since.
    if known is None or not known[1].computes(loss.function, own_key):
        if known is not None:
            runner.forget(known[0])
        layer = loss_layer(loss, structure, dims, objective.keeps_output, dim, device)
        known = runner.with_layer(layer), layer
    runner.with_losses[key] = known
    while len(runner.with_losses) > _MAX_LOSSES:
        runner.forget(runner.with_losses.pop(next(iter(runner.with_losses)))[0])
    measure = None
    if loss.combines != "sum":
        measures = torch.zeros(MAX_MEASURES, dtype=torch.float64, device=device)
        whole = given, inputs.batch_size
        measure = functools.partial(known[1].measure, measures, *whole, runner.processes)
        given, dims = (*given, measures), (*dims, None)
    return known[0], StepInputs(given, StepOrder(schedule, dims), measure=measure)


class Losses(NamedTuple):
    """The losses of a step.

    Attributes:
        each: those of this process's micro-batches.
        total: the sum over the micro-batches of all replicas.
    """

    each: list[Tensor]
    total: Tensor

    @classmethod
    def of(cls, each: Sequence[Tensor], processes: Processes) -> Losses:
        """Returns the losses of micro-batches, which only processes with the last stage pass."""
        of_replicas = processes.losses(each)
        totals = [functools.reduce(torch.add, losses) for losses in of_replicas]
        return cls(of_replicas[processes.replica], functools.reduce(torch.add, totals))


def check_list(losses: Any) -> None:
    """Checks the argument ``losses`` of a step.

    Raises:
        TypeError: it is neither a list nor None.
    """
    if losses is not None and not isinstance(losses, list):
        raise TypeError(f"losses must be a list to append to, got {type(losses).__name__}; pass losses=[]")


def result_of(found: Losses, output: Any, losses: list[Tensor] | None, return_outputs: bool) -> Any:
    """Returns what a step returns, from its losses and the output; fills ``losses``."""
    if losses is not None:
        losses += found.each
    return (found.total, output) if return_outputs else found.total


def losses_of(parts: Tensor, divisor: Any) -> Sequence[Tensor]:
    """Returns the losses of micro-batches, divided."""
    each: Sequence[Tensor] = (parts.detach().flatten() / divisor).unbind()
    return each


def checked_divisor(divisor: Any) -> Any:
    """Returns the divisor of the losses, without dimensions and without a graph."""
    if isinstance(divisor, Real):
        return divisor
    if not isinstance(divisor, Tensor):
        raise TypeError(
            f"the normalizer must be a number or a tensor with one, got {type(divisor).__name__}; pass a "
            "number, or a function of the target that returns one"
        )
    if divisor.numel() != 1:
        raise ValueError(
            f"the normalizer must be one number, got a tensor of shape {list(divisor.shape)}; let it "
            "return a sum"
        )
    return divisor.detach().reshape(())


def given_of(
    targets: Inputs | None, batch_size: int, device: torch.device
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """Returns the checked tensors of the target, and the dimension along which each is split."""
    if targets is None:
        return (), ()
    for tensor, dim in zip(targets.tensors, targets.dims.inputs, strict=True):
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"the target has a tensor of shape {list(tensor.shape)} that requires a gradient, which step "
                "does not compute; pass its .detach(), or use loss_fn(model(x), y).backward()"
            )
        if dim is not None and (tensor.dim() <= dim or tensor.shape[dim] != batch_size):
            raise ValueError(
                f"the target has a tensor of shape {list(tensor.shape)}, but the batch size is {batch_size}; "
                "wrap it by gpipe_fast.replicate if every micro-batch needs it whole"
            )
        if tensor.device.type != device.type or (device.index is not None and tensor.device != device):
            raise ValueError(
                f"the target is on {tensor.device}, but the last stage is on {device}; call "
                f".to({str(device)!r})"
            )
    return tuple(x.detach() for x in targets.tensors), targets.dims.inputs
