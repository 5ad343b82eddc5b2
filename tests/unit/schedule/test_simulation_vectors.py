"""Both simulators, Python's and that of the pages, against one table of settings and results."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpipe_fast.schedule import TRANSFERS
from tests.unit.schedule.simulation_vectors import NUM_VECTORS, TABLE, random_settings, read_table, simulated

SIMULATION = Path(__file__).parents[3] / "gpipe_fast" / "reports" / "page" / "simulation.js"
PROGRAM = """
const { simulate } = require(process.argv[1]);
const rows = JSON.parse(require("fs").readFileSync(process.argv[2], "utf8"));
const found = rows.map(({ settings }) => {
  const { ranks, critical_path, memory, ...figures } = simulate(settings);
  const actions = ranks.flat().map((a) => [a.name, a.begin, a.end]);
  const peaks = memory.map(({ curve, peak }) => [peak, ...curve.map(([, bytes]) => bytes)]);
  const path = critical_path.filter((a) => !/_/.test(a.kind)).map((a) => a.name).join(" ");
  return { ...figures, actions, peaks, critical_path: path };
});
console.log(JSON.stringify(found));
"""


def test_python_agrees_with_the_table() -> None:
    rows = read_table()
    assert len(rows) == NUM_VECTORS
    for seed, row in enumerate(rows):
        assert row["settings"] == random_settings(seed)
        found = simulated(row["settings"])
        values = found.to_dict()
        for name in ("time", "bubble", "busy", "kept", "peak_bytes"):
            assert values[name] == pytest.approx(row[name], abs=1e-8), (seed, name)
        path = " ".join(str(action) for action in found.critical_path if action.kind not in TRANSFERS)
        assert path == row["critical_path"], seed
        times = {each["action"]: [each["begin"], each["end"]] for each in values["actions"]}
        for name, *expected in row["actions"]:
            assert times[name] == pytest.approx(expected, abs=1e-8), (seed, name)


@pytest.fixture(scope="module")
def of_javascript() -> list[dict[str, Any]]:
    """Returns what simulation.js returns for all settings of the table."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed: simulation.js is not checked")
    command = ["node", "-e", PROGRAM, str(SIMULATION), str(TABLE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_javascript_agrees_with_the_table(of_javascript: list[dict[str, Any]]) -> None:
    for seed, (found, row) in enumerate(zip(of_javascript, read_table(), strict=True)):
        for name in ("time", "bubble", "busy", "kept"):
            assert found[name] == pytest.approx(row[name], abs=1e-8), (seed, name)
        expected = row["peak_bytes"] or [0] * len(found["peak_bytes"])
        assert found["peak_bytes"] == pytest.approx(expected, abs=1e-8), seed
        assert found["critical_path"] == row["critical_path"], seed
        times = {name: ends for name, *ends in found["actions"]}
        for name, *expected_times in row["actions"]:
            assert times[name] == pytest.approx(expected_times, abs=1e-8), (seed, name)


def test_the_memory_curves_of_javascript_begin_and_end_at_nothing(
    of_javascript: list[dict[str, Any]],
) -> None:
    for found in of_javascript:
        for peak, *curve in found["peaks"]:
            assert curve[0] == 0
            assert curve[-1] == pytest.approx(0, abs=1e-6)
            assert max(curve) == peak


def test_the_memory_curve_of_a_step_by_hand() -> None:
    """One stage: F0 and F1 take 1, then R1 1, B1 2, R0 1, B0 2."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed: simulation.js is not checked")
    program = """
      const { simulate } = require(process.argv[1]);
      const settings = { num_microbatches: 2, checkpoint: "always", boundary_bytes: 1, activation_bytes: 10 };
      console.log(JSON.stringify(simulate(settings).memory[0].curve));
    """
    done = subprocess.run(
        ["node", "-e", program, str(SIMULATION)], capture_output=True, text=True, timeout=60
    )
    assert json.loads(done.stdout) == [[0, 0], [0, 1], [1, 2], [2, 12], [5, 1], [5, 11], [8, 0]]
