"""The examples with GPT-2 and Llama of transformers: a step and a saved model equal the plain model's."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.examples.commands import import_example, refusal, run

EXAMPLES = ["gpt2", "llama"]
SIZES = {"layers": 2, "width": 16, "length": 16, "batch": 6, "chunks": 3, "steps": 3, "threads": 1}
TINY = [f"--{name}={value}" for name, value in SIZES.items()]
# Two stages use the tied weight, and its gradient is summed within each of them first.
UNEQUAL = {"gpt2": {"transformer.wte.weight"}, "llama": set()}

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*leave the stages idle"),
]


@pytest.fixture
def example(request: pytest.FixtureRequest) -> ModuleType:
    """Imports an example in the test, because transformers takes seconds to import."""
    return import_example(f"transformers_{request.param}")


def both(function: Any) -> Any:
    return pytest.mark.parametrize("example", EXAMPLES, indirect=True)(function)


def name_of(example: ModuleType) -> str:
    return example.__name__.split(".")[1].removeprefix("transformers_")


def tiny(example: ModuleType, *more: str) -> tuple[argparse.Namespace, Any]:
    """Returns parsed arguments and the library's model, whose weights depend on the seed alone."""
    args = example.parse([*TINY, *more])
    torch.manual_seed(args.seed)
    return args, example.new_model(args)


class MicroBatches(nn.Module):
    """The reference: the library's model, one micro-batch after the other."""

    def __init__(self, model: nn.Module, chunks: int) -> None:
        super().__init__()
        self.model = model
        self.chunks = chunks

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.cat([self.model(part).logits for part in tokens.chunk(self.chunks)])


@pytest.mark.extended
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_command_with_quick(name: str, tmp_path: Path) -> None:
    """It compares, trains, saves and loads, and prints nothing on stderr, such as warnings."""
    import_example(f"transformers_{name}")
    out = run(f"transformers_{name}", "--quick", "--threads=2", "--save", "model", folder=tmp_path)
    for what in ("logits", "loss", "logits, over the same micro-batches"):
        assert f"\n  {what}: equal bit for bit\n" in out
    ((equal, gradients),) = re.findall("gradients: ([0-9]+) of ([0-9]+) are equal bit for bit", out)
    assert int(gradients) - int(equal) == len(UNEQUAL[name])
    assert set(re.findall(r"^  gradient of (\S+):", out, re.M)) == UNEQUAL[name]
    losses = [float(loss) for loss in re.findall("^  step +[0-9]+: loss ([0-9.]+)$", out, re.M)]
    assert losses[-1] < 0.8 * losses[0]
    assert {file.name for file in (tmp_path / "model").iterdir()} >= {"config.json", "model.safetensors"}
    assert "Look next at" in out


@both
@pytest.mark.sampled(1)
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_a_step_equals_the_plain_model(example: ModuleType, checkpoint: str) -> None:
    args, model = tiny(example, "--checkpoint", checkpoint)
    _, plain = tiny(example)
    batch = example.windows(example.some_text(), args)
    pipeline = example.new_pipeline(model, args)
    ours = example.run_step(pipeline, model, *batch)
    expected = example.run_step(MicroBatches(plain, args.chunks), plain, *batch)
    assert torch.equal(ours.logits, expected.logits)
    assert torch.equal(ours.loss, expected.loss)
    assert ours.gradients.keys() == dict(plain.named_parameters()).keys()
    unequal = {name for name, g in expected.gradients.items() if not torch.equal(ours.gradients[name], g)}
    assert unequal <= UNEQUAL[name_of(example)]
    torch.testing.assert_close(ours.gradients, expected.gradients)


@both
@pytest.mark.sampled(1)
def test_one_stage_equals_the_plain_model_in_every_gradient(example: ModuleType) -> None:
    args, model = tiny(example, "--stages", "1")
    batch = example.windows(example.some_text(), args)
    ours = example.run_step(example.new_pipeline(model, args), model, *batch)
    expected = example.run_step(MicroBatches(model, args.chunks), model, *batch)
    for name, gradient in expected.gradients.items():
        assert torch.equal(ours.gradients[name], gradient), name


@both
@pytest.mark.sampled(1)
def test_training_equals_that_of_the_plain_model(example: ModuleType) -> None:
    """In one stage, so that the gradient of the tied weight is equal, too."""
    states = []
    for is_pipeline in (True, False):
        args, model = tiny(example, "--stages", "1")
        trained = example.new_pipeline(model, args) if is_pipeline else MicroBatches(model, args.chunks)
        example.train(trained, example.some_text(), args)
        states.append(model.state_dict())
    for name, value in states[1].items():
        assert torch.equal(states[0][name], value), name


@both
@pytest.mark.sampled(1)
def test_the_saved_model_has_the_keys_and_weights_of_the_library(example: ModuleType, tmp_path: Path) -> None:
    args, model = tiny(example)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    example.train(example.new_pipeline(model, args), example.some_text(), args)
    loaded = example.save_and_load(model, tmp_path).state_dict()
    assert loaded.keys() == before.keys()
    for name, value in model.state_dict().items():
        assert torch.equal(loaded[name], value), name
        assert not torch.equal(before[name], value), name


@both
@pytest.mark.sampled(1)
def test_wrong_layers_are_reported(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """The blocks of the pipeline get no mask, which is not causal with the attention "eager"."""
    args, model = tiny(example)
    model.config._attn_implementation = "eager"
    example.compare_step(model, example.new_pipeline(model, args), example.windows(example.some_text(), args))
    out = capsys.readouterr().out
    assert re.search("^  logits: largest difference [0-9.e+-]+, [0-9.e+-]+ of the largest value$", out, re.M)
    assert not re.search("^  logits: equal", out, re.M)


@both
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--stages 5", "cannot cut 4 layers into 5 stages"),
        ("--balance 2 1", "--balance must sum to 4 layers, got [2, 1]"),
        ("--width 30", "--width must be a multiple of the 4 heads, got 30"),
        ("--length 4", "--length must be above 4, got 4"),
        ("--steps 0", "argument --steps: must be at least 1, got 0"),
    ],
)
def test_bad_arguments_are_refused(
    example: ModuleType, arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal(example.parse, [*TINY, *arguments.split()], capsys)


@both
def test_quick_sets_defaults_that_options_override(example: ModuleType) -> None:
    args = example.parse(["--quick", "--steps", "3", "--threads", "1"])
    assert (args.steps, args.layers, args.width) == (3, 2, 64)
