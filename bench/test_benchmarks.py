"""Our main training steps under pytest-benchmark: `pytest bench --benchmark-only`.

Use them to compare commits (`--benchmark-autosave`, `--benchmark-compare`). `python -m bench` compares
gpipe_fast with other implementations, with alternating candidates.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from bench.compare.overhead import LOOP, Overhead
from bench.compare.step import OURS, Case, build, reference_gradients
from bench.peers import relative_difference
from gpipe_fast.gpipe import CHECKPOINT_MODES


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("mode", CHECKPOINT_MODES)
def test_overhead(benchmark: BenchmarkFixture, mode: str) -> None:
    overhead = Overhead()
    step, loop = overhead.ours(mode), overhead.plain()[LOOP]
    step()
    loop()
    assert relative_difference(step.gradients(), loop.gradients()) == 0
    benchmark(step)


@pytest.mark.parametrize("recompute", [True, False], ids=["always", "never"])
def test_gpt_step(benchmark: BenchmarkFixture, recompute: bool) -> None:
    case = Case(recompute, chunks=8)
    step = build(0, OURS, case)
    step()
    assert relative_difference(step.gradients(), reference_gradients(case)) == 0
    benchmark.pedantic(step, rounds=10, warmup_rounds=1)  # type: ignore[no-untyped-call]
