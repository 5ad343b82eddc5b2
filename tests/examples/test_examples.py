"""A smoke test of each example: it trains, and says truly that its numbers are those of the plain model."""

from __future__ import annotations

import importlib
import json
import re
import signal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.docs.markdown import ROOT

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*leave the stages idle"),
]

GPT = "--width=16 --layers=2 --heads=2 --length=16 --batch=6 --chunks=9 --stages=2 --threads=1 --sample=20"
TRANSFORMERS = "--layers=2 --width=16 --batch=6 --chunks=3 --steps=3 --threads=1"
LOGITS = [
    f"\n  {what}: equal bit for bit\n" for what in ("logits", "loss", "logits, over the same micro-batches")
]
# The options of a short run, and texts that it prints.
EXAMPLES: dict[str, tuple[str, list[str]]] = {
    "diffusers_dit": (
        "--quick --blocks=4 --steps=3 --depths 1 2 4",
        [f"{way} " for way in ("calls", "stream, depth=1", "stream, depth=2", "stream, depth=4")]
        + ["the plain model's latents: equal bit for bit"],
    ),
    "gpt": (
        f"{GPT} --steps=8 --text=text",
        [
            "logits, loss and 29 gradients of a step equal those of the plain loop",
            "over the same 6 micro-batches, bit for bit",
            "  stage 1 on cpu: block1, head; ",
            "note: a mini-batch of 6 yields 6 micro-batches, not 9",
            "  build/demo/step.html: the step above",
        ],
    ),
    "qlora": (
        "--quick --steps=4 --chunks=4",
        [
            "layers per stage: [2, 2], on cpu, cpu",
            "one step: equal bit for bit to the plain loop",
            "loaded into the plain model by PEFT: its logits: equal bit for bit",
        ],
    ),
    "resnet": (
        "--size=32 --width=4 --batch=16 --chunks=2 --balance 9 9 --steps=1 --threads=1",
        [
            "  the loss and the loop's loss: equal bit for bit",
            "  161 gradients and the loop's gradients: equal bit for bit",
            "  updates of the running statistics: 1 (deferred_batch_norm=True); loop: 2; whole mini-batch: 1",
            "  the logits and those of the plain loop over micro-batches: equal bit for bit",
        ],
    ),
    "torchgpipe_migration": (
        "--steps=3 --batch=16 --width=8 --rounds=2 --balance 3 2 3 --threads=1",
        [
            "  + from gpipe_fast import GPipe",
            "the losses of all 3 steps: equal bit for bit",
            "the 40 trained parameters: equal bit for bit",
            "  torchgpipe's last key: partitions.2.7.bias; gpipe_fast's: 7.bias",
        ],
    ),
    "transformers_from_model": (
        TRANSFORMERS,
        ["one step: equal bit for bit to the plain loop", "equal in every step: True"],
    ),
    # In two stages, the gradient of a tied weight may differ.
    "transformers_gpt2": (
        f"{TRANSFORMERS} --length=16 --stages=1",
        [*LOGITS, "28 of 28 are equal bit for bit"],
    ),
    "transformers_llama": (f"{TRANSFORMERS} --length=16", [*LOGITS, "21 of 21 are equal bit for bit"]),
    "unet": (
        "--size=16 --width=4 --batch=6 --chunks=3 --steps=1 --threads=1",
        ["  58 gradients: equal bit for bit", "stage 0 (cpu) -> stage 2 (cpu), skip connection"],
    ),
}
# What an example imports of other libraries, which may be missing or fail to load beside another torch.
LIBRARIES = {
    "diffusers_dit": "diffusers",
    "qlora": "bitsandbytes",
    "resnet": "torchvision",
    "torchgpipe_migration": "torchgpipe",
    "transformers_from_model": "transformers.models.bert.modeling_bert",
    "transformers_gpt2": "transformers.models.gpt2.modeling_gpt2",
    "transformers_llama": "transformers.models.llama.modeling_llama",
}


def import_example(name: str) -> ModuleType:
    """Imports an example, or skips the test if the example's library does not load."""
    try:
        if name in LIBRARIES:
            importlib.import_module(LIBRARIES[name])
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"{LIBRARIES[name]} does not load: {error}")
    return importlib.import_module(f"examples.{name}.__main__")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs the examples in an empty folder, but for a text."""
    (tmp_path / "text").write_text("".join(f"def f{i:02}(x):\n    return x + {i:02}\n" for i in range(100)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPIPE_FAST_PROGRESS", "0")
    return tmp_path


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_equals_the_plain_model(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options, texts = EXAMPLES[name]
    example = import_example(name)
    capsys.readouterr()  # drops what libraries write when they are imported
    example.main(options.split())
    out, errors = capsys.readouterr()
    assert errors == ""
    assert [text for text in texts if text not in out] == [], out
    assert "DIFFERENT" not in out
    assert re.search(r"docs/\w+(/\w+)?\.md", out)
    if name == "gpt":
        first, last = re.findall(
            r"^(?:first|last) held-out loss: ([0-9.]+) bits per byte$", out, re.MULTILINE
        )
        assert float(last) < float(first)
        assert "M = 6 micro-batches" in (folder / "build" / "demo" / "step.html").read_text(encoding="utf-8")


def test_the_demo_resumes_after_ctrl_c_bit_for_bit(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    demo = import_example("gpt")
    options = [*GPT.split(), "--text=text", "--steps=5", "--dropout=0.1"]
    demo.main([*options, "--save=whole.pt"])
    step = demo.Training._step

    def step_with_ctrl_c(training: Any, text: torch.Tensor) -> float:
        if len(training.losses) == 1:
            signal.raise_signal(signal.SIGINT)
        loss: float = step(training, text)
        return loss

    with monkeypatch.context() as patch:
        patch.setattr(demo.Training, "_step", step_with_ctrl_c)
        demo.main([*options, "--save=part.pt"])
    assert "interrupted after 2 of 5 steps; continue with --resume" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        demo.main([*options, "--save=part.pt", "--resume", "--width=32"])
    assert "comes from a run with --width 16, not 32" in capsys.readouterr().err
    demo.main([*options, "--save=part.pt", "--resume", "--stages=3"])
    whole, resumed = (torch.load(folder / name) for name in ("whole.pt", "part.pt"))
    assert resumed["losses"] == whole["losses"]
    assert all(torch.equal(resumed["model"][name], value) for name, value in whole["model"].items())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gpt", "--stages 7", "cannot cut 6 layers (the embedding, 4 blocks, the head) into 7 stages"),
        ("gpt", "--text missing", "there is no file or folder missing"),
        ("resnet", "--balance 9 8", "the model has 18 layers, but --balance sums to 17"),
        ("torchgpipe_migration", "--balance 4 3", "the model has 8 layers, but --balance sums to 7"),
        ("transformers_gpt2", "--steps 0", "argument --steps: must be at least 1, got 0"),
        ("transformers_llama", "--balance 2 1", "--balance must sum to 6 layers, got [2, 1]"),
        ("unet", "--size 20", "--size must be a multiple of 8 and --width of 4, got 20 and 16"),
    ],
)
def test_wrong_options_are_refused(
    name: str, options: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        import_example(name).main(options.split())
    assert message in capsys.readouterr().err


def test_every_example_is_tested_and_listed() -> None:
    folder = ROOT / "examples"
    names = {path.parent.name for path in folder.glob("*/__main__.py")}
    assert EXAMPLES.keys() == names
    text = (folder / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| \[(\w+)\]\(\1(?:/__main__)?\.py\) \|", text, re.MULTILINE))
    assert listed == names | {path.stem for path in folder.glob("*.py")}


def test_the_cells_of_the_notebook_run() -> None:
    """And show reports as tables; it is committed without outputs."""
    notebook = json.loads((ROOT / "examples" / "tour.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    names: dict[str, Any] = {}
    for cell in cells:
        assert cell["outputs"] == []
        exec(compile("".join(cell["source"]), "tour.ipynb", "exec"), names)
    assert names["loss"] < 0.6  # guessing gives 0.69
