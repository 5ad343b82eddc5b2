"""Models that transformers has quantized, with LoRA, as pipelines: losses, gradients and ten updates."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe, keyed_rng
from gpipe_fast.gpipe import CHECKPOINT_MODES
from tests.models.test_from_model import (
    ITEMS,
    LABELS,
    TOKENS,
    num_targets,
    pipelined_step,
    plain_step,
    transformers,
)
from tests.reference import SEED, unequal

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

SIZES = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "vocab_size": 30, "use_cache": False},
    **{"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "tie_word_embeddings": False},
}
INPUTS = {"input_ids": TOKENS[:8], "labels": LABELS[:8]}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FOUR_BITS = {"NF4": ("nf4", False), "NF4, double": ("nf4", True), "FP4": ("fp4", False)}
TORCHAO: dict[str, tuple[str, dict[str, Any]]] = {
    "torchao int8": ("Int8WeightOnlyConfig", {}),
    "torchao int4": ("IntxWeightOnlyConfig", {"weight_dtype": torch.int4}),
    "torchao float8": ("Float8WeightOnlyConfig", {}),
}
EIGHT_BITS = "8 bits"
KINDS = (*FOUR_BITS, *TORCHAO, EIGHT_BITS)


def settings_of(kind: str, dtype: torch.dtype) -> Any:
    package = pytest.importorskip("transformers")
    if kind in TORCHAO:
        pytest.importorskip("torchao", reason="torchao is not installed")
        quantization = pytest.importorskip("torchao.quantization")
        name, own = TORCHAO[kind]
        return package.TorchAoConfig(getattr(quantization, name)(**own))
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    if kind == EIGHT_BITS:
        return package.BitsAndBytesConfig(load_in_8bit=True)
    quant_type, double = FOUR_BITS[kind]
    return package.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quant_type,
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=dtype,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("llama")
    transformers("LlamaForCausalLM", **SIZES).save_pretrained(found)  # type: ignore[operator]
    return found


def adapted(folder: Path, kind: str, dtype: torch.dtype, dropout: float) -> nn.Module:
    """Returns a quantized Llama with LoRA on all linear layers, whose gradients are all other than zero."""
    config = settings_of(kind, dtype)
    package, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    model = package.LlamaForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=dtype, device_map={"": "cpu"}
    )
    torch.manual_seed(SEED)
    lora = peft.LoraConfig(r=2, lora_dropout=dropout, target_modules="all-linear", task_type="CAUSAL_LM")
    found: nn.Module = peft.get_peft_model(model, lora).train()
    for name, parameter in found.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return found


def pipelined(model: nn.Module, stages: int, **settings: Any) -> Any:
    return GPipe.from_model(model, kwargs=INPUTS, devices=["cpu"] * stages, **settings)


CASES = [*itertools.product(KINDS, DTYPES, CHECKPOINT_MODES, (1, 4, 8), (2, 4), (0.0, 0.1))]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("kind", "dtype", "checkpoint", "chunks", "stages", "dropout"), CASES)
def test_ten_updates_equal_the_plain_loop(
    folder: Path, kind: str, dtype: str, checkpoint: str, chunks: int, stages: int, dropout: float
) -> None:
    model = pipelined(
        adapted(folder, kind, DTYPES[dtype], dropout),
        stages,
        chunks=chunks,
        checkpoint=checkpoint,
        backend="auto" if kind == EIGHT_BITS else "aten",
    )
    plain = model.plain()  # has the same parameters
    assert not unequal(pipelined_step(model, INPUTS, ITEMS), plain_step(model, INPUTS, ITEMS, chunks))
    pieces = [x.chunk(chunks) for x in INPUTS.values()]
    parts = [dict(zip(INPUTS, each, strict=True)) for each in zip(*pieces, strict=True)]
    total = num_targets(INPUTS["labels"], ITEMS)

    def plain_loss() -> Tensor:
        with keyed_rng(plain):
            losses = [plain(**part, num_items_in_batch=total).loss for part in parts]
        return sum(losses[1:], losses[0])

    trained = [p for p in model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in trained]
    ours = ten_updates(trained, lambda: model(**INPUTS).loss)
    for parameter, value in zip(trained, before, strict=True):
        parameter.data.copy_(value)
    assert all(map(torch.equal, ours, ten_updates(trained, plain_loss)))


def ten_updates(trained: list[nn.Parameter], loss_of_step: Callable[[], Tensor]) -> list[Tensor]:
    """Returns ten losses, and then the parameters."""
    optimizer, losses = torch.optim.AdamW(trained, 1e-2), []
    for step in range(10):
        optimizer.zero_grad()
        torch.manual_seed(SEED + step)
        loss = loss_of_step()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.detach().clone() for p in trained)]
