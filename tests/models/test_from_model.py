"""Models of `GPipe.from_model` against their plain forward: outputs, loss, every gradient and buffer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gpipe_fast import GPipe, keyed_rng
from tests.reference import SEED, unequal

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

BATCH, LENGTH, VOCABULARY = 9, 8, 30
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SPECIAL = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
UNTIED = {"tie_word_embeddings": False}
Inputs = Mapping[str, Any]


def numbers(*shape: int) -> Tensor:
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(1))


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


TOKENS = numbers(BATCH, LENGTH)
LABELS = torch.where(noise(BATCH, LENGTH) > 0.5, -100, TOKENS)
PADDING = (torch.arange(LENGTH) < 6).long().expand(BATCH, LENGTH).contiguous()
IMAGES = noise(BATCH, 3, 16, 16)
CLASSES = numbers(BATCH) % 2


def transformers(name: str, **sizes: Any) -> nn.Module:
    """Returns a small model of transformers with random weights, in training mode."""
    package = pytest.importorskip("transformers")
    torch.manual_seed(SEED)
    model_class = getattr(package, name)
    config: Any = model_class.config_class(**sizes)
    return model_class(config).train()


def decoder(name: str, **sizes: Any) -> nn.Module:
    common = {"vocab_size": VOCABULARY, **SIZES, **SPECIAL, "attention_dropout": 0.1}
    return transformers(name, **(common | UNTIED | sizes))


def gpt2(**sizes: Any) -> nn.Module:
    own = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return transformers("GPT2LMHeadModel", **(own | SPECIAL | UNTIED | sizes))


def bert(name: str) -> nn.Module:
    return transformers(name, vocab_size=VOCABULARY, max_position_embeddings=20, **SIZES, **UNTIED)


def encoder_decoder(name: str, **sizes: Any) -> nn.Module:
    of_both = {"layers": 2, "attention_heads": 2, "ffn_dim": 32}
    own = {f"{part}_{key}": size for part in ("encoder", "decoder") for key, size in of_both.items()}
    return transformers(
        name, vocab_size=VOCABULARY, d_model=16, decoder_start_token_id=0, **own, **SPECIAL, **sizes
    )


def with_labels(*keys: str) -> dict[str, Any]:
    known = {"input_ids": TOKENS, "labels": LABELS, "attention_mask": PADDING}
    return {key: known[key] for key in keys}


# The loss uses the number of targets; or it is a mean over targets; or there is none.
ITEMS, MEAN, NONE = "items", "mean", "none"
Case = tuple[Callable[[], nn.Module], Inputs, str]
CAUSAL = with_labels("input_ids", "labels")
MASKED = with_labels("input_ids", "labels", "attention_mask")
KEY_VALUES = {"num_key_value_heads": 2}

GPTJ = {"n_positions": LENGTH, "n_embd": 16, "n_layer": 4, "n_head": 2, "rotary_dim": 4, **UNTIED, **SPECIAL}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
MAMBA = {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, **UNTIED, **SPECIAL}
WHISPER = {"max_source_positions": 8, "max_target_positions": 16, "num_mel_bins": 4}
PATCHES = {"image_size": 16, "patch_size": 8, **SIZES}
TEXT = {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, **SIZES, **SPECIAL}
CASES: dict[str, Case] = {
    "GPT-2": (gpt2, CAUSAL, ITEMS),
    "GPT-2 with tied weights": (partial(gpt2, tie_word_embeddings=True), CAUSAL, ITEMS),
    "GPT-2 without labels": (gpt2, with_labels("input_ids"), NONE),
    # All blocks read two halves of one tensor, the sines and cosines of positions.
    "GPT-J": (partial(transformers, "GPTJForCausalLM", vocab_size=VOCABULARY, **GPTJ), CAUSAL, ITEMS),
    "Llama": (partial(decoder, "LlamaForCausalLM"), CAUSAL, ITEMS),
    "Llama with padding": (partial(decoder, "LlamaForCausalLM"), MASKED, ITEMS),
    "BERT": (partial(bert, "BertForMaskedLM"), MASKED, MEAN),
    "BERT, one class each": (
        partial(bert, "BertForSequenceClassification"),
        {"input_ids": TOKENS, "attention_mask": PADDING, "labels": CLASSES},
        MEAN,
    ),
    "RoBERTa": (partial(bert, "RobertaForMaskedLM"), MASKED, MEAN),
    "Qwen2": (partial(decoder, "Qwen2ForCausalLM", **KEY_VALUES), CAUSAL, ITEMS),
    "Qwen3": (partial(decoder, "Qwen3ForCausalLM", head_dim=8, **KEY_VALUES), CAUSAL, ITEMS),
    "Mistral": (partial(decoder, "MistralForCausalLM", sliding_window=4, **KEY_VALUES), CAUSAL, ITEMS),
    "Gemma": (partial(decoder, "GemmaForCausalLM", head_dim=8, **KEY_VALUES), CAUSAL, ITEMS),
    "Mixtral": (partial(decoder, "MixtralForCausalLM", num_local_experts=3, **KEY_VALUES), CAUSAL, ITEMS),
    "Mamba": (partial(transformers, "MambaForCausalLM", vocab_size=VOCABULARY, **MAMBA), CAUSAL, ITEMS),
    "Whisper": (
        partial(encoder_decoder, "WhisperForConditionalGeneration", **WHISPER),
        {"input_features": noise(BATCH, 4, 16), "labels": LABELS},
        MEAN,
    ),
    "ViT": (
        partial(transformers, "ViTForImageClassification", hidden_dropout_prob=0.1, **PATCHES),
        {"pixel_values": IMAGES, "labels": CLASSES},
        ITEMS,
    ),
    "CLIP's text tower": (
        partial(transformers, "CLIPTextModel", **TEXT),
        with_labels("input_ids", "attention_mask"),
        NONE,
    ),
    "CLIP's vision tower": (
        partial(transformers, "CLIPVisionModel", **PATCHES),
        {"pixel_values": IMAGES},
        NONE,
    ),
    # Tied: the embedding of the encoder and that of the decoder are one.
    "T5": (partial(transformers, "T5ForConditionalGeneration", vocab_size=VOCABULARY, **T5), CAUSAL, MEAN),
    "BART": (partial(encoder_decoder, "BartForConditionalGeneration"), CAUSAL, MEAN),
}


def images_of(package: str, make: Callable[[Any], nn.Module]) -> Case:
    def made() -> nn.Module:
        library = pytest.importorskip(package)
        torch.manual_seed(SEED)
        return make(library).train()

    return made, {"x": noise(BATCH, 3, 32, 32)}, NONE


def convnext(models: Any) -> nn.Module:
    config = models.convnext.CNBlockConfig
    net: nn.Module = models.ConvNeXt([config(8, 16, 2), config(16, None, 1)], num_classes=4)
    return net


TORCHVISION: dict[str, Callable[[Any], nn.Module]] = {
    "ResNet": lambda models: models.resnet18(num_classes=4),
    "ConvNeXt": convnext,
    "DenseNet": lambda models: models.DenseNet(4, (2, 2), 8, num_classes=4),
    "ViT": lambda models: models.VisionTransformer(32, 16, 2, 2, 16, 32, dropout=0.1, num_classes=4),
    "Swin": lambda models: models.SwinTransformer([4, 4], 8, [1, 2], [2, 2], [4, 4], num_classes=4),
    "MobileNet": lambda models: models.mobilenet_v2(num_classes=4, width_mult=0.1),
}
TIMM: dict[str, dict[str, Any]] = {
    "resnet10t": {},
    "convnext_atto": {"drop_path_rate": 0.2, "depths": (1, 1, 2, 1), "dims": (8, 8, 16, 16)},
    "vit_tiny_patch16_224": {
        "img_size": 32,
        "embed_dim": 16,
        "num_heads": 2,
        "depth": 3,
        "proj_drop_rate": 0.1,
    },
    "mobilenetv3_small_050": {},
    "mixer_s16_224": {"img_size": 32},
}
CASES |= {
    f"torchvision's {name}": images_of("torchvision.models", make) for name, make in TORCHVISION.items()
} | {
    f"timm's {name}": images_of(
        "timm", lambda timm, n=name, o=options: timm.create_model(n, num_classes=4, **o)
    )
    for name, options in TIMM.items()
}


class UNet(nn.Module):
    """Skips in forward, batch norm, and an in-place ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([self.block(3, 4), self.block(4, 8)])
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ModuleList([self.block(16, 4), self.block(8, 4)])
        self.head = nn.Conv2d(4, 2, 1)

    @staticmethod
    def block(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], 1))
        return self.head(x)


class EncoderDecoder(nn.Module):
    """Every block of the decoder reads the encoder's output, and a mask that is not split."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, 8), nn.Embedding(VOCABULARY, 8)
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(8, 2, 16, batch_first=True) for _ in range(2))

    def forward(self, source: Tensor, target: Tensor, mask: Tensor) -> Tensor:
        memory = self.source(source)
        for block in self.encoder:
            memory = block(memory)
        x = F.dropout(self.target(target), 0.1, self.training)
        for block in self.decoder:
            x = block(x, memory, tgt_mask=mask)
        return x


class TwoOfEach(nn.Module):
    """Two inputs, and two outputs in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.side = nn.Linear(6, 4)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        side = self.side(y)
        for block in self.blocks:
            x = torch.tanh(block(x)) + side
        return {"x": x, "more": (side.mean(1), None, 3)}


class Experts(nn.Module):
    """A mixture of experts with soft gates."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(4, 3) for _ in range(2))
        self.experts = nn.ModuleList(nn.ModuleList(nn.Linear(4, 4) for _ in range(3)) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = []
        for gate, experts in zip(self.gates, self.experts, strict=True):
            share = gate(x).softmax(-1)
            probabilities.append(share)
            x = x + sum(share[:, i, None] * expert(x) for i, expert in enumerate(experts))
        return x, torch.stack(probabilities, 1)


# The mask is as large as the batch.
MASK = torch.full((BATCH, BATCH), -torch.inf).triu(1)
CASES |= {
    "U-Net": (UNet, {"x": IMAGES}, NONE),
    "encoder and decoder": (
        EncoderDecoder,
        {"source": numbers(BATCH, 5), "target": numbers(BATCH, BATCH), "mask": MASK},
        NONE,
    ),
    "two inputs and two outputs": (TwoOfEach, {"x": noise(BATCH, 4), "y": noise(BATCH, 6)}, NONE),
    "mixture of experts": (Experts, {"x": noise(BATCH, 4)}, NONE),
}


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def num_targets(labels: Tensor, loss: str) -> int:
    """Returns how many targets count; causal models shift them, those of images do not."""
    counted = labels[..., 1:] if loss == ITEMS and labels.dim() > 1 else labels
    return int((counted != -100).sum())


def plain_step(model: Any, inputs: Inputs, loss: str, chunks: int) -> dict[str, Any]:
    """A step of the plain model over micro-batches, with the loss of the whole mini-batch."""
    if loss == MEAN:  # micro-batches divide sums by the number of all targets
        found = pipelined_step(model, inputs, loss, model.plain_loop)
        torch.testing.assert_close(found, weighted_step(model.plain(), inputs, loss, chunks))
        return found
    return weighted_step(model.plain(), inputs, loss, chunks)


def weighted_step(model: Any, inputs: Inputs, loss: str, chunks: int) -> dict[str, Any]:
    """A step of the plain model over micro-batches, whose losses are weighted by their numbers of targets."""
    split = {key: x.chunk(chunks) for key, x in inputs.items() if x is not MASK}
    count = len(next(iter(split.values())))
    parts = [{key: split[key][m] if key in split else x for key, x in inputs.items()} for m in range(count)]
    more = {"use_cache": False} if getattr(getattr(model, "config", None), "use_cache", False) else {}
    total = num_targets(inputs["labels"], loss) if loss != NONE else 0
    if loss == ITEMS:
        more["num_items_in_batch"] = total
    torch.manual_seed(SEED)
    with keyed_rng(model):
        outputs = [model(**part, **more) for part in parts]
    if loss == NONE:
        columns = zip(*map(tensors, outputs), strict=True)
        return step_of(model, [torch.cat(column) for column in columns], None)
    weights = [num_targets(p["labels"], loss) / total if loss == MEAN else 1 for p in parts]
    weighted = [o.loss * w if w != 1 else o.loss for o, w in zip(outputs, weights, strict=True)]
    others = [[x for x in tensors(o) if x is not o.loss] for o in outputs]
    return step_of(model, [torch.cat(c) for c in zip(*others, strict=True)], sum(weighted[1:], weighted[0]))


def pipelined_step(model: Any, inputs: Inputs, loss: str, run: Any = None) -> dict[str, Any]:
    torch.manual_seed(SEED)
    output = (run or model)(**inputs)
    found = None if loss == NONE else output.loss
    return step_of(model, [x for x in tensors(output) if x is not found], found)


def step_of(model: nn.Module, outputs: Sequence[Tensor], loss: Tensor | None) -> dict[str, Any]:
    """Runs the backward; returns outputs, loss, gradients and buffers, and restores the buffers."""
    model.zero_grad()
    objective = sum(x.square().mean() for x in outputs if x.requires_grad) if loss is None else loss
    objective.backward()
    found: dict[str, Any] = {f"output {i}": x.detach() for i, x in enumerate(outputs)}
    found["loss"] = objective.detach()
    found |= {
        f"gradient of {n}": None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()
    }
    return found | {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}


def pipeline_of(case: Case, stages: int, chunks: int, **options: Any) -> Any:
    make, inputs, _ = case
    torch.manual_seed(SEED)
    devices = ["cpu"] * stages
    return GPipe.from_model(make().train(), kwargs=dict(inputs), devices=devices, chunks=chunks, **options)


def compare(case: Case, stages: int, chunks: int, mode: str) -> Any:
    """Asserts that a step of a pipelined model equals one of the plain model."""
    _, inputs, loss = case
    model = pipeline_of(case, stages, chunks, checkpoint=mode)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    ours = pipelined_step(model, inputs, loss)
    model.load_state_dict(state)
    expected = plain_step(model, inputs, loss, chunks)
    different = unequal(ours, expected)
    tied = tied_across_stages(model)
    for name in different:
        assert name.removeprefix("gradient of ") in tied, different
        torch.testing.assert_close(ours[name], expected[name])
    return model


def tied_across_stages(model: Any) -> set[str]:
    """Returns the parameters that several stages have, whose gradient is summed in another order."""
    owners: dict[Tensor, int] = {}
    for partition in model.pipeline.partitions:
        for parameter in partition.parameters():
            owners[parameter] = owners.get(parameter, 0) + 1
    return {name for name, parameter in model.named_parameters() if owners.get(parameter, 0) > 1}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_a_step_equals_that_of_the_plain_model(name: str) -> None:
    # Batch norm needs more than one sample.
    chunks = 2 if name.startswith(("torchvision", "timm")) else 5
    compare(CASES[name], stages=2, chunks=chunks, mode="except_last")


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "stages", "chunks", "mode"),
    [
        ("GPT-2", 2, 5, "always"),
        ("GPT-2 with tied weights", 1, 2, "always"),
        ("Llama with padding", 3, 2, "never"),
        ("BERT", 3, 5, "except_last"),
        ("BERT", 2, 1, "always"),
    ],
)
def test_equal_for_other_settings(name: str, stages: int, chunks: int, mode: str) -> None:
    compare(CASES[name], stages, chunks, mode)


def test_the_gradient_of_tied_weights_is_the_sum_of_those_of_the_stages() -> None:
    model = pipeline_of(CASES["GPT-2 with tied weights"], 2, chunks=5, balance=[1, 1])
    ours = pipelined_step(model, CAUSAL, ITEMS)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    untied = plain_step(model, CAUSAL, ITEMS, chunks=5)
    untied["gradient of transformer.wte.weight"] += untied.pop("gradient of lm_head.weight")
    assert unequal(ours, untied) == []


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["GPT-2", "Llama with padding", "BERT", "ViT"])
def test_a_whole_step_equals_that_of_the_plain_model(name: str) -> None:
    _, inputs, loss = CASES[name]
    model = pipeline_of(CASES[name], 2, 5)
    torch.manual_seed(SEED)
    model.zero_grad()
    found, output = model.step(**inputs, return_outputs=True)
    assert type(output) is type(model.plain()(**inputs))
    assert torch.equal(output.loss, found)
    tensors_of_step = [x for x in tensors(output) if x is not output.loss]
    ours: dict[str, Any] = {f"output {i}": x for i, x in enumerate(tensors_of_step)} | {"loss": found}
    ours |= {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    expected = plain_step(model, inputs, loss, 5)
    assert unequal(ours, {key: expected[key] for key in ours}) == []
    model.schedule = "1f1b"
    losses: list[Tensor] = []
    torch.manual_seed(SEED)
    assert torch.equal(model.step(**inputs, losses=losses), found)
    assert len(losses) == 5
    torch.manual_seed(SEED)
    evaluated, output = model.evaluate(**inputs, return_outputs=True)
    assert torch.equal(evaluated, found)
    assert type(output) is type(model.plain()(**inputs))
    assert not evaluated.requires_grad


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.parametrize("name", ["GPT-2", "BERT"])
def test_a_stream_equals_calls(name: str, backend: str) -> None:
    """Of two lengths in turn, which need two programs, and two batch sizes."""
    _, inputs, _ = CASES[name]
    model = pipeline_of(CASES[name], 2, 5, backend=backend).eval()

    def batch(length: int, size: int) -> dict[str, Any]:
        return {k: v[:size, :length].contiguous() for k, v in inputs.items()}

    lengths = [(6, 9), (6, 9), (4, 9), (4, 4), (6, 4), (6, 9)]
    batches = [batch(*each) for each in lengths]
    with torch.no_grad():
        expected = [model(**each) for each in batches]
    found = list(model.stream(iter(batches), depth=3))
    assert [type(each) for each in found] == [type(each) for each in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(tensors(ours), tensors(theirs), strict=True))
        assert not any(x.requires_grad for x in tensors(ours))


def test_blocks_run_as_programs_and_equal_blocks_are_traced_once() -> None:
    case = (lambda: gpt2(n_layer=3), CAUSAL, ITEMS)
    model = pipeline_of(case, 2, 2, backend="aten", balance=[2, 1])
    model(**CAUSAL)
    assert [type(layer).__name__ for layer in model.pipeline] == ["Glue", *["GPT2Block"] * 3, "Glue"]
    assert type(model.pipeline[1]) is type(model.pipeline[2])


def test_a_mask_that_masks_nothing_is_left_out_as_in_plain_calls() -> None:
    model = pipeline_of(CASES["Llama with padding"], 2, 2).eval()
    plain = model.plain()
    with torch.no_grad():
        for mask in (PADDING, torch.ones_like(PADDING), PADDING):
            ours = model(input_ids=TOKENS, attention_mask=mask).logits
            parts = zip(TOKENS.chunk(2), mask.chunk(2), strict=True)
            expected = torch.cat([plain(input_ids=x, attention_mask=m).logits for x, m in parts])
            assert torch.equal(ours, expected)


Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


class Tokens(nn.Module):
    """A small model of tokens, with a loss that the test chooses."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(9, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 9)
        self.loss = loss

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.loss(self.head(x), ids, labels)


def tokens() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(9, (7, 5), generator=generator) for _ in range(2))
    labels[torch.rand(7, 5, generator=generator) < 0.4] = -100
    labels[0, :4] = -100
    ids[:3, :3] = 8
    return ids, labels


def pipelined(plain: nn.Module, chunks: int, balance: Sequence[int] = (1, 1)) -> Any:
    return GPipe.from_model(plain, args=tokens(), balance=balance, devices=["cpu"] * 2, chunks=chunks)


SUMS: dict[str, Inputs] = {
    # Positions past the end are ignored.
    "BertForQuestionAnswering": {
        "input_ids": TOKENS,
        "start_positions": numbers(BATCH) % 12,
        "end_positions": numbers(BATCH).flip(0) % 11,
    },
    "BertForPreTraining": {"input_ids": TOKENS, "labels": LABELS, "next_sentence_label": CLASSES},
}


@pytest.mark.parametrize("name", SUMS)
def test_a_loss_of_two_means_over_different_targets(name: str) -> None:
    plain, inputs = bert(name).eval(), SUMS[name]
    expected: Any = plain(**inputs)
    parameters = [p for p in plain.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(expected.loss, parameters, allow_unused=True)
    model = GPipe.from_model(plain, kwargs=dict(inputs), devices=["cpu"] * 2, chunks=4)
    found = model(**inputs)
    for key in expected:
        torch.testing.assert_close(found[key], expected[key])
    torch.testing.assert_close(model.step(**inputs), expected.loss.detach())
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.parametrize("loss", ["exact", "per-microbatch"])
def test_router_logits_that_are_collected_inside_of_blocks_are_refused(loss: str) -> None:
    plain = decoder("MixtralForCausalLM", num_local_experts=4, output_router_logits=True)
    with pytest.raises(RuntimeError, match="router_logits would be collected inside of blocks"):
        GPipe.from_model(plain, kwargs=dict(CAUSAL), devices=["cpu"] * 2, chunks=4, loss=loss)


class PoolAndJoin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(channels, 4, 3, padding=1) for channels in (3, 4))
        self.up = nn.ModuleList(nn.Conv2d(8, 4, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.down:
            x = layer(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        for layer in self.up:
            x = layer(torch.cat([F.interpolate(x, scale_factor=2), kept.pop()], 1))
        return x


def test_a_size_that_is_only_tried_and_does_not_fit_is_not_logged() -> None:
    """Other sizes are recorded to see what depends on them; not every size can be pooled and joined."""
    plain, records = PoolAndJoin(), list[logging.LogRecord]()
    model = GPipe.from_model(plain, (IMAGES,), devices=["cpu"] * 2, chunks=2)
    handler, logger = logging.Handler(), logging.getLogger("torch._subclasses.fake_tensor")
    handler.emit = records.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        for size in (16, 24, 32):
            x = noise(4, 3, size, size)
            expected = torch.cat([model.plain()(part) for part in x.chunk(2)])
            assert torch.equal(model(x), expected)
    finally:
        logger.removeHandler(handler)
    assert not records
    assert not logger.disabled


class Branching(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if float(x.new_ones(1)) > 0 else x


def test_models_with_blocks_in_python_are_recorded_while_a_stream_is_open() -> None:
    """A record of another length takes parameters away, which running blocks need."""
    plain = Tokens(lambda logits, ids, labels: logits)
    plain.blocks = nn.ModuleList(Branching(4, 4) for _ in range(3))
    ids, labels = tokens()
    batches = [(ids[:, :n], labels[:, :n]) for n in (5, 4, 5, 3)]
    with torch.no_grad():
        expected = [plain(*batch) for batch in batches]
    model = pipelined(plain, chunks=7, balance=[2, 1]).eval()
    with pytest.warns(UserWarning, match="runs in Python"):
        found = list(model.stream(batches, depth=3))
    torch.testing.assert_close(found, expected)
    stream = model.stream([(ids, labels)] * 6, depth=4)
    results = [next(stream)]
    with torch.no_grad():
        torch.testing.assert_close(model(ids[:, :2], labels[:, :2]), plain(ids[:, :2], labels[:, :2]))
    results += stream
    torch.testing.assert_close(results, [expected[0]] * 6)


@pytest.mark.extended
@pytest.mark.parametrize("name", ["GPT-2", "ViT"])
def test_a_configuration_that_changes_between_steps_is_seen(name: str) -> None:
    _, inputs, loss = CASES[name]
    model = pipeline_of(CASES[name], 2, 2)
    for attention in ("eager", "sdpa"):
        model.config._attn_implementation = attention
        ours = pipelined_step(model, inputs, loss)
        assert unequal(ours, plain_step(model, inputs, loss, 2)) == []
