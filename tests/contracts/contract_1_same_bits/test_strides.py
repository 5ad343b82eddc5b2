"""Operators whose results have other strides than PyTorch predicts, in layers and their gradients."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_fast import GPipe
from tests.reference import unequal
from tests.sampling import seed
from tests.untraceable import FunctionLayer

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 8
Loss = Callable[[Tensor], Tensor]


def weight(width: int) -> Tensor:
    return torch.linspace(-1, 1, 3 * width).view(width, 3)


WEIGHT = weight(WIDTH)


def check(layers: nn.Sequential, x: Tensor, loss: Loss) -> None:
    """Asserts that a call and a backward leave the plain loop's bits, of layers that all run natively."""
    plain = copy.deepcopy(layers)
    balance = [1] * len(layers)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".* cannot be traced faithfully")
        pipe = GPipe(layers, balance, devices=["cpu"] * len(layers), chunks=2)
        output = pipe(x)
        loss(output).backward()
    ours = {"output": output} | {name: p.grad for name, p in pipe.named_parameters()}
    output = torch.cat([plain(part) for part in x.chunk(2)])
    loss(output).backward()
    assert unequal(ours, {"output": output} | {name: p.grad for name, p in plain.named_parameters()}) == []


LOSSES: dict[str, Loss] = {
    "squares": lambda y: y.square().sum(),
    "expanded": lambda y: y.sum(),
    "column-major": lambda y: torch.einsum("bd,dk->kb", y.flatten(1), weight(y[0].numel())).square().sum(),
    "transposed": lambda y: (y.transpose(0, -1).contiguous() * torch.arange(len(y))).sin().sum(),
}
LAYERS: dict[str, Callable[[Tensor], Tensor]] = {
    "einsum in the layer": lambda x: torch.einsum("bd,dk->kb", x.log_softmax(-1), WEIGHT).t(),
    # Kernels for complex numbers round rows one by one in another way than all at once.
    "complex rows": lambda x: real(complex_of(x[:, 2:]) * complex_of(x[:, :6])),
    "complex columns": lambda x: real((complex_of(x).t() * complex_of(x[:, 2:]).t()[:1]).t()),
    "parts of complex rows": lambda x: (
        torch.view_as_real(complex_of(x)[:, 1:]).norm(dim=0).expand(len(x), 3, 2)
    ),
    # The layer reads strides, which become numbers in its graph.
    "stride of a norm": lambda x: (y := F.group_norm(images(x), 2)) * y.stride(1),
    "own strides": lambda x: (y := F.pad(images(x), (1, 1))).as_strided(
        (len(x), 8), (y.stride(0), y.stride(1))
    ),
}


def complex_of(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.reshape(len(x), -1, 2))


def real(x: Tensor) -> Tensor:
    return torch.view_as_real(x).flatten(1)


def images(x: Tensor) -> Tensor:
    return x.view(len(x), 4, 2, 1).expand(-1, -1, -1, 3).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.sampled(16)
def test_strides_of_an_operator(name: str, loss: str) -> None:
    torch.manual_seed(0)
    layer = FunctionLayer(lambda linear, x: LAYERS[name](linear(x)), nn.Linear(6, WIDTH))
    check(nn.Sequential(layer, nn.Sigmoid()), torch.randn(8, 6), LOSSES[loss])


# Each keeps the shape of a tensor; it is given a dimension.
OPERATORS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "log_softmax": lambda x, dim: x.log_softmax(dim),
    "softmax": lambda x, dim: x.softmax(dim),
    "cumsum": lambda x, dim: x.cumsum(dim) * 0.1,
    "flip": lambda x, dim: x.flip(dim).sin(),
    "roll": lambda x, dim: x.roll(1, dim) + x,
    "logsigmoid": lambda x, dim: F.logsigmoid(x),
    "gelu": lambda x, dim: F.gelu(x),
    "power": lambda x, dim: x.sigmoid().pow(1.0),
    "stride": lambda x, dim: (y := F.logsigmoid(x)) * (y.stride(dim) % 5 + 1),
    "contiguous": lambda x, dim: x.contiguous(),
    "centred": lambda x, dim: x - x.mean(dim, keepdim=True),
    "expanded": lambda x, dim: x * x.select(dim, 0).unsqueeze(dim).expand_as(x),
    "layer norm": lambda x, dim: F.layer_norm(x, x.shape[-2:]),
    "padded": lambda x, dim: F.pad(x, (1, 1))[..., 1:-1].cos(),
    "gated": lambda x, dim: F.glu(torch.cat([x, x.flip(dim)], dim), dim),
    "product": lambda x, dim: (x @ x.transpose(-1, -2)).tanh() @ x,
    "sorted": lambda x, dim: x.sort(dim).values,
    "entropy": lambda x, dim: F.binary_cross_entropy(
        x.sigmoid(), x.detach().flip(dim).sigmoid(), reduction="none"
    ),
    "where": lambda x, dim: torch.where(x > 0, x, x.flip(dim) * 0.1),
    "group norm": lambda x, dim: F.group_norm(x.reshape(len(x), 1, -1, 1), 1).reshape(x.shape),
    "views": lambda x, dim: F.group_norm(x.unsqueeze(dim).reshape(1, len(x), -1, 1), len(x)).view(x.shape),
    "convolved": lambda x, dim: F.conv2d(
        x.reshape(len(x), 1, -1, 1), WEIGHT[:3].reshape(1, 1, 9, 1), padding=(4, 0)
    ).view(x.shape),
}


class RandomOperators(nn.Module):
    """A linear layer, then random operators on random permutations of its output."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 24)
        self.shape = rng.choice([(24,), (4, 6), (24, 1), (1, 24), (2, 3, 4), (4, 1, 6), (6, 2, 2), (1, 4, 6)])
        dims = len(self.shape) + 1
        self.steps = [
            (rng.choice(sorted(OPERATORS)), rng.sample(range(dims), dims), rng.randrange(dims))
            for _ in range(rng.randint(2, 5))
        ]

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x).unflatten(1, self.shape)
        for name, order, dim in self.steps:
            x = OPERATORS[name](x.permute(order), dim).permute([order.index(d) for d in range(len(order))])
        return x

    def extra_repr(self) -> str:
        return f"{self.shape}, {self.steps}"


@pytest.mark.parametrize("case", range(300))
@pytest.mark.sampled(8)
def test_strides_of_random_operators(case: int) -> None:
    rng = random.Random(f"{seed()}/{case}")
    torch.manual_seed(case)
    layers = nn.Sequential(RandomOperators(rng), nn.Tanh())
    print(layers)
    check(layers, torch.randn(rng.choice([4, 6, 8]), 6), rng.choice(list(LOSSES.values())))
