"""The memory of steps: predicted from shapes, counted by PyTorch's allocator on fake devices, and limited."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fake_cuda.build import can_build
from tests.fake_cuda.process import run

pytestmark = pytest.mark.skipif(
    not can_build(), reason="needs an extension built with CUDA, and the toolkit's headers"
)

MODELS = ("uneven", "gpt", "dropout", "resnet", "unet")
CALLS = ("", "gpipe", "1f1b", "zb-h1")
SETTINGS = "always,except_last,never,0.0,0.25,0.5,0.75,1.0"


def check_predictions(libraries: tuple[Path, Path], *words: str) -> int:
    """Checks predictions to 2%, and returns how many there were.

    A stage that runs ahead of the next one, or of the one before, fills its memory with tensors that wait.
    How many do is up to the clock, so a prediction has two ends, which are equal with one stage.
    """
    number = 0
    for line in run("memory_cases.py", libraries, "predicted", *words, limit=1200):
        setting, _, triples = line.partition(": ")
        for triple in triples.split(", "):
            least, most, counted = map(int, triple.split())
            assert setting[0] != "1" or least == most
            assert 0.98 * least <= counted <= 1.02 * most, (words, line)
            number += 1
    return number


# Model, schedule of a step or '' for a call, numbers of stages and of micro-batches, and settings.
PREDICTED = ("uneven", "1f1b", "2", "4", "always,never,0.5")
MORE_PREDICTED = [
    ("unet", "", "1", "1", "always,never"),  # the memory of a concatenation is freed
    *(("gpt", schedule, "1,4", "4", "always,never,0.5") for schedule in CALLS),
    *(("dropout", schedule, "1,4", "4", "always,never,0.5") for schedule in CALLS),
    *((model, "", "1,2", "4", "always,never,0.5") for model in ("resnet", "unet")),  # convolutions
]
MANY_PREDICTED = [
    *((model, schedule, "1,2,4", "1,4,16", SETTINGS) for model in MODELS[1:] for schedule in CALLS),
    *(("unet", schedule, "2,4", "1,4", "always,never,0.5") for schedule in CALLS),  # skip connections
]


@pytest.mark.parametrize(
    "words",
    [
        PREDICTED,
        *(pytest.param(words, marks=pytest.mark.extended) for words in MORE_PREDICTED),
        *(pytest.param(words, marks=pytest.mark.soak) for words in MANY_PREDICTED),
    ],
    ids=" ".join,
)
def test_memory_is_predicted(words: tuple[str, ...], libraries: tuple[Path, Path]) -> None:
    stages, microbatches, settings = (word.split(",") for word in words[2:])
    number = sum(map(int, stages)) * len(microbatches) * len(settings)
    assert check_predictions(libraries, *words) == number


@pytest.mark.parametrize(
    ("model", "count"),
    [
        *(pytest.param(model, "2", marks=pytest.mark.extended) for model in MODELS),
        *(pytest.param(model, "8", marks=pytest.mark.soak) for model in MODELS),
    ],
)
def test_no_step_takes_more_than_the_memory_that_was_passed(
    model: str, count: str, libraries: tuple[Path, Path]
) -> None:
    for schedule in ("", "1f1b"):
        lines = run("memory_cases.py", libraries, "within", model, schedule, "0", count, limit=1200)
        assert len(lines) == int(count)
        for line in lines:
            limit, counted = line.split()[:2]
            assert "refused" in line or int(counted) <= int(limit), (schedule, line)
        assert any("refused" not in line for line in lines)
