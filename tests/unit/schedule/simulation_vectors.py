"""The table simulation_vectors.json: random settings of `simulate`, and what it returns for them.

The simulator of the pages, gpipe_fast/reports/page/simulation.js, is checked against the same table. After
a change of the rules, make the table anew: ``python -m tests.unit.schedule.simulation_vectors``.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from gpipe_fast.schedule import SCHEDULES, TRANSFERS, Simulation, fill_drain, simulate

TABLE = Path(__file__).with_suffix(".json")
NUM_VECTORS = 200
_NUM_ACTIONS = 4  # of which a vector has the begin and the end


def simulated(settings: dict[str, Any]) -> Simulation:
    """Simulates with the arguments of `simulate`, and with ``slots`` for fill-drain."""
    options = {**settings}
    slots = options.pop("slots", None)
    if slots is not None:
        options["schedule"] = fill_drain(options["num_stages"], options["num_microbatches"], slots=slots)
    return simulate(**options)


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


def rounded(value: float) -> float:
    """Returns a number in the digits of the table."""
    return round(value, 9)


def vector(seed: int) -> dict[str, Any]:
    """Returns a row of the table."""
    settings = random_settings(seed)
    found = simulated(settings)
    chosen = random.Random(seed).sample([*found.ends], min(_NUM_ACTIONS, len(found.ends)))
    return {
        "settings": settings,
        "time": rounded(found.time),
        "bubble": rounded(found.bubble),
        "busy": [rounded(x) for x in found.busy],
        "kept": found.kept,
        "peak_bytes": [rounded(x) for x in found.peak_bytes],
        "critical_path": " ".join(str(a) for a in found.critical_path if a.kind not in TRANSFERS),
        "actions": [[str(a), rounded(found.begins[a]), rounded(found.ends[a])] for a in chosen],
    }


def read_table() -> list[dict[str, Any]]:
    """Returns the rows of the table."""
    rows: list[dict[str, Any]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return rows


if __name__ == "__main__":
    lines = (json.dumps(vector(seed), separators=(",", ":")) for seed in range(NUM_VECTORS))
    TABLE.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
