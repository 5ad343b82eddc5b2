"""CSVs of torch.distributed.pipelining: both dialects of its own schedules are read."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from gpipe_fast.schedule import Kind, Schedule, interleaved

pipelining = importlib.import_module("torch.distributed.pipelining.schedules")

# The class, the number of stages of a rank, and whether it splits backwards.
CLASSES = {
    "ScheduleInterleaved1F1B": (2, False),
    "ScheduleLoopedBFS": (2, False),
    "ScheduleInterleavedZeroBubble": (2, True),
    "ScheduleZBVZeroBubble": (2, True),
    "ScheduleDualPipeV": (2, True),
}


class Group:
    """Stands in for a process group of which nothing is asked but its size."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0


class StageStandIn:
    """Stands in for a stage: PyTorch's schedules ask for numbers alone to make their actions."""

    def __init__(self, index: int, num_stages: int, size: int) -> None:
        self.stage_index, self.num_stages, self.group_size, self.group_rank = index, num_stages, size, 0
        self.group, self.has_backward, self.stage_index_to_group_rank = Group(size), True, None
        self.is_first, self.is_last, self.device = index == 0, index == num_stages - 1, "cpu"
        self.submod = None


def dumped(name: str, size: int, num_microbatches: int, dialect: str, folder: Path) -> str:
    """Returns the CSV that a schedule class of PyTorch dumps."""
    per_rank, _ = CLASSES[name]
    stages: list[Any] = [
        StageStandIn(i * size if "V" not in name else (2 * size - 1) * i, per_rank * size, size)
        for i in range(per_rank)
    ]
    schedule = getattr(pipelining, name)(stages, num_microbatches, loss_fn=lambda output, target: output)
    path = folder / "schedule.csv"
    if dialect == "compute_comms":
        schedule._prepare_schedule_with_comms(schedule.pipeline_order)
    schedule._dump_csv(str(path), **({"format": dialect} if hasattr(schedule, "_simulate") else {}))
    return path.read_text()


@pytest.mark.parametrize("dialect", ["compute_only", "compute_comms"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", CLASSES)
def test_schedules_of_pytorch_are_valid(name: str, size: int, dialect: str, tmp_path: Path) -> None:
    if not hasattr(pipelining, name):
        pytest.skip(f"this version of PyTorch has no {name}")
    text = dumped(name, size, 2 * 2 * size, dialect, tmp_path)
    schedule = Schedule.from_csv(text)
    assert (schedule.num_stages, schedule.num_microbatches, len(schedule.ranks)) == (2 * size, 4 * size, size)
    kinds = {action.kind for actions in schedule.stages for action in actions}
    assert (Kind.W in kinds) == CLASSES[name][1]
    assert schedule.defers_weights == ("ZeroBubble" in name or (name, size) == ("ScheduleDualPipeV", 4))
    assert Schedule.parse(schedule.csv()) == schedule


def test_ours_is_read_by_pytorch(tmp_path: Path) -> None:
    actions = [
        [pipelining._Action.from_str(cell) for cell in row.split(",")]
        for row in interleaved(4, 4, num_ranks=2).csv().splitlines()
    ]
    assert [str(action) for action in actions[1]][:4] == ["1RECV_F0", "1F0", "1SEND_F0", "1RECV_F1"]


def test_errors_mark_the_action() -> None:
    with pytest.raises(ValueError, match="'2X0' is not an action"):
        Schedule.from_csv("0F0,2X0")
    with pytest.raises(ValueError) as error:
        Schedule.from_csv("0F0,0F1,0B1\n1F0,1F1,1B1,1B0")
    assert str(error.value) == ("stage 0 does 0F0 0SEND_F0, where it has to do 0F0 0SEND_F0 0RECV_B0 0B0")
    with pytest.raises(ValueError) as error:
        Schedule.from_csv("0F0,0F1,0B1,0B0\n1F0,1F1,1B0,1B1")
    assert str(error.value).splitlines()[1] == "rank 0  0F0 0SEND_F0 0F1 0SEND_F1 >0RECV_B1< 0B1 0RECV_B0 0B0"
