"""`GPipe.report`: records some steps, says where their time goes, and what would make them faster."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from gpipe_fast.balance.profile import interpreter_seconds, profile
from gpipe_fast.devices import Device, absent_gpu
from gpipe_fast.distributed.ranks import Ranks
from gpipe_fast.layers.structure import Inputs, LayerSequence, call_unpacked, layer_title
from gpipe_fast.reports.advice import LayerCosts, Measurements
from gpipe_fast.reports.memory_report import MemoryReport, OptimizerChoice, optimizer_bytes
from gpipe_fast.reports.recording import Recording
from gpipe_fast.reports.report import Report
from gpipe_fast.reports.steps import Steps, backward_of_sum
from gpipe_fast.runtime.stage_memory import StageBytes
from gpipe_fast.unsupported import uncompiled

# The seconds for which layers are measured for another balance.
_PROFILE_SECONDS = 0.5


class Reporting(LayerSequence):
    """The method `report` of a pipeline."""

    balance: list[int]
    devices: list[torch.device]
    _ranks: Ranks | None

    def recording(self) -> AbstractContextManager[Recording]:
        """Returns a context manager that records the begin and end of every action and every wait."""
        raise NotImplementedError

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """As for `GPipe.step`."""
        raise NotImplementedError

    def _checked_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        raise NotImplementedError

    def _layers_in_python(self) -> set[int]:
        """Returns the indices of the layers that run in Python."""
        raise NotImplementedError

    def _reporting(self) -> AbstractContextManager[None]:
        """As for `GPipe._reporting`."""
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

        The advice is the first three of: another checkpoint mode, schedule, balance, number of micro-batches
        or number of threads, and layers that should not run in Python. Each is predicted by a simulation with
        measured durations: some steps are recorded with twice as many micro-batches, or half as many, and
        with as many threads as processors; layers are measured one by one. Changes that are predicted to gain
        less than 3% are left out. Numbers depend on the machine and on what else runs on it.

        With a mesh, all ranks call this, and get the same report of all stages. The advice is then a
        checkpoint mode, a schedule or a number of micro-batches; to apply it, set it on all ranks.

        Parameters, gradients, buffers, the generators of PyTorch, NumPy and Python, and settings are left as
        they were, but a balance that is not measured yet is measured, as by the first call. Hooks run.

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
            ValueError: As for `forward`, or as for `step`; or the model has no layers, or a target no loss.
            RuntimeError: As for `forward`, or as for `step`; or the model is being recorded, or a parameter
                has a hook that would update it.
        """
        with self._reporting():
            return self._steps(args, kwargs, target, loss_fn, normalizer).report(check)

    @uncompiled
    def memory(
        self,
        *args: Any,
        target: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        normalizer: Any = None,
        optimizer: OptimizerChoice = None,
        measure: bool = False,
        device: Device | None = None,
        **kwargs: Any,
    ) -> MemoryReport:
        """Returns what a step needs on each stage, in bytes, from shapes alone; runs no layer.

        ::

            print(model.memory(x, target=y, loss_fn=F.cross_entropy, optimizer=torch.optim.AdamW))

        Parameters, gradients, the state of the optimizer, and what the actions of the schedule keep, send and
        allocate: boundary tensors, saved tensors and the scratch memory of the programs, by their offsets.
        Gradients are counted as made in the step, so before it they are None.

        Args:
            args: The first layer's arguments, as for `forward`: a mini-batch. Tensors on the meta device do.
            target: As for `step`.
            loss_fn: As for `step`. None: the call and the backward of the caller's own loss, which is not
                counted, but the output is.
            normalizer: As for `step`.
            optimizer: An optimizer, or a function that makes one of a list of parameters, such as
                ``torch.optim.AdamW``; its state is counted.
            measure: Whether to record some steps, too, as `report` does, which runs the layers.
            device: ``"cuda"`` for stages that are on a GPU each, which the machine need not have; the layers
                may then be on the meta device. By default the model's own devices.
            kwargs: The first layer's keyword arguments.

        Raises:
            TypeError: As for `step`; or ``optimizer`` is none; or ``device`` is neither a name, a number
                nor a device.
            ValueError: As for `step`; or the model has no layers; or ``device`` is no CUDA device, or is
                passed with ``measure``.
            RuntimeError: As for `forward`.
        """
        absent = None
        if device is not None:
            first = absent_gpu(device)
            if measure:
                raise ValueError(
                    f"measure=True runs the layers on their own devices, got device={str(first)!r}, too; "
                    "leave one of them out"
                )
            absent = [torch.device(first.type, stage) for stage in range(len(self.devices))]
        found, unknown = self._stage_bytes(args, kwargs, target, loss_fn, normalizer, absent)
        measured = (
            self._steps(args, kwargs, target, loss_fn, normalizer).report(False).memory if measure else ()
        )
        devices = absent or self.devices
        each = zip(self._stage_parameters(), devices, strict=True)
        return MemoryReport(
            tuple(found),
            tuple(optimizer_bytes(optimizer, own, place) for own, place in each),
            tuple(map(str, devices)),
            measured,
            tuple(unknown),
        )

    def _stage_bytes(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        loss_fn: Callable[..., Any] | None,
        normalizer: Any,
        devices: Sequence[torch.device] | None,
    ) -> tuple[Sequence[StageBytes | None], Sequence[str]]:
        """Returns what each stage needs, on devices that the machine need not have, if any are given.

        If it is not known, also returns why, for each stage.
        """
        raise NotImplementedError

    def _stage_parameters(self) -> list[list[Tensor]]:
        raise NotImplementedError

    def _steps(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        loss_fn: Callable[..., Any] | None,
        normalizer: Any,
    ) -> Steps:
        """Returns steps with arguments as for `report`."""
        if not len(self):
            raise ValueError("the model has no layers, so there is nothing to report; pass some to GPipe")
        if target is not None and loss_fn is None:
            raise ValueError(
                "target was passed without a loss; pass loss_fn, which computes it from the target"
            )
        inputs = self._checked_inputs(args, kwargs)
        loss = loss_fn if isinstance(loss_fn, torch.nn.Module) else None

        def run() -> None:
            tensors = [x.detach().requires_grad_(x.requires_grad) for x in inputs.tensors]
            step: Callable[..., Any] = self
            if loss_fn is not None:
                step = functools.partial(self.step, target=target, loss_fn=loss_fn, normalizer=normalizer)
            found = call_unpacked(step, inputs.build(tensors))
            if loss_fn is None:
                backward_of_sum(found)

        def measured(num_microbatches: int) -> Measurements:
            first = inputs.structure.build(inputs.dims.split(inputs.tensors, num_microbatches)[0])
            return Measurements(
                layers=lambda: self._measure_layers(first), python=lambda: self._measure_python(first)
            )

        is_one_call, batch_size = loss_fn is not None, inputs.batch_size
        steps = functools.partial(Steps, self, run, self.recording, batch_size, is_one_call, loss=loss)
        if self._ranks is not None:  # no process has all layers
            return steps(shares_processors=False)
        return steps(measured=measured, python_stages=self._stages_in_python)

    def _stages_in_python(self) -> set[int]:
        """Returns the stages with layers that run in Python."""
        stages = [stage for stage, size in enumerate(self.balance) for _ in range(size)]
        return {stages[layer] for layer in self._layers_in_python()}

    def _measure_layers(self, microbatch: Any) -> tuple[LayerCosts, list[int]] | None:
        """Returns the costs of the layers, and the balance; None if layers cannot be measured one by one."""
        try:
            found = profile(
                self,
                microbatch,
                self.devices[0],
                timeout=_PROFILE_SECONDS,
                threads=self._threads(),
                progress=False,
            )
        except Exception:
            return None
        seconds = [each.forward_seconds + each.backward_seconds for each in found]
        return LayerCosts(seconds, [each.boundary_bytes for each in found]), self.balance

    def _measure_python(self, microbatch: Any) -> tuple[Mapping[int, float], str] | None:
        """Returns the time of each stage's layers in the interpreter, and the names of these layers."""
        in_python = self._layers_in_python()
        if not in_python:
            return None
        try:
            found = interpreter_seconds(self, microbatch, self.devices[0])
        except Exception:  # layers that cannot be measured one by one
            return None
        layers = [layer_title(index, layer) for index, layer in enumerate(self.children())]
        stages = [stage for stage, size in enumerate(self.balance) for _ in range(size)]
        seconds = dict.fromkeys((stages[layer] for layer in in_python), 0.0)
        for layer in in_python:
            seconds[stages[layer]] += found[layer]
        return seconds, ", ".join(layers[layer] for layer in sorted(in_python))
