"""Models of transformers and timm whose configuration changes during training; skipped if not installed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_fast import GPipe, keyed_rng

pytestmark = [pytest.mark.extended, pytest.mark.usefixtures("one_thread")]

STEPS, CHANGE_STEPS, VOCABULARY, WIDTH = 20, (7, 14), 50, 32


class ConfigurationCase(NamedTuple):
    """A model and a configuration change.

    Attributes:
        layers: the model as a sequence of layers.
        x: the model's input.
        settings: the configuration or module whose attribute changes.
        attribute: the attribute's name.
        values: the attribute's alternating values.
    """

    layers: nn.Sequential
    x: Tensor
    settings: Any
    attribute: str
    values: tuple[Any, Any]


class Block(nn.Module):
    """One transformer block; returns its first output, and passes rotary position embeddings if any."""

    def __init__(self, block: nn.Module, rotary: nn.Module | None = None) -> None:
        super().__init__()
        self.block, self.rotary = block, copy.deepcopy(rotary)

    def forward(self, x: Tensor) -> Tensor:
        options: dict[str, Any] = {}
        if self.rotary is not None:
            positions = torch.arange(x.shape[1])[None]
            options = {"position_ids": positions, "attention_mask": None}
            options["position_embeddings"] = self.rotary(x, positions)
        y = self.block(x, **options)
        return y[0] if isinstance(y, tuple) else y


class Gpt2Embedding(nn.Module):
    """GPT-2's embedding of tokens and positions."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.tokens, self.positions, self.dropout = model.wte, model.wpe, model.drop

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.dropout(self.tokens(x) + self.positions(torch.arange(x.shape[1])))
        return y


ATTENTION: tuple[str, tuple[str, str]] = ("_attn_implementation", ("eager", "sdpa"))
SIZES = {"hidden_size": WIDTH, "num_attention_heads": 4, "intermediate_size": 48}


def _language_model(
    embedding: nn.Module, blocks: list[nn.Module], norm: nn.Module
) -> tuple[nn.Sequential, Tensor]:
    layers = nn.Sequential(embedding, *blocks, norm, nn.Linear(WIDTH, VOCABULARY))
    return layers, torch.randint(0, VOCABULARY, (4, 8))


def gpt2() -> ConfigurationCase:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=WIDTH, n_layer=3, n_head=4, n_positions=32, vocab_size=VOCABULARY, attn_implementation="eager"
    )
    model = transformers.GPT2Model(config)
    return ConfigurationCase(
        *_language_model(Gpt2Embedding(model), [Block(b) for b in model.h], model.ln_f), config, *ATTENTION
    )


def _decoder(name: str, **options: Any) -> ConfigurationCase:
    transformers = pytest.importorskip("transformers")
    sizes = {**SIZES, "num_hidden_layers": 2, "num_key_value_heads": 2, "vocab_size": VOCABULARY}
    config = getattr(transformers, f"{name}Config")(**sizes, attn_implementation="eager", **options)
    model = getattr(transformers, f"{name}Model")(config)
    blocks: list[nn.Module] = [Block(b, model.rotary_emb) for b in model.layers]
    return ConfigurationCase(*_language_model(model.embed_tokens, blocks, model.norm), config, *ATTENTION)


def bert() -> ConfigurationCase:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        **SIZES, num_hidden_layers=3, vocab_size=VOCABULARY, attn_implementation="eager"
    )
    model = transformers.BertModel(config)
    blocks: list[nn.Module] = [Block(b) for b in model.encoder.layer]
    return ConfigurationCase(*_language_model(model.embeddings, blocks, nn.Identity()), config, *ATTENTION)


def vit() -> ConfigurationCase:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        **SIZES, num_hidden_layers=3, image_size=16, patch_size=4, attn_implementation="eager"
    )
    model = transformers.ViTModel(config)
    blocks = model.encoder.layer if hasattr(model, "encoder") else model.layers
    layers = nn.Sequential(model.embeddings, *map(Block, blocks), model.layernorm, nn.Linear(WIDTH, 10))
    return ConfigurationCase(layers, torch.randn(4, 3, 16, 16), config, *ATTENTION)


def mamba() -> ConfigurationCase:
    transformers = pytest.importorskip("transformers")
    config = transformers.MambaConfig(
        hidden_size=WIDTH, state_size=4, num_hidden_layers=2, vocab_size=VOCABULARY, use_cache=False
    )
    model = transformers.MambaModel(config)
    blocks: list[nn.Module] = [Block(b) for b in model.layers]
    layers, x = _language_model(model.embeddings, blocks, model.norm_f)
    return ConfigurationCase(layers, x, model.layers[0], "residual_in_fp32", (True, False))


def resnet() -> ConfigurationCase:
    timm = pytest.importorskip("timm")
    model = timm.create_model("resnet10t", num_classes=10)
    first = nn.Sequential(model.conv1, model.bn1, model.act1, model.maxpool)
    last = nn.Sequential(model.global_pool, model.fc)
    layers = nn.Sequential(first, model.layer1, model.layer2, model.layer3, model.layer4, last)
    return ConfigurationCase(layers, torch.randn(4, 3, 32, 32), model.bn1, "momentum", (0.1, 0.3))


def convnext() -> ConfigurationCase:
    timm = pytest.importorskip("timm")
    model = timm.create_model("convnext_atto", num_classes=10, drop_path_rate=0.2)
    layers = nn.Sequential(model.stem, *model.stages, nn.Sequential(model.norm_pre, model.head))
    path = next(m for m in model.modules() if type(m).__name__ == "DropPath")
    return ConfigurationCase(layers, torch.randn(4, 3, 64, 64), path, "drop_prob", (path.drop_prob, 0.5))


CASES: dict[str, Callable[[], ConfigurationCase]] = {
    "gpt2": gpt2,
    "llama": lambda: _decoder("Llama"),
    "mixtral": lambda: _decoder("Mixtral", num_local_experts=4),
    "bert": bert,
    "vit": vit,
    "mamba": mamba,
    "resnet": resnet,
    "convnext": convnext,
}


def _loss(y: Tensor) -> Tensor:
    return F.cross_entropy(y.flatten(0, -2), torch.zeros(y.flatten(0, -2).shape[0], dtype=torch.long))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_training_equals_the_plain_loop_while_the_configuration_changes(name: str) -> None:
    torch.manual_seed(0)
    case = CASES[name]()
    case.layers.train()
    layers, settings = copy.deepcopy((case.layers, case.settings))
    middle = len(layers) // 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe = GPipe(layers, [middle, len(layers) - middle], devices=["cpu"] * 2, chunks=2)
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-3) for m in (case.layers, pipe)]
    for step in range(STEPS):
        if step in CHANGE_STEPS:
            value = case.values[(CHANGE_STEPS.index(step) + 1) % 2]
            for owner in (case.settings, settings):
                setattr(owner, case.attribute, value)
        torch.manual_seed(1000 + step)
        with keyed_rng(case.layers):
            expected = torch.cat([case.layers(c) for c in case.x.chunk(2)])
        _loss(expected).backward()
        torch.manual_seed(1000 + step)
        output = pipe(case.x)
        _loss(output).backward()
        assert torch.equal(output, expected), step
        for ours, theirs in zip(pipe.parameters(), case.layers.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            assert ours.grad is None or (theirs.grad is not None and torch.equal(ours.grad, theirs.grad)), (
                step
            )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
