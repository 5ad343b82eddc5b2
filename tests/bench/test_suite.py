"""`pytest bench`, and `make results`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import write_results
from bench.measure import ROOT
from tests.docs.test_figures import committed_results

# Of two comparisons with a few candidates, one is called and the other has gradients.
CHOSEN = ["bench", "-k", "(10 and modules) or U-Net"]


@pytest.mark.extended
def test_durations_are_kept_and_printed_in_one_table(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    options = ["-q", "-p", "no:cacheprovider", f"--benchmark-json={found}"]
    command = [sys.executable, "-m", "pytest", *options, *CHOSEN]
    # pytest-benchmark measures nothing in a worker of pytest-xdist.
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    done = subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    kept = {each["name"]: each for each in json.loads(found.read_text())["benchmarks"]}
    assert len(kept) == 6
    for each in kept.values():
        assert each["stats"]["rounds"] >= 5
        assert each["stats"]["median"] > 0
    assert {each["group"] for each in kept.values()} == {"call of 10 modules", "U-Net (2, 8)"}
    ours = kept["test_models[U-Net (2, 8): gpipe_fast]"]
    assert ours["extra_info"]["gradients"] == "equal"
    (row,) = (line for line in done.stdout.splitlines() if line.startswith("| U-Net (2, 8) "))
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells[1] == "gpipe_fast"
    assert cells[3:] == ["1.00", "-", "equal"]
    compare = [sys.executable, "-m", "pytest_benchmark", "compare", str(found)]
    compared = subprocess.run(compare, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert compared.returncode == 0, compared.stderr
    assert compared.stdout.count("call of 10 modules: whole call") == 1


def test_every_committed_table_is_written() -> None:
    files = {name.replace("-", "_") for name in write_results.commands()} - {"compiled", "explain"}
    files = files - {"cuda_operators_table"} | {"census_torchvision", "cuda_operators"}
    of_gpus = {name for name in committed_results() if name.startswith(("gpu-", "nvidia-"))}  # by `make gpu`
    assert {f"{name}.md" for name in files} == committed_results() - of_gpus
    assert write_results.WEIGHTS.keys() <= write_results.commands().keys()


def test_a_table_that_fails_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = {"good": ["-c", ""], "bad": ["-c", "raise SystemExit(3)"], "last": ["-c", ""]}
    monkeypatch.setattr(write_results, "uncommitted", lambda: " M setup.py")
    with pytest.raises(SystemExit, match=r"commit these changes first[^\n]*\n M setup.py"):
        write_results.main()
    monkeypatch.setattr(write_results, "uncommitted", lambda: "")
    monkeypatch.setattr(write_results.figures, "main", lambda: None)
    monkeypatch.setattr(write_results, "commands", lambda: commands)
    with pytest.raises(SystemExit):
        write_results.main()
    out = capsys.readouterr().out
    assert "FAILED (3)" in out
    assert out.count("written") == 2
