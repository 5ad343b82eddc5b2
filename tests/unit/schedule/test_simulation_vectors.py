"""The simulator of the pages, simulation.js, agrees with Python's on random settings."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpipe_fast.schedule import SCHEDULES, TRANSFERS, Simulation, fill_drain, simulate

SIMULATION = Path(__file__).parents[3] / "gpipe_fast" / "reports" / "page" / "simulation.js"
PROGRAM = """
const { simulate } = require(process.argv[1]);
const found = JSON.parse(require("fs").readFileSync(0, "utf8")).map((settings) => {
  const { ranks, critical_path, memory, ...figures } = simulate(settings);
  const ends = Object.fromEntries(ranks.flat().map((a) => [a.name, [a.begin, a.end]]));
  const curves = memory.map(({ curve, peak }) => [peak, curve]);
  const path = critical_path.filter((a) => !/_/.test(a.kind)).map((a) => a.name).join(" ");
  return { ...figures, ends, curves, critical_path: path };
});
console.log(JSON.stringify(found));
"""


def random_settings(seed: int) -> dict[str, Any]:
    """Returns arguments of `simulate`, some with one value for all stages, some with one for each."""
    draw = random.Random(seed)
    schedule = draw.choice([*SCHEDULES])
    num_devices = draw.randint(1, 4)
    num_stages = num_devices * draw.randint(1, 3) if schedule == "interleaved" else draw.randint(1, 8)
    if num_devices == 1 and schedule == "interleaved":
        num_stages = 2 * draw.randint(1, 3)  # on half as many ranks

    def per_stage(most: float) -> float | list[float]:
        values = [round(draw.random() * most, 3) for _ in range(num_stages)]
        return draw.choice([values, values[0]])

    settings: dict[str, Any] = {
        "schedule": schedule,
        "num_stages": num_stages,
        "num_microbatches": draw.randint(1, 10),
        "num_devices": num_devices,
        "checkpoint": draw.choice(["always", "except_last", "never"]),
        "forward": per_stage(2.0),
        "backward": per_stage(4.0),
    }
    if draw.random() < 0.3:
        settings["recompute"] = per_stage(2.0)
    if draw.random() < 0.3:
        settings["weights"] = 0.0
    if draw.random() < 0.5:
        settings |= {"transfer": per_stage(0.5), "latency": round(draw.random(), 3)}
    if draw.random() < 0.5:
        settings |= {"boundary_bytes": per_stage(10), "activation_bytes": per_stage(100)}
        settings |= {"bandwidth": draw.choice([20.0, 200.0])}
    if schedule == "gpipe" and draw.random() < 0.5:
        settings["slots"] = draw.randint(1, 3)
    return settings


def simulated(settings: dict[str, Any]) -> Simulation:
    """Simulates with the arguments of `simulate`, and with ``slots`` for fill-drain."""
    options = {**settings}
    if slots := options.pop("slots", None):
        options["schedule"] = fill_drain(options["num_stages"], options["num_microbatches"], slots=slots)
    return simulate(**options)


def simulated_by_javascript(settings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if shutil.which("node") is None:
        pytest.skip("node is not installed: simulation.js is not checked")
    command = ["node", "-e", PROGRAM, str(SIMULATION)]
    done = subprocess.run(command, input=json.dumps(settings), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_javascript_agrees_with_python() -> None:
    settings = [random_settings(seed) for seed in range(200)]
    for own, found in zip(settings, simulated_by_javascript(settings), strict=True):
        expected = simulated(own)
        for name in ("time", "bubble", "busy", "kept"):
            value = getattr(expected, name)
            wanted = list(value) if isinstance(value, tuple) else value
            assert found[name] == pytest.approx(wanted, abs=1e-8), (own, name)
        peaks = expected.peak_bytes or [0] * len(found["peak_bytes"])
        assert found["peak_bytes"] == pytest.approx(list(peaks), abs=1e-8), own
        path = (str(action) for action in expected.critical_path if action.kind not in TRANSFERS)
        assert found["critical_path"] == " ".join(path), own
        ends = {str(a): [expected.begins[a], end] for a, end in expected.ends.items()}
        assert found["ends"].keys() == ends.keys()
        assert all(found["ends"][name] == pytest.approx(ends[name], abs=1e-8) for name in ends), own
        for peak, curve in found["curves"]:
            kept = [number for _, number in curve]
            assert (kept[0], max(kept)) == (0, peak)
            assert kept[-1] == pytest.approx(0, abs=1e-6)


def test_the_memory_curve_of_a_step_by_hand() -> None:
    """One stage: F0 and F1 take 1, then R1 1, B1 2, R0 1, B0 2."""
    settings = {"num_microbatches": 2, "checkpoint": "always", "boundary_bytes": 1, "activation_bytes": 10}
    (found,) = simulated_by_javascript([settings])
    assert found["curves"] == [[12, [[0, 0], [0, 1], [1, 2], [2, 12], [5, 1], [5, 11], [8, 0]]]]
