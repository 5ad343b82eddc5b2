"""The memory for activations with other numbers of micro-batches: predicted from one step, and recorded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpipe_fast import GPipe
from gpipe_fast.reports.report import with_growth
from gpipe_fast.schedule import SCHEDULES, fill_drain
from tests.unit.reports.test_report import recorded
from tests.unit.reports.test_timeline import tanh_layers

pytestmark = pytest.mark.filterwarnings("ignore:.*stages idle")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_memory_with_other_numbers_of_micro_batches(schedule: str) -> None:
    """The prediction of each number equals what is recorded with it, if there is a recompute."""
    x = torch.randn(16, 16)

    def pipe(chunks: int) -> GPipe:
        return GPipe(tanh_layers(), [2, 2], chunks=chunks, checkpoint="except_last", schedule=schedule)

    loss = {"target": torch.randn(16, 16), "loss_fn": nn.functional.mse_loss}
    found = {own.num_microbatches: own for own in pipe(4).report(x, **loss).growth}
    assert list(found) == [1, 2, 4, 8, 16]
    for chunks, growth in found.items():
        report = pipe(chunks).report(x, **loss)
        (own,) = (each for each in report.growth if each.num_microbatches == chunks)
        # Scalars of the loss do not shrink; a product with a single row may have scratch memory of its own.
        if 1 < chunks < 16:
            assert own.activations == pytest.approx(growth.activations, abs=256)
            assert own.paper == pytest.approx(growth.paper, abs=256)
    assert found[1].activations == found[1].paper


@pytest.mark.sampled(4)
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_growth_and_memory_agree_on_the_present_number(schedule: str, checkpoint: str) -> None:
    layers = nn.Sequential(*(tanh_layers() for _ in range(4)))
    pipe = GPipe(layers, [1] * 4, chunks=4, schedule=schedule, checkpoint=checkpoint)
    report = pipe.report(torch.randn(16, 16), target=torch.zeros(16, 16), loss_fn=nn.functional.mse_loss)
    (own,) = (each for each in report.growth if each.num_microbatches == 4)
    assert own.activations == pytest.approx(max(each.activations for each in report.memory), rel=0.02)


def test_growth_has_numbers_of_micro_batches_that_occur() -> None:
    """Ten samples in micro-batches of 10, 5, 3, 2 and 1."""
    pipe = GPipe(tanh_layers(), [2, 2], chunks=4)
    growth = pipe.report(torch.randn(10, 16)).growth
    assert [own.num_microbatches for own in growth] == [1, 2, 4, 5, 10]


def test_a_report_of_unknown_bytes_is_left_unchanged() -> None:
    report = recorded("gpipe", 2, 4, checkpoint="never").report()
    assert with_growth(report, 8, "never", lambda count: fill_drain(2, count)) is report
