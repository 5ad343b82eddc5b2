"""What a step does with the gradients: it scales them, clips them, and runs the optimizer."""

from __future__ import annotations

import numbers
from collections.abc import Sequence, Set
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from gpipe_fast.layers.sharded import are_sharded, local_tensor, whole_tensor
from gpipe_fast.runtime.processes import ONE_PROCESS, Processes
from gpipe_fast.torch_private.operators import foreach_norm

# The norm of a gradient: the numbers of its group and of its parameter, its dtype, and its exact value.
_Norm = tuple[int, int, str, str]


class Update(NamedTuple):
    """An update of the parameters at the end of a step.

    Attributes:
        model: the model.
        optimizer: the optimizer; None for no update.
        scaler: multiplies the loss, so that small gradients do not vanish in float16; None for 1.
        max_norm: the maximum norm of all gradients together; None for no clipping.
        processes: the processes of the stages.
    """

    model: nn.Module
    optimizer: Optimizer | None
    scaler: GradScaler | None
    max_norm: float | None
    processes: Processes

    def run(self) -> None:
        """Updates the parameters by the gradients in ``.grad``."""
        needs_all = self.max_norm is not None or (self.scaler is not None and self.scaler.is_enabled())
        if self.optimizer is not None and needs_all and self.processes.is_mesh:
            self._run_with(self.processes, self.optimizer)
        else:
            self._run()

    def asked(self) -> dict[str, str]:
        """Returns what of it all processes agree on; nothing if this one has no gradients to update with."""
        parameters = self.model.parameters() if self.processes.is_mesh else ()
        if self.optimizer is None and not any(p.requires_grad and not p.is_meta for p in parameters):
            return {}
        values = {"optimizer": self.optimizer, "max_norm": self.max_norm, "scaler": self.scaler}
        return {f"the argument {n}": "None" if value is None else "given" for n, value in values.items()}

    def _run(self) -> None:
        """Updates the parameters, as a plain training loop does."""
        _, optimizer, scaler, max_norm, _ = self
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

    def _run_with(self, processes: Processes, optimizer: Optimizer) -> None:
        """Updates the parameters of this process, as `_run` does those of all processes together."""
        max_norm = self.max_norm
        scaler = self.scaler if self.scaler is not None and self.scaler.is_enabled() else None
        own = [p for p in _parameters_of(optimizer) if p.grad is not None]
        is_finite = scaler is None or _unscale(scaler, optimizer, unless_fused=max_norm is None)
        found = {
            "settings": {"max_norm": max_norm, "scale": None if scaler is None else scaler.get_scale()},
            "is_finite": is_finite,
            "norms": [] if max_norm is None else self._norms(optimizer),
        }
        of_ranks = processes.gather("update", found)
        _check_same([each["settings"] for each in of_ranks])
        if max_norm is not None:
            norms = [norm for each in of_ranks for norm in each["norms"]]
            # Each part is multiplied by the same number, also where it is a term of a sum.
            parts: Any = [
                SimpleNamespace(grad=local_tensor(p.grad.detach())) for p in own if p.grad is not None
            ]
            nn.utils.clip_grads_with_norm_(parts, max_norm, _total_norm(norms, processes.device))
        if scaler is None:
            optimizer.step()
            return
        is_finite = all(each["is_finite"] for each in of_ranks)
        if is_finite and own:
            scaler.step(optimizer)
        infinite = torch.full((), float(not is_finite), device=processes.device)
        scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {processes.device: infinite}
        scaler.update()

    def _norms(self, optimizer: Optimizer) -> list[_Norm]:
        """Returns the norm of each gradient."""
        # All ranks have the same parameters, maybe on the meta device.
        order = {parameter: number for number, parameter in enumerate(self.model.parameters())}
        found: list[_Norm] = []
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if parameter.grad is not None:
                    norm = whole_tensor(foreach_norm([parameter.grad])[0])
                    dtype = str(norm.dtype).removeprefix("torch.")
                    found.append((number, order[parameter], dtype, float(norm).hex()))
        return found


def _unscale(scaler: GradScaler, optimizer: Optimizer, unless_fused: bool) -> bool:
    """Unscales gradients, maybe unless the optimizer does itself; returns whether they are finite."""
    if unless_fused and getattr(optimizer, "_step_supports_amp_scaling", False):
        scaler._check_inf_per_device(optimizer)
    else:
        scaler.unscale_(optimizer)
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return not any(each.item() for each in found.values())


def _total_norm(norms: list[_Norm], device: torch.device) -> Tensor:
    """Returns the norm of the gradients of all ranks, added up in the order of one process.

    A tied parameter, which several ranks have with the same gradient, counts once.
    """
    exact = {(group, number): (dtype, value) for group, number, dtype, value in norms}
    each = [
        torch.tensor(float.fromhex(value), dtype=getattr(torch, dtype), device=device)
        for _, (dtype, value) in sorted(exact.items())
    ]
    return nn.utils.get_total_norm(each)


def _check_same(settings: Sequence[dict[str, Any]]) -> None:
    """Checks that all ranks update alike.

    Raises:
        RuntimeError: they do not.
    """
    for rank, other in enumerate(settings):
        if other != settings[0]:
            raise RuntimeError(
                f"rank {rank} updates with {other}, and rank 0 with {settings[0]}; pass the same max_norm, "
                "and a scaler of the same scale, on all ranks"
            )


def checked_update(
    model: nn.Module,
    optimizer: Any,
    scaler: Any,
    max_norm: Any,
    processes: Processes = ONE_PROCESS,
) -> Update:
    """Returns the update of a step; checks the arguments of `GPipe.step` before any work starts.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: the optimizer needs a closure, or has no parameter of the model; or ``max_norm`` is
            negative or NaN, is passed without an optimizer, or with a mesh for other parameters.
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
    if scaler is not None and scaler.is_enabled() and are_sharded([model]):
        raise ValueError(
            "a scaler looks for infinite gradients in one process, got a model with DTensors, whose "
            "gradients are in several; train in bfloat16, which needs no scaler"
        )
    if max_norm is not None:
        _check_max_norm(max_norm, optimizer)
        if processes.is_mesh:
            _check_numbered(optimizer, set(model.parameters()))
    return Update(model, optimizer, scaler, max_norm, processes)


def _check_optimizer(model: nn.Module, optimizer: Any) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}; pass one such as "
            "torch.optim.AdamW(model.parameters())"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            f"step runs the optimizer once, after the gradients, and {type(optimizer).__name__} calls a "
            "closure several times; call optimizer.step(closure), with a closure that calls "
            "optimizer.zero_grad() and returns model.step(...) without an optimizer"
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


def _check_numbered(optimizer: Optimizer, known: Set[Tensor]) -> None:
    for parameter in _parameters_of(optimizer):
        if parameter not in known:
            raise ValueError(
                "max_norm with a mesh clips parameters of the model, got an optimizer with another one, of "
                f"shape {list(parameter.shape)}, which all processes may have; use another optimizer for it"
            )


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
