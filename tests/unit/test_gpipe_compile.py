"""torch.compile around and within a pipeline: Dynamo compiles none of its code, and results are equal."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
import torch._dynamo.convert_frame
from torch import Tensor, nn

from gpipe_fast import GPipe
from tests.models import features, mlp
from tests.reference import collect, leaf, loop_step, pipeline_step, unequal
from tests.untraceable import FunctionLayer

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


def assert_opaque(frames: list[str]) -> None:
    assert [name for name in frames if "gpipe_fast" in name.rsplit("site-packages", 1)[-1]] == []


@pytest.mark.smoke
@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_pipeline_is_opaque_to_dynamo(in_place: bool, frames: list[str]) -> None:
    pipe, x = GPipe(mlp(), [2, 3], chunks=4, backend="aten"), features()
    expected = loop_step(mlp(), x, 4)
    forward = pipe if in_place else torch.compile(pipe, backend="eager")
    if in_place:
        pipe.compile(backend="eager")
    for _ in range(2):
        pipe.zero_grad()
        given = leaf(x)
        found = collect(pipe, given, forward(given))
        assert unequal(found, expected) == []
    assert_opaque(frames)
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


def test_steps_are_opaque_to_dynamo(frames: list[str]) -> None:
    options: dict[str, Any] = {"balance": [2, 3], "chunks": 4, "backend": "aten"}
    pipe, x = GPipe(mlp(), **options), features()
    model = GPipe.from_model(WithLoss(), (x,), devices=["cpu"] * 2, **options)
    for call in (
        lambda: pipe.step(x, loss_fn=torch.sum, normalizer=2) * 2,
        lambda: pipe.evaluate(x, loss_fn=torch.sum, normalizer=2) * 2,
        lambda: model.step(x) * 2,
    ):
        expected = call()
        frames.clear()  # those of captures of layers
        assert torch.equal(torch.compile(call, backend="eager")(), expected)
        assert_opaque(frames)
        assert len(frames) <= 2


@pytest.mark.smoke
def test_a_compiled_training_step_equals_an_uncompiled_one(frames: list[str]) -> None:
    """Only one of two outputs gets a gradient, so the backward has to make new programs."""
    model, x = nn.Sequential(*mlp(), FunctionLayer(lambda held, x: (x, 2 * x))), features()
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
    assert_opaque(frames)


@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_compiled_layers_equal_uncompiled_layers(backend: str) -> None:
    """One of them is compiled after the first call."""
    layers, x = mlp(), features()
    layers[2] = torch.compile(layers[2], backend="eager")
    pipe = GPipe(nn.Sequential(*layers), [2, 3], chunks=4, backend=backend)
    expected = loop_step(mlp(), x, 4)
    for _ in range(2):
        assert list(map(torch.equal, pipeline_step(pipe, x).values(), expected.values())) == [True] * 8
        layers[4].compile(backend="eager")


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
