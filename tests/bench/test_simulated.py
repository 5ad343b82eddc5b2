"""Predictions of step times: exact if durations do not depend on the setting."""

from __future__ import annotations

import pytest
from torch import nn

from bench.micro.simulated import PREDICTED, RECORDED, Model, Setting, measure, predict, rows
from gpipe_fast.reports.advice import Costs
from gpipe_fast.schedule import TRANSFERS, Action, Kind, fill_drain, one_f_one_b

UNITS = {Kind.F: 1.0, Kind.R: 1.0, Kind.I: 1.0, Kind.W: 1.5, Kind.B: 2.5}


def duration(action: Action) -> float:
    return 0.0 if action.kind in TRANSFERS else UNITS[action.kind] * (1 + action.stage)


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("chunks", [1, 3, 8])
def test_a_prediction_is_exact_if_durations_depend_on_kind_and_stage_alone(
    num_stages: int, chunks: int
) -> None:
    recorded = fill_drain(num_stages, RECORDED.chunks, recomputed=range(RECORDED.chunks - 1))
    costs = Costs([recorded], {action: duration(action) for action in recorded.order()})
    for checkpoint, recomputed in [("always", chunks), ("except_last", chunks - 1), ("never", 0)]:
        whole = fill_drain(num_stages, chunks, recomputed=range(recomputed))
        parts = whole.forward_part(), whole.backward_part()
        one = one_f_one_b(num_stages, chunks, recomputed=range(recomputed))
        assert predict(costs, Setting("gpipe", chunks, checkpoint)) == whole.critical_path(duration)
        assert predict(costs, Setting("1f1b", chunks, checkpoint)) == one.critical_path(duration)
        call = predict(costs, Setting("gpipe", chunks, checkpoint, is_step=False))
        assert call == sum(part.critical_path(duration) for part in parts)


def test_every_setting_is_measured_and_predicted(one_thread: None) -> None:
    model = Model("tiny", lambda: [nn.Linear(4, 4), nn.Linear(4, 4)], (2, 4))
    found = measure(model, 2, rounds=1)
    assert list(found) == PREDICTED
    assert all(time > 0 for pair in found.values() for time in pair)
    assert [row[-1] for row in rows(model, 2, found, cores=1)] == ["more stages than cores"] * len(PREDICTED)
