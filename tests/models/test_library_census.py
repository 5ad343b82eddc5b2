"""A sample of the census of libraries: no layer runs in Python, and a step equals the plain loop."""

from __future__ import annotations

import pytest

from tools import census, library_models

pytestmark = pytest.mark.usefixtures("one_thread")

# Attention of several kinds, keys and values that layers share, experts, state spaces, encoders, an encoder
# with a decoder, images, images and text, diffusion.
SAMPLE = (
    *("GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma2ForCausalLM", "FalconForCausalLM"),
    *("MixtralForCausalLM", "Qwen2MoeForCausalLM", "MambaForCausalLM", "BertForMaskedLM"),
    *("ModernBertForMaskedLM", "T5ForConditionalGeneration", "BartForConditionalGeneration"),
    *("ViTForImageClassification", "ConvNextForImageClassification", "vit_tiny_patch16_224"),
    *("Gemma4ForCausalLM", "LlavaForConditionalGeneration", "DiTTransformer2DModel"),
)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_model_of_a_library_is_all_native_and_equals_the_plain_loop(name: str) -> None:
    pytest.importorskip(library_models.MODELS[name].library)
    verdict = census.examine_library(name)
    assert verdict.report is not None, verdict.note
    assert not verdict.in_python
    tied = {"embed", "shared", "wte"}
    for row in verdict.report.rows:
        assert row.equal or (row.relative < 1e-6 and any(part in row.name for part in tied)), row
