"""Runs the command of an example in a process of its own, and reads its help and its refusals."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
# Seconds: no example needs a tenth of this on an idle machine.
TIMEOUT = 600
# What an example imports of other libraries; it may be missing, or fail to load beside another build of torch
# (transformers fails if torchvision does).
LIBRARIES = {
    "resnet": "torchvision",
    "transformers_gpt2": "transformers.models.gpt2.modeling_gpt2",
    "transformers_llama": "transformers.models.llama.modeling_llama",
}


def import_example(name: str) -> ModuleType:
    """Imports an example, or skips the test if the example's library does not load."""
    try:
        if name in LIBRARIES:
            importlib.import_module(LIBRARIES[name])
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"{LIBRARIES[name]} does not load: {error}", allow_module_level=True)
    return importlib.import_module(f"examples.{name}.__main__")


def start(name: str, *arguments: str, folder: Path) -> subprocess.Popen[str]:
    """Starts an example with ``folder`` as the working directory."""
    return subprocess.Popen(
        [sys.executable, "-m", f"examples.{name}", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "GPIPE_FAST_PROGRESS": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )


def finish(process: subprocess.Popen[str]) -> str:
    """Returns the output of an example, which must succeed and print nothing on stderr, such as warnings."""
    try:
        output, errors = process.communicate(timeout=TIMEOUT)
    finally:
        process.kill()
    assert (process.returncode, errors) == (0, ""), errors
    return output


def run(name: str, *arguments: str, folder: Path) -> str:
    """Runs an example to its end; returns its output."""
    return finish(start(name, *arguments, folder=folder))


def help_of(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> str:
    """Returns what ``--help`` prints, with single spaces between words."""
    with pytest.raises(SystemExit) as ended:
        example.main(["--help"])
    assert ended.value.code == 0
    return " ".join(capsys.readouterr().out.split())


def refusal(
    parse: Callable[[Sequence[str]], object], arguments: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> str:
    """Returns what is printed on stderr for arguments that are refused."""
    with pytest.raises(SystemExit) as refused:
        parse(arguments)
    assert refused.value.code == 2
    return capsys.readouterr().err
