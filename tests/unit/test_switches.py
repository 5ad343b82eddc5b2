"""Each switch turns one part off, and the numbers stay those of the plain loop."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe, switches
from tests.reference import loop_step, pipeline_step, unequal

pytestmark = pytest.mark.usefixtures("one_thread")


class NeedsPython(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.detach().sum() > 0 else -x


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.GELU()) for _ in range(4))
    return nn.Sequential(*blocks)


def messages_of_steps(caplog: pytest.LogCaptureFixture) -> str:
    """Returns what is logged in steps of three lengths, which equal those of the plain loop."""
    model = layers()
    pipe = GPipe(model, [2, 2], chunks=2, checkpoint="always")
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "gpipe_fast"):
        for size in (8, 16, 24):
            x = torch.randn(size, 6)
            assert unequal(pipeline_step(pipe, x), loop_step(model, x, 2)) == []
    return "\n".join(record.getMessage() for record in caplog.records if record.name == "gpipe_fast")


def test_the_log_has_the_line_of_a_layer_that_runs_in_python(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "gpipe_fast"), pytest.warns(match="runs in Python"):
        GPipe(nn.Sequential(NeedsPython(), nn.Linear(6, 6)), [1, 1], chunks=8)(torch.randn(8, 6))
    assert "NeedsPython cannot be captured" in caplog.text
    assert "return x if x.detach().sum() > 0 else -x" in caplog.text
    assert "stage 0, layer 0 (NeedsPython) runs in Python: PyTorch cannot trace it" in caplog.text


FOUND = {
    "traced": r"^layer 0: traced, for \[4, 6\]$",
    "equal-layers": r"reused the graph of layers 0 to 1",
    "templates": r"^layers 0 to 1: derived from a template, for \[12, 6\]$",
}


@pytest.mark.parametrize("name", ["", *switches.SWITCHES])
def test_a_switch_turns_its_part_off(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(switches.VARIABLE, name)
    messages = messages_of_steps(caplog)
    found = {part for part, pattern in FOUND.items() if re.search(pattern, messages, re.MULTILINE)}
    expected = {"templates": {"traced", "equal-layers"}, "equal-layers": {"templates"}, "capture": set[str]()}
    assert found == expected.get(name, set(FOUND)), messages


def test_several_parts_are_turned_off_by_the_variable_and_in_blocks(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(switches.VARIABLE, "templates, fuse")
    with switches.disabled("equal-layers"):
        off = [name for name in switches.SWITCHES if switches.is_disabled(name)]
        assert off == ["templates", "equal-layers", "fuse"]
        assert not re.search("reused|derived|template", messages_of_steps(caplog))
    assert not switches.is_disabled("equal-layers")
