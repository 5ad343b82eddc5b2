"""What a step does with the gradients: it scales them, clips them, and runs the optimizer."""

from __future__ import annotations

import numbers
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer


class Update(NamedTuple):
    """An update of the parameters at the end of a step.

    Attributes:
        optimizer: the optimizer; None for no update.
        scaler: multiplies the loss, so that small gradients do not vanish in float16; None for 1.
        max_norm: the maximum norm of all gradients together; None for no clipping.
    """

    optimizer: Optimizer | None
    scaler: GradScaler | None
    max_norm: float | None

    def run(self) -> None:
        """Updates the parameters, as a plain training loop does; their gradients are in ``.grad``."""
        optimizer, scaler, max_norm = self
        if optimizer is None:
            return
        if max_norm is not None:
            if scaler is not None:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(_parameters_of(optimizer), max_norm)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()


def checked_update(model: nn.Module, optimizer: Any, scaler: Any, max_norm: Any) -> Update:
    """Returns the update of a step; checks the arguments of `GPipe.step` before any work starts.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: the optimizer has no parameter of the model; ``max_norm`` is negative or NaN, or is passed
            without an optimizer.
        RuntimeError: gradients are disabled.
    """
    if not torch.is_grad_enabled():
        raise RuntimeError(
            "step computes gradients, which are disabled here; call it outside of torch.no_grad(), or "
            "compute the loss of model(x), or model.evaluate(x, ...), for the loss alone"
        )
    if optimizer is not None:
        _check_optimizer(model, optimizer)
    if not isinstance(scaler, GradScaler | None):
        raise TypeError(
            f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}; pass "
            "torch.amp.GradScaler('cuda'), or 'cpu', or None"
        )
    if max_norm is not None:
        _check_max_norm(max_norm, optimizer)
    return Update(optimizer, scaler, max_norm)


def _check_optimizer(model: nn.Module, optimizer: Any) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}; pass one such as "
            "torch.optim.AdamW(model.parameters())"
        )
    own = {id(parameter) for parameter in _parameters_of(optimizer)}
    if not any(id(parameter) in own for parameter in model.parameters()):
        raise ValueError(
            f"none of the optimizer's {len(own)} parameters is one of the model, so it would update nothing; "
            "make the optimizer of model.parameters(), after the model has its parameters"
        )


def _check_max_norm(max_norm: Any, optimizer: Optimizer | None) -> None:
    if not isinstance(max_norm, numbers.Real):
        raise TypeError(
            f"max_norm must be a number, got {type(max_norm).__name__}; pass the maximum norm of all "
            "gradients together, or None"
        )
    if not float(max_norm) >= 0:  # NaN, too
        raise ValueError(
            f"max_norm must be at least 0, got {max_norm}; pass None to leave gradients as they are"
        )
    if optimizer is None:
        raise ValueError(
            f"max_norm clips gradients for an optimizer, got max_norm={max_norm} without one; pass "
            "optimizer=..., or call torch.nn.utils.clip_grad_norm_ after the last step of an accumulation"
        )


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
