"""The CUDA benchmark on small models, on the CPU: all of it but the figures."""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import cuda, cuda_copies, cuda_report, cuda_row, measure
from bench.cuda_subjects import COMPILED, LOOP, OURS, ROWS, TORCHGPIPE, UNCAPTURED, in_small
from bench.idle import idle_share, intervals
from bench.peers import Step

pytestmark = [pytest.mark.extended, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where results go; steps are few."""
    monkeypatch.setattr(cuda_row, "WARM_UP", 2)
    monkeypatch.setattr(cuda_row, "PROFILED_STEPS", 1)
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    return tmp_path


def here(folder: Path) -> cuda.Launch:
    """Measures small rows in this process."""

    def launch(name: str, seconds: float, without: Collection[str]) -> cuda.Attempt:
        path = folder / "findings"
        cuda_row.run(name, path, "cpu", 0.8 * seconds, small=True, without=without)
        return cuda.Attempt(json.loads(path.read_text()))

    return launch


def written(folder: Path) -> tuple[dict[str, Any], str]:
    """The JSON and the Markdown."""
    (path,) = folder.glob("cpu-*.json")
    return json.loads(path.read_text()), path.with_suffix(".md").read_text()


def test_rows_are_measured_checked_and_written(kept: Path) -> None:
    lines: list[str] = []
    names = ["tiny-never", cuda_copies.NAME, "unet", "gpt-8-compiled"]
    cuda.bench(names, 1000, cuda.Results("cpu", 1000, small=True), here(kept), lines.append)
    found, text = written(kept)
    assert list(found["rows"]) == names
    assert len(lines) == len(names)
    assert found["machine"] == measure.machine()
    assert found["commit"] in found["machine"]
    for name, candidates in (
        ("tiny-never", [LOOP, OURS, UNCAPTURED, TORCHGPIPE]),
        ("unet", [LOOP, OURS, UNCAPTURED, TORCHGPIPE]),
        ("gpt-8-compiled", [LOOP, OURS, COMPILED]),
    ):
        row = found["rows"][name]
        assert list(row["candidates"]) == candidates
        assert f"## {ROWS[name].title}" in text
        for candidate, what in row["candidates"].items():
            assert len(what["step_us"]) == len(what["host_us"]) == in_small(ROWS[name]).rounds
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
    asked = text.partition("\n## ")[0]
    assert all(f"| {name} " in asked for name in names if name in ROWS)


def test_a_row_in_a_process_of_its_own(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "RESULTS", Path(cuda.__file__).parent / "results")
    name = "pinned, the same device, M = 1"
    attempt = cuda.in_a_process("cpu", small=True)(cuda_copies.NAME, 60, [name])
    assert attempt.fault is None
    assert len(attempt.found["candidates"]) == 3
    assert name not in attempt.found["candidates"]
    assert attempt.found["at"] is None
    attempt = cuda.in_a_process("nowhere", small=True)("tiny-never", 60, [])
    assert attempt.fault is not None
    assert "ended with 1" in attempt.fault
    assert "nowhere" in attempt.fault
    attempt = cuda.in_a_process("cpu", small=True)("tiny-never", 0.05, [])
    assert attempt.fault is not None
    assert "did not end within" in attempt.fault


GOOD = {"error": 1e-7, "equal": True, "step_us": [2.0, 2.0], "host_us": [1.0, 1.0], "idle": 0.01}


def test_who_takes_its_process_with_it_is_left_out_of_another_try(kept: Path) -> None:
    calls: list[tuple[str, ...]] = []

    def launch(name: str, seconds: float, without: Collection[str]) -> cuda.Attempt:
        calls.append(tuple(without))
        if OURS not in without:
            return cuda.Attempt({"at": OURS, "candidates": {LOOP: {"error": 0.0, "equal": True}}}, "it died")
        if TORCHGPIPE not in without:
            failed = {"failed": "RuntimeError: sticky"}
            return cuda.Attempt({"at": None, "candidates": {TORCHGPIPE: failed}}, "it died too")
        return cuda.Attempt({"at": None, "candidates": {LOOP: GOOD, UNCAPTURED: GOOD}})

    lines: list[str] = []
    cuda.bench(["gpt-8", "unet"], 1000, cuda.Results("cpu", 1000, small=False), launch, lines.append)
    assert calls[:3] == [(), (OURS,), (OURS, TORCHGPIPE)]
    found, text = written(kept)
    candidates = found["rows"]["gpt-8"]["candidates"]
    assert candidates[OURS]["failed"] == "it died"
    assert candidates[TORCHGPIPE]["failed"] == "RuntimeError: sticky"
    assert candidates[UNCAPTURED] == GOOD
    assert "FAILED: it died" in text
    assert "FAILED: RuntimeError: sticky" in lines[0]


def test_a_row_that_fails_is_written_and_the_rest_go_on(kept: Path) -> None:
    def launch(name: str, seconds: float, without: Collection[str]) -> cuda.Attempt:
        return (
            cuda.Attempt({}, "no such device")
            if name == "unet"
            else cuda.Attempt({"candidates": {LOOP: GOOD}})
        )

    cuda.bench(["unet", "resnet"], 1000, cuda.Results("cpu", 1000, small=False), launch, lambda text: None)
    found, text = written(kept)
    assert found["rows"]["unet"]["failed"] == "no such device"
    assert "Failed: no such device" in text
    assert found["rows"]["resnet"]["candidates"] == {LOOP: GOOD}


def test_rows_for_which_no_time_is_left_are_skipped(kept: Path) -> None:
    lines: list[str] = []

    def launch(name: str, seconds: float, without: Collection[str]) -> cuda.Attempt:
        assert ROWS[name].least <= seconds <= cuda.PATIENCE * ROWS[name].least
        return cuda.Attempt({"candidates": {LOOP: GOOD}})

    seconds = ROWS["tiny-never"].least + 1.0
    cuda.bench(
        ["tiny-never", "gpt-8"], seconds, cuda.Results("cpu", seconds, small=False), launch, lines.append
    )
    found, text = written(kept)
    assert "skipped" not in found["rows"]["tiny-never"]
    assert "s needed" in found["rows"]["gpt-8"]["skipped"]
    assert "Skipped:" in text
    assert "skipped" in lines[1]


def test_what_is_wrong_gets_no_ratio() -> None:
    wrong = {**GOOD, "error": 3e-7, "equal": False}
    assert cuda_report.ratio(TORCHGPIPE, {LOOP: GOOD, OURS: GOOD, TORCHGPIPE: wrong}) is not None
    for candidates in (
        {LOOP: GOOD, OURS: wrong},
        {LOOP: GOOD, OURS: {**GOOD, "error": None, "failed": "why"}},
    ):
        if candidates[OURS]["error"] is None:
            del candidates[OURS]["error"]
        assert cuda_report.ratio(LOOP, candidates) is None
        asked = {line[1]: line[3:] for line in cuda_report.asked({"gpt-8": {"candidates": candidates}})}
        assert asked["speedup over the plain loop"] == ["-", ""]
    assert cuda_report.right(OURS, {LOOP: GOOD, OURS: {**wrong, "error": 2e-7}})
    table = cuda_report.table("gpt-8", {"candidates": {LOOP: GOOD, OURS: wrong}})
    assert [str(row[-1])[:5] for row in table.rows] == ["1.0e-", "WRONG"]


def test_wrong_gradients_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = in_small(ROWS["tiny-never"])
    gradients = Step.gradients

    def changed(self: Step) -> list[torch.Tensor]:
        found = gradients(self)
        if isinstance(self.forward, torch.nn.Module):  # ours
            found[0][0] += 0.5
        return found

    monkeypatch.setattr(Step, "gradients", changed)
    findings = cuda_row.Findings(tmp_path / "findings")
    cuda_row.Measurement(row, "cpu", findings, time.monotonic()).errors([LOOP, OURS])
    assert not cuda_report.right(OURS, findings.candidates)
    assert cuda_report.right(LOOP, findings.candidates)


def test_a_candidate_that_raises_is_recorded_and_the_others_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, made = in_small(ROWS["tiny-never"]), type(ROWS["tiny-never"].full).step

    def step(self: Any, name: str, *arguments: Any, **keywords: Any) -> Step:
        if name == UNCAPTURED:
            raise RuntimeError("no graph")
        return made(self, name, *arguments, **keywords)

    monkeypatch.setattr(type(row.full), "step", step)
    findings = cuda_row.Findings(tmp_path / "findings")
    cuda_row.Measurement(row, "cpu", findings, time.monotonic() + 100).run()
    assert findings.candidates[UNCAPTURED] == {"failed": "RuntimeError: no graph"}
    assert all("step_us" in found for name, found in findings.candidates.items() if name != UNCAPTURED)


def test_idle_is_what_no_interval_covers() -> None:
    assert idle_share([]) is None
    assert idle_share([(5, 5)]) == 0
    assert idle_share([(0, 10), (2, 4), (5, 12)]) == 0
    assert idle_share([(30, 40), (0, 10), (5, 20)]) == 0.25
    assert len(intervals(lambda: torch.ones(10) @ torch.ones(10), "cpu")) >= 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is visible")
def test_nothing_is_written_without_a_gpu(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cuda.main(["tiny-never"])
    assert "needs a GPU" in capsys.readouterr().out
    assert not list(kept.iterdir())
    with pytest.raises(SystemExit):
        cuda.main(["nothing"])
