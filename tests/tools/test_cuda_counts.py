"""Counts of a step on GPUs, from the log of the fake CUDA runtime."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fake_cuda.build import can_build
from tools.cuda_counts import HEADERS, Setup, count, run, setups, tables

LOG = """\
0\tmark\toperator\taten::add
0\tmark\tcounted
0\tread\t1\t0x10\t8
0\tmark\toperator\taten::mul
1\tmark\toperator\taten::copy_\tFloat\tBFloat16\t0x20
1\tread\t1\t0x20\t8
1\twrite\t1\t0x30\t4
0\trecord\t1\t7\t1
0\twait\t2\t7\t1
0\tlaunch\t2
0\trecord\t2\t-1\t90
0\twait\t8\t-1\t90
0\tmark\toperator\taten::_foreach_copy_
0\tmark\tcast\tFloat\tBFloat16\t0x40
0\tread\t8\t0x40\t8
0\twait\t8\t3\t91
0\tcopy\t8\td2d\t0x50\t0x60\t16
0\trecord\t8\t-1\t92
0\twait\t2\t-1\t92
0\tmemset\t2\t0x50\t3
0\tfinished event\t7\t1
0\tmark\tcounted to here
0\tmark\toperator\taten::add
"""


def test_the_log_between_the_marks_is_counted() -> None:
    counts = count(LOG.splitlines(), {"0x20"})
    named = dict(zip(HEADERS[3:], counts.cells(), strict=True))
    assert named == {
        "host calls": 7,  # two operators, a record, a wait, a launch, a fill, a query
        "operators launched": 2,
        "graphs launched": 1,
        "graph nodes": 2,
        "MB read": "0.00",
        "MB written": "0.00",
        "MB copied": "0.00",
        "casts": 2,
        "casts of parameters": 1,
        "events recorded": 1,
        "stream waits": 1,
    }
    assert (counts.read, counts.written, counts.copied) == (24, 4, 19)
    rows, operators = tables([(Setup("captured", "autocast"), counts)])
    assert rows == [[1, "captured", "autocast", *counts.cells()]]
    assert list(operators.rows) == [
        ["Float to BFloat16", 2],
        ["aten::_foreach_copy_", 1],
        ["aten::copy_", 1],
        ["aten::mul", 1],
    ]


def test_setups_have_every_precision_captured_and_uncaptured() -> None:
    found = {(setup.mode, setup.precision, setup.devices) for setup in setups()}
    assert len(found) == 3 * 5
    assert any(setup.dropout for setup in setups())


@pytest.mark.skipif(not can_build(), reason="needs an extension built with CUDA, and the toolkit's headers")
def test_a_replayed_step_launches_two_graphs(libraries: tuple[Path, Path]) -> None:
    counts = run(Setup("captured", "autocast", blocks=2), libraries)
    assert counts.calls["launch"] == 2
    # Copies of the tokens and of the output gradient, and the remaining gradient copies.
    assert counts.calls["operator"] < 10
    assert counts.nodes["operator"] > 1000
    # The forward casts each of 17 weights and biases once, and the backward those that it reads.
    assert 17 < counts.parameter_casts <= 2 * 17
