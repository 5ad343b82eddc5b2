"""Outputs of a mini-batch: programs write them into one tensor, so that no concatenation copies them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTH = 16


class Several(nn.Module):
    """Returns an output that it computes, an output that is a view of it, and one that is an input."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = x * 2
        return {"own": x.sin(), "y": y, "part": y[:, :2], "input": x}


class Swapped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp().t().contiguous().t()


LAST: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, 32),
    "linear, then a view": lambda: nn.Sequential(nn.Linear(WIDTH, 48), nn.Unflatten(1, (3, 16))),
    "not aligned": lambda: nn.Linear(WIDTH, 5),
    "relu": nn.ReLU,
    "softmax": lambda: nn.Softmax(1),
    "identity": nn.Identity,
    "several": Several,
    "strided": Swapped,
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "expanded": lambda: nn.Sequential(nn.Linear(WIDTH, 1), nn.Unflatten(1, (1, 1))),
}


def leaves(output: Any) -> list[Tensor]:
    return [*output.values()] if isinstance(output, dict) else [output]


def pipeline(last: str, checkpoint: str, **options: Any) -> tuple[nn.Sequential, GPipe]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), LAST[last]())
    return plain, GPipe(copy.deepcopy(plain), [2, 1], devices=["cpu"] * 2, checkpoint=checkpoint, **options)


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("last", LAST)
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.sampled(8)
def test_outputs_changed_in_place_do_not_change_gradients(last: str, checkpoint: str, chunks: int) -> None:
    """Calls with other sizes follow one another, and the caller keeps and changes all outputs."""
    plain, pipe = pipeline(last, checkpoint, chunks=chunks)
    kept = []
    for batch in (6, 8, 6, 9):
        x = torch.randn(batch, WIDTH)
        expected = [plain(part) for part in x.chunk(chunks)]
        outputs = leaves(pipe(x))
        for i, output in enumerate(outputs):
            assert torch.equal(output, torch.cat([leaves(part)[i] for part in expected]))
            assert output.is_contiguous()
            kept.append((output, output.detach() + 1))
        plain.zero_grad()
        pipe.zero_grad()
        torch.cat([leaf.flatten() for part in expected for leaf in leaves(part)]).sum().backward()
        total = torch.cat([output.flatten() for output in outputs]).sum()
        with torch.no_grad():
            for output in outputs:
                output.add_(1)
        total.backward()
        for own, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
            assert (own.grad is None) is (theirs.grad is None)
            assert own.grad is None or torch.allclose(own.grad, theirs.grad)
    assert all(torch.equal(output, value) for output, value in kept)


def test_outputs_are_inference_tensors_in_inference_mode() -> None:
    """One is written into the result, and one is concatenated."""
    _, pipe = pipeline("several", "never", chunks=2)
    with torch.inference_mode():
        assert all(output.is_inference() for output in pipe(torch.randn(8, WIDTH)).values())
    assert not any(output.is_inference() for output in pipe(torch.randn(8, WIDTH)).values())
