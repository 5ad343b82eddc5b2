"""`pytest bench`, and `make results`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench import write_results
from bench.comparison import Outcome, verdicts
from bench.measure import ROOT
from tests.docs.test_figures import committed_results

# Of two comparisons with a few candidates, one is called and the other has gradients.
UNET = "U-Net (2, 8); 4 stages, M = 4, always"
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
    assert {each["group"] for each in kept.values()} == {"call of 10 modules", UNET}
    ours = kept[f"test_models[{UNET}: gpipe_fast]"]
    assert ours["extra_info"]["gradients"] == "equal"
    (row,) = (line for line in done.stdout.splitlines() if line.startswith(f"| {UNET} "))
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells[1] == "gpipe_fast"
    assert cells[3:] == ["1.00", "-", "equal"]
    assert "bench: call of 10 modules (1 of 2)" in done.stdout
    assert re.search(r"\nbench: U-Net .* \(2 of 2, about \d+ min left\)", done.stdout)
    assert re.search(r"^\| torchgpipe +\| +1 \| \d", done.stdout, re.MULTILINE)
    compare = [sys.executable, "-m", "pytest_benchmark", "compare", str(found)]
    compared = subprocess.run(compare, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert compared.returncode == 0, compared.stderr
    assert compared.stdout.count("call of 10 modules: whole call") == 1


def test_others_are_summed_up_by_name() -> None:
    def outcome(ms: float, mib: int | None = None) -> Outcome:
        return Outcome(0.0, [ms * 1e3] * 5, mib and mib << 20)

    found = [
        {"gpipe_fast, K = 4, never": outcome(2, 10), "gpipe_fast, K = 1, never": outcome(3)},
        {"gpipe_fast": outcome(2, 10), "torchgpipe, K = 4, never": outcome(5, 12), "plain loop": outcome(3)},
        {"gpipe_fast": outcome(1), "torchgpipe": outcome(2), "plain, whole mini-batch": Outcome(0.1)},
        {"keyed": outcome(1), "torch": outcome(2)},
    ]
    assert verdicts(found) == [
        ["torchgpipe", 2, "2.00 to 2.50", "1.20 to 1.20"],
        ["plain loop", 1, "1.50 to 1.50", "-"],
        ["plain, whole mini-batch", 0, "-", "-"],
    ]


def test_every_committed_table_is_written() -> None:
    files = {name.replace("-", "_") for name in write_results.commands()} - {"explain"}
    files = files - {"cuda_operators_table"} | {"census_torchvision", "census_libraries", "cuda_operators"}
    files |= {"census_newest"}  # by `make census-newest`
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
    monkeypatch.setattr(write_results, "commands", lambda: commands)
    with pytest.raises(SystemExit):
        write_results.main()
    out = capsys.readouterr().out
    assert "FAILED (3)" in out
    assert out.count("written") == 2


def test_files_of_an_older_tree_are_marked_once() -> None:
    file = "# Title\n\nA machine; commit 97fdb23.\nNote.\n"
    once = write_results.marked(file, "1234567")
    assert once.splitlines()[2] == (
        "**Older than this tree: measured at commit 97fdb23; `make gpu` on a GPU measures again.**"
    )
    assert write_results.marked(once, "7654321+changes") == once
    assert write_results.marked(once, "97fdb23") == file
    assert write_results.marked("# Title\n\nNo commit.\n", "1234567") == "# Title\n\nNo commit.\n"
