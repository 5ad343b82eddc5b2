"""What a model returns of all samples is the sum of shares of micro-batches, for any split, or is refused."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe_fast
from gpipe_fast import GPipe
from gpipe_fast.from_model.dataflow import symbol_of
from gpipe_fast.from_model.shares import ModelShares, small_lengths, with_shares
from tests.unit.from_model.recording import Calls, record_of

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:.*stages idle")]

X = torch.arange(30).view(10, 3) % 7
NUMBERS = torch.linspace(-2, 2, 30, dtype=torch.float64).view(10, 3).sin()
CLASSES = torch.tensor([0, 4, -100, 2, 1, 3]).repeat(5).view(10, 3)
CLASSES[:3] = -100
MASK = torch.arange(30).view(10, 3) % 4 != 1
WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 0.25, 1.5], dtype=torch.float64)

Function = Callable[["Net", Tensor, Tensor, Tensor], Any]


class Net(nn.Module):
    """Two blocks and a head, and what it returns as a function of logits, classes and a mask."""

    def __init__(self, function: Function, **modules: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 5)
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.register_buffer("weights", WEIGHTS.clone())
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)
        self.double()

    def forward(self, x: Tensor, classes: Tensor, mask: Tensor) -> Any:
        x = self.embedding(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.function(self, self.head(x), classes, mask)


def pipelined(model: nn.Module, chunks: int = 3, **options: Any) -> Any:
    options = {"blocks": "blocks", "balance": [1, 1]} | options
    return GPipe.from_model(model, (X, CLASSES, MASK), devices=["cpu"] * 2, chunks=chunks, **options)


def check(function: Function, *numbers: int, **modules: nn.Module) -> None:
    """Compares a pipeline with the whole mini-batch, and bit for bit with the plain loop."""
    model = Net(function, **modules)
    plain = copy.deepcopy(model)
    expected = plain(X, CLASSES, MASK)
    gradients = torch.autograd.grad(expected, list(plain.parameters()), allow_unused=True)
    pipe = pipelined(model)
    for chunks in numbers or (1, 3, 4, 7):
        pipe.chunks = chunks
        pipe.zero_grad()
        found = pipe(X, CLASSES, MASK)
        torch.testing.assert_close(found, expected)
        found.backward()
        for parameter, gradient in zip(pipe.parameters(), gradients, strict=True):
            if gradient is not None:
                torch.testing.assert_close(parameter.grad, gradient)
        assert gpipe_fast.verify(pipe, X, CLASSES, MASK, loss_fn=lambda loss: loss)
    torch.testing.assert_close(pipe.step(X, CLASSES, MASK), expected.detach())


def entropy(y: Tensor, c: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(y.flatten(0, 1), c.flatten(), **options)


# Terms of losses, from which sums are drawn.
TERMS: dict[str, Function] = {
    "elements": lambda m, y, c, k: y.square().mean(),
    "targets": lambda m, y, c, k: entropy(y, c),
    "first targets": lambda m, y, c, k: F.cross_entropy(y[:, 0], c[:, 0], ignore_index=-100),
    "shifted targets": lambda m, y, c, k: entropy(y[:, :-1], c[:, 1:]),
    "weights of classes": lambda m, y, c, k: entropy(y, c, weight=m.weights),
    "smoothed": lambda m, y, c, k: entropy(y, c, label_smoothing=0.1),
    "masked": lambda m, y, c, k: (y.abs().sum(-1) * k).sum() / k.sum().clamp(min=1),
    "of larger classes": lambda m, y, c, k: (y.sum(-1) * (c > 2)).sum() / (c > 2).sum(),
    "masked by the mean": lambda m, y, c, k: (y.mean(-1) * k).mean() / k.double().mean(),
    "a sum": lambda m, y, c, k: y.sigmoid().sum(),
    "by samples": lambda m, y, c, k: y.square().sum() / len(y),
    "a module": lambda m, y, c, k: nn.MSELoss()(y, y.detach() + 1),
    "a parameter": lambda m, y, c, k: torch.exp(-m.scale) * y.abs().mean() + m.scale,
    "a constant": lambda m, y, c, k: y.new_tensor(0.5) + y.mean(),
}


def sums(count: int) -> Sequence[tuple[str, ...]]:
    """Returns sums of terms: each term once, then drawn ones."""
    generator = random.Random(0)
    names = list(TERMS)
    generator.shuffle(names)
    drawn = [generator.sample(names, generator.choice((2, 3))) for _ in range(count)]
    return [*(tuple(names[i : i + 2]) for i in range(0, len(names), 2)), *map(tuple, drawn)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("names", sums(5), ids=" and ".join)
def test_sums_of_means_are_those_of_the_whole_mini_batch(names: tuple[str, ...]) -> None:
    def loss(m: Net, y: Tensor, c: Tensor, k: Tensor) -> Tensor:
        return sum((i + 1) / 2 * TERMS[name](m, y, c, k) for i, name in enumerate(names))  # type: ignore[return-value]

    check(loss)


def test_a_count_of_one_class_may_divide() -> None:
    check(lambda m, y, c, k: (y.sum(-1) * (c == -100)).sum() / (c == -100).sum())


class Focal(nn.Module):
    """A loss with a parameter of its own, which returns a value of all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.power = nn.Parameter(torch.tensor(2.0))
        self.inner = nn.NLLLoss(weight=torch.ones(5))

    def forward(self, logits: Tensor, classes: Tensor) -> Tensor:
        log_p = logits.flatten(0, 1).log_softmax(-1)
        return self.inner((1 - log_p.exp()).pow(self.power) * log_p, classes.flatten())  # type: ignore[no-any-return]


def three(model: Net, y: Tensor, c: Tensor, k: Tensor) -> dict[str, Tensor]:
    """Three losses with weights of classes and masks, their sum, and numbers that are none."""
    losses = {
        "classes": entropy(y, c, weight=model.weights),
        "first": F.cross_entropy(y[:, 0], c[:, 0].clamp(min=0)),
        "distance": (F.mse_loss(y[..., 0], y.new_zeros(y.shape[:2]), reduction="none") * k).sum() / k.sum(),
    }
    total = losses["classes"] + 0.5 * losses["first"] + torch.exp(-model.scale) * losses["distance"]
    right = (y.argmax(-1) == c).sum()
    return losses | {"total": total, "targets": (c != -100).sum(), "right": right, "columns": y.mean((0, 1))}


@pytest.mark.parametrize("chunks", [1, 3, 4, 7])
def test_several_losses_of_one_model(chunks: int) -> None:
    model = Net(three)
    expected = copy.deepcopy(model)(X, CLASSES, MASK)
    pipe = pipelined(model, chunks)
    found = pipe(X, CLASSES, MASK)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=name)
        assert found[name].dtype == value.dtype
    assert gpipe_fast.verify(pipe, X, CLASSES, MASK, loss_fn=lambda losses: losses["total"])


def test_modules_of_losses_are_opened() -> None:
    check(
        lambda m, y, c, k: m.loss(y, c) + m.bce(y[..., 0], k.double()),
        loss=Focal(),
        bce=nn.BCEWithLogitsLoss(),
    )


def test_what_is_drawn_between_modules_is_drawn_once() -> None:
    def denoising(m: Net, y: Tensor, c: Tensor, k: Tensor) -> Tensor:
        noise = torch.randn_like(y)
        return F.mse_loss(m.head2(y + noise), noise)

    pipe = pipelined(Net(denoising, head2=nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.2))).train(), 4)
    assert gpipe_fast.verify(pipe, X, CLASSES, MASK, loss_fn=lambda loss: loss)


def changed_before(m: Net, y: Tensor, c: Tensor, k: Tensor) -> Tensor:
    y /= 2
    y += 1
    y.clamp_(-2, 2)
    k = k & (c > 0)
    k |= c == 3
    c = c.clone()
    c[c == 4] = -100
    return entropy(y, c) + y.square().mean() + (y.mean(-1) * k).sum() / k.sum()


def changed_after(m: Net, y: Tensor, c: Tensor, k: Tensor) -> Tensor:
    loss = y.mean()
    y.mul_(2)
    return loss + y.sum()


@pytest.mark.parametrize("function", [changed_before, changed_after])
def test_what_a_model_changes_in_place_counts_as_it_was(function: Function) -> None:
    check(function, 3)


def transposed(m: Net, y: Tensor, c: Tensor, k: Tensor) -> Tensor:
    first, second = y.mT.mT.split([2, 1], dim=1)
    best = second.topk(2).values
    return first[..., [0, 2]].sum() / y.numel() + best.mean() + torch.zeros(len(y), device=y.device).sum()


def under_other_modes(m: Net, y: Tensor, c: Tensor, k: Tensor) -> Tensor:
    with torch.no_grad():
        weights = y.softmax(-1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = y.float() @ y.float().mT
    return (weights * y).sum(-1).mean() + found.double().mean()


@pytest.mark.parametrize("function", [transposed, under_other_modes])
def test_calls_keep_their_arguments_and_modes(function: Function) -> None:
    check(function, 4)


class Rows(nn.Module):
    """A block that returns a number of all samples beside them."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x.square().mean()


REFUSED: dict[str, tuple[Function, str]] = {
    "a root": (lambda m, y, c, k: y.square().mean().sqrt(), "sqrt at .*test_shares.py:"),
    "a contrast": (
        lambda m, y, c, k: F.cross_entropy(y[:, 0] @ y[:, 1].T, torch.arange(len(y))),
        "matmul at",
    ),
    "of a block": (lambda m, y, c, k: m.rows(y)[1], "Rows at .*test_shares.py:.*all samples"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_combines_samples_is_refused_by_its_line_or_averaged(name: str) -> None:
    function, message = REFUSED[name]
    model = Net(function, rows=Rows())
    blocks = ["blocks.0", "blocks.1", *(["rows"] if "rows" in function.__code__.co_names else [])]
    options: dict[str, Any] = {"blocks": blocks, "balance": [1, len(blocks) - 1]}
    inputs = X, CLASSES, MASK
    with pytest.raises(RuntimeError, match=f"does not follow.*{message}.*loss='per-microbatch'"):
        pipelined(model, **options)
    plain = copy.deepcopy(model)
    pipe = pipelined(model, loss="per-microbatch", **options)
    parts = zip(*(x.chunk(3) for x in inputs), strict=True)
    expected = sum(len(part[0]) * plain(*part) for part in parts) / 10
    torch.testing.assert_close(pipe(*inputs), expected)
    assert gpipe_fast.verify(pipe, *inputs, loss_fn=lambda loss: loss)


LINEAR = nn.Linear(3, 3)


def shares_of(function: Callable[[Tensor], Any]) -> ModelShares:
    model = Calls(lambda x: function(LINEAR(x)), [LINEAR])
    return with_shares(record_of(model, NUMBERS.float(), split=[0]), [0], (), averages=False)


def test_a_loss_without_finite_numbers_is_refused_alone() -> None:
    shares = shares_of(lambda y: ((y / 0).sum(), y.sum()))
    first, second = shares.flow.result.refs()
    assert "no finite number" in shares.refused[first]
    assert shares.kinds == {second: "share"}


def test_an_order_of_samples_is_known() -> None:
    shares = shares_of(lambda y: (y.flatten(), y.T.flatten(), y.repeat(2, 1), y.repeat_interleave(2, 0)))
    first, *middle, last = shares.flow.result.refs()
    assert shares.kinds == {first: "in order", last: "in order"}
    assert shares.refused.keys() == {*middle}


def test_a_share_without_measures_needs_no_input() -> None:
    shares = shares_of(lambda y: (y.sum(), torch.ones(3).sum()))
    share, alike = shares.flow.result.refs()
    assert shares.kinds == {share: "share"}
    assert alike not in shares.refused
    assert shares.measures is None
    assert shares.flow.num_inputs == 1
    assert shares_of(lambda y: y.mean()).flow.num_inputs == 2


def test_lengths_are_small_where_conditions_allow() -> None:
    assert small_lengths([symbol_of(1) >= 3], [512, 300]) == [5, 7]
    assert small_lengths([symbol_of(1) > 100], [512, 300]) == [512, 300]
    assert small_lengths([], [1, 4]) == [1, 4]


def test_large_sizes_cost_nothing_and_stay() -> None:
    head = nn.Linear(3, 128_000, device="meta")

    def loss(y: Tensor) -> Tensor:
        images = F.interpolate((y[:, None, :, None] * 2).expand(-1, 150, 3, 128), (512, 512))
        logits = (y @ head.weight.mT).view(-1, 128_000)
        return images.mean() + F.cross_entropy(logits, torch.zeros(len(y), dtype=torch.long))

    model = Calls(lambda x: loss(LINEAR(x)), [LINEAR, head])
    shares = with_shares(record_of(model, NUMBERS.float(), split=[0]), [0], (), averages=False)
    assert list(shares.kinds.values()) == ["share"]
    leaves = [leaf for call in shares.flow.calls for leaf in call.arguments.leaves]
    assert {512, 128_000} <= {leaf for leaf in leaves if type(leaf) is int}
    sizes = {size for value in shares.flow.values for size in value.shape}
    assert all(type(size) is int or size.sizes() == [0] for size in sizes)
