"""A pipelined model of transformers is still the user's: saved, loaded, extended, used to generate."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import gpipe_fast
from gpipe_fast import GPipe
from tests.models.test_from_model import (
    CAUSAL,
    SIZES,
    SPECIAL,
    TOKENS,
    VOCABULARY,
    decoder,
    transformers,
)

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


def llama(**sizes: Any) -> Any:
    return decoder("LlamaForCausalLM", **sizes)


def pipelined(model: nn.Module, **options: Any) -> Any:
    return GPipe.from_model(model, kwargs=CAUSAL, devices=["cpu"] * 2, chunks=3, **options)


def equals_the_plain_model(model: Any) -> bool:
    return bool(gpipe_fast.verify(model, **CAUSAL, loss_fn=lambda output: output.loss))


def test_it_is_saved_and_loaded_stage_by_stage(tmp_path: Path) -> None:
    model = pipelined(llama())
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    config = type(model.config).from_pretrained(tmp_path)
    with torch.device("meta"):
        empty = model._plain_class(config).train()
    loaded = pipelined(empty, balance=[1, 1])
    loaded.load_weights(tmp_path / "model.safetensors.index.json", init=loaded._init_weights)
    expected = model.plain().eval()(input_ids=TOKENS, use_cache=False).logits
    assert torch.equal(loaded.plain().eval()(input_ids=TOKENS, use_cache=False).logits, expected)
    again = model._plain_class.from_pretrained(tmp_path).eval()
    assert torch.equal(again(input_ids=TOKENS, use_cache=False).logits, expected)


def test_text_is_generated_by_the_plain_model_or_without_a_cache() -> None:
    model = pipelined(llama()).eval()
    options: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False}
    expected = model.plain().generate(TOKENS[:3, :4], **options)
    assert torch.equal(model.generate(TOKENS[:3, :4], use_cache=False, **options), expected)
    with mock.patch.object(type(model._calls), "run", side_effect=AssertionError):
        assert torch.equal(model.generate(TOKENS[:3, :4], **options), expected)
        beams = {"num_beams": 2, **options}
        assert torch.equal(
            model.generate(TOKENS[:3, :4], **beams), model.plain().generate(TOKENS[:3, :4], **beams)
        )


def test_a_cache_is_off_with_a_note(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "gpipe_fast"):
        model = pipelined(llama())
    assert "LlamaForCausalLM: a pipeline keeps no cache" in caplog.text
    assert model(**CAUSAL).past_key_values is None
    with pytest.warns(UserWarning, match="use_cache=True becomes use_cache=False"):
        assert model(**CAUSAL, use_cache=True).past_key_values is None


@pytest.mark.extended
@pytest.mark.parametrize("when", ["before", "after"])
def test_adapters_of_peft(when: str) -> None:
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    if when == "before":
        model = pipelined(peft.get_peft_model(llama(), adapters).train())
        trained = model
    else:
        model = pipelined(llama())
        model(**CAUSAL)
        trained = peft.get_peft_model(model, adapters).train()
    trained(**CAUSAL).loss.backward()
    with_gradient = {name for name, p in trained.named_parameters() if p.grad is not None}
    assert with_gradient == {name for name, _ in trained.named_parameters() if "lora_" in name}
    assert equals_the_plain_model(model)


GEMMA3N: dict[str, Any] = {
    **SIZES,
    **SPECIAL,
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": [32] * 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_kv_shared_layers": 2,
    "laurel_rank": 4,
    "tie_word_embeddings": False,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "altup_num_inputs": 2,
    "activation_sparsity_pattern": [0.0] * 4,
}


def test_blocks_use_keys_and_values_of_others() -> None:
    model = pipelined(transformers("Gemma3nForCausalLM", **GEMMA3N))
    assert equals_the_plain_model(model)
