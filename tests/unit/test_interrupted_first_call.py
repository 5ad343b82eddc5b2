"""Ctrl-C during a first call, at any step of it, leaves a model that works, and nothing behind."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from gpipe_fast import GPipe, progress
from gpipe_fast.balance import automatic
from gpipe_fast.lower.lower import lower
from gpipe_fast.lower.program import ProgramIR
from gpipe_fast.lower.split import split
from gpipe_fast.runtime.compile import Compiler
from gpipe_fast.runtime.compiled import CompiledStage
from gpipe_fast.runtime.stage import TRACING_LOCK
from gpipe_fast.trace.dynamo import Captured, capture
from gpipe_fast.trace.join import join
from gpipe_fast.trace.joint_graph import parameters_of
from gpipe_fast.trace.layer_states import describe
from tests.internals import balance_is_pending, compiler_of, stages_are_idle, template_of
from tests.programs import run_python
from tests.reference import loop_step, pipeline_step, unequal

pytestmark = pytest.mark.usefixtures("one_thread")

M = 2


class Block(nn.Module):
    """A layer with a parameter, buffers and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.dropout(self.norm(self.linear(x)).tanh())
        return y


def pipe() -> GPipe:
    torch.manual_seed(0)
    layers = nn.Sequential(Block(), nn.Linear(6, 6), Block(), Block())
    return GPipe(layers, [2, 2], chunks=M, checkpoint="always")


def features(batch: int = 12) -> Tensor:
    return torch.randn(batch, 6, generator=torch.Generator().manual_seed(batch))


@contextlib.contextmanager
def interrupt_at(code: CodeType, number: int) -> Iterator[None]:
    """Raises KeyboardInterrupt in the block at the given call of a function of this code, as Ctrl-C may."""
    calls = 0

    def trace(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        if frame.f_code is code:
            calls += 1
            if calls == number:
                sys.settrace(None)
                raise KeyboardInterrupt

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        sys.settrace(before)
    assert calls >= number


def tensors_of(model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns parameters and buffers with copies of them."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: (tensor, tensor.detach().clone()) for name, tensor in named}


def assert_works(model: GPipe, before: dict[str, tuple[Tensor, Tensor]]) -> None:
    """Asserts that nothing is left of an interrupted call, and that the next step is the plain loop's."""
    assert_unchanged(model, before)
    held = [value for module in model.modules() for value in vars(module).values()]
    assert not any(isinstance(value, FakeTensor) for value in held)
    assert locks_are_free(model)
    assert not [thread for thread in threading.enumerate() if thread.name == "gpipe_fast progress"]
    assert getattr(progress._active, "work", None) is None
    assert sys.getprofile() is None
    assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0
    x = features()
    ours = pipeline_step(model, x, input_gradient=False)
    assert unequal(ours, loop_step(nn.Sequential(*model), x, M, input_gradient=False)) == []


def assert_unchanged(model: GPipe, before: dict[str, tuple[Tensor, Tensor]]) -> None:
    for name, (tensor, value) in tensors_of(model).items():
        assert tensor is before[name][0]
        assert torch.equal(value, before[name][1])


def locks_are_free(model: GPipe) -> bool:
    """Returns whether another thread can acquire the lock of tracing and those of the stages."""
    found: list[bool] = []

    def acquire() -> None:
        found.append(TRACING_LOCK.acquire(blocking=False))
        if found[0]:
            TRACING_LOCK.release()
        found.append(stages_are_idle(model))

    thread = threading.Thread(target=acquire)
    thread.start()
    thread.join()
    return found == [True, True]


# A function, and the number of its call at which the signal arrives.
PLACES: dict[str, tuple[Callable[..., Any], int]] = {
    "the description of the layers": (describe, 1),
    "the list of parameters": (parameters_of, 1),
    "the first capture of a layer": (capture, 1),
    "the run of a captured graph": (Captured.run, 1),
    "the run of a captured graph in a trace": (Captured.run, 3),
    "the trace of a backward": (torch.autograd.grad, 1),
    "joining the graphs of equal layers": (join, 1),
    "splitting the second stage": (split, 2),
    "lowering a forward": (lower, 1),
    "lowering a backward": (lower, 2),
    "building a program": (ProgramIR.build, 2),
    "making a segment": (CompiledStage.segment, 3),
    "the likely layouts of gradients": (Compiler._compile_for_gradients, 1),
}


@pytest.mark.parametrize(
    ("place", "call"), [*zip(PLACES.values(), itertools.cycle([GPipe.prepare, GPipe.__call__]))], ids=PLACES
)
def test_an_interrupted_call_leaves_a_model_that_works(
    place: tuple[Callable[..., Any], int], call: Callable[[GPipe, Tensor], object]
) -> None:
    model, (function, number) = pipe(), place
    before = tensors_of(model)
    with interrupt_at(function.__code__, number):
        call(model, features())
    assert_works(model, before)


@pytest.mark.parametrize("number", [1, 2])
def test_an_interrupted_template_is_made_by_the_next_call(number: int) -> None:
    """However often it is interrupted: these are no failed attempts, after which no template is made."""
    torch.manual_seed(0)
    model = GPipe(nn.Sequential(Block(), Block()), [2], chunks=M)
    model.prepare(features(8), also=[features(10)])
    before = tensors_of(model)
    for _ in range(4):
        with interrupt_at(Captured.run.__code__, number):
            model.prepare(features(12))
    assert template_of(compiler_of(model)) is None
    assert_works(model, before)
    assert template_of(compiler_of(model)) is not None


def test_an_interrupted_measurement_is_repeated_by_the_next_call() -> None:
    torch.manual_seed(0)
    model = GPipe(nn.Sequential(*(Block() for _ in range(3))), devices=["cpu", "cpu"], chunks=8)
    with interrupt_at(automatic.profile_layers.__code__, 1):
        model(features(16))
    assert balance_is_pending(model)
    before = tensors_of(model)
    with interrupt_at(Block.forward.__code__, 3):
        model(features(16))
    assert_unchanged(model, before)
    model(features(16))
    assert not balance_is_pending(model)


@pytest.mark.parametrize(("kind", "count"), [("dispatch", 40), ("functions", 6)])
def test_a_signal_anywhere_does_not_end_the_process(kind: str, count: int) -> None:
    check_interrupts(kind, count, 0)


@pytest.mark.extended
@pytest.mark.parametrize("first", [1, *(pytest.param(n, marks=pytest.mark.soak) for n in range(2, 20))])
@pytest.mark.parametrize(("kind", "count"), [("dispatch", 200), ("functions", 100)])
def test_a_signal_at_further_places_does_not_end_the_process(kind: str, count: int, first: int) -> None:
    check_interrupts(kind, count, first)


def check_interrupts(kind: str, count: int, first: int) -> None:
    """Asserts that Ctrl-C at some ``count`` places of a first call raises KeyboardInterrupt, and no more."""
    program = str(Path(__file__).with_name("interrupt_programs.py"))
    done = run_python(program, kind, str(count), str(first), timeout=60 + 10 * count, GPIPE_FAST_PROGRESS="0")
    assert done.stdout.endswith(" children\n"), done.stderr
    assert done.stdout.count("\n") == 1, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) >= count
