"""The CUDA benchmark with small models on the CPU: everything but the figures."""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import measure
from bench.gpu import copies as cuda_copies
from bench.gpu import cuda
from bench.gpu import report as cuda_report
from bench.gpu import row as cuda_row
from bench.gpu.idle import idle_share, intervals
from bench.gpu.subjects import (
    COMPILED,
    LOOP,
    OURS,
    ROWS,
    TORCHGPIPE,
    UNCAPTURED,
    UNFUSED,
    with_small_subject,
)
from bench.peers import Step
from gpipe_fast import GPipe

pytestmark = [pytest.mark.extended, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(autouse=True)
def results_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Redirects results to a temporary folder and reduces the number of steps."""
    monkeypatch.setattr(cuda_row, "WARM_UP", 2)
    monkeypatch.setattr(cuda_row, "PROFILED_STEPS", 1)
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    return tmp_path


def launch_in_this_process(folder: Path) -> cuda.Launch:
    """Returns a launcher that measures small rows in this process."""

    def launch(name: str, seconds: float, without: Collection[str]) -> cuda.ProcessOutcome:
        path = folder / "findings"
        cuda_row.run(name, path, "cpu", 0.8 * seconds, small=True, without=without)
        return cuda.ProcessOutcome(json.loads(path.read_text()))

    return launch


def read_results(folder: Path) -> tuple[dict[str, Any], str]:
    """Returns the JSON and the Markdown of the run."""
    (path,) = folder.glob("cpu-*.json")
    return json.loads(path.read_text()), path.with_suffix(".md").read_text()


def test_rows_are_measured_checked_and_written(results_folder: Path) -> None:
    lines: list[str] = []
    names = ["tiny-never", cuda_copies.NAME, "unet", "gpt-8-compiled"]
    cuda.bench(
        names,
        1000,
        cuda.Results("cpu", 1000, small=True),
        launch_in_this_process(results_folder),
        lines.append,
    )
    found, text = read_results(results_folder)
    assert list(found["rows"]) == names
    assert len(lines) == len(names) + 1
    assert lines[-1] == "4 of 4 rows are complete"
    assert found["machine"] == measure.machine()
    assert found["commit"] in found["machine"]
    for name, candidates in (
        ("tiny-never", [LOOP, OURS, UNFUSED, UNCAPTURED, TORCHGPIPE]),
        ("unet", [LOOP, OURS, UNFUSED, UNCAPTURED, TORCHGPIPE]),
        ("gpt-8-compiled", [LOOP, OURS, COMPILED]),
    ):
        row = found["rows"][name]
        assert list(row["candidates"]) == candidates
        assert f"## {ROWS[name].title}" in text
        for candidate, what in row["candidates"].items():
            assert len(what["step_us"]) == len(what["host_us"]) == with_small_subject(ROWS[name]).rounds
            assert all(0 < h <= s for h, s in zip(what["host_us"], what["step_us"], strict=True))
            assert 0 <= what["idle"] < 1
            assert what["intervals"] > 10
            assert what["error"] < 0.05
            assert what["equal"], candidate
    copies = found["rows"][cuda_copies.NAME]["candidates"]
    assert len(copies) == 4
    assert all(each["plain_gbps"] > 0 and "failed" not in each for each in copies.values())
    assert "WRONG:" not in text
    assert "FAILED" not in text
    targets = text.partition("\n## ")[0]
    assert all(f"| {name} " in targets for name in names if name in ROWS)


def test_a_measuring_process_reports_findings_failures_and_timeouts(
    results_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "RESULTS", measure.ROOT / "bench" / "results")
    name = "pinned, the same device, M = 1"
    attempt = cuda.subprocess_launcher("cpu", small=True)(cuda_copies.NAME, 60, [name])
    assert attempt.failure is None
    assert len(attempt.found["candidates"]) == 3
    assert name not in attempt.found["candidates"]
    assert attempt.found["at"] is None
    attempt = cuda.subprocess_launcher("nowhere", small=True)("tiny-never", 60, [])
    assert attempt.failure is not None
    assert "ended with 1" in attempt.failure
    assert "nowhere" in attempt.failure
    attempt = cuda.subprocess_launcher("cpu", small=True)("tiny-never", 0.05, [])
    assert attempt.failure is not None
    assert "did not end within" in attempt.failure


GOOD_CANDIDATE = {"error": 1e-7, "equal": True, "step_us": [2.0, 2.0], "host_us": [1.0, 1.0], "idle": 0.01}


def test_a_candidate_that_crashes_its_process_is_excluded_from_the_retry(results_folder: Path) -> None:
    calls: list[tuple[str, ...]] = []

    def launch(name: str, seconds: float, without: Collection[str]) -> cuda.ProcessOutcome:
        calls.append(tuple(without))
        if OURS not in without:
            return cuda.ProcessOutcome(
                {"at": OURS, "candidates": {LOOP: {"error": 0.0, "equal": True}}}, "it died"
            )
        if TORCHGPIPE not in without:
            failed = {"failed": "RuntimeError: sticky"}
            return cuda.ProcessOutcome({"at": None, "candidates": {TORCHGPIPE: failed}}, "it died too")
        return cuda.ProcessOutcome(
            {"at": None, "candidates": {LOOP: GOOD_CANDIDATE, UNCAPTURED: GOOD_CANDIDATE}}
        )

    lines: list[str] = []
    cuda.bench(["gpt-8", "unet"], 1000, cuda.Results("cpu", 1000, small=False), launch, lines.append)
    assert calls[:3] == [(), (OURS,), (OURS, TORCHGPIPE)]
    found, text = read_results(results_folder)
    candidates = found["rows"]["gpt-8"]["candidates"]
    assert candidates[OURS]["failed"] == "it died"
    assert candidates[TORCHGPIPE]["failed"] == "RuntimeError: sticky"
    assert candidates[UNCAPTURED] == GOOD_CANDIDATE
    assert "FAILED: it died" in text
    assert "FAILED: RuntimeError: sticky" in lines[0]


def test_a_failed_row_is_written_and_later_rows_still_run(results_folder: Path) -> None:
    def launch(name: str, seconds: float, without: Collection[str]) -> cuda.ProcessOutcome:
        return (
            cuda.ProcessOutcome({}, "no such device")
            if name == "unet"
            else cuda.ProcessOutcome({"candidates": {LOOP: GOOD_CANDIDATE}})
        )

    cuda.bench(["unet", "resnet"], 1000, cuda.Results("cpu", 1000, small=False), launch, lambda text: None)
    found, text = read_results(results_folder)
    assert found["rows"]["unet"]["failed"] == "no such device"
    assert "Failed: no such device" in text
    assert found["rows"]["resnet"]["candidates"] == {LOOP: GOOD_CANDIDATE}


def test_rows_without_enough_time_are_skipped(results_folder: Path) -> None:
    lines: list[str] = []

    def launch(name: str, seconds: float, without: Collection[str]) -> cuda.ProcessOutcome:
        assert ROWS[name].min_seconds <= seconds <= cuda.MAX_TIME_FACTOR * ROWS[name].min_seconds
        return cuda.ProcessOutcome({"candidates": {LOOP: GOOD_CANDIDATE}})

    seconds = ROWS["tiny-never"].min_seconds + 1.0
    cuda.bench(
        ["tiny-never", "gpt-8"], seconds, cuda.Results("cpu", seconds, small=False), launch, lines.append
    )
    found, text = read_results(results_folder)
    assert "skipped" not in found["rows"]["tiny-never"]
    assert "s needed" in found["rows"]["gpt-8"]["skipped"]
    assert "Skipped:" in text
    assert "skipped" in lines[1]
    assert lines[2] == "1 of 2 rows are complete"


def test_candidates_with_wrong_gradients_get_no_ratio() -> None:
    wrong = {**GOOD_CANDIDATE, "error": 3e-7, "equal": False}
    assert (
        cuda_report.ratio(TORCHGPIPE, {LOOP: GOOD_CANDIDATE, OURS: GOOD_CANDIDATE, TORCHGPIPE: wrong})
        is not None
    )
    for candidates in (
        {LOOP: GOOD_CANDIDATE, OURS: wrong},
        {LOOP: GOOD_CANDIDATE, OURS: {**GOOD_CANDIDATE, "error": None, "failed": "why"}},
    ):
        if candidates[OURS]["error"] is None:
            del candidates[OURS]["error"]
        assert cuda_report.ratio(LOOP, candidates) is None
        targets = {
            line[1]: line[3:] for line in cuda_report.target_rows({"gpt-8": {"candidates": candidates}})
        }
        assert targets["speedup over the plain loop"] == ["-", ""]
    assert cuda_report.is_right(OURS, {LOOP: GOOD_CANDIDATE, OURS: {**wrong, "error": 2e-7}})
    table = cuda_report.table("gpt-8", {"candidates": {LOOP: GOOD_CANDIDATE, OURS: wrong}})
    assert [str(row[-1])[:5] for row in table.rows] == ["1.0e-", "WRONG"]


def test_wrong_gradients_are_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = with_small_subject(ROWS["tiny-never"])
    gradients = Step.gradients

    def gradients_with_an_error(self: Step) -> list[torch.Tensor]:
        found = gradients(self)
        if isinstance(self.forward, torch.nn.Module):  # ours
            found[0][0] += 0.5
        return found

    monkeypatch.setattr(Step, "gradients", gradients_with_an_error)
    findings = cuda_row.Findings(tmp_path / "findings")
    cuda_row.Measurement(row, "cpu", findings, time.monotonic()).measure_errors([LOOP, OURS])
    assert not cuda_report.is_right(OURS, findings.candidates)
    assert cuda_report.is_right(LOOP, findings.candidates)


def test_a_candidate_that_raises_is_recorded_and_the_others_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, made = with_small_subject(ROWS["tiny-never"]), type(ROWS["tiny-never"].full).step

    def step(self: Any, name: str, *arguments: Any, **keywords: Any) -> Step:
        if name == UNCAPTURED:
            raise RuntimeError("no graph")
        return made(self, name, *arguments, **keywords)

    monkeypatch.setattr(type(row.full), "step", step)
    findings = cuda_row.Findings(tmp_path / "findings")
    cuda_row.Measurement(row, "cpu", findings, time.monotonic() + 100).run()
    assert findings.candidates[UNCAPTURED] == {"failed": "RuntimeError: no graph"}
    assert all("step_us" in found for name, found in findings.candidates.items() if name != UNCAPTURED)


def test_the_fused_candidate_may_fail_without_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that do not load: pipelines with fused kernels, captured or not, raise."""
    made = GPipe.__init__

    def fail_with_fused_kernels(self: GPipe, *arguments: Any, fuse: bool | None, **keywords: Any) -> None:
        if fuse is not False:
            raise RuntimeError("a kernel does not load")
        made(self, *arguments, fuse=fuse, **keywords)

    monkeypatch.setattr(GPipe, "__init__", fail_with_fused_kernels)
    findings = cuda_row.Findings(tmp_path / "findings")
    row = with_small_subject(ROWS["tiny-never"])
    cuda_row.Measurement(row, "cpu", findings, time.monotonic() + 100).run()
    timed = {name for name, found in findings.candidates.items() if "step_us" in found}
    assert timed == {LOOP, UNFUSED, TORCHGPIPE}


def test_idle_share_is_the_time_that_no_interval_covers() -> None:
    assert idle_share([]) is None
    assert idle_share([(5, 5)]) == 0
    assert idle_share([(0, 10), (2, 4), (5, 12)]) == 0
    assert idle_share([(30, 40), (0, 10), (5, 20)]) == 0.25
    assert len(intervals(lambda: torch.ones(10) @ torch.ones(10), "cpu")) >= 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is visible")
def test_without_a_gpu_no_results_are_written(
    results_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cuda.main(["tiny-never"])
    assert "needs a GPU" in capsys.readouterr().out
    assert not list(results_folder.iterdir())
    with pytest.raises(SystemExit):
        cuda.main(["nothing"])
