"""Access to the internals of a `GPipe` for tests; the only test file that uses its private attributes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

from torch import Tensor

import gpipe_fast.runtime.plan
from gpipe_fast import GPipe
from gpipe_fast._extension import Pipeline
from gpipe_fast.layers.structure import ONE_TENSOR, Inputs
from gpipe_fast.runtime import planner, segments
from gpipe_fast.runtime.compile import Compiler
from gpipe_fast.runtime.plan import Plan
from gpipe_fast.schedule import Schedule
from gpipe_fast.trace import aot, function
from gpipe_fast.trace.symbolic import Template

# Fault injection


def delay(model: GPipe, seed: int, longest_us: int) -> None:
    """Delays every action of later steps by random times up to ``longest_us``, before and after it."""
    pipeline_of(model).disturb(seed, longest_us)


def plant_failure(
    model: GPipe,
    action: object,
    error: str = "ValueError",
    *,
    after: int = 0,
    seed: int = 0,
    longest_us: int = 0,
) -> None:
    """Makes an action raise in later steps, after ``after`` operators of its program; also injects delays."""
    plant_failures(model, [(str(action), after, error)], seed, longest_us)


def plant_failures(
    model: GPipe, failures: Sequence[tuple[str, int, str]], seed: int = 0, longest_us: int = 0
) -> None:
    """Makes several actions raise; each failure is an action, a number of operators and an error's name."""
    pipeline_of(model).disturb(seed, longest_us, failures)


def disturb_no_more(model: GPipe) -> None:
    """Removes injected delays and failures."""
    pipeline_of(model).disturb()


# State of a pipeline


def pipeline_of(model: GPipe) -> Pipeline:
    """Returns the C++ pipeline."""
    return model._pipeline


def compiler_of(model: GPipe) -> Compiler:
    """Returns the compiler, which traces the stages and counts the traces."""
    return model._planner._compiler


def plan_of(model: GPipe, x: Tensor) -> Plan:
    """Returns the plan of a call; traces the stages if necessary, but does not run them."""
    return model._plan(Inputs.of((x,), {}))


def latest_plan(model: GPipe) -> Plan:
    """Returns the plan of the latest call."""
    assert model._planner.latest is not None
    return model._planner.latest


def num_plans(model: GPipe) -> int:
    """Returns the number of signatures with a plan."""
    return len(model._planner._plans)


def plan_by(model: GPipe, x: Tensor, schedule: Schedule) -> None:
    """Makes the next call with an input like ``x`` use the given schedule."""
    model._planner._plans.clear()
    model._planner._last = None
    with mock.patch.object(gpipe_fast.runtime.plan, "fill_drain", return_value=schedule):
        assert plan_of(model, x).schedule is schedule


def parts_of(model: GPipe) -> list[object]:
    """Returns the Python objects that a pipeline owns, except its layers."""
    return [model._planner, *model._planner._segments, *model._stages]


def remembered(model: GPipe) -> tuple[list[tuple[int, int]], int]:
    """Returns the sizes of the caches: Python and lowered segments by stage, and gradient layouts."""
    planner = model._planner
    return [(len(s._interpreted), len(s._lowered)) for s in planner._segments], len(planner._arrived)


def template_of(compiler: Compiler) -> Template | None:
    """Returns the template of a compiler that has traced a single kind of input."""
    (kind,) = compiler._kinds.values()
    return kind.template


def native_call(model: GPipe, x: Tensor) -> mock._Call:
    """Returns the arguments that a call passes to the C++ pipeline, which a mock replaces."""
    with mock.patch.object(model, "_pipeline") as stand_in:
        stand_in.forward.return_value = ([x], ONE_TENSOR)
        model(x)
    return stand_in.forward.call_args


@contextmanager
def remembering(count: int) -> Iterator[None]:
    """Limits the caches of pipelines created inside the block to ``count`` entries per stage.

    The limit applies to Python segments, to lowered segments and to gradient layouts.
    """
    with (
        mock.patch.object(segments, "REMEMBERED", count),
        mock.patch.object(planner, "REMEMBERED", count),
    ):
        yield


@contextmanager
def layers_can_run_while_one_is_compiled(model: GPipe) -> Iterator[list[bool]]:
    """Yields a list with one entry per stage for every segment that a backward compiles inside the block.

    An entry tells whether the stage's layers could run meanwhile (whether the stage's lock was free).
    """
    found: list[bool] = []

    def try_locks() -> None:
        for own in model._planner._segments:
            with ExitStack() as held:
                found.append(own.hold(held))

    def compile_now(*arguments: Any) -> Any:
        thread = threading.Thread(target=try_locks)
        thread.start()
        thread.join()
        return original(*arguments)

    original = segments.Segments._compile_now
    with mock.patch.object(segments.Segments, "_compile_now", compile_now):
        yield found


# Disabled safeguards


@contextmanager
def without_watching_buffers() -> Iterator[None]:
    """Disables the detection of buffers that a forward replaces during tracing."""
    with mock.patch.object(function, "_tensors", return_value={}):
        yield


@contextmanager
def with_autocast_cache() -> Iterator[None]:
    """Enables autocast's weight cache during tracing."""
    with mock.patch.object(aot, "_uncached_autocast", nullcontext):
        yield
