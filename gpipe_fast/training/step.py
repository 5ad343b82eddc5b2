"""What `GPipe.step` gives its loss, checked; and the losses that it gets."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from gpipe_fast.distributed.ranks import Ranks
from gpipe_fast.layers.structure import Inputs
from gpipe_fast.runtime.plan import StepOrder
from gpipe_fast.training.losses import shape_of_loss
from gpipe_fast.training.update import StageUpdates


class Given(NamedTuple):
    """What a step gets besides the inputs of the first layer.

    Attributes:
        tensors: the tensors of the target, on the last stage's device.
        order: the order of forwards and backwards.
        divisor: by what the sum of the losses is divided.
        weights: by what the loss of each micro-batch is multiplied before; None for 1.
        dim: the dimension along which losses are concatenated.
        scaler: multiplies the loss before its backward; None for 1.
        updates: what updates the parameters of each stage after its last backward; None for nothing.
        offer: tells other processes the losses, the first of the outputs that it gets; None if there are
            none, or the losses are there.
    """

    tensors: tuple[Tensor, ...]
    order: StepOrder
    divisor: Any
    weights: Sequence[float] | None
    dim: int
    scaler: GradScaler | None = None
    updates: StageUpdates | None = None
    offer: Callable[[Sequence[Tensor]], None] | None = None

    def gradients(self, num_microbatches: int, losses: Sequence[Tensor]) -> list[list[Tensor]]:
        """Returns the gradients of the loss of each micro-batch, in the order in which autograd multiplies.

        Args:
            num_microbatches: the number of micro-batches.
            losses: tensors like the loss, one for each dtype that it may have.
        """
        found = [self._gradient(torch.ones_like(loss)) for loss in losses]
        if self.weights is None:
            return [found] * num_microbatches
        columns = [[gradient * weight for weight in self.weights] for gradient in found]
        return list(map(list, zip(*columns, strict=True)))

    def _gradient(self, gradient: Tensor) -> Tensor:
        """Returns the gradient of the loss of a micro-batch of weight 1, given that of the scaled loss."""
        if self.scaler is not None:
            gradient = self.scaler.scale(gradient)
        found: Tensor = gradient / self.divisor
        return found.view(shape_of_loss(self.dim))


class Losses(NamedTuple):
    """The losses of a step.

    Attributes:
        each: those of this process's micro-batches.
        total: the sum over the micro-batches of all replicas.
    """

    each: list[Tensor]
    total: Tensor

    @classmethod
    def of(cls, each: Sequence[Tensor], ranks: Ranks | None) -> Losses:
        """Returns the losses of micro-batches; of several ranks, only those with the last stage pass any."""
        if ranks is None:
            return cls(list(each), functools.reduce(torch.add, each))
        of_replicas = ranks.losses(each)
        totals = [functools.reduce(torch.add, losses) for losses in of_replicas]
        return cls(of_replicas[ranks.replica], functools.reduce(torch.add, totals))


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


def losses_of(parts: Tensor, divisor: Any, weights: Sequence[float] | None) -> Sequence[Tensor]:
    """Returns the losses of micro-batches, weighted and divided."""
    each: Sequence[Tensor] = (parts.detach().flatten() / divisor).unbind()
    if weights is None:
        return each
    # A loss without any target that counts is NaN, and has no weight.
    return [x * w if w else torch.zeros_like(x) for x, w in zip(each, weights, strict=True)]


def check_graphs(inputs: Sequence[Tensor], parameters: Iterable[Tensor]) -> None:
    """Checks that no input has a graph through which a parameter of the model could get a gradient."""
    own = {id(parameter) for parameter in parameters}
    for tensor in inputs:
        if tensor.requires_grad and (tensor.grad_fn is not None or id(tensor) in own):
            raise ValueError(
                f"optimizer_in='drain' would update parameters before the backward of the input of shape "
                f"{list(tensor.shape)}, from which they may get more gradients; pass optimizer_in='end', or "
                "the input without its graph, x.detach()"
            )


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
    _check_targets(targets.tensors, targets.dims.inputs, batch_size, device)
    return tuple(x.detach() for x in targets.tensors), targets.dims.inputs


def _check_targets(
    tensors: Sequence[Tensor], dims: Sequence[int | None], batch_size: int, device: torch.device
) -> None:
    for tensor, dim in zip(tensors, dims, strict=True):
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
