"""Layers that run in Python, alone and beside lowered ones, equal the plain loop."""

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
from gpipe_fast.runtime.python_layers import PythonLayers
from gpipe_fast.runtime.segments import SegmentSearch
from tests.internals import compiler_of
from tests.reference import (
    loop_step,
    pipeline,
    pipeline_step,
    plain_loop,
    restored,
    unequal,
)
from tests.untraceable import (
    UNTRACEABLE,
    WIDTH,
    FunctionLayer,
    M,
    Recurrent,
    StatefulLayer,
    branch_on_data,
    densified,
    features,
    model,
    segments_by_stage,
    without_warnings,
    write_input_in_place,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.sampled(8)
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.parametrize("kind", UNTRACEABLE)
def test_an_untraceable_layer_equals_the_plain_loop(kind: str, backend: str, checkpoint: str) -> None:
    torch.manual_seed(3)
    layers = model(UNTRACEABLE[kind]())
    # TorchScript profiles its first runs and then optimizes, which changes the rounding.
    for _ in range(3 if kind == "TorchScript" else 1):
        expected = densified(loop_step(layers, features(), M))
    for balance in ([2, 5], [3, 2, 2]):
        pipe = GPipe(layers, balance, chunks=M, checkpoint=checkpoint, backend=backend)
        with without_warnings():
            steps = [densified(pipeline_step(pipe, features())) for _ in range(3)]
        for number, ours in enumerate(steps):
            assert unequal(ours, expected) == [], f"step {number}, balance {balance}"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_a_layer_in_forward_mode_equals_the_plain_loop(backend: str, checkpoint: str) -> None:
    def add_derivative(linear: nn.Module, x: Tensor) -> Tensor:
        value, derivative = torch.func.jvp(linear, (x,), (torch.ones_like(x),))
        return value + derivative

    layers = model(FunctionLayer(add_derivative))
    expected = loop_step(layers, features(), M)
    for balance in ([7], [2, 5], [3, 2, 2]):
        pipe = GPipe(layers, balance, chunks=M, checkpoint=checkpoint, backend=backend)
        with without_warnings():
            for _ in range(2):
                assert unequal(pipeline_step(pipe, features()), expected) == []
    with pytest.raises(RuntimeError, match="forward-mode AD makes a tensor of zeros without memory"):
        GPipe(layers, [7], chunks=M, backend="aten")(features())


class ReturnsParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.weight


@pytest.mark.sampled(3)
@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.parametrize("balance", [[4], [2, 2], [1, 1, 2]])
def test_a_layer_that_returns_its_parameter_equals_the_plain_loop(
    balance: list[int], backend: str, checkpoint: str
) -> None:
    torch.manual_seed(3)
    multiply = FunctionLayer(lambda linear, given: linear(given[0]) @ given[1])
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), ReturnsParameter(), multiply, nn.Tanh())
    x = torch.randn(16, WIDTH)
    pipe = GPipe(layers, balance, chunks=8, checkpoint=checkpoint, backend=backend)
    for _ in range(2):
        assert unequal(pipeline_step(pipe, x), loop_step(layers, x, 8)) == []


@pytest.mark.smoke
def test_layers_and_stages_around_layers_in_python_are_lowered() -> None:
    pipe = GPipe(model(Recurrent(nn.LSTM), FunctionLayer(branch_on_data)), [2, 5, 4], chunks=M)
    with without_warnings():
        for _ in range(4):
            pipeline_step(pipe, features())
    assert segments_by_stage(pipe) == [
        [(0, 2, True)],
        [(0, 1, False), (1, 4, True), (4, 5, False)],
        [(0, 4, True)],
    ]
    # From then on Python runs only for the layers in Python, and no segment is searched.
    num_calls: Counter[str] = Counter()

    def count_calls(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            num_calls[name] += 1
            return function(*args)

        return call

    with (
        mock.patch.object(SegmentSearch, "find", count_calls("find", SegmentSearch.find)),
        mock.patch.object(PythonLayers, "forward", count_calls("forward", PythonLayers.forward)),
        mock.patch.object(PythonLayers, "backward", count_calls("backward", PythonLayers.backward)),
    ):
        traces = compiler_of(pipe).num_traces
        pipeline_step(pipe, features())
    assert compiler_of(pipe).num_traces == traces
    assert num_calls == {"forward": 2 * M, "backward": 2 * M}


def test_one_untraceable_layer_leaves_the_rest_of_its_stage_lowered() -> None:
    pipe = GPipe(model(FunctionLayer(branch_on_data)), [7], chunks=M)
    with without_warnings():
        for _ in range(3):
            pipeline_step(pipe, features())
    assert segments_by_stage(pipe) == [[(0, 2, True), (2, 3, False), (3, 7, True)]]


def test_backend_eager_lowers_no_layer_and_warns_about_none() -> None:
    pipe = GPipe(model(nn.Identity()), [3, 4], chunks=8, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipeline_step(pipe, features())
    assert segments_by_stage(pipe) == [[(0, 3, False)], [(0, 4, False)]]


@pytest.mark.parametrize("frozen", ["input", "before", "within", "after", "all"])
def test_frozen_parts_around_a_layer_in_python_equal_the_plain_loop(frozen: str) -> None:
    layers = model(FunctionLayer(branch_on_data))
    parts = {"before": layers[:2], "within": layers[2:3], "after": layers[3:], "all": layers, "input": ()}
    for part in parts[frozen]:
        part.requires_grad_(False)
    needs_gradient = frozen not in ("input", "all")
    expected = loop_step(layers, features(), M, input_gradient=needs_gradient)
    pipe = GPipe(layers, [2, 3, 2], chunks=M)
    with without_warnings():
        for _ in range(2):
            assert unequal(pipeline_step(pipe, features(), input_gradient=needs_gradient), expected) == []


def test_inference_in_eval_mode_equals_the_plain_loop() -> None:
    layers = model(Recurrent(nn.LSTM), StatefulLayer()).eval()
    pipe = GPipe(layers, [3, 4, 4], chunks=M)
    with without_warnings(), torch.no_grad(), restored(layers):
        expected = plain_loop(layers, features(), M)
        before = [b.clone() for b in layers.buffers()]
    with without_warnings(), torch.no_grad(), restored(layers):
        assert torch.equal(pipe(features()), expected)
        assert all(map(torch.equal, layers.buffers(), before))
    assert not expected.requires_grad


@pytest.mark.smoke
def test_nested_values_around_layers_in_python_equal_the_plain_loop() -> None:
    def tensor_to_dict(f: nn.Module, x: Tensor) -> Any:
        h = f(x)
        return {"h": h, "mask": h > 0, "twice": (h, h), "scale": 0.5, "flag": bool(h.numel())}

    def dict_to_dict(f: nn.Module, value: Any) -> Any:
        float(value["h"].sum())
        return {**value, "h": f(value["h"]), "more": [value["mask"].long().sum(-1)]}

    def dict_to_tensor(f: nn.Module, value: Any) -> Any:
        a, b = value["twice"]
        return torch.where(value["mask"], f(value["h"]), a * b) * value["scale"] + value["more"][0][..., None]

    torch.manual_seed(0)
    layers = nn.Sequential(
        FunctionLayer(tensor_to_dict),
        FunctionLayer(dict_to_dict),
        FunctionLayer(dict_to_dict),
        FunctionLayer(dict_to_tensor),
    )
    for index, layer in enumerate(layers):
        layer.name = str(index)
    expected = loop_step(layers, features(), M)
    for balance in ([4], [1, 2, 1]):
        for checkpoint in ("always", "never"):
            pipe = GPipe(layers, balance, chunks=M, checkpoint=checkpoint)
            with without_warnings():
                for _ in range(2):
                    assert unequal(pipeline_step(pipe, features()), expected) == []


def test_a_loss_that_reads_one_of_two_outputs_equals_the_plain_loop() -> None:
    def two_outputs(f: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        float(x.sum())
        return f(x), x * 2

    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), FunctionLayer(two_outputs), nn.Identity())
    pipe = GPipe(layers, [1, 1, 1], chunks=M)
    with without_warnings():
        for which in (0, 1, 0):
            report = verify(pipe, features(), lambda outputs, i=which: outputs[i].square().sum())  # type: ignore[misc]
            assert report, report


@pytest.mark.smoke
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_calls_of_a_layer_have_torchgpipes_order_and_phases(checkpoint: str) -> None:
    torchgpipe = pytest.importorskip("torchgpipe")

    class PhaseRecorder(nn.Module):
        def __init__(self, name: str, phases: Any, notes: list[tuple[str, bool, bool, float]]) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.name, self.phases, self.notes = name, phases, notes

        def forward(self, x: Tensor) -> Tensor:
            phases = [bool(query()) for query in self.phases]
            self.notes.append((self.name, phases[0], phases[1], float(x[0, 0, 0])))
            return x + 0 * self.linear(x)

    def notes(library: Any, build: Callable[..., nn.Module]) -> list[tuple[str, bool, bool, float]]:
        found: list[tuple[str, bool, bool, float]] = []
        phases = (library.is_checkpointing, library.is_recomputing)
        layers = nn.Sequential(*(PhaseRecorder(name, phases, found) for name in "ab"))
        build(layers, [1, 1], devices=["cpu", "cpu"], chunks=M, checkpoint=checkpoint)(
            features()
        ).sum().backward()
        return found

    import gpipe_fast

    expected = notes(torchgpipe, torchgpipe.GPipe)
    with without_warnings():
        for backend in ("eager", "auto"):

            def build(*args: Any, backend: str = backend, **kwargs: Any) -> GPipe:
                return GPipe(*args, backend=backend, **kwargs)

            ours = notes(gpipe_fast, build)
            for name in "ab":  # stages run at the same time
                assert [n for n in ours if n[0] == name] == [n for n in expected if n[0] == name], backend
    assert len(expected) == 2 * (M + {"always": M, "except_last": M - 1, "never": 0}[checkpoint])


def awkward_inputs() -> list[Tensor]:
    """Returns mini-batches that are unaligned, expanded, permuted, or have gaps."""
    return [
        features(6, 3),
        features(1, 3).expand(6, 3, WIDTH),
        torch.randn(6, WIDTH, 3).transpose(1, 2),
        torch.randn(6, 7, WIDTH)[:, 1:6:2],
    ]


@pytest.mark.parametrize("kind", ["branch on data", "LSTM"])
@pytest.mark.parametrize("index", range(4))
def test_unaligned_and_non_contiguous_inputs_equal_the_plain_loop(index: int, kind: str) -> None:
    """The rounding of matrix products depends on alignment and strides."""
    layers, x = nn.Sequential(UNTRACEABLE[kind](), nn.Linear(WIDTH, 3)), awkward_inputs()[index]
    expected = loop_step(layers, x, 2, input_gradient=False)
    for checkpoint in ("always", "never"):
        pipe = GPipe(layers, [1, 1], chunks=2, checkpoint=checkpoint)
        with without_warnings():
            assert unequal(pipeline_step(pipe, x, input_gradient=False), expected) == []


@pytest.mark.parametrize("index", [0, 2, 3])
def test_a_layer_that_writes_its_input_does_not_change_the_callers_tensor(index: int) -> None:
    layers, x = (
        nn.Sequential(FunctionLayer(write_input_in_place), nn.Linear(WIDTH, 3)),
        awkward_inputs()[index],
    )
    original = x.clone()
    with torch.no_grad():
        expected = torch.cat([layers(c) for c in x.chunk(2)])
        x.copy_(original)
        with without_warnings():
            assert torch.equal(GPipe(layers, [1, 1], chunks=2)(x), expected)
    assert torch.equal(x, original)
    with without_warnings():
        pipeline_step(GPipe(layers, [1, 1], chunks=2), x)
    assert torch.equal(x, original)


@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_layers_under_torch_compile_equal_the_plain_loop(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Compiling disables the argument checks of distributions permanently.
    distributions = torch.distributions.Distribution
    monkeypatch.setattr(distributions, "_validate_args", distributions._validate_args)
    torch.manual_seed(0)
    compiled = torch.compile(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()), backend="aot_eager")
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), compiled, nn.Linear(WIDTH, 3))
    x = features()
    expected = loop_step(layers, x, M)
    pipe = GPipe(layers, [2, 2], chunks=M, backend=backend)
    with without_warnings():
        for _ in range(3):
            assert unequal(pipeline_step(pipe, x), expected) == []


@pytest.mark.parametrize("training", [False, True])
def test_inference_mode_equals_the_plain_loop(training: bool) -> None:
    layers = model(FunctionLayer(branch_on_data), Recurrent(nn.LSTM, num_layers=2, dropout=0.5)).train(
        training
    )
    pipe = GPipe(layers, [2, 9], chunks=M)
    with torch.inference_mode(), restored(layers):
        expected = plain_loop(layers, features(), M)
    with torch.inference_mode(), without_warnings():
        for _ in range(3):
            with restored(layers):
                assert torch.equal(pipeline(pipe, features()), expected)
