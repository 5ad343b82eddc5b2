"""Prepared calls: when the key is drawn, and changes by layers in Python."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gpipe_fast.randomness.random import MinibatchKey
from gpipe_fast.runtime.planner import PreparedCall


def call(draws: bool | None = None, state: Any = None) -> PreparedCall:
    plan: Any = SimpleNamespace(draws=draws)
    pipeline: Any = None
    return PreparedCall(plan, pipeline, (), (), state)


def test_a_key_is_drawn_only_if_one_is_needed() -> None:
    drawn: list[int] = []

    def draw() -> int:
        drawn.append(7)
        return 7

    assert call(draws=False).key(draw) == 0
    assert isinstance(call(draws=None).key(draw), MinibatchKey)
    assert drawn == []
    assert call(draws=True).key(draw) == 7
    assert drawn == [7]


def test_a_change_by_a_layer_in_python_is_an_error() -> None:
    call(state=None).check_unchanged()
    call(state=SimpleNamespace(is_changed=lambda: False)).check_unchanged()
    with pytest.raises(RuntimeError, match="changed what other layers read, during the call"):
        call(state=SimpleNamespace(is_changed=lambda: True)).check_unchanged()
