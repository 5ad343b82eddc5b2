"""`GPipe.from_model` on models of transformers: what is recorded, times, and memory to load a large one.

Models of transformers with 4 blocks of width 128, or 2 and 2, in two stages on the CPU with one thread each;
{BATCH} samples, of {LENGTH} tokens or 64 patches, in {CHUNKS} micro-batches; checkpoint='except_last'. A
first call includes the step. Steps: median and 20th and 80th percentile of {ROUNDS}, by turns with the plain
model over the same micro-batches, which recomputes nothing and has one thread. Each model has a process of
its own.
"""

from __future__ import annotations

import importlib
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench import process, resident
from bench.measure import Table, report, samples, timing
from gpipe_fast import GPipe

CHUNKS, BATCH, LENGTH, VOCABULARY = 4, 8, 64, 1000
ROUNDS = 5
SIZES = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
SPECIAL = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
COMMON = {"vocab_size": VOCABULARY, "tie_word_embeddings": False}
DECODER = {**SIZES, **SPECIAL, **COMMON}
ENCODER_DECODER = {
    "d_model": 128,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 512,
    "decoder_ffn_dim": 512,
    "decoder_start_token_id": 0,
    **SPECIAL,
    "vocab_size": VOCABULARY,
}
T5 = {"d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "GPT2LMHeadModel": {"n_embd": 128, "n_layer": 4, "n_head": 4, **SPECIAL, **COMMON},
    "LlamaForCausalLM": DECODER,
    "Qwen2ForCausalLM": {**DECODER, "num_key_value_heads": 2},
    "MistralForCausalLM": {**DECODER, "num_key_value_heads": 2, "sliding_window": 32},
    "GemmaForCausalLM": {**DECODER, "num_key_value_heads": 2, "head_dim": 32},
    "BertForMaskedLM": {**SIZES, **COMMON},
    "RobertaForMaskedLM": {**SIZES, **COMMON},
    "T5ForConditionalGeneration": {**T5, **COMMON},
    "BartForConditionalGeneration": ENCODER_DECODER,
    "ViTForImageClassification": {**SIZES, "image_size": 64, "patch_size": 8},
}
# A Llama of 1.3 billion parameters, as of Sheared-LLaMA.
LARGE = {
    "hidden_size": 2048,
    "intermediate_size": 5504,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}


def model_of(name: str, sizes: Mapping[str, Any]) -> Any:
    """Returns a model of transformers with random weights, in training mode and without dropout."""
    package = importlib.import_module("transformers")
    torch.manual_seed(0)
    model_class = getattr(package, name)
    model: nn.Module = model_class(model_class.config_class(**sizes)).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def inputs_of(name: str) -> dict[str, Tensor]:
    """Returns a mini-batch for a model."""
    generator = torch.Generator().manual_seed(1)
    if name == "ViTForImageClassification":
        images = torch.randn(BATCH, 3, 64, 64, generator=generator)
        return {"pixel_values": images, "labels": torch.zeros(BATCH, dtype=torch.int64)}
    tokens = torch.randint(1, VOCABULARY, (BATCH, LENGTH), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def measure(name: str) -> dict[str, Any]:
    """Returns what is recorded of a model, and the times of `from_model`, of a first call, and of steps."""
    plain, inputs = model_of(name, MODELS[name]), inputs_of(name)
    start = time.perf_counter()
    pipe = GPipe.from_model(plain, kwargs=inputs, devices=["cpu"] * 2, balance=[2, 2], chunks=CHUNKS)
    made = time.perf_counter()
    pipe.threads_per_stage = 1

    def step() -> None:
        pipe.zero_grad()
        pipe(**inputs).loss.backward()

    def plain_step() -> None:
        plain.zero_grad()
        for part in zip(*(x.chunk(CHUNKS) for x in inputs.values()), strict=True):
            (plain(**dict(zip(inputs, part, strict=True))).loss / CHUNKS).backward()

    step()
    called = time.perf_counter()
    times = samples({"pipe": step, "plain": plain_step}, ROUNDS)
    calls = pipe._calls.program.flow.calls
    return {
        "glue": sum(not call.is_module for call in calls),
        "modules": sum(call.is_module for call in calls),
        "from_model": made - start,
        "first call": called - made,
        **{kind: timing(each).ms() for kind, each in times.items()},
    }


def load_large() -> dict[str, float]:
    """Loads a model from a folder of safetensors files, and returns the peak of its memory, in MiB."""
    package = importlib.import_module("transformers")
    config = package.LlamaConfig(**LARGE)

    def make(device: str) -> Any:
        with torch.device(device):
            return package.LlamaForCausalLM(config).to(torch.bfloat16)

    tokens = torch.ones(BATCH, LENGTH, dtype=torch.int64, device="meta")
    with tempfile.TemporaryDirectory() as folder:
        process.call("bench.compare.from_model:save_large", folder)
        # The first call of from_model imports what PyTorch needs to trace.
        small = {**LARGE, "hidden_size": 64, "num_hidden_layers": 2}
        GPipe.from_model(
            package.LlamaForCausalLM(package.LlamaConfig(**small)),
            kwargs={"input_ids": tokens, "labels": tokens},
            devices=["cpu"] * 2,
            balance=[1, 1],
        )
        before = resident.present()
        resident.reset_peak()
        pipe = GPipe.from_model(
            make("meta"),
            kwargs={"input_ids": tokens, "labels": tokens},
            devices=["cpu"] * 2,
            balance=[12, 12],
            chunks=CHUNKS,
        )
        pipe.load_weights(Path(folder) / "model.safetensors.index.json", init=pipe._init_weights)
        assert not any(x.is_meta for x in (*pipe.parameters(), *pipe.buffers()))
        weights = sum(x.nbytes for x in pipe.parameters()) / 2**20
        return {
            "parameters": sum(x.numel() for x in pipe.parameters()),
            "weights": weights,
            "peak": resident.peak() - before,
        }


def save_large(folder: str) -> None:
    """Saves random weights as files of at most 1 GB."""
    package = importlib.import_module("transformers")
    with torch.device("meta"):
        model = package.LlamaForCausalLM(package.LlamaConfig(**LARGE)).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.uniform_(-0.02, 0.02, generator=generator)
    model.save_pretrained(folder, max_shard_size="1GB")


def main() -> None:
    found = {name: process.call("bench.compare.from_model:measure", name) for name in MODELS}
    rows = [
        [name, *(f"{v:.2f}" if isinstance(v, float) else v for v in each.values())]
        for name, each in found.items()
    ]
    large = process.call("bench.compare.from_model:load_large")
    weights, peak = large["weights"], large["peak"]
    large_row = [f"{large['parameters']:,}", round(weights), round(peak), f"{peak / weights:.2f}"]
    report(
        globals(),
        "model | functions between modules | modules called | from_model, s | first call,"
        " s | step, ms | plain loop, ms",
        rows,
        [
            Table(
                "Loading",
                ["parameters", "weights, MiB", "peak, MiB", "peak, relative to the weights"],
                [large_row],
                "A Llama in bfloat16, built on the meta device, made a pipeline, and loaded from a folder of "
                "safetensors files with an index. The peak is that of resident memory from before the model "
                "is built until it is loaded.",
            )
        ],
    )
