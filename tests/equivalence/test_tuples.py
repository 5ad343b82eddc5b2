"""Modules that take and return tuples of tensors, and gradients that come to some of the outputs only."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe, keyed_rng
from gpipe_fast.gpipe import CHECKPOINT_MODES
from tests.reference import SEED, restored

pytestmark = pytest.mark.usefixtures("one_thread")

Pair = tuple[Tensor, Tensor]


class Mix(nn.Module):
    """A pair to a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, pair: Pair) -> Pair:
        x, y = pair
        return self.norm(self.a(x) + y), torch.tanh(self.b(y))


class Split(nn.Module):
    """A tensor to a pair, one of integers beside two of floats where asked."""

    def __init__(self, integers: bool = False) -> None:
        super().__init__()
        self.linear, self.integers = nn.Linear(6, 12), integers

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        a, b = self.linear(x).chunk(2, 1)
        return (a, b.argmax(1), b.tanh()) if self.integers else (a, b.tanh())


class Sum(nn.Module):
    def forward(self, pair: Pair) -> Tensor:
        return pair[0] * 2 + pair[1]


class Single(nn.Module):
    """Takes and returns tuples of one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, single: tuple[Tensor]) -> tuple[Tensor]:
        (x,) = single
        return (self.linear(x),)


class Rows(nn.Module):
    """Outputs whose first dimensions differ: two rows a sample, and one."""

    def forward(self, x: Tensor) -> Pair:
        return x.repeat_interleave(2, 0) * 3, x.sum(1)


def features(batch: int = 8, seed: int = 1, requires_grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 6, generator=generator).requires_grad_(requires_grad)


def loop(model: nn.Sequential, input: Tensor | tuple[Tensor, ...], chunks: int) -> tuple[Tensor, ...]:
    """The plain loop, always as a tuple."""
    inputs = input if isinstance(input, tuple) else (input,)
    parts = list(zip(*(x.chunk(chunks) for x in inputs), strict=True))
    torch.manual_seed(SEED)
    with keyed_rng(model):
        outputs = [model(p if isinstance(input, tuple) else p[0]) for p in parts]
    columns = zip(*(o if isinstance(o, tuple) else (o,) for o in outputs), strict=True)
    return tuple(torch.cat(column) for column in columns)


def ours(pipe: GPipe, input: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    torch.manual_seed(SEED)
    output = pipe(input)
    return output if isinstance(output, tuple) else (output,)


def step(
    model: nn.Module,
    outputs: Callable[[], tuple[Tensor, ...]],
    inputs: Sequence[Tensor],
    used: Sequence[int] | None = None,
) -> list[Tensor | None]:
    """Outputs, gradients and buffers of one step in which the loss reads the outputs in ``used``."""
    with restored(model):
        for x in inputs:
            x.grad = None
        found = outputs()
        differentiable = [o for o in found if o.requires_grad]
        chosen = differentiable if used is None else [differentiable[i] for i in used]
        loss = sum(((i + 1) * o.square()).sum() for i, o in enumerate(chosen))
        loss.backward()  # type: ignore[union-attr]
        gradients = [x.grad for x in inputs] + [p.grad for p in model.parameters()]
        copies = [None if g is None else g.clone() for g in gradients]
        return [*(o.detach() for o in found), *copies, *(b.clone() for b in model.buffers())]


def same(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> bool:
    return len(a) == len(b) and all(
        x is y if x is None or y is None else torch.equal(x, y) for x, y in zip(a, b, strict=True)
    )


MODELS: dict[str, tuple[Callable[[], list[nn.Module]], list[int], int]] = {
    "pair in, pair out": (lambda: [Mix(), nn.Identity(), Mix()], [1, 2], 2),
    "pair in, tensor out": (lambda: [Mix(), Sum(), nn.Linear(6, 3)], [1, 1, 1], 2),
    "tensor in, pair out": (lambda: [nn.Linear(6, 6), nn.Dropout(0.3), Split()], [1, 2], 1),
    "integers among the outputs": (lambda: [nn.Linear(6, 6), Split(integers=True)], [1, 1], 1),
    "tuples of one": (lambda: [Single(), Single()], [1, 1], -1),
    "first dimensions that differ": (lambda: [nn.Linear(6, 6), Rows()], [1, 1], 1),
}


@pytest.mark.smoke
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("name", MODELS)
def test_equals_the_plain_loop(name: str, checkpoint: str) -> None:
    make, balance, arity = MODELS[name]
    torch.manual_seed(0)
    model = nn.Sequential(*make())
    inputs = tuple(features(8, seed) for seed in range(abs(arity)))
    input = inputs[0] if arity == 1 else inputs
    pipe = GPipe(model, balance, chunks=3, checkpoint=checkpoint)
    assert isinstance(pipe(input), tuple) == isinstance(model(input), tuple)
    expected = step(model, lambda: loop(model, input, 3), inputs)
    assert same(step(pipe, lambda: ours(pipe, input), inputs), expected)
    with torch.no_grad():
        assert same(ours(pipe.eval(), input), loop(model, input, 3))


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("integers", [False, True])
def test_an_output_without_a_gradient_is_as_in_eager(checkpoint: str, integers: bool) -> None:
    """In every order of uses: a forward expects what came last, and is right when something else comes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), Split(integers))
    pipe, x = GPipe(model, [2, 2], chunks=4, checkpoint=checkpoint), features()
    expected = {
        used: step(model, lambda: loop(model, x, 4), [x], used) for used in ((0,), (1,), (0, 1), (1, 0))
    }
    for used in ((0, 1), (0,), (0,), (1,), (0, 1), (1, 0), (0,)):
        assert same(step(pipe, lambda: ours(pipe, x), [x], used), expected[used]), used


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Pair:
        return self.first(x), self.second(x)


def test_a_head_that_no_loss_reads_has_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(6, 6), TwoHeads())
    pipe = GPipe(model, [1, 1], chunks=2, checkpoint="never")
    for _ in range(2):  # when it comes as a surprise, and when it is expected
        model.zero_grad()
        pipe(features())[0].sum().backward()
        assert model[1].first.weight.grad is not None
        assert model[1].second.weight.grad is None


def test_outputs_may_be_differentiated_one_after_the_other() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 6), TwoHeads()), features()
    found = []
    for outputs in (GPipe(model, [1, 1], chunks=2)(x), loop(model, x, 2)):
        parameters = list(model[0].parameters())
        first = torch.autograd.grad(outputs[0].sum(), parameters, retain_graph=True)
        second = torch.autograd.grad(outputs[1].square().sum(), parameters)
        found.append([*first, *second])
    assert all(map(torch.equal, *found))


def test_autocast_of_the_forward_holds_for_a_backward_made_later() -> None:
    torch.manual_seed(0)
    model, x, found = nn.Sequential(nn.Linear(6, 6), TwoHeads()), features(), []
    for forward in (GPipe(model, [1, 1], chunks=2), lambda x: loop(model, x, 2)):
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            outputs = forward(x)
        found.append(torch.autograd.grad(outputs[0].float().square().sum(), [x, *model[0].parameters()]))
    assert all(map(torch.equal, *found))


def test_a_change_before_a_backward_that_comes_as_a_surprise_is_noticed() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), TwoHeads())
    outputs = GPipe(model, [1, 2], chunks=2)(features())
    model[1].p = 0.9
    with pytest.raises(RuntimeError, match="module was changed between forward and backward"):
        outputs[0].sum().backward()


def test_inputs_that_need_no_gradient_get_none() -> None:
    model = nn.Sequential(Mix())
    x, y = features(), features(seed=2, requires_grad=False)
    GPipe(model, [1], chunks=2)((x, y))[0].sum().backward()
    assert x.grad is not None
    assert y.grad is None


ERRORS: dict[str, tuple[type[Exception], str, object]] = {
    "batch sizes": (
        ValueError,
        r"same batch size, their first dimension; got \[8, 6\], \[3, 6\]",
        (features(8), features(3)),
    ),
    "not a tensor": (TypeError, "expected Tensor, but got set", (features(), {3})),
    "nothing": (TypeError, "expected Tensor, but got tuple", ()),
    "no tensor": (TypeError, "expected Tensor, but got list", [3, None]),
}


@pytest.mark.parametrize(("kind", "message", "input"), ERRORS.values(), ids=ERRORS.keys())
def test_errors(kind: type[Exception], message: str, input: object) -> None:
    with pytest.raises(kind, match=message):
        GPipe(nn.Sequential(Mix()), [1], chunks=2)(input)  # type: ignore[arg-type]


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


def test_an_output_that_cannot_be_joined_is_refused() -> None:
    with pytest.raises(RuntimeError, match="output 0 of the last layer is 0-dimensional"):
        GPipe(nn.Sequential(nn.Linear(6, 6), Mean()), [1, 1], chunks=2)(features())


def test_a_module_with_several_outputs_is_collected() -> None:
    """Its plan refers to what makes another plan, through C++, where the collector does not look."""
    pipe = GPipe(nn.Sequential(nn.Linear(6, 6), TwoHeads()), [1, 1], chunks=2)
    pipe(features())[0].sum().backward()
    gone = weakref.ref(pipe)
    del pipe
    gc.collect()
    assert gone() is None
