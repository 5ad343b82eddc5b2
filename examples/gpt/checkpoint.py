"""The demo's checkpoint: all that training needs to go on as if it had never stopped, in one file."""

from __future__ import annotations

import argparse
import hashlib
import os
from pathlib import Path
from typing import Any

import torch

from examples.gpt.text import Text
from examples.gpt.train import Training

# What the losses depend on, besides the text. Neither stages nor what is recomputed changes a bit.
_SETTINGS = ("steps", "chunks", "width", "layers", "heads", "dropout", "length", "batch", "lr", "seed")


def settings_of(args: argparse.Namespace, text: Text) -> dict[str, Any]:
    """What a run that goes on must have in common with the one that was left."""
    digest = hashlib.sha256(text.training.numpy().tobytes()).hexdigest()
    return {name: getattr(args, name) for name in _SETTINGS} | {"text": digest}


def save_checkpoint(path: Path, training: Training, settings: dict[str, Any]) -> None:
    """Writes a checkpoint, all of it or nothing; its ``"model"`` is for a plain ``nn.Sequential`` too."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    torch.save({"settings": settings, **training.state_dict()}, unfinished)
    os.replace(unfinished, path)


def load_checkpoint(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Reads a checkpoint for `Training.load_state_dict`.

    Raises:
        ValueError: there is none, or it is of a run with other settings.
    """
    if not path.is_file():
        raise ValueError(f"there is no checkpoint {path} to go on from")
    try:
        state: dict[str, Any] = torch.load(path)
        found = state["settings"]
    except Exception as error:
        raise ValueError(f"{path} is no checkpoint of this demo: {error}") from error
    for name, value in settings.items():
        if name == "text" and found.get(name) != value:
            raise ValueError(f"the checkpoint {path} is of a run on another text")
        if found.get(name) != value:
            raise ValueError(
                f"the checkpoint {path} is of a run with --{name} {found.get(name)}, not {value}"
            )
    return state
