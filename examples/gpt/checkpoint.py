"""The demo's checkpoint file: the complete training state, so that a resumed run is bitwise the same."""

from __future__ import annotations

import argparse
import hashlib
import os
from pathlib import Path
from typing import Any

import torch

from examples.gpt.text import Text
from examples.gpt.train import Training

# The settings that losses depend on, besides the text. The stages and the checkpoint mode change no bit.
_SETTINGS = ("steps", "chunks", "width", "layers", "heads", "dropout", "length", "batch", "lr", "seed")


def resume_settings(args: argparse.Namespace, text: Text) -> dict[str, Any]:
    """Returns the settings that a resumed run must share with the interrupted one."""
    digest = hashlib.sha256(text.training.numpy().tobytes()).hexdigest()
    return {name: getattr(args, name) for name in _SETTINGS} | {"text": digest}


def save_checkpoint(path: Path, training: Training, settings: dict[str, Any]) -> None:
    """Writes a checkpoint atomically; a plain ``nn.Sequential`` can load its ``"model"`` entry."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    torch.save({"settings": settings, **training.state_dict()}, unfinished)
    os.replace(unfinished, path)


def load_checkpoint(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Reads a checkpoint for `Training.load_state_dict`.

    Raises:
        ValueError: the file is missing, is not a checkpoint, or comes from a run with other settings.
    """
    if not path.is_file():
        raise ValueError(f"there is no checkpoint {path} to resume from")
    try:
        state: dict[str, Any] = torch.load(path)
        found = state["settings"]
    except Exception as error:
        raise ValueError(f"{path} is not a checkpoint of this demo: {error}") from error
    for name, value in settings.items():
        if name == "text" and found.get(name) != value:
            raise ValueError(f"the checkpoint {path} comes from a run on another text")
        if found.get(name) != value:
            raise ValueError(
                f"the checkpoint {path} comes from a run with --{name} {found.get(name)}, not {value}"
            )
    return state
