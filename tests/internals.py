"""Access to the internals of a `GPipe` for tests; the only test file that uses its private attributes."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import Tensor

from gpipe_fast import GPipe
from gpipe_fast._extension import Pipeline
from gpipe_fast.container import runner_of as runner_of
from gpipe_fast.fuse.casts import hoist_parameter_casts
from gpipe_fast.layers.structure import ONE_TENSOR, Inputs
from gpipe_fast.lower.checkpoint import SavedFraction
from gpipe_fast.lower.program import ProgramIR
from gpipe_fast.lower.split import SplitGraphs
from gpipe_fast.runtime import compiled, exit_and_fork, planner, segments
from gpipe_fast.runtime.compile import Compiler
from gpipe_fast.runtime.compiled import CompiledStage
from gpipe_fast.runtime.eviction import Eviction
from gpipe_fast.runtime.plan import PlannedCall
from gpipe_fast.runtime.stage import Stage
from gpipe_fast.trace.joint_graph import JointGraph
from gpipe_fast.trace.symbolic import Template

# Fault injection


def inject_delays(model: GPipe, seed: int, max_delay_us: int) -> None:
    """Delays every action of later steps by random times up to ``max_delay_us``, before and after it."""
    pipeline_of(model).inject_faults(seed, max_delay_us)


def inject_failure(
    model: GPipe,
    action: object,
    error: str = "ValueError",
    *,
    after: int = 0,
    seed: int = 0,
    max_delay_us: int = 0,
) -> None:
    """Makes an action raise in later steps, after ``after`` operators of its program; also injects delays."""
    inject_failures(model, [(str(action), after, error)], seed, max_delay_us)


def inject_failures(
    model: GPipe, failures: Sequence[tuple[str, int, str]], seed: int = 0, max_delay_us: int = 0
) -> None:
    """Makes several actions raise; each failure is an action, a number of operators and an error's name."""
    pipeline_of(model).inject_faults(seed, max_delay_us, failures)


def remove_faults(model: GPipe) -> None:
    """Removes injected delays and failures."""
    pipeline_of(model).inject_faults()


# State of a pipeline


def programs_of(model: GPipe) -> list[ProgramIR]:
    """Returns the lowered programs of all stages, for all signatures so far."""
    lowered = [
        found
        for stage in runner_of(model).planner.compiler.lowered()
        for found in stage.traced.lowered.values()
    ]
    return [p for found in lowered for p in (found.forward, found.backward) if p is not None]


def stages_of(model: GPipe) -> list[Stage]:
    """Returns the stages."""
    return runner_of(model).stages


def pipeline_of(model: GPipe) -> Pipeline:
    """Returns the C++ pipeline."""
    return runner_of(model).pipeline


def compiler_of(model: GPipe) -> Compiler:
    """Returns the compiler, which traces the stages and counts the traces."""
    return runner_of(model).planner.compiler


def eviction_of(model: GPipe) -> Eviction:
    """Returns the limit on the bytes of the model's plans, which counts them."""
    return runner_of(model).planner.eviction


def compiled_stages(model: GPipe) -> list[CompiledStage]:
    """Returns the cached compiled stages, the least recently used first."""
    return runner_of(model).planner.compiler.cached()


def plan_of(model: GPipe, x: Tensor) -> PlannedCall:
    """Returns the plan of a call; traces the stages if necessary, but does not run them."""
    return runner_of(model).plan(Inputs.of((x,), {}), model.training)[1]


def latest_plan(model: GPipe) -> PlannedCall:
    """Returns the plan of the latest call."""
    latest = runner_of(model).planner.latest
    assert latest is not None
    return latest


def stages_are_idle(model: GPipe) -> bool:
    """Returns whether no thread holds the lock of any stage."""
    with ExitStack() as held:
        return all(own.try_lock(held) for own in runner_of(model).planner.segments)


def balance_is_pending(model: GPipe) -> bool:
    """Returns whether the next call will measure the layers."""
    return runner_of(model).placement.is_pending


def num_plans(model: GPipe) -> int:
    """Returns the number of signatures with a plan."""
    return len(runner_of(model).planner.plans)


def owned_objects(model: GPipe) -> list[object]:
    """Returns the Python objects that a pipeline owns, except its layers."""
    runner = runner_of(model)
    return [runner, runner.planner, *runner.planner.segments, *runner.stages]


def cache_sizes(model: GPipe) -> tuple[list[tuple[int, int]], int]:
    """Returns the sizes of the caches: Python and lowered segments by stage, and gradient layouts."""
    planner = runner_of(model).planner
    return [(len(s._python_segments), len(s._lowered)) for s in planner.segments], len(
        planner._layout_history
    )


def template_of(compiler: Compiler) -> Template | None:
    """Returns the template of a compiler that has traced a single kind of input."""
    (kind,) = compiler._families.values()
    return kind.template


def native_call(model: GPipe, x: Tensor) -> mock._Call:
    """Returns the arguments that a call passes to the C++ pipeline, which a mock replaces."""
    with mock.patch.object(runner_of(model), "pipeline") as fallback:
        fallback.forward.return_value = ([x], ONE_TENSOR)
        model(x)
    return fallback.forward.call_args


@contextmanager
def limited_caches(count: int) -> Iterator[None]:
    """Limits the caches of pipelines created inside the block to ``count`` entries per stage.

    The limit applies to Python segments, to lowered segments and to gradient layouts.
    """
    with (
        mock.patch.object(segments, "CACHE_LIMIT", count),
        mock.patch.object(planner, "_MAX_PLANS", count // 2),  # two micro-batches of a plan may differ
    ):
        yield


@contextmanager
def stage_locks_while_compiling(model: GPipe) -> Iterator[list[bool]]:
    """Yields a list with one entry per stage for every segment that a backward compiles inside the block.

    An entry tells whether the stage's layers could run meanwhile (whether the stage's lock was free).
    """
    found: list[bool] = []

    def record_free_locks() -> None:
        for own in runner_of(model).planner.segments:
            with ExitStack() as held:
                found.append(own.try_lock(held))

    def compile_now(*arguments: Any) -> Any:
        thread = threading.Thread(target=record_free_locks)
        thread.start()
        thread.join()
        return original(*arguments)

    original = segments.Segments._compile_now
    with mock.patch.object(segments.Segments, "_compile_now", compile_now):
        yield found


@contextmanager
def with_hoisted_casts(hoist: bool = True) -> Iterator[None]:
    """Hoists casts of parameters in stages lowered inside the block, or does not, on any device."""

    def split(joint: JointGraph, saved_fraction: SavedFraction, **options: Any) -> SplitGraphs:
        return original(hoist_parameter_casts(joint) if hoist else joint, saved_fraction, **options)

    original = compiled.split
    with (
        mock.patch.object(compiled, "hoist_parameter_casts", lambda joint: joint),
        mock.patch.object(compiled, "split", split),
    ):
        yield


# Exit


def after_pipelines_at_exit(action: Callable[[], object]) -> None:
    """Runs an action at exit, after the pipelines are closed."""
    close_all = exit_and_fork._close_all
    atexit.unregister(close_all)
    atexit.register(action)
    atexit.register(close_all)
