"""Recorded steps of a pipeline: with its settings, and with others that might be faster."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import nn

from gpipe_fast import progress
from gpipe_fast.devices import available_processors
from gpipe_fast.layers.batchnorm import normalises_micro_batches
from gpipe_fast.layers.structure import flatten, stage_threads
from gpipe_fast.reports.advice import (
    LEAST_GAIN,
    Alternative,
    Costs,
    LayerCosts,
    Measurements,
    as_code,
    improvements,
)
from gpipe_fast.reports.recording import Recording, report_of
from gpipe_fast.reports.report import Report
from gpipe_fast.reports.tables import Printed, Table, failure, ms, others_running
from gpipe_fast.user_warning import no_warnings_of_idle_stages

# The limits of the number of steps that are recorded for each setting, and the seconds that they may take
# between these limits.
_NUM_STEPS, _SECONDS = (6, 30), 0.5


@dataclass(frozen=True)
class Trial:
    """Settings that `tune` tried.

    Attributes:
        settings: the values of attributes of the model that differ from the present ones.
        predicted: the predicted seconds of a step; None for the present settings.
        measured: the measured seconds of a step; None if the step failed.
        failure: the error of a step that failed; else empty.
    """

    settings: Mapping[str, Any]
    predicted: float | None
    measured: float | None
    failure: str = ""


@dataclass(frozen=True)
class Tuning(Printed):
    """What `tune` found. ``print`` shows a table of the trials, and the fastest settings as code.

    Attributes:
        trials: the trials, in the order in which they ran; the first has the present settings.
        settings: the fastest settings that differ from the present ones; empty if none is faster.
        before: the seconds of a step with the present settings, measured once more at the end.
        after: the seconds of a step with the fastest settings, measured next to it.
        is_complete: whether all advice was tried before the time was over.
    """

    trials: tuple[Trial, ...]
    settings: Mapping[str, Any]
    before: float
    after: float
    is_complete: bool

    _properties = ("code",)

    @property
    def code(self) -> str:
        """The fastest settings as a line of Python; empty if the present ones are the fastest."""
        return as_code(self.settings)

    def _headline(self) -> str:
        rest = "" if self.is_complete else " There was no time to try all advice."
        if not self.settings:
            return f"Nothing that was tried is faster than {ms(self.before)} ms.{rest}"
        gain = 1 - self.after / self.before
        return f"{ms(self.before)} ms before, {ms(self.after)} ms after, {gain:.1%} less.{rest}"

    def _parts(self) -> list[str | Table]:
        rows = [
            [
                as_code(trial.settings) or "the present settings",
                "" if trial.predicted is None else ms(trial.predicted),
                trial.failure if trial.measured is None else ms(trial.measured),
            ]
            for trial in self.trials
        ]
        table = Table("", ["settings", "predicted ms", "measured ms"], rows)
        return [table, self._headline(), *([self.code] if self.code else [])]


@dataclass
class Steps:
    """Steps of a pipeline on one mini-batch, which are recorded under its settings and under others.

    Attributes:
        model: the pipeline, whose settings are attributes.
        run: runs one step.
        recording: records what runs in a block.
        batch_size: the number of samples of the mini-batch.
        is_one_call: whether forward and backward are one call, in the order of ``model.schedule``.
        layers: measures the layers for micro-batches of this number, and returns their costs, measured
            independently once or several times, and the balance; None if they cannot be measured.
        loss: the loss, if it is a module.
        has_mesh: whether stages are in several processes, so that layers stay where they are.
    """

    model: Any
    run: Callable[[], None]
    recording: Callable[[], AbstractContextManager[Recording]]
    batch_size: int
    is_one_call: bool
    layers: Callable[[int], tuple[Sequence[LayerCosts], Sequence[int]] | None] = lambda _: None
    loss: nn.Module | None = None
    has_mesh: bool = False

    @property
    def _modules(self) -> list[nn.Module]:
        return [self.model] if self.loss is None else [self.model, self.loss]

    def report(self, check: bool) -> Report:
        """Returns the report of the median step, with advice.

        Args:
            check: whether to measure the first piece of advice, too.
        """
        with unchanged(*self._modules), progress.working("recording steps"):
            return self._report(check)

    def tune(self, seconds: float, show: bool | None) -> Tuning:
        """Tries advice, the best first, and the advice for what was tried, until the time is over.

        Args:
            seconds: the time, which the last trial may exceed.
            show: whether to show a progress bar at once.
        """
        end = time.monotonic() + seconds
        trials: list[Trial] = []
        waiting: dict[str, tuple[float | None, dict[str, Any]]] = {"": (None, {})}  # by code
        with unchanged(*self._modules), progress.working("trying settings", show=show) as work:
            while waiting and (not trials or time.monotonic() < end):
                code = min(waiting, key=lambda code: waiting[code][0] or 0.0)
                predicted, settings = waiting.pop(code)
                trial, report = self._try(settings, predicted)
                trials.append(trial)
                if report is not None:
                    tried = {as_code(each.settings) for each in trials}
                    for advice in report.advice:
                        both = settings | advice.settings
                        if advice.settings and as_code(both) not in tried:
                            waiting[as_code(both)] = advice.predicted, both
                best = min(each.measured for each in trials if each.measured is not None)
                limit = (1 - LEAST_GAIN) * best
                waiting = {key: value for key, value in waiting.items() if (value[0] or 0.0) < limit}
                work.count(int(max(0.0, seconds - (end - time.monotonic()))), int(seconds))
            fastest = min(trials, key=lambda each: float("inf") if each.measured is None else each.measured)
            settings = dict(fastest.settings)
            before = trials[0].measured or 0.0  # an error there is raised
            after = before * (median(self._beside(settings)[1]) if settings else 1.0)
        if after > (1 - LEAST_GAIN) * before:
            settings, after = {}, before
        return Tuning(tuple(trials), settings, before, after, not waiting)

    def _try(self, settings: dict[str, Any], predicted: float | None) -> tuple[Trial, Report | None]:
        try:
            with self._changed(settings):
                report = self._report(check=False)
        except Exception as error:  # a layer refuses the size, or memory does not suffice
            if not settings:  # the error is the user's
                raise
            return Trial(settings, predicted, None, failure(error)), None
        return Trial(settings, predicted, report.step), report

    def _report(self, check: bool) -> Report:
        self._num_steps = _NUM_STEPS[0]
        first = self._record(2)[1].span()  # the same in all processes
        self._num_steps = min(max(_NUM_STEPS[0], int(_SECONDS / max(first, 1e-9))), _NUM_STEPS[1])
        recorded = self._record(self._num_steps)
        costs, middle = self._costs(recorded), sorted(recorded, key=Recording.span)[len(recorded) // 2]
        report = report_of(middle, costs.seconds)
        model = self.model
        measured = Measurements(
            self._try_chunks,
            lambda: self._try_threads(costs.num_stages),
            lambda: self.layers(costs.num_microbatches),
        )
        found, withheld = improvements(
            report.step,
            _short(recorded),
            costs,
            schedule=model.schedule if self.is_one_call else None,
            checkpoint=model.checkpoint,
            measured=measured,
            batch_norm=normalises_micro_batches([model]),
            layers_stay=self.has_mesh,
        )
        while check and found and found[0].settings and found[0].measured is None and not found[0].of_a_new:
            try:
                ratio = median(self._beside(found[0].settings)[1])
                found[0] = replace(found[0], measured=report.step * ratio)
            except Exception:  # a layer refuses micro-batches of this size
                del found[0]
        spans = [each.span() for each in recorded]
        return replace(
            report,
            advice=tuple(found),
            withheld=tuple(withheld),
            spread=(min(spans), max(spans)),
            others=others_running(os.getloadavg()[0], available_processors()),
        )

    def _record(self, number: int) -> list[Recording]:
        """Records steps, after one that is not recorded."""
        self.run()
        found = []
        for _ in range(number):
            with self.recording() as recording:
                self.run()
            found.append(recording)
        return found

    def _costs(self, recorded: Sequence[Recording]) -> Costs:
        processors = float("inf")
        if not self.has_mesh and all(device.type == "cpu" for device in self.model.devices):
            processors = max(1.0, available_processors() / (self.model.threads_per_stage or 1))
        return Costs.of(
            recorded[0].phases(),
            [each.latest for each in recorded],
            [each.python for each in recorded],
            processors,
        )

    def _beside(self, settings: Mapping[str, Any]) -> tuple[Costs, list[float]]:
        """Records steps with other settings and with the present ones in turn.

        Returns:
            The durations with the other settings, and the seconds of their steps relative to the present
            ones, in each turn.
        """
        found, ratios = list[Recording](), list[float]()
        for _ in range(2):
            number = -(-self._num_steps // 2)
            with self._changed(settings):
                own = self._record(number)
                costs = self._costs(found := [*found, *own])
            ratios.append(_short(own) / _short(self._record(number)))
        return costs, ratios

    def _try_chunks(self, number: int) -> Alternative | None:
        """Tries a number of micro-batches; returns None if that fails."""
        if 1 <= number <= self.batch_size:
            # A layer may refuse such micro-batches, as batch norm refuses single samples.
            with contextlib.suppress(Exception):
                return Alternative(number, *self._beside({"chunks": number}))
        return None

    def _try_threads(self, num_stages: int) -> Alternative | None:
        """Tries the number of threads with which stages share the processors."""
        if self.has_mesh or any(device.type != "cpu" for device in self.model.devices):
            return None
        number = max(1, available_processors() // num_stages)
        present = stage_threads(self.model.threads_per_stage, num_stages)
        if number == present:
            return None
        # More threads than processors wait for each other.
        return Alternative(number, *self._beside({"threads_per_stage": number}), number < present)

    @contextlib.contextmanager
    def _changed(self, settings: Mapping[str, Any]) -> Iterator[None]:
        """Changes settings for a block."""
        before = {name: getattr(self.model, name) for name in settings}
        try:
            for name, value in settings.items():
                setattr(self.model, name, value)
            yield
        finally:
            for name, value in before.items():
                setattr(self.model, name, value)


def _short(recorded: Sequence[Recording]) -> float:
    """Returns the seconds that one of five steps does not exceed."""
    return sorted(each.span() for each in recorded)[len(recorded) // 5]


@contextlib.contextmanager
def unchanged(*modules: nn.Module) -> Iterator[None]:
    """Restores gradients, buffers and random generators after the block; it warns of no idle stages.

    Args:
        modules: the model, and others that take part in its steps, such as a loss.

    Raises:
        RuntimeError: a parameter has a hook that would update it.
    """
    named = [(name, p) for module in modules for name, p in module.named_parameters()]
    for name, parameter in named:
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise RuntimeError(
                f"the parameter {name!r} has a post-accumulate-grad hook, which a recorded step would run, "
                "and which may update it; remove the hook for the report"
            )
    parameters = [parameter for _, parameter in named]
    found = (b for module in modules for b in module.buffers())
    buffers = [b for b in found if not b.is_meta and not nn.parameter.is_lazy(b)]
    gradients, values = [p.grad for p in parameters], [b.clone() for b in buffers]
    for parameter in parameters:
        parameter.grad = None
    numpy = sys.modules.get("numpy")
    state, numpy_state = random.getstate(), numpy.random.get_state() if numpy is not None else None
    devices = sorted({p.device for p in parameters if p.is_cuda}, key=str)
    try:
        with torch.random.fork_rng(devices), no_warnings_of_idle_stages():
            yield
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in zip(buffers, values, strict=True):
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


def backward_of_sum(output: Any) -> None:
    """Runs the backward of the sum of outputs, if they require a gradient."""
    needed = [x for x in flatten(output)[0] if x.requires_grad]
    if needed:
        torch.autograd.backward(needed, [torch.ones_like(x) for x in needed])
