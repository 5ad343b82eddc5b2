"""The balance that the first call chooses: by measured times, or by what fits into a memory."""

from __future__ import annotations

import itertools
import operator
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from gpipe_fast.balance.automatic import default_balance
from gpipe_fast.layers.structure import Inputs
from gpipe_fast.lower.checkpoint import checkpoint_policy
from gpipe_fast.runtime.memory_limit import (
    Choice,
    LimitError,
    Limits,
    choice_within,
    layer_needs,
    relative_sizes,
)
from gpipe_fast.runtime.plan import StepOrder
from gpipe_fast.runtime.planner import Call
from gpipe_fast.schedule import Schedule, ScheduleChoice, schedule_for
from gpipe_fast.schedule.cuts import (
    LayerNeeds,
    best_partitions,
    needs_of_stages,
    time_of_stages,
)
from gpipe_fast.user_warning import warn_user

if TYPE_CHECKING:
    from gpipe_fast.runtime.runner import Runner

# How many of the partitions that are estimated to be fastest are traced, which takes longest, and how many
# of them that fit are enough.
_MOST_TRIED, _ENOUGH = 6, 2


def first_balance(
    runner: Runner, inputs: Inputs, training: bool, schedule: ScheduleChoice | None
) -> list[int] | None:
    """Returns the balance for the first call; None if a later call has to choose it.

    Args:
        runner: the runner of the layers.
        inputs: the inputs of the call.
        training: whether the model is in train mode.
        schedule: that of the step that follows; None if none does.

    Raises:
        LimitError: nothing fits into the memory.
    """
    limits = runner.settings.limits(runner.placement.devices)
    if limits is None:
        return _by_time(runner, inputs) or runner.placement.balance
    if not (training and torch.is_grad_enabled()):
        return None
    order = None if schedule is None else StepOrder(schedule, ())
    return _within_memory(runner, limits, replace(runner.call_of(inputs, training), order=order))


def _by_time(runner: Runner, inputs: Inputs) -> list[int] | None:
    """Returns the balance by the time of the layers on the first micro-batch of these inputs.

    If they cannot be measured, it warns and returns None.
    """
    first = inputs.dims.split(inputs.tensors, runner.chunks_of(inputs.batch_size))[0]
    try:
        return default_balance(
            len(runner.stages),
            nn.Sequential(OrderedDict(runner.children)),
            inputs.structure.build(first),
            threads=runner.settings.threads_per_stage,
            device=runner.placement.devices[0],
        )
    except Exception as error:
        warn_user(
            "layers are balanced by parameter count, unless you pass balance=[...], because measuring "
            f"their time failed: {error}"
        )
        return None


def _within_memory(runner: Runner, limits: Limits, call: Call) -> list[int]:
    """Returns the balance with which a step that fits into the memory is fastest.

    Estimates are from single layers. So the best partitions by these are compared by their plans, until two
    fit. If none does, the one that needs least is tried.

    Args:
        runner: the runner of the layers.
        limits: the bytes for each device.
        call: the call, with the order of the step that follows; None if there is none.

    Raises:
        LimitError: nothing fits into the memory.
    """
    estimates = Estimates.of(runner, call, "gpipe" if call.order is None else call.order.schedule)
    tried = [(balance, call) for _, balance in estimates.fastest(limits, _MOST_TRIED)]
    found, failure = fastest_of(runner, tried, limits, _ENOUGH)
    if not found:
        found, failure = fastest_of(runner, [(estimates.smallest(), call)], limits)
    if call.order is None and not found and failure is not None:
        raise failure
    if not found:
        return list(estimates.smallest())  # a step has a loss, too, and with it the last stage may need less
    return list(found[0][1])


def fastest_of(
    runner: Runner, tried: Sequence[tuple[tuple[int, ...], Call]], limits: Limits, enough: int | None = None
) -> tuple[list[tuple[Choice, tuple[int, ...], Call]], LimitError | None]:
    """Returns those balances and calls whose plans fit, the fastest first, and why the first other does not.

    Args:
        runner: the runner of the layers.
        tried: the balances, and the calls.
        limits: the bytes for each device.
        enough: how many that fit are enough; None for all.
    """
    found: list[tuple[Choice, tuple[int, ...], Call]] = []
    failure: LimitError | None = None
    for balance, call in tried:
        if len(found) == enough:
            break
        planner = runner.planner_for(list(balance), runner.placement.devices)
        try:
            found.append((choice_within(planner, call, limits), balance, call))
        except LimitError as error:
            failure = failure or error
    return sorted(found, key=lambda each: each[0].nanoseconds), failure


class Estimates(NamedTuple):
    """What partitions of layers are estimated from.

    Attributes:
        layers: what each layer needs.
        devices: the device of each stage.
        sizes: the size of each micro-batch, relative to the largest.
        schedule: the schedule if everything is recomputed.
    """

    layers: Sequence[LayerNeeds]
    devices: Sequence[torch.device]
    sizes: Sequence[float]
    schedule: Schedule

    @classmethod
    def of(cls, runner: Runner, call: Call, schedule: ScheduleChoice) -> Estimates:
        """Returns the estimates for a call, under a schedule."""
        devices = runner.placement.devices
        ones = [1] * len(runner.layers)
        planner = runner.planner_for(ones, [devices[0]] * len(ones))
        alone = replace(call, checkpoint=checkpoint_policy("always", len(ones), True), order=None)
        layers, sizes = layer_needs(planner, alone), relative_sizes(alone)
        recomputed = [*itertools.product(range(len(devices)), range(len(sizes)))]
        num_devices = len(set(devices))
        made = schedule_for(
            schedule, len(devices), len(sizes), num_devices=num_devices, recomputed=recomputed
        )
        return cls(layers, devices, sizes, made)

    def fastest(self, limits: Limits, count: int = 1) -> list[tuple[float, tuple[int, ...]]]:
        """Returns some times within limits, and the partitions, the least time first."""
        cost = time_of_stages(self.layers, self.devices, limits, self.sizes, self.schedule)
        return best_partitions(cost, len(self.layers), len(self.devices), count=count)

    def smallest(self) -> tuple[int, ...]:
        """Returns the partition that needs least: in all, if stages share a device, or in its worst stage."""
        join = operator.add if len({*self.devices}) < len(self.devices) else max
        cost = needs_of_stages(self.layers, self.schedule)
        [(_, balance)] = best_partitions(cost, len(self.layers), len(self.devices), join)
        return balance
