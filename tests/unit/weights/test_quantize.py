"""Weights that are quantized while they are loaded: those of `from_pretrained`, and the peak of memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gpipe_fast import GPipe
from gpipe_fast.layers.quantized import is_quantized, parts_of
from tests.distributed.launch import needs_gloo, run_ranks
from tests.distributed.model_cases import quantized_loss, quantized_peak
from tests.models.test_quantized_models import DTYPES, KINDS, SIZES, settings_of

pytestmark = pytest.mark.filterwarnings("ignore")

WIDTH, NUM_BLOCKS = 512, 12
BLOCK = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_key_value_heads": 2}
BLOCK_BYTES = 4 * 16 * WIDTH**2  # 4 matrices of attention, 3 of 4 * WIDTH in the gated layers


def saved(folder: Path, name: str, shard: str, **sizes: Any) -> Path:
    package = pytest.importorskip("transformers", minversion="5.0")
    torch.manual_seed(0)
    config = getattr(package, f"{name}Config")(**SIZES | sizes)
    getattr(package, f"{name}ForCausalLM")(config).save_pretrained(folder, max_shard_size=shard)
    return folder / "model.safetensors.index.json"


def on_meta(folder: Path, dtype: torch.dtype = torch.float32, **where: Any) -> Any:
    package = pytest.importorskip("transformers")
    with torch.device("meta"):
        config = package.AutoConfig.from_pretrained(folder)
        empty = package.AutoModelForCausalLM.from_config(config, dtype=dtype)
    ids = torch.ones(4, 8, dtype=torch.int64)
    where = where or {"devices": ["cpu"] * 2, "balance": [2, 2]}
    return GPipe.from_model(empty, kwargs={"input_ids": ids, "labels": ids}, **where)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_from_pretrained(kind: str, dtype: str, tmp_path: Path) -> None:
    settings = settings_of(kind, DTYPES[dtype])
    index = saved(tmp_path, "Qwen2", "20KB")  # has biases
    package = pytest.importorskip("transformers")
    options = {"quantization_config": settings, "dtype": DTYPES[dtype], "device_map": {"": "cpu"}}
    expected = package.AutoModelForCausalLM.from_pretrained(tmp_path, **options)
    model = on_meta(tmp_path, DTYPES[dtype])
    model.load_weights(index, init=model._init_weights, quantization_config=settings)
    found = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, tensor in (*expected.named_parameters(), *expected.named_buffers()):
        ours = found[name]
        assert (type(ours), ours.dtype, ours.device) == (type(tensor), tensor.dtype, tensor.device)
        assert is_quantized(tensor) == (tensor.ndim == 2 and "proj" in name)
        parts = parts_of(ours)
        assert parts.keys() == parts_of(tensor).keys()
        assert all(torch.equal(parts[path], part) for path, part in parts_of(tensor).items())
        if not parts:
            assert torch.equal(ours, tensor)
    assert model.is_quantized
    assert model.config.quantization_config is settings


def test_a_source_that_does_not_fit_can_be_followed_by_another(tmp_path: Path) -> None:
    settings = settings_of("NF4", torch.float32)
    index, model = saved(tmp_path, "Llama", "20KB"), on_meta(tmp_path)
    with pytest.raises(RuntimeError, match=r"Missing key.*lm_head"):
        model.load_weights({}, quantization_config=settings)
    model.load_weights(index, init=model._init_weights, quantization_config=settings)
    assert is_quantized(model.model.layers[0].mlp.up_proj.weight)
    assert model(input_ids=torch.ones(4, 8, dtype=torch.int64)).logits.isfinite().all()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The index of a checkpoint of twelve blocks in shards of about one."""
    settings_of("NF4", torch.float32)
    sizes = {**BLOCK, "num_hidden_layers": NUM_BLOCKS}
    return saved(tmp_path_factory.mktemp("large"), "Llama", f"{BLOCK_BYTES // 2**20 + 1}MB", **sizes)


@needs_gloo
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_no_process_ever_holds_more_than_its_stage_and_two_blocks(large: Path, num_ranks: int) -> None:
    assert len(list(large.parent.glob("*.safetensors"))) >= 10
    for peak, stage in run_ranks(num_ranks, quantized_peak, str(large), num_ranks):
        assert stage < 1.2 * NUM_BLOCKS / num_ranks * BLOCK_BYTES / 7
        assert 0.9 * stage < peak <= stage + 2 * BLOCK_BYTES


@needs_gloo
def test_losses_of_stages_in_two_processes_are_those_of_one(tmp_path: Path) -> None:
    settings_of("NF4", torch.float32)
    index = saved(tmp_path, "Llama", "20KB")
    (alone,), together = (run_ranks(number, quantized_loss, str(index), 2) for number in (1, 2))
    assert together == [alone] * 2
    assert alone[0] > alone[-1] > 0
