"""The example of `GPipe.from_model`: its losses, and those of the saved model, are the plain model's."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch

from tests.examples.commands import import_example, run

TINY = ["--layers=2", "--width=16", "--batch=6", "--chunks=3", "--steps=3", "--threads=1"]

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*leave the stages idle"),
]


@pytest.mark.extended
def test_the_command_with_quick(tmp_path: Path) -> None:
    import_example("transformers_from_model")
    out = run("transformers_from_model", "--quick", "--threads=2", "--save", "model", folder=tmp_path)
    assert "one step: equal bit for bit to the plain loop" in out
    assert "equal in every step: True" in out
    losses = [float(loss) for loss in re.findall(r"^  step +[0-9]+: ([0-9.]+)", out, re.M)]
    assert losses[-1] < 0.8 * losses[0]
    assert {file.name for file in (tmp_path / "model").iterdir()} >= {"config.json", "model.safetensors"}


def test_training_equals_that_of_the_plain_model() -> None:
    example = import_example("transformers_from_model")
    args = example.parse(TINY)
    model = example.new_pipeline(example.new_model(args), args)
    begin = copy.deepcopy(model.state_dict())
    states, losses = [], []
    for trained in (model, model.plain_loop):
        model.load_state_dict(begin)
        torch.manual_seed(args.seed)
        losses.append(example.train(model, args, trained))
        states.append(copy.deepcopy(model.state_dict()))
    assert losses[0] == losses[1]
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())
