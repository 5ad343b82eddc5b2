"""`tune`: tries settings that a report predicts to be faster, or finds the fastest that fit into a memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch

from gpipe_fast.container import runner_of
from gpipe_fast.from_model.pipelined import Pipelined, steps_of_model
from gpipe_fast.gpipe import GPipe
from gpipe_fast.reports.memory_report import MemoryChoice, MemoryChoices
from gpipe_fast.reports.reporting import steps_of
from gpipe_fast.reports.steps import Tuning
from gpipe_fast.runtime.first_balance import Estimates, fastest_of
from gpipe_fast.runtime.planner import Call
from gpipe_fast.runtime.settings import MemoryLimit, checked_memory
from gpipe_fast.runtime.stage import TRACING_LOCK
from gpipe_fast.unsupported import uncompiled

# How many choices `tune` returns for a memory.
_NUM_CHOICES = 3


@uncompiled
def tune(
    model: Any,
    *args: Any,
    target: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    normalizer: Any = None,
    seconds: float = 60.0,
    progress: bool | None = None,
    memory: MemoryLimit = None,
    **kwargs: Any,
) -> Tuning | MemoryChoices:
    """Tries settings of a pipeline on one mini-batch, in the order of the gain that its reports predict.

    ::

        found = gpipe_fast.tune(model, x, target=y, loss_fn=torch.nn.functional.cross_entropy)
        print(found)  # a table, and the fastest settings as a line of code

    Each trial records some steps and makes a report, whose advice (see `GPipe.report`) is tried later: the
    number of micro-batches, the balance, threads, the checkpoint mode and the schedule. At the end, the
    present and the fastest settings are measured in turn. The model is left as it was, as by `GPipe.report`.

    ``checkpoint='never'`` and fewer micro-batches take more memory; a trial that runs out of it counts as
    failed.

    With ``memory``, nothing runs but operators, to measure them: returned are the fastest settings whose
    training step fits into that memory, and two runners-up, as code to paste::

        print(gpipe_fast.tune(model, x, memory="20GiB"))

    All cuts into as many stages as the model has are compared, each with the least recomputation that fits,
    under the model's schedule; if the model has ``chunks='auto'``, also other numbers of micro-batches.

    Args:
        model: A `GPipe`, or a model made by `GPipe.from_model`.
        args: The model's arguments: a mini-batch.
        target: As for `GPipe.report`; only for a `GPipe`.
        loss_fn: As for `GPipe.report`; only for a `GPipe`.
        normalizer: As for `GPipe.report`; only for a `GPipe`.
        seconds: The time after which no new trial begins.
        progress: Whether to show the progress at once, in a line that is rewritten; by default only after two
            seconds and on a terminal, and elsewhere one line says that settings are tried.
        memory: The bytes of each device, as for `GPipe`; only for a `GPipe` in training mode, without mesh.
        kwargs: Keyword arguments of the model.

    Raises:
        TypeError: ``model`` is no pipeline; or as for `GPipe.report`.
        ValueError: ``seconds`` is not a positive number, or the model has a mesh; or as for `GPipe.report`.
            No settings fit into ``memory``; the message says what is needed at least.
        RuntimeError: As for `GPipe.report`.
    """
    if not isinstance(model, (GPipe, Pipelined)):
        raise TypeError(
            "tune takes a GPipe or a model made by GPipe.from_model, got "
            f"{type(model).__name__}; wrap the model in one of them"
        )
    if not isinstance(seconds, (int, float)) or not 0 < seconds < float("inf"):
        raise ValueError(f"seconds must be a positive number, got {seconds!r}")
    if isinstance(model, GPipe) and (processes := runner_of(model).processes).is_mesh:
        raise ValueError(
            "tune stops by the clock of one process, got a pipeline with a mesh, on rank "
            f"{processes.rank} of {processes.size}; call model.report(...) on all ranks, and set what "
            "it advises on all"
        )
    if memory is not None:
        if not isinstance(model, GPipe):
            raise TypeError(
                "tune with memory takes a GPipe so far, got a model made by GPipe.from_model; pass memory to "
                "GPipe.from_model, which chooses what to recompute"
            )
        return _choices_within(model, args, kwargs, memory)
    given = (target, loss_fn, normalizer)
    if isinstance(model, GPipe):
        return steps_of(model, args, kwargs, *given).tune(seconds, progress)
    if any(value is not None for value in given):
        raise TypeError(
            "a model made by GPipe.from_model computes its own loss, but target, loss_fn or normalizer was "
            "passed; leave them out, and pass the model's labels"
        )
    return steps_of_model(model, args, kwargs).tune(seconds, progress)


def _choices_within(
    model: GPipe, args: tuple[Any, ...], kwargs: dict[str, Any], memory: MemoryLimit
) -> MemoryChoices:
    """Returns the fastest settings of a pipeline that fit into the memory of each device; see `tune`.

    Raises:
        ValueError: nothing fits, an argument is invalid, or the model is not in training mode.
    """
    runner = runner_of(model)
    limits = checked_memory(memory, model.devices)
    inputs = runner.checked_inputs(args, kwargs)
    if limits is None or not model.training or runner.processes.is_mesh:
        raise ValueError(
            f"tune with memory={memory!r} is for training in one process; call model.train(), and pass no "
            "mesh to GPipe"
        )
    counts = [runner.chunks_of(inputs.batch_size)]
    if model.chunks == "auto":
        counts = sorted({*counts, *(2**i for i in range(inputs.batch_size.bit_length()))})
    estimates: list[tuple[float, tuple[int, ...], Call]] = []
    smallest: list[tuple[tuple[int, ...], Call]] = []
    with TRACING_LOCK, torch.enable_grad():
        runner.detect_changes()
        for count in counts:
            call = replace(runner.call_of(inputs, training=True), chunks=count)
            own = Estimates.of(runner, call, model.schedule)
            estimates += [(*each, call) for each in own.fastest(limits, _NUM_CHOICES)]
            smallest.insert(0, (own.smallest(), call))
        estimates.sort(key=itemgetter(0))
        found, failure = fastest_of(runner, [each[1:] for each in estimates[: 2 * _NUM_CHOICES]], limits)
        if not found:
            found, failure = fastest_of(runner, smallest, limits)
    if failure is not None and not found:
        raise failure
    return MemoryChoices(
        tuple(
            MemoryChoice(
                {"balance": list(balance), "chunks": call.chunks, "memory_limit": memory},
                choice.nanoseconds / 1e9,
                tuple(own.total for own in choice.bytes),
            )
            for choice, balance, call in found[:_NUM_CHOICES]
        )
    )
