"""Prints what is fused in a Llama of transformers (`GPipe.explain`); needs no GPU.

`python -m tools explain` writes the forward of its first stage to docs/guide/fused_kernels.md.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import torch

from gpipe_fast import GPipe

PAGE = Path(__file__).parents[1] / "docs" / "guide" / "fused_kernels.md"
BEGIN, END = "<!-- printed by python -m tools explain -->", "<!-- end of what is printed -->"


def explained() -> str:
    """Returns the beginning of an explanation of a training in bf16 autocast, in two stages."""
    transformers: Any = importlib.import_module("transformers")
    example: Any = importlib.import_module("examples.transformers_llama.__main__")
    torch.manual_seed(0)
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4}
    config = transformers.LlamaConfig(vocab_size=32000, **sizes, **heads)
    layers = example.llama_layers(transformers.LlamaForCausalLM(config))
    model = GPipe(layers, balance=[3, 3], chunks=4)
    with torch.autocast("cpu", torch.bfloat16):
        printed = str(model.explain(torch.zeros(16, 512, dtype=torch.int64), device="cuda"))
    return printed.partition("\nForward: left")[0].rstrip()


def main() -> None:
    """Explains the model, and writes the page."""
    text = f"{BEGIN}\n\n```text\n{explained()}\n```\n\n{END}"
    print(text, flush=True)
    pattern = f"{re.escape(BEGIN)}.*{re.escape(END)}"
    PAGE.write_text(re.sub(pattern, lambda _: text, PAGE.read_text(), flags=re.DOTALL))
