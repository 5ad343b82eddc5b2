"""The runner: layers are captured and traced once for all that uses them, and settings act or raise."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import warnings
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast.container import runner_of
from gpipe_fast.runtime import equal_layers
from gpipe_fast.trace import capture_layers
from tests.untraceable import FunctionLayer, branch_on_data, without_warnings

X, Y = torch.randn(8, 6), torch.randint(0, 6, (8,))


class Block(nn.Module):
    """A block that is large enough to be traced alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(6), nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), Block(), Block(), nn.Dropout(0.0), nn.Linear(6, 6))


@contextmanager
def counted() -> Iterator[tuple[Counter[int], Counter[int]]]:
    """Counts, by the layer's ``id``, captures and traces inside the block; losses are left out."""
    captures, traces = Counter[int](), Counter[int]()

    def capture(layer: nn.Module, *args: Any) -> Any:
        captures[id(layer)] += type(layer).__name__ != "Loss"
        return real_capture(layer, *args)

    def trace(traced: Sequence[nn.Module], *args: Any) -> Any:
        traces.update(id(layer) for layer in traced if type(layer).__name__ != "Loss")
        return real_trace(traced, *args)

    real_capture, real_trace = capture_layers.capture, equal_layers.trace
    with (
        mock.patch.object(capture_layers, "capture", capture),
        mock.patch.object(equal_layers, "trace", trace),
    ):
        yield captures, traces


def sum_of_squares(output: Tensor) -> Tensor:
    return output.square().sum()


def layers_in_python(pipe: GPipe) -> set[int]:
    runner = runner_of(pipe)
    return {i for each in runner.runners for i in each.planner.in_python if i < len(runner.layers)}


@pytest.mark.parametrize("change", ["setting", "layer", "layer before a step", "balance"])
def test_a_change_during_a_run_does_not_wait_for_it_under_the_tracing_lock(change: str) -> None:
    """A layer in Python may wait for the tracing lock, as in the first call of another pipeline."""
    entered, goes_on = threading.Event(), threading.Event()
    other = GPipe(nn.Sequential(nn.Linear(6, 6).requires_grad_(False)), [1])

    def call_another(_: nn.Module, x: Tensor) -> Tensor:
        entered.set()
        goes_on.wait(20)
        return x + other(x)

    model = GPipe(nn.Sequential(nn.Linear(6, 6), FunctionLayer(call_another)), [1, 1], backend="eager")

    def make_change() -> None:
        if change == "setting":
            model.fuse = not model.fuse
        elif change == "balance":
            model.balance = [2]
        else:
            model._modules["0"] = nn.Linear(6, 6)
            model.step(X, target=Y, loss_fn=F.cross_entropy) if "step" in change else model(X)

    threads = [threading.Thread(target=each, daemon=True) for each in (lambda: model(X), make_change)]
    threads[0].start()
    assert entered.wait(20)
    threads[1].start()
    threads[1].join(0.3)
    goes_on.set()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)


def test_a_runner_with_a_loss_makes_stages_as_any_other() -> None:
    pipe = GPipe(layers(), [3, 3], chunks=2)
    pipe.step(X, target=Y, loss_fn=F.cross_entropy)
    longer = runner_of(pipe).runners[-1]
    stages = longer.stages_of(longer.placement.balance, longer.placement.devices)
    assert [len(stage.layers) for stage in stages] == [len(stage.layers) for stage in longer.stages] == [3, 4]


def all_uses(pipe: GPipe) -> list[Callable[[], object]]:
    """Returns calls of all kinds with gradients: they have the same programs but for the loss."""
    return [
        lambda: pipe(X).square().sum().backward(),
        lambda: pipe.step(X, target=Y, loss_fn=F.cross_entropy),
        lambda: pipe.step(X, target=Y, loss_fn=F.cross_entropy, return_outputs=True),
        lambda: pipe.step(X, target=Y, loss_fn=nn.CrossEntropyLoss(label_smoothing=0.1)),
        lambda: pipe.step(X, target=X, loss_fn=F.mse_loss),
        lambda: pipe.step(X, loss_fn=sum_of_squares, normalizer=8),
        lambda: pipe.memory(X, target=Y, loss_fn=F.cross_entropy),
    ]


@pytest.mark.parametrize("balance", [[6], [3, 3], [1, 2, 2, 1]])
@pytest.mark.parametrize("first", range(3))
def test_layers_are_captured_and_traced_once_for_calls_and_steps(balance: list[int], first: int) -> None:
    pipe = GPipe(layers(), balance, chunks=2)
    uses = all_uses(pipe)
    with counted() as (captures, traces):
        for use in uses[first:] + uses[:first]:
            use()
        assert max(captures.values()) == 1
        assert max(traces.values()) == 1
        numbers = captures.total(), traces.total()
    with counted() as (captures, traces), torch.no_grad():  # other operators, so other graphs
        pipe(X)
        before = captures.total(), traces.total()
        pipe.evaluate(X, target=Y, loss_fn=F.cross_entropy)
        list(pipe.stream([X, X]))
        assert (captures.total(), traces.total()) == before
    assert before <= numbers


def test_a_layer_in_python_is_found_once_for_calls_and_steps() -> None:
    for step_first in (False, True):
        pipe = GPipe(
            nn.Sequential(Block(), FunctionLayer(branch_on_data, nn.Linear(6, 6)), nn.Linear(6, 6)),
            [1, 2],
            chunks=2,
        )
        uses = all_uses(pipe)[:4]
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for use in uses[::-1] if step_first else uses:
                use()
            for use in uses:  # what ran in Python in the calls before is lowered
                use()
        assert len([each for each in warned if "runs in Python" in str(each.message)]) == 1
        assert layers_in_python(pipe) == {1}
        with counted() as (captures, _):
            for use in uses:
                use()
        assert not captures.total()


def test_a_loss_in_python_leaves_calls_lowered() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        if output.sum().item() > 1e9:
            return output.sum()
        return F.cross_entropy(output, target, reduction="sum")

    pipe = GPipe(layers(), [3, 3], chunks=2)
    with without_warnings():
        for _ in range(2):
            found = pipe.step(X, target=Y, loss_fn=loss, normalizer=8)
    pipe(X)
    assert layers_in_python(pipe) == set()
    expected = pipe.step(X, target=Y, loss_fn=F.cross_entropy)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_a_deleted_pipeline_with_losses_is_freed_by_reference_counts_alone(backend: str) -> None:
    gc.collect()
    gc.disable()
    try:
        pipe = GPipe(layers(), [3, 3], chunks=2, backend=backend)
        with without_warnings():
            for use in all_uses(pipe)[:5]:
                use()
        del use
        runners = runner_of(pipe).runners
        assert len(runners) == 5
        references = [weakref.ref(thing) for each in runners for thing in (each, each.planner)]
        del pipe, runners
        assert [ref() for ref in references] == [None] * len(references)
    finally:
        gc.enable()


def test_settings_that_programs_depend_on_act_between_calls() -> None:
    pipe = GPipe(layers(), [3, 3], chunks=2)
    pipe(X)
    compiler = runner_of(pipe).planner.compiler
    for name, value in (("backend", "aten"), ("grad_dtype", torch.float32), ("transport", "pinned")):
        setattr(pipe, name, value)
        assert getattr(pipe, name) == value
        assert runner_of(pipe).planner.compiler is not compiler
    pipe[1].forward = functools.partial(branch_on_data, nn.Identity())
    with pytest.raises(RuntimeError, match="cannot be traced"):
        pipe(X)
    pipe.backend = "eager"
    with without_warnings():
        pipe(X)
    for name in ("backend", "transport"):
        before = getattr(pipe, name)
        with pytest.raises(ValueError, match=f"{name} is not one of"):
            setattr(pipe, name, "fast")
        assert getattr(pipe, name) == before


def test_a_step_between_a_call_and_its_backward_leaves_both_right() -> None:
    pipe, plain = GPipe(layers(), [3, 3], chunks=2), layers()
    output = pipe(X)
    loss = pipe.step(X, target=Y, loss_fn=F.cross_entropy)
    output.square().sum().backward()
    halves = X.chunk(2)
    losses = [
        F.cross_entropy(plain(half), y, reduction="sum") for half, y in zip(halves, Y.chunk(2), strict=True)
    ]
    for part in reversed(losses):
        (part / 8).backward()
    for part in reversed([plain(half).square().sum() for half in halves]):
        part.backward()
    assert torch.equal(loss, torch.stack([x / 8 for x in losses]).sum())
    for ours, expected in zip(pipe.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert expected.grad is not None
        torch.testing.assert_close(ours.grad, expected.grad)


def test_a_loss_with_a_complex_constant() -> None:
    def loss(output: Tensor) -> Tensor:
        return (torch.fft.fft(output) * 2j).real.square().sum()

    pipe, plain = GPipe(layers(), [3, 3], chunks=2), layers()
    found = pipe.step(X, loss_fn=loss, normalizer=1)
    losses = [loss(plain(half)) for half in X.chunk(2)]
    for each in reversed(losses):
        each.backward()
    torch.testing.assert_close(found, torch.stack(losses).sum())
    for ours, expected in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad)


def test_a_step_in_eval_mode_before_the_balance_is_chosen_within_a_memory() -> None:
    pipe = GPipe(
        nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))), devices=["cpu"] * 2, chunks=2, memory="1GB"
    )
    pipe.eval().step(X, target=X, loss_fn=F.mse_loss)
    assert pipe.train().step(X, target=X, loss_fn=F.mse_loss) > 0
    assert pipe.memory(X, target=X, loss_fn=F.mse_loss).stages


def test_layers_may_have_any_names_in_a_step() -> None:
    names = ("loss", "loss_of_step", "_", "loss0")
    named = OrderedDict((name, nn.Linear(6, 6)) for name in names)
    assert GPipe(nn.Sequential(named), [2, 2], chunks=2).step(X, target=X, loss_fn=F.mse_loss) > 0


def test_losses_and_what_they_close_over_are_freed_when_others_take_their_place() -> None:
    def loss_with(target: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda output: (output - target[: len(output)]).square().sum()

    pipe, references = GPipe(layers(), [3, 3], chunks=2), []
    for number in range(12):
        target = torch.full((8, 6), float(number))
        references.append(weakref.ref(target))
        found = pipe.step(X, loss_fn=loss_with(target), normalizer=1)
        assert torch.allclose(found, (pipe(X) - target[:4].repeat(2, 1)).square().sum())
        del target
    gc.collect()
    assert sum(ref() is not None for ref in references) <= 5
    numbers = [
        len(compiled.segment_key.layers.states) for compiled in runner_of(pipe).planner.compiler.cached()
    ]
    assert len(numbers) <= 12


def test_a_recording_is_not_lost_by_another_transport() -> None:
    pipe = GPipe(layers(), [3, 3], chunks=2)
    with pipe.recording() as recording:
        with pytest.raises(RuntimeError, match="while the model is recorded, got transport='pinned'"):
            pipe.transport = "pinned"
        pipe(X)
    assert pipe.transport == "auto"
    assert recording.phases()


def test_a_loss_that_shares_a_parameter_waits_for_layers_in_calls() -> None:
    class Shared(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, output: Tensor) -> Tensor:
            return output.square().sum() + self.weight.square().sum()

    pipe = GPipe(layers(), [3, 3], chunks=1)
    pipe.step(X, loss_fn=Shared(pipe[0].weight), normalizer=1)
    base, longer = (runner.planner for runner in runner_of(pipe).runners)
    with contextlib.ExitStack() as held:
        assert longer._lock(held)
        found: list[bool] = []

        def try_all() -> None:
            with contextlib.ExitStack() as other:
                found.extend(each.try_lock(other) for each in base.segments)

        thread = threading.Thread(target=try_all)
        thread.start()
        thread.join()
    assert found == [False, False]
