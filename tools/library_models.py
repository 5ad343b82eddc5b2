"""Small models of transformers, timm and diffusers with random weights, by class, sizes and inputs."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

BATCH, LENGTH, WORDS = 6, 8, 40


def _tokens(*shape: int) -> Tensor:
    return torch.randint(3, WORDS, shape, generator=torch.Generator().manual_seed(1))


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


IDS, IMAGE = _tokens(BATCH, LENGTH), _noise(BATCH, 3, 32, 32)
PADDING = (torch.arange(LENGTH) < 6).long().expand(BATCH, LENGTH).contiguous()
CLASSES = torch.arange(BATCH) % 2
CAUSAL = {"input_ids": IDS, "labels": IDS}
PADDED = {**CAUSAL, "attention_mask": PADDING}
MASKED = {**PADDED, "labels": torch.where(_noise(BATCH, LENGTH) > 0.5, -100, IDS)}
CLASSIFIED = {"input_ids": IDS, "attention_mask": PADDING, "labels": CLASSES}
ASKED = {
    **{"input_ids": IDS, "attention_mask": PADDING},
    **{"start_positions": torch.arange(BATCH), "end_positions": torch.arange(BATCH)},
}
ENCODED = {"input_ids": IDS, "attention_mask": PADDING}
PICTURED = {"pixel_values": IMAGE, "labels": CLASSES}
SEEN = {"pixel_values": IMAGE}
HEARD = {"input_values": _noise(BATCH, 400)}
SPECTRAL = {"input_features": _noise(BATCH, 4, 128), "labels": IDS}
LATENT = _noise(BATCH, 4, 8, 8)

Sizes = dict[str, Any]
# Sizes by the names that configurations have for them; a configuration gets those that it knows.
SIZES: Sizes = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("hidden_dim", "moe_intermediate_size", "shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 4),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_top_k"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions"), 64),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"), 0),
    "num_key_value_heads": 2,
    "head_dim": 8,
    "d_kv": 8,
    "vocab_size": WORDS,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 2,
}


@dataclass(frozen=True)
class Model:
    """A model of a library.

    Attributes:
        inputs: the keyword arguments of its forward.
        sizes: what its configuration or constructor is given besides `SIZES`.
        library: the library that has it.
        inner: the name of the module in it that is pipelined alone; empty for the model itself.
    """

    inputs: Mapping[str, Any]
    sizes: Mapping[str, Any] = field(default_factory=dict)
    library: str = "transformers"
    inner: str = ""

    def build(self, name: str) -> nn.Module:
        """Returns the model with random weights, in training mode.

        Raises:
            AttributeError: the library is of another version, and lacks it.
        """
        library = importlib.import_module(self.library)
        torch.manual_seed(0)
        model: nn.Module = _BUILDERS[self.library](library, name, self.sizes)
        return model.train()

    def pipelined(self, model: nn.Module) -> tuple[nn.Module, dict[str, Any]]:
        """Returns the module of a model that is pipelined, and the keyword arguments of its call."""
        if not self.inner:
            return model, dict(self.inputs)
        inner, found = model.get_submodule(self.inner), dict[str, Any]()
        with (
            inner.register_forward_pre_hook(lambda _, args, kwargs: found.update(kwargs), with_kwargs=True),
            torch.no_grad(),
        ):
            model(**self.inputs)
        return inner, found


def _of_transformers(library: Any, name: str, sizes: Mapping[str, Any]) -> Any:
    model_class = getattr(library, name)
    return model_class(_config(model_class.config_class, sizes))


def _config(kind: Any, sizes: Mapping[str, Any]) -> Any:
    if "model_type" in sizes:  # of an AutoConfig
        kind = type(kind.for_model(sizes["model_type"]))
        sizes = {key: size for key, size in sizes.items() if key != "model_type"}
    names: dict[str, str] = getattr(kind, "attribute_map", {})
    known = inspect.signature(kind.__init__).parameters.keys() | names.keys()
    common = {key: size for key, size in SIZES.items() if key in known and names.get(key) not in sizes}
    parts = getattr(kind, "sub_configs", {})
    nested = {
        key: _config(parts[key], own)
        for key, own in sizes.items()
        if isinstance(own, dict) and key in parts and isinstance(parts[key], type)
    }
    return kind(**{**common, **sizes, **nested})


_BUILDERS: dict[str, Callable[[Any, str, Mapping[str, Any]], Any]] = {
    "transformers": _of_transformers,
    "timm": lambda library, name, sizes: library.create_model(name, num_classes=4, **sizes),
    "diffusers": lambda library, name, sizes: getattr(library, name)(**sizes),
}


def _all(
    inputs: Mapping[str, Any], *names: str, library: str = "transformers", inner: str = "", **sizes: Any
) -> dict[str, Model]:
    return {name: Model(inputs, sizes, library, inner) for name in names}


_DECODED: Sizes = {"decoder_start_token_id": 0, "num_decoder_layers": 2, "num_layers": 2}
_ROUTED: Sizes = {"n_group": 1, "topk_group": 1, "n_shared_experts": 1}
_LATENT: Sizes = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
_STATES: Sizes = {"mamba_d_state": 8, "mamba_n_heads": 8, "mamba_chunk_size": 4, "mamba_d_ssm": 64}
_STAGES: Sizes = {
    "depths": [1, 1, 1, 1],
    "hidden_sizes": [8, 16, 16, 32],
    "patch_size": 2,
    "embedding_size": 8,
}
_WINDOWS: Sizes = {"depths": [2, 2], "num_heads": [2, 4], "embed_dim": 8, "patch_size": 2, "window_size": 2}
_SOUND: Sizes = {
    "conv_dim": [8, 8],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 2],
    "num_conv_pos_embeddings": 4,
}
_UNET: Sizes = {
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "attention_head_dim": 4,
}
# A layer of each kind, and two that take the keys and values of these.
_SHARED: Sizes = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": WORDS,
    "hidden_size_per_layer_input": 8,
}
_GEMMA_3N: Sizes = {
    "intermediate_size": [64] * 4,
    "activation_sparsity_pattern": [0.0] * 4,
    "laurel_rank": 4,
    "altup_num_inputs": 2,
}
# Four features of an image, between two tokens.
_IMAGE, _EDGE = 2, 1
_READ = IDS.clone()
_READ[:, 1], _READ[:, 2:6], _READ[:, 6] = _EDGE, _IMAGE, _EDGE
_LOOKED = {"input_ids": _READ, "attention_mask": torch.ones_like(_READ), "labels": _READ}
_KINDS = (_READ == _IMAGE).long()
_SEQUENCE: Sizes = {"image_token_id": _IMAGE, "vision_start_token_id": _EDGE, "vision_end_token_id": _EDGE}
_PATCHES = {
    **_LOOKED,
    "pixel_values": _noise(BATCH * 16, 96),
    "image_grid_thw": torch.tensor([[1, 4, 4]] * BATCH),
    "mm_token_type_ids": _KINDS,
}
_PATCH: Sizes = {"depth": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
_TRANSFORMER: Sizes = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4}
_PROMPTED: Sizes = {"joint_attention_dim": 16, "pooled_projection_dim": 16}
_PROMPT = {"encoder_hidden_states": _noise(BATCH, 4, 16), "timestep": torch.arange(BATCH)}
_POOLED = {**_PROMPT, "pooled_projections": _noise(BATCH, 16)}

MODELS: dict[str, Model] = {
    # Decoders.
    **_all(CAUSAL, "GPT2LMHeadModel", "GPTNeoXForCausalLM", "GPTBigCodeForCausalLM", "OPTForCausalLM"),
    **_all(CAUSAL, "BloomForCausalLM", "FalconForCausalLM", "XGLMForCausalLM", "MptForCausalLM"),
    **_all(CAUSAL, "GPTJForCausalLM", "CodeGenForCausalLM", rotary_dim=4),
    **_all(CAUSAL, "GPTNeoForCausalLM", attention_types=[[["global", "local"], 2]]),
    **_all(PADDED, "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    **_all(PADDED, "GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "PhiForCausalLM"),
    **_all(CAUSAL, "Phi3ForCausalLM", "CohereForCausalLM", "Cohere2ForCausalLM", "OlmoForCausalLM"),
    **_all(CAUSAL, "Olmo2ForCausalLM", "Olmo3ForCausalLM", "StableLmForCausalLM", "Starcoder2ForCausalLM"),
    **_all(CAUSAL, "GlmForCausalLM", "Glm4ForCausalLM", "GraniteForCausalLM", "HeliumForCausalLM"),
    **_all(CAUSAL, "NemotronForCausalLM", "PersimmonForCausalLM", "SmolLM3ForCausalLM", "SeedOssForCausalLM"),
    **_all(CAUSAL, "Exaone4ForCausalLM", "ApertusForCausalLM", "ArceeForCausalLM", "BioGptForCausalLM"),
    **_all(CAUSAL, "DiffLlamaForCausalLM", "VaultGemmaForCausalLM", "Lfm2ForCausalLM", "BitNetForCausalLM"),
    **_all(CAUSAL, "ModernBertDecoderForCausalLM", "NanoChatForCausalLM", "Ernie4_5ForCausalLM"),
    **_all(CAUSAL, "HunYuanDenseV1ForCausalLM", "MinistralForCausalLM"),
    # Decoders with experts.
    **_all(CAUSAL, "MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "OlmoeForCausalLM"),
    **_all(CAUSAL, "PhimoeForCausalLM", "GraniteMoeForCausalLM", "GptOssForCausalLM", "FlexOlmoForCausalLM"),
    **_all(CAUSAL, "MiniMaxForCausalLM", "JetMoeForCausalLM", "Ernie4_5_MoeForCausalLM"),
    **_all(CAUSAL, "Glm4MoeForCausalLM", "Dots1ForCausalLM", "HunYuanMoEV1ForCausalLM", **_ROUTED),
    **_all(
        CAUSAL, "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", num_key_value_heads=4, **_ROUTED, **_LATENT
    ),
    # State spaces, and mixtures of them with attention.
    **_all(CAUSAL, "MambaForCausalLM", "FalconMambaForCausalLM", "RwkvForCausalLM", state_size=4),
    **_all(CAUSAL, "Mamba2ForCausalLM", state_size=4, num_heads=8, n_groups=1, chunk_size=4),
    **_all(CAUSAL, "JambaForCausalLM", attn_layer_period=2, attn_layer_offset=1, mamba_dt_rank=4),
    **_all(CAUSAL, "BambaForCausalLM", "FalconH1ForCausalLM", attn_layer_indices=[1], **_STATES),
    **_all(CAUSAL, "RecurrentGemmaForCausalLM", "Qwen3NextForCausalLM"),
    **_all(CAUSAL, "Gemma3nForCausalLM", **_SHARED, **_GEMMA_3N),
    **_all(CAUSAL, "Gemma4ForCausalLM", **_SHARED, global_head_dim=8),
    # Language models in models that read images, too.
    **_all(
        {**_LOOKED, "pixel_values": _noise(BATCH, 3, 16, 16)},
        "LlavaForConditionalGeneration",
        inner="model.language_model",
        image_token_id=_IMAGE,
        vision_feature_layer=-1,
        text_config={"model_type": "llama"},
        vision_config={"model_type": "clip_vision_model", "image_size": 16},
    ),
    **_all(
        _PATCHES,
        "Qwen2VLForConditionalGeneration",
        inner="model.language_model",
        **_SEQUENCE,
        text_config={
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
        },
        vision_config=_PATCH,
    ),
    **_all(
        {**_LOOKED, "pixel_values": _noise(BATCH, 3, 16, 16), "token_type_ids": _KINDS},
        "Gemma3ForConditionalGeneration",
        inner="model.language_model",
        image_token_id=_IMAGE,
        boi_token_index=_EDGE,
        eoi_token_index=_EDGE,
        mm_tokens_per_image=4,
        text_config={},
        vision_config={"model_type": "siglip_vision_model", "image_size": 16, "patch_size": 4},
    ),
    # Encoders.
    **_all(MASKED, "BertForMaskedLM", "RobertaForMaskedLM", "ElectraForMaskedLM", "AlbertForMaskedLM"),
    **_all(MASKED, "DistilBertForMaskedLM", "XLMRobertaForMaskedLM", "CamembertForMaskedLM"),
    **_all(MASKED, "MPNetForMaskedLM", "DebertaForMaskedLM", "DebertaV2ForMaskedLM", "ModernBertForMaskedLM"),
    **_all(MASKED, "EsmForMaskedLM", "RoFormerForMaskedLM", "MobileBertForMaskedLM", "ConvBertForMaskedLM"),
    **_all(MASKED, "EuroBertForMaskedLM", "NystromformerForMaskedLM", "SqueezeBertForMaskedLM"),
    **_all(CAUSAL, "FNetForMaskedLM"),
    **_all(CLASSIFIED, "BertForSequenceClassification", "XLNetForSequenceClassification"),
    **_all(CLASSIFIED, "LlamaForSequenceClassification", "GPT2ForSequenceClassification"),
    **_all(ASKED, "BertForQuestionAnswering", "LlamaForQuestionAnswering"),
    **_all({**ENCODED, "labels": IDS % 2}, "Qwen2ForTokenClassification"),
    **_all(ENCODED, "CLIPTextModel", "SiglipTextModel"),
    # Encoders with decoders.
    **_all(CAUSAL, "T5ForConditionalGeneration", "MT5ForConditionalGeneration", **_DECODED),
    **_all(CAUSAL, "UMT5ForConditionalGeneration", "LongT5ForConditionalGeneration", **_DECODED),
    **_all(CAUSAL, "SwitchTransformersForConditionalGeneration", **_DECODED),
    **_all(CAUSAL, "BartForConditionalGeneration", "MBartForConditionalGeneration", "MarianMTModel"),
    **_all(CAUSAL, "PegasusForConditionalGeneration", "BlenderbotForConditionalGeneration"),
    **_all(CAUSAL, "M2M100ForConditionalGeneration"),
    **_all(CAUSAL, "LEDForConditionalGeneration", attention_window=4),
    # Images and sound.
    **_all(PICTURED, "ViTForImageClassification", "DeiTForImageClassification", "BeitForImageClassification"),
    **_all(PICTURED, "Dinov2ForImageClassification", "PoolFormerForImageClassification"),
    **_all(PICTURED, "SwinForImageClassification", **_WINDOWS),
    **_all(PICTURED, "SegformerForImageClassification", num_attention_heads=[1, 2, 5, 8]),
    **_all(PICTURED, "ConvNextForImageClassification", "ConvNextV2ForImageClassification", **_STAGES),
    **_all(PICTURED, "ResNetForImageClassification", **_STAGES),
    **_all(SEEN, "CLIPVisionModel", "SiglipVisionModel", "DINOv3ViTModel", "ViTMAEForPreTraining"),
    **_all(
        SEEN,
        "DetrForObjectDetection",
        use_timm_backbone=False,
        backbone_config={"model_type": "resnet", **_STAGES, "out_features": ["stage4"]},
    ),
    **_all(HEARD, "Wav2Vec2Model", "HubertModel", "WavLMModel", **_SOUND),
    **_all(SPECTRAL, "WhisperForConditionalGeneration", num_mel_bins=4),
    # timm.
    **_all({"x": IMAGE}, "resnet10t", "mobilenetv3_small_050", "efficientnet_lite0", library="timm"),
    **_all({"x": IMAGE}, "convnext_atto", "regnetx_002", "ghostnet_050", library="timm"),
    **_all(
        {"x": IMAGE},
        "vit_tiny_patch16_224",
        "mixer_s16_224",
        "deit_tiny_patch16_224",
        library="timm",
        img_size=32,
    ),
    # diffusers.
    **_all(
        {"sample": _noise(BATCH, 4, 16, 16), **_PROMPT},
        "UNet2DConditionModel",
        library="diffusers",
        cross_attention_dim=16,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        **_UNET,
    ),
    **_all(
        {"hidden_states": LATENT, "timestep": torch.arange(BATCH), "class_labels": CLASSES},
        "DiTTransformer2DModel",
        library="diffusers",
        **{**_TRANSFORMER, "sample_size": 8, "out_channels": 8},
    ),
    **_all(
        {"hidden_states": LATENT, **_POOLED},
        "SD3Transformer2DModel",
        library="diffusers",
        **{**_TRANSFORMER, **_PROMPTED, "sample_size": 8, "out_channels": 4, "caption_projection_dim": 32},
    ),
}
