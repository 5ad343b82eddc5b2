"""The notation of actions."""

from __future__ import annotations

import pytest

from gpipe_fast.schedule.actions import (
    Action,
    Kind,
)


def test_the_notation_of_every_kind_is_parsed() -> None:
    for kind in Kind:
        action = Action(12, kind, 345)
        assert str(action) == f"12{kind.value}345"
        assert Action.parse(f" {action} ") == action


@pytest.mark.parametrize("text", ["", "F", "0F", "F0", "0X1", "-1F0", "0F0,1F0", "0SEND0", "0f0"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not an action; expected a form like 2F0"):
        Action.parse(text)
