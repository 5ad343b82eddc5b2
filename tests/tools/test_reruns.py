"""The table of layers in Python that run twice: generated layers show what the proof prevents."""

from __future__ import annotations

import pytest
from torch import nn

from tools import reruns

pytestmark = pytest.mark.usefixtures("one_thread")


def test_effects_and_wrong_gradients_are_told_apart() -> None:
    proved, every, none = reruns.program_rows(reruns.KINDS)
    assert (proved[2], none[1:]) == (reruns.KINDS, [0, reruns.KINDS, 0, 0])
    assert all(int(str(number)) > 0 for number in every[1:])


def test_classes_are_counted_once() -> None:
    class Own(nn.ReLU):
        pass

    assert reruns.class_row("name", [nn.Sequential(Own(), Own()), Own()]) == ["name", "2 of 2", "1 of 1"]
