"""Numbers that follow the batch size are told from those that are equal to it by chance."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpipe_fast.from_model.batch import Differs, Number, batch_dims, probes_for, unify
from gpipe_fast.from_model.dataflow import Dataflow
from tests.unit.from_model.recording import record_of

OWN = (4, 6)
SIZES = [OWN, *probes_for(OWN, taken={4, 6, 11})]


def unified(function: Any) -> Dataflow:
    """Records a function of a tensor of these sizes, and unifies the records."""
    flows = [record_of(function, torch.empty(batch, length, 3)) for batch, length in SIZES]
    return unify(flows, SIZES)


def test_a_number_of_the_model_that_is_the_batch_size_by_chance_stays_one() -> None:
    flow = unified(lambda x: x.flatten().new_zeros(4, len(x)))
    constant, batch = flow.values[-1].shape
    assert constant == 4
    assert batch == Number(0, (1, 0), (0,))
    assert batch.at(OWN) == 4


def test_products_of_batch_size_and_length() -> None:
    flow = unified(lambda x: x[:, 1:].reshape(-1))
    assert flow.values[-1].shape == (Number(0, (-3, 0), (3,)),)
    assert batch_dims(flow.values[-1]) == [0]
    assert flow.values[-1].shape[0].at(OWN) == 4 * 5 * 3


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x.relu() if len(x) > 9 else x.tanh(), "calls another function"),
        (lambda x: x + 1 if len(x) > 9 else x + 1.0, "values of other types"),
        (lambda x: x * (1 / len(x)), "passes 0.25 or"),
        (lambda x: x.new_zeros(len(x) ** 2), "does not follow the sizes"),
        (lambda x: x.new_zeros(len(x) // 2), "no multiple"),
        (lambda x: sum(x.unbind(0)), "another number of calls"),
        (lambda x: x.unbind(0)[0], "nests values otherwise"),
    ],
)
def test_what_does_not_follow_the_sizes_is_refused(function: Any, reason: str) -> None:
    with pytest.raises(Differs, match=reason):
        unified(function)
