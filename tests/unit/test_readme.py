"""The README: its code runs, it is short, and its figures are those of the files in bench/results."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.docs.markdown import BLOCK, ROOT, tables_of

TEXT = (ROOT / "README.md").read_text()
# The number of words as `wc -w` counts them, including code, tables and links.
MOST_WORDS = 700

# The candidates of a row of the README's table, in the order of its columns; None for an empty cell.
STEP = ("gpipe_fast", "torchgpipe", "torch.distributed.pipelining", "plain loop")
OVERHEAD = ("gpipe_fast, K = 4, never", "torchgpipe, K = 4, never", None, "plain loop")
GPU = "nvidia-h200-2026-11-28.md"
ON_A_GPU = ("gpipe_fast, not captured", "torchgpipe", None, "plain loop")
TIME, MEMORY = "ms: median [p20, p80]", "peak memory, MiB"


def measured(file: str, table: int, candidate: str, column: str, microbatches: str | None = None) -> str:
    """Returns one figure of a file in bench/results, without its percentiles."""
    rows = tables_of((ROOT / "bench" / "results" / file).read_text())[table]
    rows = [row for row in rows if row["candidate"] == candidate]
    (row,) = [row for row in rows if microbatches in (None, row.get("micro-batches"))]
    return row[column].split()[0]


def test_the_code_blocks_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(TEXT.split()) <= MOST_WORDS
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall(TEXT)
    assert len(blocks) >= 2
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert next(names["llama"].parameters()).grad is not None
    names["layers"].load_state_dict(torch.load(tmp_path / "model.pt"))
    assert names["loss"].item() < 0.6  # guessing gives 0.69


def test_the_figures_repeat_the_results_of_the_benchmarks() -> None:
    expected = [
        [measured("step.md", table, name, column, "16") for name in STEP]
        for table in (0, 1)
        for column in (TIME, MEMORY)
    ]
    expected.append([measured("overhead.md", 0, name, TIME) if name else "" for name in OVERHEAD])
    for column in (TIME, "peak, MiB"):
        expected.append([measured(GPU, 0, name, column) if name else "" for name in ON_A_GPU])
    (table,) = [rows for rows in tables_of(TEXT) if "gpipe_fast" in rows[0]]
    columns = ("gpipe_fast", "torchgpipe", "torch pipelining", "plain loop")
    assert [[row[column] for column in columns] for row in table] == expected
    large = measured("step.md", 1, "plain, whole mini-batch", TIME, "16")
    small = measured("overhead.md", 0, "plain, whole mini-batch", TIME)
    assert f"{large} ms, and {small} ms" in " ".join(TEXT.split())
    calls = tables_of((ROOT / "bench/results/first_call.md").read_text())[0]
    first, later = (row["forward and backward, s"] for row in calls if row["model"].startswith("GPT-2 small"))
    assert f"a step of GPT-2 small takes {first} s, then {later} s" in TEXT


# The sentence that every page says which speaks of GPUs in general.
ON_GPUS = "The GPU code has run on one H200, never on several GPUs"
SPEAK_OF_GPUS = ["README.md", "CONTRIBUTING.md"] + [
    f"docs/{name}.md"
    for name in (
        "getting_started",
        "gpus",
        "same_numbers",
        "guide/several_machines",
        "guide/training_loops",
        "coming_from/deepspeed",
        "coming_from/device_map",
        "coming_from/pipelining",
        "coming_from/torchgpipe",
    )
]


@pytest.mark.parametrize("page", SPEAK_OF_GPUS)
def test_pages_say_the_same_of_gpus(page: str) -> None:
    text = " ".join((ROOT / page).read_text().split())
    assert ON_GPUS in text
    others = (
        r"not run on a GPU|checked on a GPU yet|run on one GPU|run on one H200(?!, never)|GPUs were not tried"
    )
    assert re.findall(others, text) == []


def test_the_number_of_compared_layers_and_models_is_that_of_the_censuses() -> None:
    classes = re.search(r"(\d+) classes", (ROOT / "bench/results/census.md").read_text())
    models = tables_of((ROOT / "bench/results/census_torchvision.md").read_text())[0]
    equal = [row for row in models if row["compared with the plain loop"] == "equal"]
    assert classes is not None
    text = " ".join(TEXT.split())
    assert f"{classes[1]} layer classes of `torch.nn`, {len(equal)} models of torchvision" in text
