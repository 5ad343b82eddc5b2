"""Losses that look alike: each step computes the loss that it was given, whatever the step before it did."""

from __future__ import annotations

import builtins
import functools
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast.container import runner_of

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*runs in Python", "ignore:.*stages idle"),
]

Loss = Callable[..., Tensor]
TEMPLATE = """
def loss(output):
    return (output * SCALE).sum()
"""


def template(scale: float) -> Loss:
    namespace: dict[str, Any] = {"SCALE": scale}
    exec(TEMPLATE, namespace)
    found: Loss = namespace["loss"]
    return found


CODE = template(1.0).__code__


def closure(scale: Any) -> Loss:
    return lambda output: (output * scale).sum()


def calls(loss: Loss) -> Loss:
    return lambda output: loss(output)


def default(scale: float) -> Loss:
    def loss(output: Tensor, factor: float = scale) -> Tensor:
        return (output * factor).sum()

    return loss


def keyword_default(scale: float) -> Loss:
    def loss(output: Tensor, *, factor: float = scale) -> Tensor:
        return (output * factor).sum()

    return loss


def attribute(scale: float) -> Loss:
    def loss(output: Tensor) -> Tensor:
        return (output * loss.scale).sum()  # type: ignore[attr-defined]

    loss.scale = scale  # type: ignore[attr-defined]
    return loss


def recursion(scale: float) -> Loss:
    def loss(output: Tensor, depth: int = 2) -> Tensor:
        return loss(output, depth - 1) if depth else (output * scale).sum()

    return loss


def mutual_recursion(scale: float) -> Loss:
    def even(output: Tensor, depth: int = 2) -> Tensor:
        return odd(output, depth - 1) if depth else (output * scale).sum()

    def odd(output: Tensor, depth: int) -> Tensor:
        return even(output, depth - 1)

    return even


def empty_cell(scale: float) -> Loss:
    def loss(output: Tensor) -> Tensor:
        return (output * scale).sum() if scale else later

    if not scale:
        later = torch.ones(())
    return loss


def wrapped(scale: float) -> Loss:
    own = closure(scale)

    @functools.wraps(own)
    def loss(*args: Any) -> Tensor:
        return loss.__wrapped__(*args)

    return loss


class Factor(float):
    """A number with an attribute."""

    own: float


def attribute_of_a_number(scale: float) -> Loss:
    factor = Factor(7.0)
    factor.own = scale
    return lambda output: (output * factor.own).sum()


class CallsPartial(functools.partial):  # type: ignore[type-arg]
    scale: float

    def __call__(self, output: Tensor) -> Tensor:
        found: Tensor = super().__call__(output) * self.scale
        return found


def partial_of_a_subclass(scale: float) -> Loss:
    found = CallsPartial(torch.sum)
    found.scale = scale
    return found


class Scaled:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def loss(self, output: Tensor) -> Tensor:
        return (output * self.scale).sum()

    __call__ = loss


class Subclass(nn.MSELoss):
    def forward(self, output: Tensor, target: Tensor | None = None) -> Tensor:
        return output.sum() * self.scale  # type: ignore[operator]


def subclass(scale: float) -> Loss:
    found = Subclass(reduction="sum")
    found.scale = torch.tensor(scale)  # type: ignore[assignment]
    return found


def scaled(output: Tensor, scale: float = 1.0) -> Tensor:
    return (output * scale).sum()


LOSSES: dict[str, Callable[[float], Loss]] = {
    "template": template,
    # Without built-in functions, no operator runs under a mode of PyTorch.
    "other globals": lambda scale: types.FunctionType(CODE, {"SCALE": scale, "__builtins__": builtins}),
    "closure": closure,
    "tuple in a closure": lambda scale: (lambda pair: lambda output: (output * pair[1]).sum())((0, scale)),
    "default": default,
    "keyword default": keyword_default,
    "attribute": attribute,
    "recursion": recursion,
    "mutual recursion": mutual_recursion,
    "empty cell": empty_cell,
    "wrapped": wrapped,
    "attribute of a number": attribute_of_a_number,
    "partial": lambda scale: functools.partial(scaled, scale=scale),
    "partial of a partial": lambda scale: functools.partial(
        functools.partial(scaled, scale=7.0), scale=scale
    ),
    "subclass of partial": partial_of_a_subclass,
    "method": lambda scale: Scaled(scale).loss,
    "object": Scaled,
    "module": subclass,
    **{
        f"calls {name}": functools.partial(lambda make, scale: calls(make(scale)), make)
        for name, make in (
            *(("template", template), ("attribute", attribute), ("recursion", recursion)),
            *(("wrapped", wrapped), ("method", lambda scale: Scaled(scale).loss)),
        )
    },
}
SCALES = (1.0, 2.0, 1.0)


def plain_step(model: nn.Module, loss: Loss, *args: Tensor) -> list[Tensor]:
    return _results(model, lambda x: loss(model(x), *args[1:]), args[0])


def _results(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss = run(x)
    if loss.requires_grad:
        loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def pipeline() -> tuple[nn.Sequential, GPipe, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    return model, GPipe(model, [1, 1], chunks=1), torch.randn(3, 4)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("are_kept", [False, True])
@pytest.mark.parametrize("kind", LOSSES)
def test_losses_that_look_alike_are_told_apart(kind: str, are_kept: bool) -> None:
    make = functools.cache(LOSSES[kind]) if are_kept else LOSSES[kind]
    model, pipe, x = pipeline()
    for scale in SCALES:
        loss = make(scale)
        expected = plain_step(model, loss, x)
        assert_equal(_results(model, functools.partial(pipe.step, loss_fn=loss, normalizer=1), x), expected)
    assert torch.equal(pipe.evaluate(x, loss_fn=loss, normalizer=1), expected[0])


def test_a_loss_that_is_made_anew_in_each_step_is_not_traced_anew() -> None:
    _, pipe, x = pipeline()
    for _ in range(3):
        pipe.step(x, loss_fn=mutual_recursion(2.0), normalizer=1)
    assert len(runner_of(pipe).with_losses) == 1


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_variable_of_a_loss_may_change_between_steps(is_kept: bool) -> None:
    model, pipe, x = pipeline()
    kept = []
    for scale in (*SCALES, 10.0, True):
        kept.append(lambda output: (output * scale).sum())  # noqa: B023 as users do
        loss = kept[0 if is_kept else -1]
        found = _results(model, functools.partial(pipe.step, loss_fn=loss, normalizer=1), x)
        assert_equal(found, plain_step(model, loss, x))


def halve_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output / 2


def double_target(module: nn.Module, args: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return args[0], 2 * args[1]


def halved(output: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return (output - target).square().sum() / 2


Change = Callable[[nn.MSELoss], Any]
# Each returns a function that undoes the change.
CHANGES: dict[str, Change] = {
    "hook": lambda loss: loss.register_forward_hook(halve_output).remove,
    "hook before": lambda loss: loss.register_forward_pre_hook(double_target).remove,
    "own forward": lambda loss: (
        setattr(loss, "forward", halved),
        functools.partial(delattr, loss, "forward"),
    )[1],
    "own method": lambda loss: (
        setattr(loss, "forward", types.MethodType(lambda self, *args: halved(*args), loss)),
        functools.partial(delattr, loss, "forward"),
    )[1],
    "forward of the class": lambda loss: _patch(nn.MSELoss, "forward", lambda self, *args: halved(*args)),
    "function": lambda loss: _patch(F, "mse_loss", halved),
}


def _patch(target: Any, name: str, value: Any) -> Callable[[], Any]:
    patch = mock.patch.object(target, name, value)
    patch.start()
    return patch.stop


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("kind", CHANGES)
def test_a_changed_loss_of_pytorch_computes_what_it_was_changed_to(kind: str, reduction: str) -> None:
    model, pipe, x = pipeline()
    loss, y = nn.MSELoss(reduction=reduction), torch.randn(3, 4)
    options: dict[str, Any] = {"normalizer": 1} if reduction == "sum" else {}

    def step(x: Tensor) -> Tensor:
        found: Tensor = pipe.step(x, target=y, loss_fn=loss, **options)
        return found

    def check() -> None:
        found, expected = _results(model, step, x), plain_step(model, loss, x, y)
        if options:
            assert_equal(found, expected)
        else:
            torch.testing.assert_close(found, expected)

    check()
    undo = CHANGES[kind](loss)
    try:
        check()
    finally:
        undo()
    check()
