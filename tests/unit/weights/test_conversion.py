"""Files of models of transformers whose tensors have other names, or other shapes, than the model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpipe_fast.weights.load import load_weights

SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 16),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 2),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 3),
    "vocab_size": 30,
    "head_dim": 8,
}
VISION = {"model_type": "clip_vision_model", "image_size": 16, "patch_size": 8, "projection_dim": 8}
SMALL = {
    key: SIZES[key]
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
}
# Stacked experts, experts next to plain matrices, other prefixes, and the same names.
MODELS: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": SIZES,
    "Qwen2MoeForCausalLM": SIZES,
    "Qwen3MoeForCausalLM": SIZES,
    "OlmoeForCausalLM": SIZES,
    "LlavaForConditionalGeneration": {
        "vision_config": {**VISION, **SMALL},
        "text_config": {"model_type": "llama", "vocab_size": 30, **SMALL},
    },
    "LlamaForCausalLM": SIZES,
}


def model_of(name: str, seed: int) -> Any:
    package = pytest.importorskip("transformers", minversion="5.0")
    model_class = getattr(package, name)
    known = model_class.config_class().to_dict().keys() | model_class.config_class.attribute_map.keys()
    torch.manual_seed(seed)
    return model_class(model_class.config_class(**{k: v for k, v in MODELS[name].items() if k in known}))


@pytest.mark.parametrize(
    ("name", "is_meta"), [*((name, False) for name in MODELS), ("MixtralForCausalLM", True)]
)
def test_saved_models_are_loaded(name: str, is_meta: bool, tmp_path: Path) -> None:
    model = model_of(name, 0)
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    with torch.device("meta" if is_meta else "cpu"):
        other: nn.Module = model_of(name, 1)
    index = tmp_path / "model.safetensors.index.json"
    load_weights(other, index, lambda: [(other, torch.device("cpu"))], True, other._init_weights)
    state = other.state_dict()
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())


def test_a_tensor_that_is_absent_is_named(tmp_path: Path) -> None:
    model = model_of("MixtralForCausalLM", 0)
    model.save_pretrained(tmp_path)
    safetensors = pytest.importorskip("safetensors.torch")
    weights = safetensors.load_file(tmp_path / "model.safetensors")
    left = {name: value for name, value in weights.items() if "layers.1.block_sparse_moe" not in name}
    assert len(left) < len(weights)
    with pytest.raises(RuntimeError, match=r"layers\.1\.mlp\.experts"):
        load_weights(model, left, lambda: [(model, torch.device("cpu"))], True, None)
