"""`find_switch` names the switches that make a planted difference go away, and leaves the model unchanged."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from gpipe_fast import GPipe, switches
from gpipe_fast.trace.symbolic import Template
from gpipe_fast.verify import find_switch
from tests.models import features, mlp
from tests.unit.reports.losses import squared_loss

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("cause", [*switches.SWITCHES, None])
def test_the_switch_of_a_planted_difference_is_found(cause: str | None) -> None:
    forward = GPipe.forward

    def wrong(self: GPipe, x: torch.Tensor) -> torch.Tensor:
        return forward(self, x) + (cause is None or not switches.is_disabled(cause))

    pipe = GPipe(mlp(), [2, len(mlp()) - 2], chunks=4)
    before = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    with mock.patch.object(GPipe, "forward", wrong):
        found = find_switch(pipe, features(8), squared_loss)
    assert found.causes == ([] if cause is None else [cause])
    assert f"{cause or 'nothing'} " in str(found)
    assert all(torch.equal(tensor, before[name]) for name, tensor in pipe.state_dict().items())
    assert pipe.backend == "auto"


def test_equal_steps_have_no_cause() -> None:
    found = find_switch(GPipe(mlp(), [len(mlp())], chunks=4, backend="aten"), features(8), squared_loss)
    assert found.all_on.ok
    assert found.causes == []
    assert "capture" not in found.by_switch


def test_templates_are_made_for_the_other_mini_batches() -> None:
    """Only then can a template be the cause."""
    pipe = GPipe(mlp(), [len(mlp())], chunks=2)
    with mock.patch.object(Template, "at", autospec=True, side_effect=Template.at) as at:
        found = find_switch(pipe, features(24), squared_loss, also=[features(8), features(16)])
    assert found.all_on.ok
    assert at.called
