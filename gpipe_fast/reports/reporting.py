"""The methods of `GPipe` that say how it runs, and what would make it faster or smaller."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from gpipe_fast.container import Container, runner_of
from gpipe_fast.devices import Device, absent_gpu
from gpipe_fast.layers.structure import Inputs, call_unpacked
from gpipe_fast.profile import profile_layers
from gpipe_fast.reports.advice import LayerCosts
from gpipe_fast.reports.explanation import Explanation, explain_call, on_absent_device
from gpipe_fast.reports.memory_report import MemoryReport, OptimizerChoice, optimizer_bytes
from gpipe_fast.reports.recording import Recording, record
from gpipe_fast.reports.report import Report
from gpipe_fast.reports.steps import Steps, backward_of_sum
from gpipe_fast.runtime.planner import failure_message
from gpipe_fast.runtime.runner import Runner, StepInputs
from gpipe_fast.runtime.stage import TRACING_LOCK
from gpipe_fast.runtime.stage_memory import StageBytes, stage_bytes
from gpipe_fast.trace.joint_graph import parameters_of
from gpipe_fast.trace.traceability import Untraceable
from gpipe_fast.training.losses import check_target, loss_of
from gpipe_fast.training.step import Objective, targets_of, with_loss
from gpipe_fast.unsupported import uncompiled

# The seconds for which layers are measured for another balance, each time.
_PROFILE_SECONDS = 0.25


class Reporting(Container):
    """The methods of a pipeline that say how it runs: `report`, `memory`, `explain` and `recording`."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """As for `GPipe.step`."""
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
        the shortest durations over the recorded steps; steps with twice, or else half, as many micro-batches,
        and again while that gains, and with as many threads as processors run in turn with the present ones;
        layers are measured one by one. Left out are changes that are predicted to gain less than 3%. If the
        recorded steps differ too much, or take much longer than their actions alone, the report says for
        which changes it does not predict a gain.

        With a mesh, all ranks call this, and get the same report of all stages. To apply advice, set it on
        all ranks; another balance needs a new pipeline.

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
        with self._runner.processes.reporting():
            return steps_of(self, args, kwargs, target, loss_fn, normalizer).report(check)

    @uncompiled
    def memory(
        self,
        *args: Any,
        target: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        normalizer: Any = None,
        optimizer: OptimizerChoice = None,
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
            device: ``"cuda"`` for stages that are on a GPU each, which the machine need not have; the layers
                may then be on the meta device. By default the model's own devices.
            kwargs: The first layer's keyword arguments.

        Raises:
            TypeError: As for `step`; or ``optimizer`` is none; or ``device`` is neither a name, a number
                nor a device.
            ValueError: As for `step`; or the model has no layers; or ``device`` is no CUDA device.
            RuntimeError: As for `forward`.
        """
        runner, absent = self._runner, None
        if device is not None:
            first = absent_gpu(device)
            absent = [torch.device(first.type, stage) for stage in range(len(runner.stages))]
        if not len(self):
            raise ValueError("the model has no layers, so it needs no memory; pass some to GPipe")
        if absent is not None and runner.settings.memory_limit is not None:
            raise ValueError(
                "device was passed, but memory holds for the model's own devices; set model.memory_limit = "
                "None, and model.checkpoint, to predict for another device"
            )
        inputs, given, longer = runner.checked_inputs(args, kwargs, allow_meta=True), None, runner
        if loss_fn is not None:
            targets = targets_of(runner, target)
            if targets is not None:
                targets = targets.with_memory(runner.placement.devices[-1])
            if not runner.processes.is_mesh:
                check_target(loss_fn, None if targets is None else targets.tensors, "memory")
            objective = Objective(loss_of(loss_fn, normalizer))
            longer, given = with_loss(runner, inputs, self.training, objective, targets)
        found, unknown = _predicted(longer, inputs, self.training, given, absent)
        devices = absent or self.devices
        each = zip(_parameters_by_stage(runner), devices, strict=True)
        return MemoryReport(
            tuple(found),
            tuple(optimizer_bytes(optimizer, own, place) for own, place in each),
            tuple(map(str, devices)),
            tuple(unknown),
        )

    def explain(self, *args: Any, device: Device | None = None, **kwargs: Any) -> Explanation:
        """Explains what fused kernels compute in each stage, and what they save; runs no layer.

        Args:
            args: The arguments of a call, as for `forward`: a mini-batch. Only shapes, dtypes, strides and
                ``requires_grad`` are read.
            device: A CUDA device for which the stages are explained, as ``'cuda'``. The machine need not have
                it. By default the model's own devices; on the CPU, nothing is fused.
            kwargs: The keyword arguments of a call.

        Returns:
            The explanation, for the present grad mode, autocast mode and settings of the model.
            Autocast for the CPU counts as autocast for a device that is named. ``print`` shows tables.

        Raises:
            TypeError: As for `forward`; or ``device`` is neither a name, a number nor a device.
            ValueError: As for `forward`; or ``device`` is no CUDA device.
            RuntimeError: A stage cannot be traced and ``backend='aten'``, or another thread runs layers.
        """
        place = None if device is None else absent_gpu(device)
        runner = self._runner
        inputs = runner.checked_inputs(args, kwargs)
        with TRACING_LOCK:
            runner.detect_changes()
            planner = runner.planner
            if place is not None:
                planner = runner.planner_for(self.balance, [place] * len(self.balance), is_absent=True)
            call = runner.call_of(inputs, self.training)
            # What is saved is chosen for the model's own devices, whose limits are known.
            return explain_call(planner, runner.within_memory(runner.planner, call, self.training), place)

    def recording(self) -> AbstractContextManager[Recording]:
        """Returns a context manager that records the begin and end of every action and every wait.

        With a mesh, all ranks record the same calls. At the end of the block they exchange what they have
        recorded, so that each has the events of all stages, on the clock of the first rank; it raises a
        RuntimeError if a rank has failed or does not answer within ``timeout``. If an exception leaves the
        block, the recording has only what ran in this process.
        """
        return record(self._runner)


def steps_of(
    model: Reporting,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: Any,
    loss_fn: Callable[..., Any] | None,
    normalizer: Any,
) -> Steps:
    """Returns steps with arguments as for `report`."""
    if not len(model):
        raise ValueError("the model has no layers, so there is nothing to report; pass some to GPipe")
    if target is not None and loss_fn is None:
        raise ValueError("target was passed without a loss; pass loss_fn, which computes it from the target")
    inputs = runner_of(model).checked_inputs(args, kwargs)
    loss = loss_fn if isinstance(loss_fn, torch.nn.Module) else None

    def run() -> None:
        tensors = [x.detach().requires_grad_(x.requires_grad) for x in inputs.tensors]
        step: Callable[..., Any] = model
        if loss_fn is not None:
            step = functools.partial(model.step, target=target, loss_fn=loss_fn, normalizer=normalizer)
        found = call_unpacked(step, inputs.build(tensors))
        if loss_fn is None:
            backward_of_sum(found)

    def layers(num_microbatches: int) -> tuple[list[LayerCosts], list[int]] | None:
        if has_mesh:
            return _measure_layers_of_ranks(model)
        first = inputs.structure.build(inputs.dims.split(inputs.tensors, num_microbatches)[0])
        return _measure_layers(model, model, first, model.devices[0])

    is_one_call, batch_size = loss_fn is not None, inputs.batch_size
    has_mesh = runner_of(model).processes.is_mesh
    return Steps(model, run, model.recording, batch_size, is_one_call, layers, loss, has_mesh)


def _measure_layers(
    model: Reporting, layers: Any, microbatch: Any, device: torch.device
) -> tuple[list[LayerCosts], list[int]] | None:
    """Returns the costs of layers, measured twice, and the balance; None if they cannot be measured."""
    found, threads = [], runner_of(model).threads()
    for _ in range(2):
        try:
            each = profile_layers(
                layers, microbatch, device=device, timeout=_PROFILE_SECONDS, threads=threads, progress=False
            )
        except Exception:
            return None
        seconds = [own.forward_seconds + own.backward_seconds for own in each]
        found.append(LayerCosts(seconds, [own.boundary_bytes for own in each]))
    return found, model.balance


def _measure_layers_of_ranks(model: Reporting) -> tuple[list[LayerCosts], list[int]] | None:
    """Returns the costs of all layers, each measured by its rank with made-up inputs; None if unknown."""
    runner = runner_of(model)
    plan, own = runner.runners[-1].planner.latest, []
    compiled = None if plan is None else plan.compiled
    for stage in runner.own_stages if compiled is not None else ():
        assert compiled is not None
        spec = compiled[0][stage].segment_key.input_specs
        tensors = [torch.zeros_like(each.example()) for each in spec.tensors[: spec.num_plain]]
        microbatch = spec.structure.build([x.requires_grad_(x.is_floating_point()) for x in tensors])
        found = _measure_layers(model, runner.partitions()[stage], microbatch, model.devices[stage])
        own.append([stage, [] if found is None or runner.stages[stage].pops else found[0]])
    each = sorted(part for _, parts in runner.processes.exchange(own) for part in parts)
    if len(each) < len(model.balance) or not all(costs for _, costs in each):
        return None
    halves = [[costs[i] for _, costs in each] for i in range(2)]
    joined = [LayerCosts(*map(list, map(chain.from_iterable, zip(*half, strict=True)))) for half in halves]
    return joined, model.balance


def _predicted(
    runner: Runner,
    inputs: Inputs,
    training: bool,
    given: StepInputs | None,
    devices: list[torch.device] | None,
) -> tuple[Sequence[StageBytes | None], Sequence[str]]:
    """Returns what each stage needs; if that is not known, None and why, for each stage.

    Args:
        runner: the runner of the layers, and of the loss if there is one.
        inputs: the inputs.
        training: whether the model is in train mode.
        given: what a step gives to its loss.
        devices: the devices of the stages, which the machine need not have; None for their own.
    """
    runner.choose_balance(inputs, training)
    with TRACING_LOCK:
        call = runner.updated_call(inputs, training, given)
        call = runner.within_memory(runner.planner, call, training)
        if devices is None:
            planner = runner.planner
            plan = planner.plan(call)
            if plan.compiled is not None:
                return stage_bytes(runner.stages, plan.compiled, call), ()
            return [None] * len(runner.stages), planner.unknown_stages(plan.failed_stage, plan.obstacle)
        # All stages are traced on the first device.
        balance = runner.placement.balance
        planner = runner.planner_for(balance, [devices[0]] * len(devices), is_absent=True)
        nothing = [None] * len(devices)
        if planner.backend == "eager":
            return nothing, planner.unknown_stages(None, "")
        with on_absent_device(call, devices[0]) as absent:
            absent.state.update_key()  # under these modes
            try:
                compiled = planner.compile(absent)
            except Untraceable as error:
                return nothing, planner.unknown_stages(error.stage, failure_message(error, planner.stages))
            return stage_bytes(runner.stages_of(balance, devices, is_absent=True), compiled, absent), ()


def _parameters_by_stage(runner: Runner) -> list[list[Tensor]]:
    """Returns the parameters of each stage; one that several stages have, only in the first of them."""
    owners: dict[Tensor, int] = {}
    for index, stage in enumerate(runner.stages):
        for parameter in parameters_of(stage.layers):
            owners.setdefault(parameter, index)
    return [[p for p, owner in owners.items() if owner == i] for i in range(len(runner.stages))]
