"""Layers that run in Python, beside lowered ones and instead of them: each against the plain loop."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from gpipe_fast import GPipe, verify
from gpipe_fast.gpipe import CHECKPOINT_MODES
from gpipe_fast.runtime.eager import EagerLayers
from gpipe_fast.runtime.segments import Search
from tests.inside import compiler_of
from tests.reference import (
    loop_step,
    pipeline,
    pipeline_step,
    plain_loop,
    restored,
    unequal,
)
from tests.untraceable import (
    LENGTH,
    UNTRACEABLE,
    WIDTH,
    Counting,
    M,
    Of,
    Recurrent,
    branch,
    chains,
    dense,
    features,
    in_place,
    model,
    quiet,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.sampled(30)
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.parametrize("kind", UNTRACEABLE)
def test_equals_the_plain_loop(kind: str, backend: str, checkpoint: str) -> None:
    torch.manual_seed(3)
    layers = model(UNTRACEABLE[kind]())
    # TorchScript looks on in its first runs, and then computes otherwise.
    for _ in range(3 if kind == "TorchScript" else 1):
        expected = dense(loop_step(layers, features(), M))
    for balance in ([7], [2, 5], [3, 2, 2]):
        pipe = GPipe(layers, balance, chunks=M, checkpoint=checkpoint, backend=backend)
        with quiet():
            steps = [dense(pipeline_step(pipe, features())) for _ in range(3)]
        for number, ours in enumerate(steps):
            assert unequal(ours, expected) == [], f"step {number}, balance {balance}"


@pytest.mark.smoke
def test_the_stages_around_one_in_python_are_lowered() -> None:
    pipe = GPipe(model(Recurrent(nn.LSTM), Of(branch)), [2, 5, 4], chunks=M)
    with quiet():
        for _ in range(4):
            pipeline_step(pipe, features())
    assert chains(pipe) == [
        [(0, 2, True)],
        [(0, 1, False), (1, 4, True), (4, 5, False)],
        [(0, 4, True)],
    ]
    # From then on Python is entered for the layers in Python alone: nothing is searched.
    entered: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            entered[name] += 1
            return function(*args)

        return call

    with (
        mock.patch.object(Search, "find", counted("find", Search.find)),
        mock.patch.object(EagerLayers, "forward", counted("forward", EagerLayers.forward)),
        mock.patch.object(EagerLayers, "backward", counted("backward", EagerLayers.backward)),
    ):
        traces = compiler_of(pipe).num_traces
        pipeline_step(pipe, features())
    assert compiler_of(pipe).num_traces == traces
    assert entered == {"forward": 2 * M, "backward": 2 * M}


def test_one_layer_does_not_make_its_stage_run_in_python() -> None:
    pipe = GPipe(model(Of(branch)), [7], chunks=M)
    with quiet():
        for _ in range(3):
            pipeline_step(pipe, features())
    assert chains(pipe) == [[(0, 2, True), (2, 3, False), (3, 7, True)]]


def test_layers_that_could_be_lowered_are_not_under_eager() -> None:
    pipe = GPipe(model(nn.Identity()), [3, 4], chunks=8, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipeline_step(pipe, features())
    assert chains(pipe) == [[(0, 3, False)], [(0, 4, False)]]


@pytest.mark.parametrize("frozen", ["input", "before", "within", "after", "all"])
def test_where_nothing_needs_a_gradient(frozen: str) -> None:
    layers = model(Of(branch))
    parts = {"before": layers[:2], "within": layers[2:3], "after": layers[3:], "all": layers, "input": ()}
    for part in parts[frozen]:
        part.requires_grad_(False)
    needed = frozen not in ("input", "all")
    expected = loop_step(layers, features(), M, input_gradient=needed)
    pipe = GPipe(layers, [2, 3, 2], chunks=M)
    with quiet():
        for _ in range(2):
            assert unequal(pipeline_step(pipe, features(), input_gradient=needed), expected) == []


def test_eval_and_no_grad() -> None:
    layers = model(Recurrent(nn.LSTM), Counting()).eval()
    pipe = GPipe(layers, [3, 4, 4], chunks=M)
    with quiet(), torch.no_grad(), restored(layers):
        expected = plain_loop(layers, features(), M)
        before = [b.clone() for b in layers.buffers()]
    with quiet(), torch.no_grad(), restored(layers):
        assert torch.equal(pipe(features()), expected)
        assert all(map(torch.equal, layers.buffers(), before))
    assert not expected.requires_grad


def test_under_autocast() -> None:
    layers = model(Of(branch), Recurrent(nn.GRU))
    pipe = GPipe(layers, [2, 3, 6], chunks=M)
    with quiet(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        expected = loop_step(layers, features(), M)
        for _ in range(2):
            assert unequal(pipeline_step(pipe, features()), expected) == []
    assert getattr(expected["output"], "dtype", None) is torch.bfloat16


def test_gradients_of_all_layouts_arrive() -> None:
    """From a mean an expanded gradient comes, and from a transposition a permuted one."""

    def transposed(f: nn.Module, x: Tensor) -> Tensor:
        float(x.sum())
        return f(x).transpose(1, 2).contiguous().transpose(1, 2)

    def averaged(f: nn.Module, x: Tensor) -> Tensor:
        float(x.sum())
        return f(x).mean(1, keepdim=True).expand(-1, LENGTH, -1)

    for function in (transposed, averaged):
        layers = model(Of(function), Of(function))
        expected = loop_step(layers, features(), M)
        for checkpoint in CHECKPOINT_MODES:
            pipe = GPipe(layers, [2, 4, 5], chunks=M, checkpoint=checkpoint)
            with quiet():
                for number in range(3):
                    assert unequal(pipeline_step(pipe, features()), expected) == [], (number, checkpoint)


@pytest.mark.smoke
def test_nested_values_around_layers_in_python() -> None:
    def opened(f: nn.Module, x: Tensor) -> Any:
        h = f(x)
        return {"h": h, "mask": h > 0, "twice": (h, h), "scale": 0.5, "flag": bool(h.numel())}

    def passed(f: nn.Module, value: Any) -> Any:
        float(value["h"].sum())
        return {**value, "h": f(value["h"]), "more": [value["mask"].long().sum(-1)]}

    def closed(f: nn.Module, value: Any) -> Any:
        a, b = value["twice"]
        return torch.where(value["mask"], f(value["h"]), a * b) * value["scale"] + value["more"][0][..., None]

    torch.manual_seed(0)
    layers = nn.Sequential(Of(opened), Of(passed), Of(passed), Of(closed))
    for index, layer in enumerate(layers):
        layer.name = str(index)
    expected = loop_step(layers, features(), M)
    for balance in ([4], [1, 1, 1, 1], [2, 2]):
        for checkpoint in CHECKPOINT_MODES:
            pipe = GPipe(layers, balance, chunks=M, checkpoint=checkpoint)
            with quiet():
                for _ in range(2):
                    assert unequal(pipeline_step(pipe, features()), expected) == []


def test_an_output_without_a_gradient_in_the_loss() -> None:
    def two(f: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        float(x.sum())
        return f(x), x * 2

    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), Of(two), nn.Identity())
    pipe = GPipe(layers, [1, 1, 1], chunks=M)
    with quiet():
        for which in (0, 1, 0):
            report = verify(pipe, features(), lambda outputs, i=which: outputs[i].square().sum())  # type: ignore[misc]
            assert report, report


@pytest.mark.smoke
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_side_effects_and_phases_are_torchgpipes(checkpoint: str) -> None:
    torchgpipe = pytest.importorskip("torchgpipe")

    class Noting(nn.Module):
        def __init__(self, name: str, phases: Any, notes: list[tuple[str, bool, bool, float]]) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.name, self.phases, self.notes = name, phases, notes

        def forward(self, x: Tensor) -> Tensor:
            phases = [bool(asked()) for asked in self.phases]
            self.notes.append((self.name, phases[0], phases[1], float(x[0, 0, 0])))
            return x + 0 * self.linear(x)

    def notes(library: Any, build: Callable[..., nn.Module]) -> list[tuple[str, bool, bool, float]]:
        found: list[tuple[str, bool, bool, float]] = []
        phases = (library.is_checkpointing, library.is_recomputing)
        layers = nn.Sequential(*(Noting(name, phases, found) for name in "ab"))
        build(layers, [1, 1], devices=["cpu", "cpu"], chunks=M, checkpoint=checkpoint)(
            features()
        ).sum().backward()
        return found

    import gpipe_fast

    expected = notes(torchgpipe, torchgpipe.GPipe)
    with quiet():
        for backend in ("eager", "auto"):

            def build(*args: Any, backend: str = backend, **kwargs: Any) -> GPipe:
                return GPipe(*args, backend=backend, **kwargs)

            ours = notes(gpipe_fast, build)
            for name in "ab":  # stages run at the same time
                assert [n for n in ours if n[0] == name] == [n for n in expected if n[0] == name], backend
    assert len(expected) == 2 * (M + {"always": M, "except_last": M - 1, "never": 0}[checkpoint])


def awkward_inputs() -> list[Tensor]:
    """Micro-batches that are not aligned, expanded, permuted, or with gaps."""
    return [
        features(6, 3),
        features(1, 3).expand(6, 3, WIDTH),
        torch.randn(6, WIDTH, 3).transpose(1, 2),
        torch.randn(6, 7, WIDTH)[:, 1:6:2],
    ]


@pytest.mark.parametrize("kind", ["branch on data", "LSTM"])
@pytest.mark.parametrize("index", range(4))
def test_inputs_whose_memory_is_not_aligned_or_dense(index: int, kind: str) -> None:
    """Matrix products round by alignment and strides."""
    layers, x = nn.Sequential(UNTRACEABLE[kind](), nn.Linear(WIDTH, 3)), awkward_inputs()[index]
    expected = loop_step(layers, x, 2, input_gradient=False)
    for checkpoint in ("always", "never"):
        pipe = GPipe(layers, [1, 1], chunks=2, checkpoint=checkpoint)
        with quiet():
            assert unequal(pipeline_step(pipe, x, input_gradient=False), expected) == []


@pytest.mark.parametrize("index", [0, 2, 3])
def test_a_layer_that_writes_its_input_leaves_the_callers_as_it_was(index: int) -> None:
    layers, x = nn.Sequential(Of(in_place), nn.Linear(WIDTH, 3)), awkward_inputs()[index]
    kept = x.clone()
    with torch.no_grad():
        expected = torch.cat([layers(c) for c in x.chunk(2)])
        x.copy_(kept)
        with quiet():
            assert torch.equal(GPipe(layers, [1, 1], chunks=2)(x), expected)
    assert torch.equal(x, kept)
    with quiet():
        pipeline_step(GPipe(layers, [1, 1], chunks=2), x)
    assert torch.equal(x, kept)


@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_layers_under_torch_compile(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Compiling turns their checks off, for good.
    distributions = torch.distributions.Distribution
    monkeypatch.setattr(distributions, "_validate_args", distributions._validate_args)
    torch.manual_seed(0)
    compiled = torch.compile(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()), backend="aot_eager")
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), compiled, nn.Linear(WIDTH, 3))
    x = features()
    expected = loop_step(layers, x, M)
    pipe = GPipe(layers, [2, 2], chunks=M, backend=backend)
    with quiet():
        for _ in range(3):
            assert unequal(pipeline_step(pipe, x), expected) == []


@pytest.mark.parametrize("training", [False, True])
def test_under_inference_mode(training: bool) -> None:
    layers = model(Of(branch), Recurrent(nn.LSTM, num_layers=2, dropout=0.5)).train(training)
    pipe = GPipe(layers, [2, 9], chunks=M)
    with torch.inference_mode(), restored(layers):
        expected = plain_loop(layers, features(), M)
    with torch.inference_mode(), quiet():
        for _ in range(3):
            with restored(layers):
                assert torch.equal(pipeline(pipe, features()), expected)
