"""Modes of the caller that change between a forward and its backward, or between the results of a stream."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from tests.reference import collect, unequal
from tests.untraceable import WIDTH, without_warnings

pytestmark = pytest.mark.usefixtures("one_thread")


class Scaled(nn.Module):
    """Scales by a value that is no parameter."""

    def __init__(self, value: float | Tensor) -> None:
        super().__init__()
        self.linear, self.value = nn.Linear(WIDTH, WIDTH), value

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * self.value
        return y


class InPython(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if float(x.detach().sum()) < 1e9 else x


KINDS: dict[str, Callable[[], list[nn.Module]]] = {
    "number": lambda: [Scaled(0.5), Scaled(2.0)],
    "tensor": lambda: [Scaled(torch.tensor(0.5)), Scaled(torch.full((WIDTH,), 2.0))],
    "in Python": lambda: [Scaled(torch.tensor(0.5)), InPython(2.0), Scaled(torch.tensor(2.0))],
}
# Layouts in which gradients arrive.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda g: g,
    "with gaps": lambda g: torch.stack([g, g], -1)[..., 0],
    "column-major": lambda g: g.t().contiguous().t(),
    "expanded": lambda g: g[:1].expand_as(g),
}


def autocast(enabled: bool) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled, cache_enabled=False)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("checkpoint", ["always", "never", "except_last"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_backward_outside_of_the_autocast(kind: str, layout: str, checkpoint: str) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(*KINDS[kind]())
    plain, x = copy.deepcopy(layers), torch.randn(6, WIDTH)
    pipe = GPipe(layers, [len(layers) - 1, 1], devices=["cpu"] * 2, chunks=2, checkpoint=checkpoint)
    gradients = [torch.randn(6, WIDTH) for _ in range(3)]
    with without_warnings():
        for gradient in gradients:
            results = []
            for module, run in ((pipe, pipe), (plain, lambda x: torch.cat([plain(c) for c in x.chunk(2)]))):
                module.zero_grad()
                leaf = x.clone().requires_grad_()
                with autocast(True):
                    output = run(leaf)
                results.append(collect(module, leaf, output, LAYOUTS[layout](gradient.to(output.dtype))))
            assert unequal(*results) == []


@pytest.mark.sampled(4)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("num_first", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_whose_results_are_taken_under_other_modes(kind: str, num_first: int, first: bool) -> None:
    """A mini-batch that is read ahead has the modes of then."""
    torch.manual_seed(0)
    layers = nn.Sequential(*KINDS[kind]()).eval()
    plain, batches = copy.deepcopy(layers), [torch.randn(4, WIDTH) for _ in range(6)]
    pipe = GPipe(layers, [len(layers) - 1, 1], devices=["cpu"] * 2, chunks=2)
    with torch.no_grad(), without_warnings():
        for _ in range(2):
            pipe(batches[0])
        results = pipe.stream(batches, depth=2)
        with autocast(first):
            found = [next(results) for _ in range(num_first)]
        with autocast(not first):
            found += results
        for index, (batch, result) in enumerate(zip(batches, found, strict=True)):
            with autocast(first == (index < num_first + 1)):
                expected = torch.cat([plain(c) for c in batch.chunk(2)])
            assert torch.equal(result, expected), index


# Views of a parameter, which PyTorch lets require gradients under no_grad, too.
VIEWS: dict[str, Callable[[nn.Parameter, Tensor], Tensor]] = {
    "expand": lambda p, x: p.expand_as(x),
    "view": lambda p, x: p.view(1, -1) + 0 * x,
    "returned view": lambda p, x: p.view(1, -1).expand(len(x), -1),
    "index": lambda p, x: p[None].expand(len(x), WIDTH),
    "expand with input": lambda p, x: p[None, :].expand_as(x),
}


class View(nn.Module):
    def __init__(self, view: Callable[[nn.Parameter, Tensor], Tensor]) -> None:
        super().__init__()
        self.view, self.weight = view, nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.view(self.weight, x)


@pytest.mark.parametrize("backend", ["eager", "aten"])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.sampled(3)
def test_views_of_parameters_without_gradients(view: str, backend: str) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), View(VIEWS[view]), nn.Linear(WIDTH, WIDTH))
    plain, x = copy.deepcopy(layers), torch.randn(4, WIDTH)
    for balance in ([1, 1, 1], [2, 1], [3]):
        devices = ["cpu"] * len(balance)
        pipe = GPipe(layers, balance, devices=devices, chunks=2, backend=backend)
        with torch.no_grad(), without_warnings():
            expected = torch.cat([plain(c) for c in x.chunk(2)])
            for output in (pipe(x), *pipe.stream([x, x])):
                assert torch.equal(output, expected)
                assert not output.requires_grad
