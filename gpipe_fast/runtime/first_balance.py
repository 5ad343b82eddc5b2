"""The balance that the first call chooses: by measured times, or by what fits into a memory."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from gpipe_fast.balance.automatic import default_balance
from gpipe_fast.layers.structure import Inputs
from gpipe_fast.lower.checkpoint import checkpoint_policy
from gpipe_fast.runtime.memory_limit import Limits, choice_within, partitions_within
from gpipe_fast.runtime.plan import StepOrder
from gpipe_fast.runtime.planner import Call
from gpipe_fast.schedule import ScheduleChoice
from gpipe_fast.schedule.budget import BudgetError
from gpipe_fast.schedule.cuts import Partition
from gpipe_fast.user_warning import warn_user

if TYPE_CHECKING:
    from gpipe_fast.runtime.runner import Runner


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
        BudgetError: nothing fits into the memory.
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

    The costs of single layers are estimates of those of stages. So the fastest partition by these is
    compared with the fastest one of all, by their plans. If none fits, the one that needs least is tried.

    Args:
        runner: the runner of the layers.
        limits: the bytes for each device.
        call: the call, with the order of the step that follows; None if there is none.

    Raises:
        BudgetError: nothing fits into the memory.
    """
    partitions = partitions_of(runner, call, "gpipe" if call.order is None else call.order.schedule)
    try:
        candidates = [tuple(partitions(limits)[0].balance)]
    except BudgetError as error:
        candidates = [tuple(error.balance)]
    candidates.append(tuple(partitions(dict.fromkeys(limits, math.inf))[0].balance))
    times: dict[tuple[int, ...], float] = {}
    failure: BudgetError | None = None
    for candidate in dict.fromkeys(candidates):
        planner = runner.planner_for(list(candidate), runner.placement.devices)
        try:
            times[candidate] = choice_within(planner, call, limits).nanoseconds
        except BudgetError as error:
            failure = failure or error
    if failure is not None and not times:
        if call.order is None:
            raise failure
        times[candidates[0]] = 0.0  # a step has a loss, too, and with it the last stage may need less
    fastest = min(times, key=times.__getitem__)
    return list(fastest)


def partitions_of(
    runner: Runner, call: Call, schedule: ScheduleChoice
) -> Callable[[Limits], list[Partition]]:
    """Returns a function that returns the fastest partitions for a call within limits."""
    ones = [1] * len(runner.layers)
    planner = runner.planner_for(ones, [runner.placement.devices[0]] * len(ones))
    call = replace(call, checkpoint=checkpoint_policy("always", len(ones), True), order=None)
    return partitions_within(planner, call, runner.placement.devices, schedule)
