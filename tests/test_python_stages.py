"""Layers that run in Python, beside lowered ones and instead of them: each against the plain loop."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.utils.checkpoint
import torchgpipe
from reference import (
    collect,
    gradient_like,
    leaf,
    loop_step,
    pipeline,
    pipeline_step,
    plain_loop,
    restored,
    unequal,
)
from torch import Tensor, nn

from gpipe_fast import GPipe, is_checkpointing, is_recomputing, verify
from gpipe_fast.eager import EagerLayers
from gpipe_fast.gpipe import CHECKPOINT_MODES
from gpipe_fast.late import Search

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, LENGTH, BATCH, M = 6, 5, 8, 4


class Of(nn.Module):
    """A function of a linear layer and of what comes in."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: Any) -> Any:
        return self.function(self.linear, x)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.inner = kind(WIDTH, WIDTH, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner(x)[0]
        return output


class Counting(nn.Module):
    """Counts calls as an attribute, as a buffer written in place, and as one that is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), 0
        self.register_buffer("written", torch.zeros(()))
        self.register_buffer("replaced", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.written += 1
        y: Tensor = self.linear(x) * self.replaced
        self.replaced = self.replaced * 0.5 + y.detach().mean((0, 1)).abs()
        return y + self.written


class Hooked(nn.Module):
    """Hooks of the user's own, which change what comes out and the gradient that comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.linear.register_forward_hook(lambda module, args, output: output * 2)
        self.linear.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 3,))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y


class Tied(nn.Module):
    """One parameter used three times in one call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        y: Tensor = self.linear(torch.tanh(self.linear(x)) + self.linear(x))
        return y


class Scripted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * x


class Pooled(nn.Module):
    """Embeds the signs of what comes in; the table's gradients are sparse, or its rows are cut to length."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(2, WIDTH, **options)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table((x > 0).long()).sum(-1) + x


def branch(f: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = f(x)
    return y.tanh() if float(y.sum()) > 0 else y.sigmoid()


def selected(f: nn.Module, x: Tensor) -> Tensor:
    """As many rows as are positive, scattered back."""
    rows = x[..., 0] > 0
    y = x.clone()
    y[rows] = f(x[rows])
    return y


def in_place(f: nn.Module, x: Tensor) -> Tensor:
    if float(x.sum()) > 1e9:
        raise AssertionError
    y: Tensor = f(x.mul_(2).relu_())
    return y


def rates(f: nn.Module, x: Tensor) -> Tensor:
    return f(x) * torch.poisson(x.detach().abs() * 3)


def reentrant(f: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = torch.utils.checkpoint.checkpoint(f, x, use_reentrant=True)
    return y


def asking(f: nn.Module, x: Tensor) -> Tensor:
    assert not (is_checkpointing() and is_recomputing())
    y: Tensor = f(x)
    return y


UNTRACEABLE: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: Recurrent(nn.LSTM),
    "GRU": lambda: Recurrent(nn.GRU, num_layers=2, dropout=0.5),
    "bidirectional": lambda: nn.Sequential(
        Recurrent(nn.RNN, bidirectional=True), nn.Linear(2 * WIDTH, WIDTH)
    ),
    "branch on data": lambda: Of(branch),
    "data-dependent shape": lambda: Of(selected),
    "in place": lambda: Of(in_place),
    "poisson": lambda: Of(rates),
    "reentrant checkpoint": lambda: Of(reentrant),
    "asks for the phase": lambda: Of(asking),
    "side effects": Counting,
    "own hooks": Hooked,
    "tied within": Tied,
    "TorchScript": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), torch.jit.script(Scripted())),
    "sparse gradients": lambda: Pooled(sparse=True),
    "max_norm": lambda: Pooled(max_norm=0.5),
}


def model(*untraceable: nn.Module) -> nn.Sequential:
    """Layers with draws and statistics around those that cannot be traced."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)]
    for layer in untraceable:
        layers += [layer, nn.BatchNorm1d(LENGTH), nn.GELU(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 3))


def features(batch: int = BATCH, length: int = LENGTH) -> Tensor:
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(1))


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def chains(pipe: GPipe, microbatch: int = 0) -> list[list[tuple[int, int, bool]]]:
    """Of every stage, from which layer to which its segments go, and whether they are lowered."""
    plan = list(pipe._planner._plans.values())[-1].native
    return [plan.segments(stage, microbatch) for stage in range(len(pipe.balance))]


def dense(result: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {k: v.to_dense() if v is not None and v.is_sparse else v for k, v in result.items()}


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
        traces = pipe._planner._programs.compiler.num_traces
        pipeline_step(pipe, features())
    assert pipe._planner._programs.compiler.num_traces == traces
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


def test_one_warning_names_stage_layer_and_reason() -> None:
    pipe = GPipe(model(Of(branch), Recurrent(nn.GRU)), [3, 8], chunks=8)
    pipe.eval()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in (8, 8, 16):
            pipe(features(batch))
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == 2, messages
    assert any("stage 0, layer 2 (Of) runs in Python: " in m and "DataDependent" in m for m in messages)
    assert any("stage 1, layer 6 (Recurrent) runs in Python: GRU inner: recurrent" in m for m in messages)
    assert {warning.filename for warning in caught} == {__file__}


def test_aten_refuses_instead() -> None:
    pipe = GPipe(model(Recurrent(nn.GRU)), [2, 5], chunks=2, backend="aten")
    with pytest.raises(RuntimeError, match=r"stage 1, layer 2 \(Recurrent\) cannot be traced faithfully"):
        pipe(features())


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


class Failing(nn.Module):
    """Raises in its given call, counted from 0; or in that of its backward."""

    def __init__(self, error: BaseException, forward: int = -1, backward: int = -1) -> None:
        super().__init__()
        self.linear, self.error = nn.Linear(WIDTH, WIDTH), error
        self.at = {"forward": forward, "backward": backward}
        self.calls: Counter[str] = Counter()
        self.register_buffer("count", torch.zeros(()))

    def _called(self, what: str) -> None:
        self.calls[what] += 1
        if self.calls[what] == self.at[what] + 1:
            raise self.error

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self._called("forward")
        y: Tensor = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: self._called("backward"))
        return y


class OwnError(Exception):
    pass


@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.parametrize(
    "error",
    [OwnError("planted"), SystemExit(3), KeyboardInterrupt(), StopIteration("s"), GeneratorExit()],
    ids=repr,
)
@pytest.mark.parametrize("when", ["forward", "recompute", "backward"])
def test_an_exception_comes_out_as_it_is(when: str, error: BaseException, backend: str) -> None:
    failing = Failing(error)
    layers = model(failing)
    pipe = GPipe(layers, [2, 2, 3], chunks=M, checkpoint="always", backend=backend)
    with quiet():
        expected = pipeline_step(pipe, features())
        failing.calls.clear()
        failing.at = {
            "forward": {"forward": 2, "recompute": M + 1, "backward": -1}[when],
            "backward": 1 if when == "backward" else -1,
        }
        state = {name: value.clone() for name, value in layers.state_dict().items()}
        if when == "forward":
            with pytest.raises(type(error)) as raised:
                pipe(features())
            assert all(torch.equal(value, state[name]) for name, value in layers.state_dict().items())
        else:
            output = pipe(features())
            with pytest.raises(type(error)) as raised:
                output.backward(gradient_like(output))
            pipe.load_state_dict(state)
        assert raised.value is error
        assert all(p.grad is None for p in layers.parameters())
        assert unequal(pipeline_step(pipe, features()), expected) == []


def test_the_action_is_noted() -> None:
    error = OwnError("planted")
    failing = Failing(error, forward=2)
    with quiet(), pytest.raises(OwnError):
        GPipe(model(failing), [2, 5], chunks=M, backend="eager")(features())
    if hasattr(error, "__notes__"):
        assert error.__notes__ == ["in action 1F2 of the pipeline (stage 1, layers 2 to 6)"]


def test_a_tensor_whose_gradient_would_be_lost_is_refused() -> None:
    outside = torch.ones(WIDTH, requires_grad=True)

    def scaled(f: nn.Module, x: Tensor) -> Tensor:
        float(x.sum())
        return f(x) * outside

    with (
        quiet(),
        pytest.raises(RuntimeError, match=r"layer 2 \(Of\) uses a tensor of shape \[6\] that needs"),
    ):
        GPipe(model(Of(scaled)), [2, 5], chunks=M)(features())


def test_a_parameter_given_other_data_before_its_recompute_is_refused() -> None:
    layers = model(Of(branch))
    pipe = GPipe(layers, [2, 5], chunks=M, checkpoint="always")
    with quiet():
        output = pipe(features())
        layers[2].linear.weight.data = layers[2].linear.weight.data.clone()
        with pytest.raises(RuntimeError, match="was given other data between forward and backward"):
            output.sum().backward()


def test_hooks_on_parameters_see_the_whole_gradient_once() -> None:
    layers = model(Of(branch))
    weight, seen = layers[2].linear.weight, []
    weight.register_hook(lambda gradient: seen.append(gradient.clone()) or gradient * 2)
    with quiet():
        ours = pipeline_step(GPipe(layers, [2, 5], chunks=M), features())
    assert len(seen) == 1
    assert unequal(ours, loop_step(layers, features(), M)) == []


def test_own_generators_are_drawn_from_once_and_again_in_the_recompute() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.generator = nn.Linear(WIDTH, WIDTH), torch.Generator()

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x * torch.randn(x.shape, generator=self.generator))

    noisy = Noisy()
    layers = model(noisy)

    def step(run: Callable[[], dict[str, Tensor | None]]) -> dict[str, Tensor | None]:
        noisy.generator.manual_seed(5)
        result = run()
        return {**result, "next": torch.randn(3, generator=noisy.generator)}

    expected = step(lambda: loop_step(layers, features(), M))
    for checkpoint in CHECKPOINT_MODES:
        pipe = GPipe(layers, [2, 5], chunks=M, checkpoint=checkpoint)
        with quiet():
            assert unequal(step(lambda pipe=pipe: pipeline_step(pipe, features())), expected) == []  # type: ignore[misc]


@pytest.mark.smoke
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_a_second_backward(checkpoint: str) -> None:
    layers = model(Of(branch), Counting())
    pipe = GPipe(layers, [2, 4, 5], chunks=M, checkpoint=checkpoint)
    with quiet(), restored(layers):
        x = leaf(features())
        output = pipeline(pipe, x)
        output.backward(gradient_like(output), retain_graph=True)
        first = {n: p.grad.clone() for n, p in layers.named_parameters() if p.grad is not None}
        buffers = [b.clone() for b in layers.buffers()]
        layers.zero_grad()
        output.backward(gradient_like(output))
        for name, parameter in layers.named_parameters():
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, first[name])
        assert all(map(torch.equal, layers.buffers(), buffers))


def test_interleaved_mini_batches_keep_to_their_own() -> None:
    with_norm = model(Of(branch)).eval()
    layers = nn.Sequential(*(layer for layer in with_norm if not isinstance(layer, nn.BatchNorm1d)))
    inputs = [features(8), features(6, 3), features(8) * 2]

    def grads(run: Callable[[Tensor], Tensor], interleaved: bool) -> list[Tensor]:
        layers.zero_grad()
        torch.manual_seed(0)
        leaves = [leaf(x) for x in inputs]
        if interleaved:
            outputs = [run(x) for x in leaves]
            for output in outputs:
                output.backward(gradient_like(output))
        else:
            for x in leaves:
                output = run(x)
                output.backward(gradient_like(output))
        return [x.grad for x in leaves if x.grad is not None]

    with quiet():
        for checkpoint in ("always", "never"):
            pipe = GPipe(layers, [2, 4], chunks=2, checkpoint=checkpoint)
            assert all(map(torch.equal, grads(pipe, True), grads(pipe, False)))


def test_attributes_that_change_in_every_call_do_not_trace_again() -> None:
    counting = Counting()
    pipe = GPipe(model(counting), [2, 5], chunks=M)
    with quiet():
        for _ in range(3):
            pipe(features())
        compiler, plans = pipe._planner._programs.compiler, len(pipe._planner._plans)
        traces = compiler.num_traces
        for _ in range(5):
            pipe(features())
    assert counting.calls == 8 * M
    assert (compiler.num_traces, len(pipe._planner._plans)) == (traces, plans)


def test_a_changed_lowered_layer_is_noticed_beside_one_in_python() -> None:
    layers = model(Of(branch))
    pipe = GPipe(layers, [2, 5], chunks=M)
    with quiet():
        pipeline_step(pipe, features())
        pipeline_step(pipe, features())
        layers[5].p = 0.7
        assert unequal(pipeline_step(pipe, features()), loop_step(layers, features(), M)) == []
        layers[2].linear.weight.requires_grad_(False)
        assert unequal(pipeline_step(pipe, features()), loop_step(layers, features(), M)) == []


def test_threads_take_turns() -> None:
    layers = model(Of(branch)).eval()
    pipe = GPipe(layers, [2, 5], chunks=M)
    expected = plain_loop(layers, features(), M)
    results: list[Tensor] = []

    def call() -> None:
        for _ in range(5):
            results.append(pipe(features()))

    with quiet():
        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(results) == 20
    assert all(torch.equal(result, expected) for result in results)


def test_constants_that_never_repeat_end_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that a layer in Python returns is one that the next layers are traced for."""

    class Clock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.time = 0

        def forward(self, x: Tensor) -> tuple[Tensor, int]:
            self.time += 1
            return x, self.time

    def faded(f: nn.Module, value: Any) -> Tensor:
        x, time = value
        return f(x) / time

    monkeypatch.setattr("gpipe_fast.planner.TRACES", 8)
    layers = nn.Sequential(Clock(), Of(faded))
    pipe = GPipe(layers, [1, 1], chunks=2, checkpoint="always")
    with quiet():
        for step in range(12):
            layers[0].time = 2 * step
            expected = loop_step(layers, features(4), 2)
            layers[0].time = 2 * step
            with restored(pipe):
                x = leaf(features(4))
                assert unequal(collect(pipe, x, pipe(x)), expected) == []
    assert 8 <= pipe._planner._programs.compiler.num_traces <= 8 + 4


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


@pytest.mark.parametrize("backend", ["auto", "eager", "aten"])
def test_nothing_stays_of_a_pipeline_that_is_gone(backend: str) -> None:
    """Segments in C++ refer to layers in Python: a cycle through them would never be found."""
    layers = model(nn.Identity() if backend == "aten" else Of(branch))
    gc.collect()
    gc.disable()
    try:
        pipe = GPipe(layers, [2, 5], chunks=M, backend=backend)
        with quiet():
            for _ in range(3):
                pipeline_step(pipe, features())
        planner = pipe._planner
        left = [weakref.ref(thing) for thing in (pipe, planner, *planner._late, *pipe._stages)]
        del pipe, planner
        assert [ref() for ref in left] == [None] * len(left)
    finally:
        gc.enable()


@pytest.mark.parametrize("backend", ["auto", "eager", "aten"])
def test_layers_without_parameters_yet_are_refused(backend: str) -> None:
    pipe = GPipe(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LazyLinear(3)), [1, 1], backend=backend)
    with pytest.raises(RuntimeError, match=r"layer 1 \(LazyLinear\).*run one batch through the module first"):
        pipe(features())


def test_a_failure_that_belongs_to_no_layer_is_found_by_trying() -> None:
    pipe = GPipe(model(Of(reentrant), nn.Identity()), [11], chunks=M)
    pipe.eval()
    with pytest.warns(UserWarning, match=r"layer 2 \(Of\) runs in Python: .*use_reentrant"):
        pipeline_step(pipe, features())
    for _ in range(2):
        pipeline_step(pipe, features())
    assert chains(pipe) == [[(0, 2, True), (2, 3, False), (3, 11, True)]]


def test_of_many_shapes_the_latest_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpipe_fast.late._REMEMBERED", 4)
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), Of(branch), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    pipe = GPipe(layers, [1, 3], chunks=2, checkpoint="always")
    with quiet():
        held = [(x := leaf(features(4, length)), pipe(x)) for length in range(2, 9)]
        for x, output in held:  # whose segments are forgotten
            output.backward(gradient_like(output))
            expected = leaf(x)
            reference = plain_loop(layers, expected, 2)
            reference.backward(gradient_like(reference))
            assert torch.equal(output, reference)
            assert x.grad is not None
            assert expected.grad is not None
            assert torch.equal(x.grad, expected.grad)
        layers.zero_grad()
        for _ in range(3):
            for length in range(2, 9):
                x = features(4, length)
                assert unequal(pipeline_step(pipe, x), loop_step(layers, x, 2)) == [], length
    for late in pipe._planner._late:
        assert 0 < len(late._interpreted) <= 4
        assert len(late._lowered) <= 4
        assert len(late._gradients) <= 4


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
