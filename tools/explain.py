"""Prints explanations of models of transformers (`GPipe.explain`); needs no GPU.

`python -m tools explain` writes docs/explain.md, between its introduction and its end.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import torch

from gpipe_fast import GPipe

PAGE = Path(__file__).parents[1] / "docs" / "explain.md"
BEGIN, END = "<!-- printed by python -m tools explain -->", "<!-- end of what is printed -->"
LAYERS, BATCH, CHUNKS = 4, 16, 4


# The configuration of each model, beside its blocks; the examples cut it into layers.
MODELS: dict[str, dict[str, int]] = {
    "GPT2": {},
    "Llama": {
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    },
}
TITLES = {"GPT2": "GPT-2 of transformers", "Llama": "Llama of transformers"}


def explained(name: str) -> str:
    """Returns the text of a model's explanation, trained in bf16 autocast with its layers in two stages."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(num_hidden_layers=LAYERS, **MODELS[name])
    kind = "GPT2LMHeadModel" if name == "GPT2" else "LlamaForCausalLM"
    example: Any = importlib.import_module(f"examples.transformers_{name.lower()}.__main__")
    layers = getattr(example, f"{name.lower()}_layers")(getattr(transformers, kind)(config))
    half = (len(layers) + 1) // 2
    model = GPipe(layers, balance=[half, len(layers) - half], chunks=CHUNKS)
    with torch.autocast("cpu", torch.bfloat16):
        return str(model.explain(torch.zeros(BATCH, 512, dtype=torch.int64), device="cuda"))


def main() -> None:
    """Explains all models, and writes the page."""
    printed = [f"## {title}\n\n```text\n{explained(name)}\n```\n" for name, title in TITLES.items()]
    text = "\n".join([BEGIN, "", *printed, END])
    print(text, flush=True)
    pattern = f"{re.escape(BEGIN)}.*{re.escape(END)}"
    PAGE.write_text(re.sub(pattern, lambda _: text, PAGE.read_text(), flags=re.DOTALL))
