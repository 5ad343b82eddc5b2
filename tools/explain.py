"""Prints explanations of models of transformers and torchvision (`GPipe.explain`); needs no GPU.

`python -m tools explain` writes docs/explain.md, between its introduction and its end.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_fast import GPipe

PAGE = Path(__file__).parents[1] / "docs" / "explain.md"
BEGIN, END = "<!-- printed by python -m tools explain -->", "<!-- end of what is printed -->"
LAYERS, BATCH, CHUNKS = 4, 16, 4


def _example(name: str) -> Any:
    return importlib.import_module(f"examples.transformers_{name}.__main__")


def _make(kind: Callable[..., Any], config: object) -> Any:
    return kind(config)


def gpt2() -> tuple[nn.Sequential, Tensor]:
    """Returns the layers of the smallest GPT-2, with four of its twelve blocks, and tokens."""
    import transformers

    model = _make(transformers.GPT2LMHeadModel, transformers.GPT2Config(n_layer=LAYERS))
    return _example("gpt2").gpt2_layers(model), torch.zeros(BATCH, 512, dtype=torch.int64)


def llama() -> tuple[nn.Sequential, Tensor]:
    """Returns the layers of a Llama with four blocks of width 1024, and tokens."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=LAYERS,
        num_attention_heads=16,
        num_key_value_heads=4,
    )
    return _example("llama").llama_layers(_make(transformers.LlamaForCausalLM, config)), torch.zeros(
        BATCH, 512, dtype=torch.int64
    )


class _ViTLayer(nn.Module):
    """A block of transformers' ViT, which returns the hidden states alone."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor) -> Tensor:
        found = self.layer(hidden)
        return found if isinstance(found, Tensor) else found[0]


def vit() -> tuple[nn.Sequential, Tensor]:
    """Returns four blocks of transformers' ViT-B, and hidden states of 197 positions."""
    from transformers import ViTConfig, ViTModel

    model = ViTModel(ViTConfig(num_hidden_layers=LAYERS))
    blocks = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == LAYERS)
    return nn.Sequential(*map(_ViTLayer, blocks)), torch.zeros(BATCH, 197, 768)


def torchvision_vit() -> tuple[nn.Sequential, Tensor]:
    """Returns four blocks of torchvision's ViT-B, and hidden states of 197 positions."""
    import torchvision  # type: ignore[import-untyped, unused-ignore]

    model = torchvision.models.VisionTransformer(
        image_size=224, patch_size=16, num_layers=LAYERS, num_heads=12, hidden_dim=768, mlp_dim=3072
    )
    return nn.Sequential(*model.encoder.layers), torch.zeros(BATCH, 197, 768)


MODELS: dict[str, Callable[[], tuple[nn.Sequential, Tensor]]] = {
    "GPT-2 of transformers": gpt2,
    "Llama of transformers": llama,
    "ViT of transformers": vit,
    "ViT of torchvision": torchvision_vit,
}


def explained(name: str) -> str:
    """Returns the text of a model's explanation, trained in bf16 autocast with its layers in two stages."""
    torch.manual_seed(0)
    layers, x = MODELS[name]()
    half = (len(layers) + 1) // 2
    model = GPipe(layers, balance=[half, len(layers) - half], chunks=CHUNKS)
    if x.is_floating_point():
        x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        return str(model.explain(x, device="cuda"))


def main() -> None:
    """Explains all models, and writes the page."""
    printed = [f"## {name}\n\n```text\n{explained(name)}\n```\n" for name in MODELS]
    text = "\n".join([BEGIN, "", *printed, END])
    print(text, flush=True)
    pattern = f"{re.escape(BEGIN)}.*{re.escape(END)}"
    PAGE.write_text(re.sub(pattern, lambda _: text, PAGE.read_text(), flags=re.DOTALL))
