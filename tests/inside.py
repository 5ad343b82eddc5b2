"""What tests see and change inside a `GPipe`; the one file of theirs that knows its private attributes."""

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

# Failures


def delay(model: GPipe, seed: int, longest_us: int) -> None:
    """Delays every action of the steps to come by up to this long, before and after it."""
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
    """Lets an action raise in the steps to come, after so many operators of its program, beside delays."""
    plant_failures(model, [(str(action), after, error)], seed, longest_us)


def plant_failures(
    model: GPipe, failures: Sequence[tuple[str, int, str]], seed: int = 0, longest_us: int = 0
) -> None:
    """Lets several actions raise: each by name, after so many operators, this error."""
    pipeline_of(model).disturb(seed, longest_us, failures)


def disturb_no_more(model: GPipe) -> None:
    """Takes delays and failures back."""
    pipeline_of(model).disturb()


# What a pipeline has made


def pipeline_of(model: GPipe) -> Pipeline:
    """The C++ pipeline."""
    return model._pipeline


def compiler_of(model: GPipe) -> Compiler:
    """Traces the stages, and counts how often."""
    return model._planner._compiler


def plan_of(model: GPipe, x: Tensor) -> Plan:
    """The plan of a call, which is traced for it but not run."""
    return model._plan(Inputs.of((x,), {}))


def latest_plan(model: GPipe) -> Plan:
    """That of the latest call."""
    assert model._planner.latest is not None
    return model._planner.latest


def num_plans(model: GPipe) -> int:
    """How many signatures have one."""
    return len(model._planner._plans)


def plan_by(model: GPipe, x: Tensor, schedule: Schedule) -> None:
    """Makes the next call with such an input take place in this schedule."""
    model._planner._plans.clear()
    model._planner._last = None
    with mock.patch.object(gpipe_fast.runtime.plan, "fill_drain", return_value=schedule):
        assert plan_of(model, x).schedule is schedule


def parts_of(model: GPipe) -> list[object]:
    """The Python objects that a pipeline owns, but for its layers."""
    return [model._planner, *model._planner._segments, *model._stages]


def remembered(model: GPipe) -> tuple[list[tuple[int, int]], int]:
    """How many segments are remembered, by stage: in Python and lowered; and how many gradients' layouts."""
    planner = model._planner
    return [(len(s._interpreted), len(s._lowered)) for s in planner._segments], len(planner._arrived)


def template_of(compiler: Compiler) -> Template | None:
    """The one of a compiler that has traced a single kind of input."""
    (kind,) = compiler._kinds.values()
    return kind.template


def native_call(model: GPipe, x: Tensor) -> mock._Call:
    """The arguments with which a call reaches the C++ pipeline, which does not run."""
    with mock.patch.object(model, "_pipeline") as stand_in:
        stand_in.forward.return_value = ([x], ONE_TENSOR)
        model(x)
    return stand_in.forward.call_args


@contextmanager
def remembering(count: int) -> Iterator[None]:
    """Lets the stages of a pipeline that is made here remember so many segments each, and no more."""
    with (
        mock.patch.object(segments, "REMEMBERED", count),
        mock.patch.object(planner, "REMEMBERED", count),
    ):
        yield


@contextmanager
def layers_can_run_while_one_is_compiled(model: GPipe) -> Iterator[list[bool]]:
    """Lists of every segment that a backward has compiled whether layers could run meanwhile, by stage."""
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


# Rules taken away


@contextmanager
def without_watching_buffers() -> Iterator[None]:
    """Lets tracing overlook that a forward replaces buffers."""
    with mock.patch.object(function, "_tensors", return_value={}):
        yield


@contextmanager
def with_autocast_cache() -> Iterator[None]:
    """Lets tracing keep autocast's cache of weights."""
    with mock.patch.object(aot, "_uncached_autocast", nullcontext):
        yield
