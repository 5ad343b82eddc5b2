"""The autograd node of a mini-batch: the gradients that it returns and the errors that it raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from tests.models import features, mlp
from tests.reference import leaf, plain_loop, restored

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("changed", ["parameter", "input"])
def test_an_in_place_change_before_the_backward_raises(changed: str) -> None:
    pipe, x = GPipe(mlp(), [2, 3], chunks=2), features()
    loss = pipe(x).sum()
    with torch.no_grad():
        (x if changed == "input" else pipe[2].bias).add_(1)
    name = "input 0" if changed == "input" else r"parameter 'bias' of layer 2 \(Linear\)"
    message = rf"modified by an inplace operation: {name} \[torch\.FloatTensor \["
    with pytest.raises(RuntimeError, match=message):
        loss.backward()
    assert all(p.grad is None for p in pipe.parameters())


def test_the_backward_cannot_be_differentiated() -> None:
    """Without the error, a gradient penalty would silently have no effect."""
    pipe, x = GPipe(mlp(), [2, 3], chunks=2), leaf(features())
    loss = pipe(x).sum()
    with pytest.raises(RuntimeError, match=r"cannot be differentiated .*nn\.Sequential\(\*model\)"):
        torch.autograd.grad(loss, x, create_graph=True)


class RootOfNothing(nn.Module):
    """Has an infinite gradient, which the layer before multiplies by 0."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 0).sqrt()


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected")
@pytest.mark.parametrize("is_step", [False, True])
def test_detect_anomaly_says_how_to_find_the_layer(is_step: bool) -> None:
    """And the plain layers then name the operator."""
    layers = nn.Sequential(nn.Linear(6, 8), RootOfNothing(), nn.Linear(8, 4))
    pipe, x = GPipe(layers, [2, 1], chunks=2), features()

    def run() -> None:
        if is_step:
            pipe.step(x, target=torch.zeros(8, 4), loss_fn=nn.functional.mse_loss)
        else:
            pipe(x).sum().backward()

    with torch.autograd.detect_anomaly():
        with pytest.raises(RuntimeError, match=r"parameter .* has NaN.*nn\.Sequential\(\*model\)"):
            run()
        with pytest.raises(RuntimeError, match="'MulBackward0' returned nan"):
            nn.Sequential(*pipe)(x).sum().backward()
    run()  # as PyTorch, without detect_anomaly
    assert pipe[0].weight.grad.isnan().all()


@pytest.mark.parametrize("changed", ["parameter", "input"])
def test_the_backward_ignores_data_assigned_after_the_forward(changed: str) -> None:
    """Eager autograd has saved the old storage; a recompute must not read the new one, either."""
    model = mlp()

    def step(forward: Callable[[Tensor], Tensor]) -> list[Tensor]:
        with restored(model):
            x = leaf(features())
            data = [t.data for t in (x, model[0].weight)]
            loss = forward(x).square().sum()
            tensor = x if changed == "input" else model[0].weight
            tensor.data = torch.full_like(tensor, 3.0)
            found = list(torch.autograd.grad(loss, [x, *model.parameters()]))
            x.data, model[0].weight.data = data
            return found

    pipe = GPipe(model, [2, 3], chunks=4, checkpoint="always")
    assert all(map(torch.equal, step(pipe), step(lambda x: plain_loop(model, x, 4))))


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


def test_an_undefined_output_gradient_gives_parameters_no_gradient() -> None:
    for forward in (GPipe(mlp(), [2, 3], chunks=4), mlp()):
        x = leaf(features())
        (NoGradient.apply(forward(x)).sum() + x.sum()).backward()
        assert x.grad is not None
        assert torch.equal(x.grad, torch.ones_like(x))
        assert all(p.grad is None for p in forward.parameters())


def test_outputs_require_grad_only_if_inputs_or_parameters_do() -> None:
    model = mlp().requires_grad_(False)
    pipe = GPipe(model, [2, 3], chunks=4)
    assert not pipe(features()).requires_grad
    assert pipe(leaf(features())).grad_fn.name() == "GPipeBackward"
    model[4].requires_grad_(True)
    with torch.no_grad():
        assert not pipe(features()).requires_grad
    x = leaf(features())
    pipe(x).sum().backward()
    assert x.grad is not None
    assert [p.grad is None for p in model.parameters()] == [True] * 4 + [False] * 2


def test_saved_tensor_hooks_are_not_called_for_a_pipeline() -> None:
    pipe, packed = GPipe(mlp(), [2, 3], chunks=4), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        output = pipe(features())
    assert packed == []
    output.sum().backward()
