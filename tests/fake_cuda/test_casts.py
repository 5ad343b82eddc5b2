"""Casts of parameters under autocast on the fake CUDA runtime: bits, counts, races and memory."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from tests.fake_cuda.cast_cases import CHUNKS, STEPS, WIDTH
from tests.fake_cuda.race_detector import Line, check, read

# The parameters of `cast_cases.layers_of` that each stage casts.
CASTS = {"linear": 2 * 2 + 2 * 2, "tied": 2 * 2 + 2 + 1}


def last_step(log: Iterable[Line], parameters: Sequence[str]) -> dict[str, Counter[str]]:
    """Returns, by phase, how often each address was cast in an operator of several casts.

    Parameters cast alone are counted as ``alone``.
    """
    found: dict[str, Counter[str]] = {}
    phase = "other"
    for kind, *words in (line.words for line in log if line.kind == "mark"):
        if kind in ("forward", "backward", "other"):
            phase = kind
            found[phase] = Counter()
        elif kind == "cast":
            found[phase][words[-1]] += 1
        elif words[-1] in parameters:
            found[phase]["alone"] += 1
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("model", "devices", "checkpoint", "capture"),
    [
        ("linear", "cuda:0,cuda:1", "always", "captured"),
        ("tied", "cuda:0,cuda:0", "never", "captured"),
        ("tied", "cuda:0,cuda:1", "except_last", "captured"),
        ("linear", "cuda:0,cuda:0", "except_last", "uncaptured"),
    ],
)
def test_each_stage_casts_its_parameters_twice_in_a_step(
    model: str, devices: str, checkpoint: str, capture: str, run: Callable[..., list[str]], tmp_path: Path
) -> None:
    words = (model, devices, checkpoint, capture)
    (text,) = run("cast_cases.py", *words, late=1, log=tmp_path / "log", names=1)
    found = json.loads(text)
    assert found["differences"] == []
    assert found["replays"] == (STEPS - 2 if capture == "captured" else 0)
    log = read(tmp_path / "log")
    counts = last_step(log, found["parameters"])
    # Each of two stages casts a weight that both share; on another device they cast a replica.
    most = 2 if (model, devices) == ("tied", "cuda:0,cuda:0") else 1
    assert counts["forward"].total() == CASTS[model]
    assert 0 < counts["backward"].total() <= CASTS[model]
    assert max(counts["forward"].values()) == most
    assert max(counts["backward"].values()) <= most
    assert counts["forward"]["alone"] == counts["backward"]["alone"] == 0
    assert check(log, may_wait=True) == []
    cast_bytes = 2 * WIDTH * (WIDTH + 1) * 2
    if checkpoint == "never":
        assert found["plain"][0] - found["hoisted"][0] > (CHUNKS - 1) * cast_bytes
    else:
        assert found["hoisted"][0] <= found["plain"][0]
    after = found["hoisted"][1:]  # after a backward, and after failures
    assert after == after[:1] * 3
    assert after[0] <= found["plain"][1]
