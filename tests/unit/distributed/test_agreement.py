"""How ranks describe what they have in common, and how a difference is named."""

from __future__ import annotations

from gpipe_fast.distributed.agreement import difference, digest_of


def test_a_difference_is_named() -> None:
    ours, theirs = {"chunks": "2", "input 0": "a"}, {"chunks": "2", "input 0": "b"}
    assert digest_of(ours) != digest_of(theirs) == digest_of(dict(theirs))
    assert difference(ours, theirs) == "input 0: here a, there b"
    assert difference(ours, {"chunks": "2"}) == "input 0: here a, there nothing"
    assert len(difference({"schedule": "x" * 1000}, {})) < 500
