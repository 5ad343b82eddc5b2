"""Actions: their notation, the cells of PyTorch's CSVs, and what surrounds a forward or a backward."""

from __future__ import annotations

import pytest

from gpipe_fast.schedule.actions import (
    Action,
    Kind,
    backward_steps,
    forward_steps,
    parse_cell,
    tick,
    with_transfers,
)


@pytest.mark.parametrize("kind", Kind)
def test_the_notation_of_every_kind_is_parsed(kind: Kind) -> None:
    action = Action(12, kind, 345)
    assert str(action) == f"12{kind.value}345"
    assert Action.parse(f" {action} ") == action


@pytest.mark.parametrize("text", ["", "F", "0F", "F0", "0X1", "-1F0", "0F0,1F0", "0SEND0", "0f0"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not an action; expected a form like 2F0"):
        Action.parse(text)


def test_cells_have_any_number_of_actions() -> None:
    for text in ("", "3UNSHARD", "0RESHARD", "1REDUCE_GRAD2"):
        assert parse_cell(text) == []
    assert parse_cell("2F0") == [Action(2, Kind.F, 0)]
    assert parse_cell("(2F1;3B0)OVERLAP_F_B") == [Action(2, Kind.F, 1), Action(3, Kind.B, 0)]
    with pytest.raises(ValueError, match="'2F0;1F1' is not an action"):
        parse_cell("2F0;1F1")


def test_transfers_take_no_time() -> None:
    ticks = {kind.value: tick(Action(0, kind, 0)) for kind in Kind}
    assert [name for name, time in ticks.items() if not time] == ["SEND_F", "RECV_F", "SEND_B", "RECV_B"]
    assert set(ticks.values()) == {0.0, 1.0}


def names(kinds: list[Kind]) -> str:
    return " ".join(kind.value for kind in kinds)


def test_the_ends_of_a_pipeline_transfer_less() -> None:
    assert [names(forward_steps(stage, 3)) for stage in range(3)] == [
        "F SEND_F", "RECV_F F SEND_F", "RECV_F F",
    ]  # fmt: skip
    plain = [names(backward_steps(stage, 3, recompute=False, split=False)) for stage in range(3)]
    assert plain == ["RECV_B B", "RECV_B B SEND_B", "B SEND_B"]
    split = [names(backward_steps(stage, 3, recompute=True, split=True)) for stage in range(3)]
    assert split == ["R RECV_B I W", "R RECV_B I SEND_B W", "R I SEND_B W"]


@pytest.mark.parametrize(
    ("text", "splits", "recomputed", "expected"),
    [
        ("1F2", True, [], "1RECV_F2 1F2 1SEND_F2"),
        ("1B2", False, [], "1RECV_B2 1B2 1SEND_B2"),
        ("1B2", True, [2], "1R2 1RECV_B2 1I2 1SEND_B2 1W2"),
        ("1B2", True, [(0, 2), 1], "1RECV_B2 1I2 1SEND_B2 1W2"),
        ("1B2", False, [(1, 2)], "1R2 1RECV_B2 1B2 1SEND_B2"),
        ("0B2", True, [], "0RECV_B2 0B2"),  # nothing is sent, so nothing waits for the first part
        ("1I2", False, [], "1RECV_B2 1I2 1SEND_B2"),
        ("1W2", False, [2], "1W2"),
    ],
)
def test_actions_around_a_computation(
    text: str, splits: bool, recomputed: list[int | tuple[int, int]], expected: str
) -> None:
    found = with_transfers(Action.parse(text), 2, splits, recomputed)
    assert " ".join(map(str, found)) == expected
