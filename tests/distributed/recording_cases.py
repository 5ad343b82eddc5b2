"""What the ranks of tests of recordings and reports run."""

from __future__ import annotations

import dataclasses
import time
import warnings
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from gpipe_fast import GPipe
from gpipe_fast.container import runner_of
from gpipe_fast.recording import Event, Recording
from tests.distributed.cases import MODELS, TIMEOUT, _error_of
from tests.models import features


def pipeline(num_stages: int = 0, num_replicas: int = 1, **options: Any) -> GPipe:
    warnings.simplefilter("ignore")
    make, _, balances = MODELS["batch norm"]
    balance = balances[(num_stages or dist.get_world_size()) - 2]
    shape = num_replicas, dist.get_world_size() // num_replicas
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "pp"))
    settings = {"chunks": 4, "schedule": "1f1b", "timeout": TIMEOUT} | options
    return GPipe(make(), balance, mesh=mesh, **settings)


def step(pipe: GPipe) -> None:
    x = features(12)
    pipe.step(x, target=x[:, :4], loss_fn=F.mse_loss)


def recorded(num_stages: int, schedule: str, num_replicas: int = 1) -> dict[str, Any]:
    """Records two steps, of which the second is reported on; returns what the recording has."""
    pipe = pipeline(num_stages, num_replicas, schedule=schedule)
    step(pipe)
    with pipe.recording() as recording:
        step(pipe)
        step(pipe)
    return {
        "stages": [[dataclasses.astuple(event) for event in stage] for stage in recording.stages],
        "sizes": recording.sizes,
        "rank_of": recording.rank_of,
        "clock_error": recording.clock_error,
        "report": recording.report().to_dict(),
    }


def on_other_clocks(seconds: float) -> dict[str, Any]:
    """As `recorded`, where the clock of each rank is ahead of the one before."""
    ahead = seconds * dist.get_rank()
    true_ns = time.monotonic_ns
    with (
        mock.patch("time.monotonic_ns", side_effect=lambda: true_ns() + int(ahead * 1e9)),
        mock.patch.object(Recording, "stages", _Shifted(ahead), create=True),
    ):
        return recorded(0, "1f1b")


class _Shifted:
    """An attribute of recordings: events as a process with another clock would record them."""

    def __init__(self, ahead: float) -> None:
        self._ahead, self._number, self._stages = ahead, 0, ()

    def __get__(self, recording: Recording, owner: type) -> Any:
        return self._stages

    def __set__(self, recording: Recording, stages: Any) -> None:
        self._number += 1
        if self._number % 3 == 2:  # what this process has recorded, after () and before those of all
            stages = tuple(tuple(self._later(event) for event in stage) for stage in stages)
        self._stages = stages

    def _later(self, event: Event) -> Event:
        return dataclasses.replace(event, begin=event.begin + self._ahead, end=event.end + self._ahead)


def reported(check: bool) -> tuple[dict[str, Any], bool]:
    """Returns the report, and whether the model was left as it was."""
    pipe, x = pipeline(schedule="gpipe"), features(12)
    before = [tensor.clone() for tensor in pipe.state_dict().values()]
    report = pipe.report(x, target=x[:, :4], loss_fn=F.mse_loss, check=check)
    two_calls = pipe.report(x)
    assert len(two_calls.phases) == 2
    after = pipe.state_dict().values()
    is_unchanged = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return report.to_dict(), is_unchanged and all(p.grad is None for p in pipe.parameters())


def failing_in_a_recording() -> list[str]:
    """Rank 1 raises an error in a recording, then calls instead of leaving one; the next one works."""
    pipe, is_odd, errors = pipeline(), dist.get_rank() == 1, []

    def failing() -> None:
        with pipe.recording():
            step(pipe)
            if is_odd:
                raise ValueError("no data")

    def calling() -> None:
        with pipe.recording():
            step(pipe)
            if is_odd:
                step(pipe)

    def failing_once() -> None:
        with pipe.recording() as recording:
            if is_odd:
                runner_of(pipe).pipeline.inject_faults(faults=[("1F0", 0, "ValueError")])
            _error_of(lambda: step(pipe))
            runner_of(pipe).pipeline.inject_faults()
            step(pipe)
        recording.report()

    for case in (failing, calling, failing_once):
        errors.append(_error_of(case))
    return errors
