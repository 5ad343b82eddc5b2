"""Mistakes that trigger the errors of loading weights."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from torch import nn

from gpipe_fast import GPipe
from tests.unit.message_cases import case


def load(source: object, *, strict: bool = True, fill: bool = False) -> None:
    """Loads a source into a linear layer on the meta device."""
    with torch.device("meta"):
        model = GPipe(nn.Sequential(nn.Linear(2, 2)), [1])
    init = (lambda module: module.weight.zero_()) if fill else None
    model.load_weights(source, strict=strict, init=init)  # type: ignore[arg-type]


def load_with_a_number_as_init() -> None:
    GPipe(nn.Sequential(nn.Linear(2, 2)), [1]).load_weights({}, strict=False, init=3)  # type: ignore[arg-type]


def load_with_a_hook() -> None:
    model = GPipe(nn.Sequential(nn.Linear(2, 2, device="meta")), [1])
    model[0].weight.register_hook(print)
    model.load_weights({}, strict=False, init=print)


def load_file(name: str, content: object) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        if name.endswith(".pt"):
            torch.save(content, path)
        else:
            path.write_text(json.dumps(content))
        load(path)


def load_index_with_a_lacking_name() -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.save({}, Path(folder, "shard.pt"))
        index = Path(folder, "model.pt.index.json")
        index.write_text(json.dumps({"weight_map": {"0.weight": "shard.pt"}}))
        load(index)


OF_WEIGHTS = [
    case("is a folder", "model.safetensors", load, "."),
    case("got 3", "names of tensors", load, {3: torch.ones(2)}),
    case("'0.weight' on the meta device", "of a file", load, {"0.weight": torch.ones(2, device="meta")}),
    case("x.bin cannot be mapped", "again", load_file, "x.bin", {}),
    case("init must be a function of a module, got int", "reset_parameters", load_with_a_number_as_init),
    case("got int", "pass a mapping", load, 3),
    case("contains a int", "save model.state_dict()", load_file, "model.pt", 3),
    case("has no 'weight_map'", "model.safetensors.index.json", load_file, "x.index.json", {}),
    case("lack: 0.weight", "again", load_index_with_a_lacking_name),
    case("a meta tensor", "after the model is loaded", load_with_a_hook),
    case("would have", "save it again", load_file, "x.safetensors", {}),
    case("lacks 0.weight, 0.bias", "pass init=function", load, {}, strict=False),
    case("init left 0.bias", "every element", load, {}, strict=False, fill=True),
]
