"""torch.compile around and within a pipeline: Dynamo compiles none of its code, and results are equal."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
import torch._dynamo.convert_frame
from torch import Tensor, nn

from gpipe_fast import GPipe
from tests.models import features, mlp
from tests.reference import loop_step, pipeline_step, unequal

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def frames() -> Iterator[list[str]]:
    """Records the source files of all frames that Dynamo compiles."""
    found: list[str] = []
    compile_frame = torch._dynamo.convert_frame._compile

    def recording_compile(code: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(code.co_filename)
        return compile_frame(code, *args, **kwargs)

    torch._dynamo.reset()
    with mock.patch.object(torch._dynamo.convert_frame, "_compile", recording_compile):
        yield found
    torch._dynamo.reset()


def own_frames(frames: list[str]) -> list[str]:
    return [name for name in frames if "gpipe_fast" in name.rsplit("site-packages", 1)[-1]]


def compiled(pipe: GPipe) -> Callable[[Tensor], Tensor]:
    return torch.compile(pipe, backend="eager")


def compiled_in_place(pipe: GPipe) -> Callable[[Tensor], Tensor]:
    pipe.compile(backend="eager")
    return pipe


@pytest.mark.smoke
@pytest.mark.parametrize("compile_it", [compiled, compiled_in_place])
def test_a_compiled_pipeline_is_opaque_to_dynamo(
    compile_it: Callable[[GPipe], Callable[[Tensor], Tensor]], frames: list[str]
) -> None:
    pipe, x = GPipe(mlp(), [2, 3], chunks=4, backend="aten"), features()
    expected = pipeline_step(GPipe(mlp(), [2, 3], chunks=4), x)
    forward = compile_it(pipe)
    for _ in range(2):
        pipe.zero_grad()
        leaf = x.clone().requires_grad_()
        y = forward(leaf)
        y.backward(torch.ones_like(y))
        assert torch.equal(y, expected["output"])
    assert own_frames(frames) == []
    assert len(frames) <= 2


class WithLoss(nn.Module):
    """Returns the square of what its layers return."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def whole_step(x: Tensor) -> Callable[[], Tensor]:
    pipe = GPipe(mlp(), [2, 3], chunks=4, backend="aten")
    return lambda: pipe.step(x, loss_fn=torch.sum, normalizer=2) * 2


def evaluation(x: Tensor) -> Callable[[], Tensor]:
    pipe = GPipe(mlp(), [2, 3], chunks=4, backend="aten")
    return lambda: pipe.evaluate(x, loss_fn=torch.sum, normalizer=2) * 2


def step_of_a_model(x: Tensor) -> Callable[[], Tensor]:
    model = GPipe.from_model(WithLoss(), (x,), devices=["cpu"] * 2, balance=[2, 3], chunks=4, backend="aten")
    return lambda: model.step(x) * 2


@pytest.mark.parametrize("make", [whole_step, evaluation, step_of_a_model])
def test_steps_are_opaque_to_dynamo(
    make: Callable[[Tensor], Callable[[], Tensor]], frames: list[str]
) -> None:
    call = make(features())
    expected = call()
    frames.clear()  # those of captures of layers
    assert torch.equal(torch.compile(call, backend="eager")(), expected)
    assert own_frames(frames) == []
    assert len(frames) <= 2


class InputAndDouble(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, 2 * x


@pytest.mark.smoke
def test_a_compiled_training_step_equals_an_uncompiled_one(frames: list[str]) -> None:
    """Only one of two outputs gets a gradient, so the backward has to make new programs."""
    model, x = nn.Sequential(*mlp(), InputAndDouble()), features()
    pipe = GPipe(model, [2, 4], chunks=4, backend="aten")

    def step(x: Tensor) -> Tensor:
        loss = pipe(x)[1].square().mean()
        loss.backward()
        return loss

    gradients = []
    for call in (torch.compile(step, backend="eager"), step):
        pipe.zero_grad()
        gradients.append(
            [call(x).detach(), *(p.grad.clone() for p in pipe.parameters() if p.grad is not None)]
        )
    assert all(map(torch.equal, *gradients))
    assert frames
    assert own_frames(frames) == []


@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_compiled_layers_equal_uncompiled_layers(backend: str) -> None:
    layers, x = list(mlp()), features()
    layers[2] = torch.compile(layers[2], backend="eager")
    layers[4].compile(backend="eager")
    pipe = GPipe(nn.Sequential(*layers), [2, 3], chunks=4, backend=backend)
    expected = loop_step(mlp(), x, 4)
    for _ in range(2):
        assert list(map(torch.equal, pipeline_step(pipe, x).values(), expected.values())) == [True] * 8


def test_a_layer_compiled_after_the_first_call_stays_native() -> None:
    pipe, x = GPipe(mlp(), [2, 3], chunks=4, backend="aten"), features()
    expected = pipeline_step(pipe, x)
    pipe[2].compile(backend="eager")
    assert unequal(pipeline_step(pipe, x), expected) == []


def test_copies_of_a_compiled_pipeline_run_their_own_layers() -> None:
    """Like copies of other modules, they drop the compiled call."""
    pipe, x = GPipe(mlp(), [2, 3], chunks=4), features()
    pipe.compile(backend="eager")
    for other in (copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        other(x).sum().backward()
        assert other[0].weight.grad is not None
    assert pipe[0].weight.grad is None


def test_fullgraph_compilation_is_refused() -> None:
    pipe = GPipe(mlp(), [2, 3], chunks=4)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="a GPipe runs its own"):
        torch.compile(pipe, backend="eager", fullgraph=True)(features())
