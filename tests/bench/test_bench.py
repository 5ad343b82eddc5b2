"""A smoke test of the benchmarks and tools, which compare numbers before they time; no test asserts speed."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import measure
from bench.__main__ import BENCHMARKS, TOOLS, run, summary
from bench.comparison import Comparison, compare, is_right, rows
from bench.gpu import cuda
from bench.micro import engine
from bench.peers import Step

pytestmark = pytest.mark.usefixtures("one_thread")


def sampled_comparisons() -> list[Comparison]:
    """Returns comparisons of `make bench`; test_suite.py runs one of models."""
    modules = [importlib.import_module(f"bench.{name}.test_{name}") for name in ("compare", "micro")]
    every = [each for module in modules for each in module.COMPARISONS if each.sampled]
    return [each for each in every if isinstance(each, Comparison)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("comparison", sampled_comparisons(), ids=lambda each: each.name)
def test_a_comparison_times_candidates_whose_numbers_are_right(comparison: Comparison) -> None:
    found = replace(comparison, rounds=1, calls=1).measure(seconds=0.0)
    assert list(found) == list(comparison.names)
    for name, outcome in found.items():
        assert is_right(name, outcome), name
        assert min(outcome.times) > 0


def test_the_engine_runs_its_actions_in_order() -> None:
    rows = engine.rows(engine.run(rounds=2, steps=2))  # the C++ program checks the order
    assert [(stages, microbatches) for stages, microbatches, *_ in rows] == engine.SIZES


def test_candidates_with_wrong_gradients_are_not_timed() -> None:
    def step(factor: float) -> Step:
        weight = torch.nn.Parameter(torch.ones(2))
        return Step([weight], lambda x: factor * weight * x, torch.ones(2), torch.ones(2))

    steps = {
        "gpipe_fast": step(1.0),
        "close": step(1 + 1e-7),
        "gpipe_fast, close": step(1 + 1e-6),
        "far": step(2.0),
    }
    found = compare(steps, [torch.ones(2)], rounds=1)
    assert [name for name, each in found.items() if each.times] == ["gpipe_fast", "close"]
    wrong = ["-", "-", "-", "WRONG, off by 1e+00"]
    assert rows(found, "gpipe_fast")[-1] == ["far", *wrong]


def test_a_benchmark_writes_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    monkeypatch.setattr(measure, "ROUND_SECONDS", 0.0)
    run(BENCHMARKS, ["signature"])
    text = (tmp_path / "signature.md").read_text()
    assert measure.machine() in text
    assert text.count("\n|") > 3


@pytest.mark.extended
def test_the_cuda_benchmark_measures_a_small_model_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    assert cuda.main(["tiny-never", "--device=cpu", "--seconds=300"])
    (path,) = tmp_path.glob("cpu-*.md")
    text = path.read_text()
    assert "| gpipe_fast, captured" in text
    assert text.count("| addmm ") == 2
    assert "WRONG" not in text.partition("|")[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is visible")
def test_without_a_gpu_no_results_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    assert not cuda.main()
    assert "needs a GPU" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_every_name_is_a_module_with_a_summary() -> None:
    for module in (BENCHMARKS | TOOLS).values():
        assert callable(importlib.import_module(module).main)
        assert summary(module)
    for words in ([], ["nothing"], ["draws", "signature", "--flag"]):
        with pytest.raises(SystemExit, match="draws"):
            run(BENCHMARKS, words)
