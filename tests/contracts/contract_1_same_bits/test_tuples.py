"""Modules with tuples as inputs and outputs, and losses that use only some of the outputs."""

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


class PairToPair(nn.Module):
    """Maps a pair to a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, pair: Pair) -> Pair:
        x, y = pair
        return self.norm(self.a(x) + y), torch.tanh(self.b(y))


class TensorToPair(nn.Module):
    """Maps a tensor to two float tensors, with an integer tensor between them if `integers`."""

    def __init__(self, integers: bool = False) -> None:
        super().__init__()
        self.linear, self.integers = nn.Linear(6, 12), integers

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        a, b = self.linear(x).chunk(2, 1)
        return (a, b.argmax(1), b.tanh()) if self.integers else (a, b.tanh())


class PairToTensor(nn.Module):
    def forward(self, pair: Pair) -> Tensor:
        return pair[0] * 2 + pair[1]


class TupleOfOne(nn.Module):
    """Maps a tuple of one tensor to a tuple of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, single: tuple[Tensor]) -> tuple[Tensor]:
        (x,) = single
        return (self.linear(x),)


class UnequalBatchSizes(nn.Module):
    """Returns two rows per sample, and one row per sample."""

    def forward(self, x: Tensor) -> Pair:
        return x.repeat_interleave(2, 0) * 3, x.sum(1)


def features(batch: int = 8, seed: int = 1, requires_grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 6, generator=generator).requires_grad_(requires_grad)


def loop(model: nn.Sequential, input: Tensor | tuple[Tensor, ...], chunks: int) -> tuple[Tensor, ...]:
    """Runs the plain loop and returns its outputs as a tuple."""
    inputs = input if isinstance(input, tuple) else (input,)
    parts = list(zip(*(x.chunk(chunks) for x in inputs), strict=True))
    torch.manual_seed(SEED)
    with keyed_rng(model):
        outputs = [model(p if isinstance(input, tuple) else p[0]) for p in parts]
    columns = zip(*(o if isinstance(o, tuple) else (o,) for o in outputs), strict=True)
    return tuple(torch.cat(column) for column in columns)


def run_pipeline(pipe: GPipe, input: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    torch.manual_seed(SEED)
    output = pipe(input)
    return output if isinstance(output, tuple) else (output,)


def step(
    model: nn.Module,
    outputs: Callable[[], tuple[Tensor, ...]],
    inputs: Sequence[Tensor],
    used: Sequence[int] | None = None,
) -> list[Tensor | None]:
    """Returns outputs, gradients and buffers of one step whose loss uses the outputs at indices ``used``."""
    with restored(model):
        for x in inputs:
            x.grad = None
        found = outputs()
        differentiable = [o for o in found if o.requires_grad]
        used_outputs = differentiable if used is None else [differentiable[i] for i in used]
        loss = sum(((i + 1) * o.square()).sum() for i, o in enumerate(used_outputs))
        loss.backward()  # type: ignore[union-attr]
        gradients = [x.grad for x in inputs] + [p.grad for p in model.parameters()]
        copies = [None if g is None else g.clone() for g in gradients]
        return [*(o.detach() for o in found), *copies, *(b.clone() for b in model.buffers())]


def all_equal(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> bool:
    return len(a) == len(b) and all(
        x is y if x is None or y is None else torch.equal(x, y) for x, y in zip(a, b, strict=True)
    )


MODELS: dict[str, tuple[Callable[[], list[nn.Module]], list[int], int]] = {
    "pair in, pair out": (lambda: [PairToPair(), nn.Identity(), PairToPair()], [1, 2], 2),
    "pair in, tensor out": (lambda: [PairToPair(), PairToTensor(), nn.Linear(6, 3)], [1, 1, 1], 2),
    "tensor in, pair out": (lambda: [nn.Linear(6, 6), nn.Dropout(0.3), TensorToPair()], [1, 2], 1),
    "integers among the outputs": (lambda: [nn.Linear(6, 6), TensorToPair(integers=True)], [1, 1], 1),
    "tuples of one": (lambda: [TupleOfOne(), TupleOfOne()], [1, 1], -1),
    "outputs of different batch sizes": (lambda: [nn.Linear(6, 6), UnequalBatchSizes()], [1, 1], 1),
}


@pytest.mark.smoke
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_tuples_equals_the_plain_loop(name: str, checkpoint: str) -> None:
    make, balance, arity = MODELS[name]
    torch.manual_seed(0)
    model = nn.Sequential(*make())
    inputs = tuple(features(8, seed) for seed in range(abs(arity)))
    input = inputs[0] if arity == 1 else inputs
    pipe = GPipe(model, balance, chunks=3, checkpoint=checkpoint)
    assert isinstance(pipe(input), tuple) == isinstance(model(input), tuple)
    expected = step(model, lambda: loop(model, input, 3), inputs)
    assert all_equal(step(pipe, lambda: run_pipeline(pipe, input), inputs), expected)
    with torch.no_grad():
        assert all_equal(run_pipeline(pipe.eval(), input), loop(model, input, 3))


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("integers", [False, True])
def test_an_output_without_a_gradient_equals_the_plain_loop(checkpoint: str, integers: bool) -> None:
    """A forward expects the gradients of the previous step; any other combination must be handled, too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), TensorToPair(integers))
    pipe, x = GPipe(model, [2, 2], chunks=4, checkpoint=checkpoint), features()
    expected = {
        used: step(model, lambda: loop(model, x, 4), [x], used) for used in ((0,), (1,), (0, 1), (1, 0))
    }
    for used in ((0, 1), (0,), (0,), (1,), (0, 1), (1, 0), (0,)):
        assert all_equal(step(pipe, lambda: run_pipeline(pipe, x), [x], used), expected[used]), used


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Pair:
        return self.first(x), self.second(x)


def test_a_head_that_the_loss_does_not_use_has_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(6, 6), TwoHeads())
    pipe = GPipe(model, [1, 1], chunks=2, checkpoint="never")
    for _ in range(2):  # the missing gradient is first unexpected, then expected
        model.zero_grad()
        pipe(features())[0].sum().backward()
        assert model[1].first.weight.grad is not None
        assert model[1].second.weight.grad is None


def test_outputs_may_be_differentiated_separately() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 6), TwoHeads()), features()
    found = []
    for outputs in (GPipe(model, [1, 1], chunks=2)(x), loop(model, x, 2)):
        parameters = list(model[0].parameters())
        first = torch.autograd.grad(outputs[0].sum(), parameters, retain_graph=True)
        second = torch.autograd.grad(outputs[1].square().sum(), parameters)
        found.append([*first, *second])
    assert all(map(torch.equal, *found))


def test_a_backward_traced_later_uses_the_autocast_mode_of_its_forward() -> None:
    torch.manual_seed(0)
    model, x, found = nn.Sequential(nn.Linear(6, 6), TwoHeads()), features(), []
    for forward in (GPipe(model, [1, 1], chunks=2), lambda x: loop(model, x, 2)):
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            outputs = forward(x)
        found.append(torch.autograd.grad(outputs[0].float().square().sum(), [x, *model[0].parameters()]))
    assert all(map(torch.equal, *found))


def test_a_change_of_the_module_before_an_unexpected_backward_is_rejected() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), TwoHeads())
    outputs = GPipe(model, [1, 2], chunks=2)(features())
    model[1].p = 0.9
    with pytest.raises(RuntimeError, match="module was changed between forward and backward"):
        outputs[0].sum().backward()


def test_inputs_that_need_no_gradient_get_none() -> None:
    model = nn.Sequential(PairToPair())
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
def test_invalid_inputs_are_rejected(kind: type[Exception], message: str, input: object) -> None:
    with pytest.raises(kind, match=message):
        GPipe(nn.Sequential(PairToPair()), [1], chunks=2)(input)  # type: ignore[arg-type]


class ScalarOutput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


def test_a_0_dimensional_output_is_rejected() -> None:
    with pytest.raises(RuntimeError, match="output 0 of the last layer is 0-dimensional"):
        GPipe(nn.Sequential(nn.Linear(6, 6), ScalarOutput()), [1, 1], chunks=2)(features())


def test_a_pipeline_with_several_outputs_is_garbage_collected() -> None:
    """The plan refers through C++ to a callback that makes plans; the garbage collector cannot see that."""
    pipe = GPipe(nn.Sequential(nn.Linear(6, 6), TwoHeads()), [1, 1], chunks=2)
    pipe(features())[0].sum().backward()
    reference = weakref.ref(pipe)
    del pipe
    gc.collect()
    assert reference() is None
