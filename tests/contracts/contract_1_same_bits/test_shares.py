"""Steps at every share of saved activations: the bits of the plain loop, under every schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe_fast
from bench.models.gpt import Block
from gpipe_fast import GPipe, is_recomputing
from gpipe_fast.lower.checkpoint import CHECKPOINT_MODES, CheckpointChoice
from gpipe_fast.schedule import SCHEDULES
from gpipe_fast.skip import pop, skippable, stash
from tests.reference import loop_step, pipeline_step, unequal

pytestmark = pytest.mark.usefixtures("one_thread")

SEED, CHUNKS = 3, 4
SHARES = [0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0]


class DropoutBlock(nn.Module):
    """A GPT block with dropout, also on the attention's weights."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.block, self.heads = Block(width, heads), heads
        self.qkv, self.drop = nn.Linear(width, 3 * width), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        y = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), dropout_p=0.3)
        x = x + self.drop(y.transpose(1, 2).reshape(batch, length, width))
        found: Tensor = self.drop(self.block(x))
        return found


def gpt() -> tuple[nn.Sequential, Tensor]:
    layers = [nn.Embedding(11, 16), *(DropoutBlock(16, 2) for _ in range(2)), nn.Linear(16, 11)]
    return nn.Sequential(*layers), torch.randint(11, (8, 6))


@skippable(stash=["wide"])
class Down(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.down = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 2, 2)

    def forward(self, x: Tensor) -> Any:
        wide = F.silu(self.conv(x))
        yield stash("wide", wide)
        return self.down(wide).relu()


@skippable(pop=["wide"])
class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.conv = nn.ConvTranspose2d(8, 4, 2, 2), nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Any:
        wide = yield pop("wide")
        return self.conv(torch.cat([wide, F.gelu(self.up(x))], 1)).tanh()


def unet() -> tuple[nn.Sequential, Tensor]:
    middle = [nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Dropout2d(0.2)]
    return nn.Sequential(Down(), *middle, Up()), torch.randn(8, 3, 8, 8)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second, self.last = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x)).relu()
        found: Tensor = (x + self.last(self.second(y))).relu()
        return found


def resnet() -> tuple[nn.Sequential, Tensor]:
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), Residual(), Residual()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 3)), torch.randn(8, 3, 6, 6)


MODELS: dict[str, Callable[[], tuple[nn.Sequential, Tensor]]] = {"gpt": gpt, "unet": unet, "resnet": resnet}
CHOICES: list[CheckpointChoice] = [*SHARES, *CHECKPOINT_MODES]
LISTS: list[Sequence[str | float]] = [[0.25, 0.75], ["never", 0.5], [0.4, "except_last"], [0.0, 1.0]]


def made(name: str) -> tuple[nn.Sequential, Tensor, list[int]]:
    torch.manual_seed(SEED)
    model, x = MODELS[name]()
    return model, x, [len(model) - len(model) // 2, len(model) // 2]


def results(model: nn.Module, loss: Tensor) -> dict[str, Tensor | None]:
    found = {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}
    return found | {name: b.clone() for name, b in model.named_buffers()}


def mean(output: Tensor) -> Tensor:
    return output.square().flatten(1).mean(1).sum()


def check_step(name: str, schedule: str, choice: CheckpointChoice) -> None:
    """Compares a step with the plain loop, whose backwards run in the order of the schedule's."""
    model, x, balance = made(name)
    parts = x.chunk(CHUNKS)
    torch.manual_seed(SEED)
    with gpipe_fast.keyed_rng(model):
        losses = [mean(model(part)) / len(x) for part in parts]
    for loss in reversed(losses) if schedule == "gpipe" else losses:
        loss.backward()
    expected = results(model, losses[0])
    model, x, balance = made(name)
    options: dict[str, Any] = {"backend": "aten", "chunks": CHUNKS, "schedule": schedule}
    pipe = GPipe(model, balance, devices=["cpu"] * 2, checkpoint=choice, **options)
    torch.manual_seed(SEED)
    loss = pipe.step(x, loss_fn=mean, normalizer=len(x))
    found = results(pipe, loss)
    del found["loss"], expected["loss"]
    assert [n for n in expected if not torch.equal(found[n], expected[n])] == []  # type: ignore[arg-type]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("choice", "schedule"), list(product([*CHOICES, *LISTS], SCHEDULES)), ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_step_equals_the_plain_loop(name: str, schedule: str, choice: CheckpointChoice) -> None:
    check_step(name, schedule, choice)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("choice", [*CHOICES, *LISTS], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_forward_and_backward_equal_the_plain_loop(name: str, choice: CheckpointChoice) -> None:
    model, x, balance = made(name)
    expected = loop_step(model, x, CHUNKS)
    pipe = GPipe(model, balance, devices=["cpu"] * 2, chunks=CHUNKS, checkpoint=choice, backend="aten")
    assert unequal(pipeline_step(pipe, x), expected) == []


def test_dropout_draws_the_same_under_every_share_pytorch_190758() -> None:
    """In pytorch#190758, a budget of memory makes a recomputed dropout draw another mask than its forward.

    With a weight of ones, the gradient of the input is the mask, which the output shows too.
    """

    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout((x * 1.5).tanh(), 0.5) + x.detach()

    x = torch.randn(8, 50, generator=torch.Generator().manual_seed(SEED))
    found = []
    for choice in CHOICES:
        pipe = GPipe(nn.Sequential(Masked(), Masked(), Masked()), [2, 1], chunks=CHUNKS, checkpoint=choice)
        leaf = x.clone().requires_grad_()
        torch.manual_seed(SEED)
        output = pipe(leaf)
        output.sum().backward()
        assert leaf.grad is not None
        found.append((output.detach(), leaf.grad))
    for output, gradient in found:
        assert torch.equal(output, found[0][0])
        assert torch.equal(gradient, found[0][1])


@pytest.mark.parametrize("share", [0.25, 0.75, 1.0])
def test_layers_in_python_save_nothing_with_a_share_below_1(share: float) -> None:
    phases: list[bool] = []

    class Asking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            phases.append(is_recomputing())
            return x.tanh()

    torch.manual_seed(SEED)
    model, x = nn.Sequential(nn.Linear(6, 6), Asking(), nn.Linear(6, 3)), torch.randn(8, 6)
    expected = loop_step(model, x, CHUNKS)
    phases.clear()
    pipe = GPipe(model, [3], chunks=CHUNKS, checkpoint=share, backend="eager")
    assert unequal(pipeline_step(pipe, x), expected) == []
    assert phases == [False] * CHUNKS + [True] * (CHUNKS if share < 1 else 0)
