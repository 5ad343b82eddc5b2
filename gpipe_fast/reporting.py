"""`GPipe.report`: records some steps, says where their time goes, and what would make them faster."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from gpipe_fast import progress
from gpipe_fast.balance.partition import balance_by_cost
from gpipe_fast.balance.profile import profile
from gpipe_fast.layers.structure import Inputs, LayerSequence, call_unpacked, flatten
from gpipe_fast.runtime.advice import Costs, improvements
from gpipe_fast.runtime.recording import Recording
from gpipe_fast.runtime.report import Report
from gpipe_fast.stages import partitions_of
from gpipe_fast.uncompiled import uncompiled

# The number of steps that are recorded for each setting, after one that is not.
_NUM_STEPS = 5
# The seconds for which layers are measured for another balance.
_PROFILE_SECONDS = 0.5


class Reporting(LayerSequence):
    """The method `report` of a pipeline."""

    balance: list[int]
    devices: list[torch.device]
    chunks: Any
    checkpoint: str
    schedule: Any
    threads_per_stage: int | None

    def recording(self) -> AbstractContextManager[Recording]:
        """Returns a context manager that records the begin and end of every action and every wait."""
        raise NotImplementedError

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """As for `Training.step`."""
        raise NotImplementedError

    def _checked_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        raise NotImplementedError

    def _threads(self) -> int:
        """Returns the number of intra-op threads of a stage."""
        raise NotImplementedError

    @uncompiled
    def report(
        self,
        *args: Any,
        target: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        normalizer: Any = None,
        check: bool = False,
        **kwargs: Any,
    ) -> Report:
        """Records some steps, and returns where the time of the median one goes, and what to change.

        ::

            print(model.report(x, target=y, loss_fn=torch.nn.functional.cross_entropy))

        The advice is the first three of: another checkpoint mode, schedule, balance or number of
        micro-batches. Each is predicted by a simulation with the measured durations; for other numbers of
        micro-batches, some steps are recorded with twice as many, or half as many. Changes that are predicted
        to gain less than 3% are left out. Numbers depend on the machine and on what else runs on it.

        Parameters, gradients, buffers, random generators and settings are left as they were, but a balance
        that is not measured yet is measured, as by the first call.

        Args:
            args: The first layer's arguments, as for `forward`: a mini-batch.
            target: As for `step`.
            loss_fn: As for `step`. None: the sum of ``forward``'s outputs takes the place of the loss; if
                gradients are disabled or nothing requires one, forwards alone are recorded.
            normalizer: As for `step`.
            check: Whether to record some steps with the first piece of advice, too, and print measured
                beside predicted. Advice with which a step fails is left out.
            kwargs: Keyword arguments of the first layer.

        Returns:
            The report.

        Raises:
            TypeError: As for `forward`, or as for `step`.
            ValueError: As for `forward`, or as for `step`; or the model has no layers.
            RuntimeError: As for `forward`, or as for `step`; or the model is being recorded.
        """
        if not len(self):
            raise ValueError("the model has no layers, so there is nothing to report; pass some to GPipe")
        inputs = self._checked_inputs(args, kwargs)

        def run() -> None:
            tensors = [x.detach().requires_grad_(x.requires_grad) for x in inputs.tensors]
            step: Callable[..., Any] = self
            if loss_fn is not None:
                step = functools.partial(self.step, target=target, loss_fn=loss_fn, normalizer=normalizer)
            found = call_unpacked(step, inputs.build(tensors))
            if loss_fn is None:
                _backward(found)

        with _unchanged(self), progress.working("recording steps"):
            report, costs = self._measure(run)
            found = improvements(
                report.step,
                costs,
                batch_size=inputs.batch_size,
                schedule=None if loss_fn is None else self.schedule,
                checkpoint=self.checkpoint,
                other=functools.partial(self._measure_other, run, costs, inputs.batch_size),
                new_balance=functools.partial(self._new_balance, inputs, costs.num_microbatches),
            )
            while check and found and found[0].measured is None:
                try:
                    with self._changed(found[0].settings):
                        found[0] = replace(found[0], measured=self._measure(run)[0].step)
                except Exception:  # a layer refuses micro-batches of this size
                    del found[0]
        return replace(report, advice=tuple(found))

    def _measure(self, run: Callable[[], None]) -> tuple[Report, Costs]:
        """Returns the report of the median step, and its durations."""
        run()
        found = []
        for _ in range(_NUM_STEPS):
            with self.recording() as recording:
                run()
            found.append(recording)
        reports = [recording.report() for recording in found]
        middle = sorted(range(_NUM_STEPS), key=lambda i: reports[i].step)[_NUM_STEPS // 2]
        return reports[middle], Costs.of(found[middle].phases(), [each.seconds() for each in found])

    def _measure_other(self, run: Callable[[], None], costs: Costs, batch_size: int) -> Costs | None:
        """Returns the durations with another number of micro-batches; None if there is no other."""
        number = costs.num_microbatches
        for other in (2 * number, number // 2):
            if 1 <= other <= batch_size and other != number:
                # A layer may refuse such micro-batches, as batch norm refuses single samples.
                with contextlib.suppress(Exception), self._changed({"chunks": other}):
                    return self._measure(run)[1]
        return None

    def _new_balance(self, inputs: Inputs, chunks: int) -> tuple[list[int], list[float]] | None:
        """Returns a balance by measured time, and its part of the present one's time for each stage."""
        first = inputs.dims.split(inputs.tensors, chunks)[0]
        threads = torch.get_num_threads()
        torch.set_num_threads(self._threads())
        try:
            found = profile(
                self, inputs.structure.build(first), self.devices[0], timeout=_PROFILE_SECONDS, progress=False
            )
        except Exception:  # layers that cannot be measured one by one
            return None
        finally:
            torch.set_num_threads(threads)
        seconds = [each.forward_seconds + each.backward_seconds for each in found]
        balance = balance_by_cost(len(self.balance), seconds)
        if balance == self.balance:
            return None
        new, old = ([sum(part) for part in partitions_of(seconds, each)] for each in (balance, self.balance))
        return balance, [a / max(b, 1e-9) for a, b in zip(new, old, strict=True)]

    @contextlib.contextmanager
    def _changed(self, settings: dict[str, Any]) -> Iterator[None]:
        """Changes settings for a block."""
        before = {name: getattr(self, name) for name in settings}
        try:
            for name, value in settings.items():
                setattr(self, name, value)
            yield
        finally:
            for name, value in before.items():
                setattr(self, name, value)


def _backward(output: Any) -> None:
    """Runs the backward of the sum of outputs, if they require a gradient."""
    needed = [x for x in flatten(output)[0] if x.requires_grad]
    if needed:
        torch.autograd.backward(needed, [torch.ones_like(x) for x in needed])


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Restores gradients, buffers and random generators after the block."""
    parameters, buffers = list(model.parameters()), [b for b in model.buffers() if not b.is_meta]
    gradients, values = [p.grad for p in parameters], [b.clone() for b in buffers]
    for parameter in parameters:
        parameter.grad = None
    state = random.getstate()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(state)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in zip(buffers, values, strict=True):
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
