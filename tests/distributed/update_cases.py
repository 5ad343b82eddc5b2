"""What the ranks of the tests of updates that need all gradients run: clipping and scalers."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from gpipe_fast import GPipe
from tests.contracts.contract_1_same_bits.test_grad_dtype import Cast
from tests.distributed.cases import TIMEOUT, Decoder, _error_of, loss_of
from tests.reference import SEED

STEPS, OVERFLOW = 4, 2
BALANCES = {2: [2, 6], 3: [2, 2, 4]}


def layers() -> nn.Sequential:
    """Returns a model with a tie of its first and last stages, a frozen layer and gradients of two dtypes."""
    torch.manual_seed(0)
    embedding = nn.Embedding(11, 6)
    half = nn.Linear(6, 6).bfloat16()
    frozen = nn.Linear(6, 6).requires_grad_(False)
    return nn.Sequential(
        *(First(embedding), nn.Linear(6, 6), Cast(torch.bfloat16), half, Cast(torch.float32)),
        *(frozen, nn.LayerNorm(6), Decoder(embedding.weight)),
    )


class First(nn.Module):
    """The gradient of its bias is infinite if the token 10 occurs; no other gradient is."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding, self.dropout = embedding, nn.Dropout(0.1)
        self.bias = nn.Parameter(torch.zeros(6))

    def forward(self, ids: Tensor) -> Tensor:
        factor = torch.where(ids == 10, 3e38, 0.0)[..., None]
        bias = self.bias
        for _ in range(2):
            bias = bias + factor * (bias - bias.detach())
        return self.dropout(self.embedding(ids)) + bias


def tokens() -> Tensor:
    return torch.randint(10, (7, 3), generator=torch.Generator().manual_seed(1))


def in_groups(kind: Any, **options: Any) -> Callable[[nn.Module], Optimizer]:
    """Returns what makes an optimizer of matrices, and then of vectors, on the meta device or not."""

    def make(model: nn.Module) -> Optimizer:
        groups = [{"params": [p for p in model.parameters() if (p.dim() > 1) == large]} for large in (1, 0)]
        return kind(groups, **options)

    return make


def in_order(kind: Any, **options: Any) -> Callable[[nn.Module], Optimizer]:
    return lambda model: kind([p for p in model.parameters() if not p.is_meta], **options)


def scaler() -> GradScaler:
    """Returns a scaler whose scale is no power of two, so that the order of products shows."""
    return GradScaler("cpu", init_scale=3000.0, growth_interval=2)


# Name: what makes the optimizer; whether there is a scaler; other arguments of steps.
RECIPES: dict[str, tuple[Callable[[nn.Module], Optimizer], bool, dict[str, Any]]] = {
    "clipping in groups": (in_groups(AdamW, lr=0.01), False, {"max_norm": 0.3}),
    "scaler and fused": (in_order(AdamW, lr=0.01, fused=True), True, {}),
    "scaler and clipping": (in_groups(SGD, lr=0.1), True, {"max_norm": 0.3}),
}


def train(model: GPipe, name: str, x: Tensor) -> dict[str, Any]:
    """Returns what some steps leave behind; in one of them, a gradient of the first stage is infinite."""
    make, scales, options = RECIPES[name]
    optimizer, scaling = make(model), scaler() if scales else None
    schedule = CosineAnnealingLR(optimizer, STEPS)
    found: dict[str, Any] = {}
    torch.manual_seed(SEED)
    for step in range(STEPS):
        optimizer.zero_grad()
        batch = x.clone()
        if scales and step == OVERFLOW:
            batch[-1, 0] = 10
        loss = model.step(
            batch,
            target=torch.zeros(len(x), 2),
            loss_fn=loss_of,
            normalizer=8,
            optimizer=optimizer,
            scaler=scaling,
            **options,
        )
        schedule.step()
        found[f"loss {step}"] = loss
        found |= {
            f"gradient of {n}, {step}": p.grad for n, p in model.named_parameters() if p.grad is not None
        }
    found |= {n: p.detach() for n, p in model.named_parameters() if not p.is_meta}
    found |= {
        f"{key} of {n}": value
        for n, p in model.named_parameters()
        for key, value in optimizer.state.get(p, {}).items()
    }
    return found | {"scaler": None if scaling is None else scaling.state_dict()}


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    return a == b


def same_bits(names: list[str], schedule: str = "gpipe", num_replicas: int = 1) -> int:
    """Compares training over all ranks with training in one process; returns how many tensors are equal.

    Replicas train on the same samples: twice a gradient that is divided by twice the number is that gradient.
    """
    warnings.simplefilter("ignore")
    shape = num_replicas, dist.get_world_size() // num_replicas
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "pp"))
    balance, number = BALANCES[shape[1]], 0
    for name in names:
        options: dict[str, Any] = {"chunks": 3, "schedule": schedule}
        ours = GPipe(layers(), balance, mesh=mesh, timeout=TIMEOUT, **options)
        alone = GPipe(layers(), balance, devices=["cpu"] * len(balance), **options)
        alone.threads_per_stage = 1
        found, expected = (train(model, name, tokens()) for model in (ours, alone))
        assert [n for n, value in found.items() if not equal(value, expected[n])] == [], name
        number += len(found)
    return number


def failing() -> list[str]:
    """The last rank fails in clipping, then clips otherwise: returns the errors; all go on afterwards."""
    warnings.simplefilter("ignore")
    balance = BALANCES[dist.get_world_size()]
    model = GPipe(layers(), balance, chunks=3, mesh=dist.group.WORLD, timeout=TIMEOUT)
    odd = dist.get_rank() == dist.get_world_size() - 1
    optimizer = RECIPES["clipping in groups"][0](model)
    before = {n: p.detach().clone() for n, p in model.named_parameters() if not p.is_meta}

    def step(max_norm: float = 0.3) -> None:
        target = torch.zeros(7, 2)
        options: dict[str, Any] = {"loss_fn": loss_of, "normalizer": 7, "optimizer": optimizer}
        model.step(tokens(), target=target, max_norm=max_norm, **options)

    fault = mock.patch.object(torch, "_foreach_norm", side_effect=ValueError("no norm"))
    with fault if odd else contextlib.nullcontext():
        errors = [_error_of(step)]
    errors.append(_error_of(lambda: step(0.2 if odd else 0.3)))
    named = dict(model.named_parameters())
    assert all(torch.equal(named[name], value) for name, value in before.items())
    step()
    return errors
