"""How ranks describe what they have in common, and how a difference is named."""

from __future__ import annotations

from gpipe_fast.distributed.agreement import difference, digest_of, shortened


def test_a_difference_is_named() -> None:
    ours, theirs = {"chunks": "2", "input 0": "a"}, {"chunks": "2", "input 0": "b"}
    assert digest_of(ours) != digest_of(theirs) == digest_of(dict(theirs))
    assert difference(ours, theirs) == "input 0: here a, there b"
    assert difference(ours, {"chunks": "2"}) == "input 0: here a, there nothing"
    assert len(difference({"schedule": "x" * 1000}, {})) < 500


def test_long_texts_are_shortened() -> None:
    assert shortened("x" * 400) == "x" * 400
    assert shortened("x" * 401) == "x" * 400 + "..."


def test_equal_descriptions_differ_in_the_version_alone() -> None:
    assert difference({"chunks": "2"}, {"chunks": "2"}) == "the versions of gpipe_fast"
