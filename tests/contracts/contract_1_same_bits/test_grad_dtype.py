"""`grad_dtype`: 16-bit gradients are accumulated over micro-batches in float32, and rounded once."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gpipe_fast
from gpipe_fast import GPipe
from gpipe_fast.gpipe import CHECKPOINT_MODES
from tests.reference import SEED, gradient_like, restored, unequal
from tests.untraceable import FunctionLayer

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*micro-batches on", "ignore:stage .* runs in Python"),
]

WIDTH, CHUNKS, BATCH = 8, 6, 24
LOW_PRECISION_DTYPES = [torch.bfloat16, torch.float16]
Gradients = dict[str, Tensor | None]


class Sometimes(nn.Module):
    """Uses its weight for some micro-batches only, depending on the data; it runs in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight if x.flatten()[0] > 0 else x


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def tied() -> list[nn.Module]:
    """Two layers of one stage share a weight."""
    layers = [linear(), nn.Tanh(), linear(), nn.Tanh(), linear(), nn.Tanh()]
    layers[2].weight = layers[0].weight
    return layers


def used_repeatedly() -> nn.Module:
    """Uses a weight three times, the last time only one row."""
    return FunctionLayer(lambda f, x: (x @ f.weight).tanh() @ f.weight + f.weight[0], linear())


MODELS: dict[str, tuple[Callable[[], list[nn.Module]], list[int]]] = {
    "plain": (lambda: [linear(), nn.GELU(), nn.LayerNorm(WIDTH), linear()], [2, 2]),
    "tied": (tied, [4, 2]),
    "used repeatedly": (lambda: [used_repeatedly(), used_repeatedly()], [1, 1]),
    "sometimes": (lambda: [linear(), Sometimes(), nn.LayerNorm(WIDTH), linear()], [2, 2]),
    # Float32 parameters among lower-precision ones.
    "mixed": (lambda: [linear(), nn.Tanh(), Cast(torch.float32), linear().float()], [2, 2]),
}


def make_model(name: str, dtype: torch.dtype) -> tuple[nn.Sequential, list[int], Tensor]:
    torch.manual_seed(SEED)
    make, balance = MODELS[name]
    layers = [layer if name == "mixed" and i == 3 else layer.to(dtype) for i, layer in enumerate(make())]
    return nn.Sequential(*layers), balance, torch.randn(BATCH, WIDTH).to(dtype)


def float32_accumulated(model: nn.Sequential, x: Tensor, rounded: bool = True) -> Gradients:
    """Returns the plain loop's gradients, accumulated in float32; if `rounded`, in the parameters' dtypes."""
    named = dict(model.named_parameters())
    torch.manual_seed(SEED)
    with gpipe_fast.keyed_rng(model):
        parts = [model(part) for part in x.chunk(CHUNKS)]
    gradients = gradient_like(torch.cat(parts)).split([len(part) for part in parts])
    sums: dict[str, Tensor] = {}
    for part, gradient in reversed(list(zip(parts, gradients, strict=True))):
        found = torch.autograd.grad([part], list(named.values()), [gradient], allow_unused=True)
        for name, gradient_part in zip(named, found, strict=True):
            if gradient_part is not None:
                sums[name] = sums[name] + gradient_part.float() if name in sums else gradient_part.float()
    return {
        name: sums[name].to(p.dtype if rounded else torch.float32) if name in sums else None
        for name, p in named.items()
    }


def gradients_of(pipe: GPipe, x: Tensor) -> Gradients:
    with restored(pipe):
        torch.manual_seed(SEED)
        output = pipe(x)
        output.backward(gradient_like(output))
        return {n: None if p.grad is None else p.grad.clone() for n, p in pipe.named_parameters()}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("dtype", LOW_PRECISION_DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_a_loop_that_accumulates_in_float32(
    name: str, dtype: torch.dtype, checkpoint: str
) -> None:
    model, balance, x = make_model(name, dtype)
    expected = float32_accumulated(model, x)
    for cut, backend in ((balance, "auto"), ([len(model)], "auto"), (balance, "eager")):
        options = {"checkpoint": checkpoint, "backend": backend, "grad_dtype": torch.float32}
        pipe = GPipe(model, cut, chunks=CHUNKS, **options)
        for call in range(3):  # the second call runs segments that are lowered late
            assert unequal(gradients_of(pipe, x), expected) == [], f"call {call} of {cut}, {backend}"


def test_a_gradient_tied_across_stages_is_rounded_once() -> None:
    """The sums of both stages are also added in float32."""
    torch.manual_seed(SEED)
    layers = [linear(), nn.Tanh(), linear(), nn.Tanh()]
    untied, x = nn.Sequential(*layers).bfloat16(), torch.randn(BATCH, WIDTH).bfloat16()
    with torch.no_grad():
        layers[2].weight.copy_(layers[0].weight)
    exact = float32_accumulated(untied, x, rounded=False)
    first, second = exact["0.weight"], exact["2.weight"]
    layers[2].weight = layers[0].weight
    pipe = GPipe(nn.Sequential(*layers), [2, 2], chunks=CHUNKS, grad_dtype=torch.float32)
    assert first is not None
    assert second is not None
    ours = gradients_of(pipe, x)["0.weight"]
    assert ours is not None
    assert ours.dtype is torch.bfloat16
    assert torch.equal(ours, (first + second).bfloat16())


def test_a_second_backward_of_a_copy_adds_to_the_existing_gradients() -> None:
    model, balance, x = make_model("plain", torch.bfloat16)
    expected = float32_accumulated(model, x)
    pipe = copy.deepcopy(GPipe(model, balance, chunks=CHUNKS, grad_dtype=torch.float32))
    output = pipe(x)
    for _ in range(2):
        output.backward(gradient_like(output), retain_graph=True)
    twice = {name: None if g is None else g + g for name, g in expected.items()}
    assert unequal({name: p.grad for name, p in pipe.named_parameters()}, twice) == []


def test_sparse_gradients_of_layers_in_python_keep_the_parameters_dtype() -> None:
    torch.manual_seed(SEED)
    table = nn.Embedding(5, 4, sparse=True).bfloat16()
    pipe = GPipe(nn.Sequential(table), [1], chunks=2, backend="eager", grad_dtype=torch.float32)
    pipe(torch.tensor([[0, 1], [1, 4]])).sum().backward()
    gradient = table.weight.grad
    assert gradient is not None
    assert gradient.is_sparse
    assert gradient.dtype is torch.bfloat16
    assert gradient.to_dense().sum(1).tolist() == [4, 8, 0, 0, 4]
