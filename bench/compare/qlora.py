"""Steps of adapters beside frozen weights of 4 bits, over two stages and as `device_map` runs them.

A Llama of {BLOCKS} blocks of width {WIDTH}, quantized by bitsandbytes (NF4, scales quantized, bfloat16), with
LoRA of rank {RANK} on all linear layers; {BATCH} x {LENGTH} tokens. Two stages on the CPU with one thread
each, {CHUNKS} micro-batches, schedule='1f1b'. `device_map`: accelerate's hooks on each block, which run one
block at a time, the whole mini-batch at once. Candidates take turns; their gradients differ by at most {OFF}
relative to the largest. Counted in one step by PyTorch's profiler: products, and weights that are
dequantized, once for each product with one. The libraries are those
that `make smoke-newest` installs.
"""

from __future__ import annotations

import importlib
import tempfile
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bench import process
from bench.measure import ROOT, report, samples, timing
from gpipe_fast import GPipe

BLOCKS, WIDTH, RANK, BATCH, LENGTH, CHUNKS, ROUNDS = 8, 256, 8, 16, 128, 4, 11
WORDS, OFF = 64, 0.02  # bfloat16
SIZES = {
    **{"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": BLOCKS},
    **{"num_attention_heads": 4, "vocab_size": WORDS, "tie_word_embeddings": False, "use_cache": False},
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0),
}
HOOKS, HOOKS_RECOMPUTE = "device_map", "device_map, gradient checkpointing"
PIPELINES = {f"two stages, checkpoint='{mode}'": mode for mode in ("always", "except_last", "never")}
# On the CPU, `bitsandbytes::gemm_4bit` dequantizes the weight, and calls a product.
PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm")
DEQUANTIZED = "bitsandbytes::dequantize_4bit"


def adapted() -> Any:
    """Returns a new model, with the same weights each time."""
    library: Any = importlib.import_module("transformers")
    peft: Any = importlib.import_module("peft")
    settings = library.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        library.LlamaForCausalLM(library.LlamaConfig(**SIZES)).save_pretrained(folder)
        model = library.LlamaForCausalLM.from_pretrained(
            folder, quantization_config=settings, dtype=torch.bfloat16, device_map={"": "cpu"}
        )
    lora = peft.LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    found: nn.Module = peft.get_peft_model(model.train(), lora)
    for name, parameter in found.named_parameters():
        if "lora_B" in name:  # zero, so that half of the gradients would be
            nn.init.normal_(parameter, std=0.02)
    return found


class Candidate:
    """A step of a model; call it to run it."""

    def __init__(self, name: str, ids: Tensor) -> None:
        self.model: Any = adapted()
        self.given = {"input_ids": ids, "labels": ids}
        if name in PIPELINES:
            options: dict[str, Any] = {"checkpoint": PIPELINES[name], "schedule": "1f1b", "backend": "aten"}
            balance = [BLOCKS // 2] * 2
            self.model = GPipe.from_model(
                self.model, kwargs=self.given, balance=balance, devices=["cpu"] * 2, chunks=CHUNKS, **options
            )
            self.model.threads_per_stage = 1
        else:
            hooks: Any = importlib.import_module("accelerate.hooks")
            base = self.model.get_base_model()
            for block in base.model.layers:
                hooks.add_hook_to_module(block, hooks.AlignDevicesHook("cpu", io_same_device=True))
            if name == HOOKS_RECOMPUTE:
                base.gradient_checkpointing_enable({"use_reentrant": False})

    def __call__(self) -> None:
        if hasattr(self.model, "step"):
            self.model.step(**self.given)
        else:
            self.model(**self.given).loss.backward()

    def gradients(self) -> dict[str, Tensor]:
        """Returns the gradients of a step."""
        self.model.zero_grad()
        self()
        return {name: p.grad.float() for name, p in self.model.named_parameters() if p.grad is not None}


def counted(step: Callable[[], object]) -> tuple[float, int]:
    """Returns the operations of the products of a step, in G, and how many weights are dequantized."""
    from torch._C._profiler import _ExperimentalConfig

    every = _ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(record_shapes=True, experimental_config=every) as profile:
        step()
    operations, dequantized = 0, 0
    for event in profile.events():
        if event.name in PRODUCTS:
            left, right = event.input_shapes[event.name == "aten::addmm" :][:2]
            operations += 2 * torch.Size(left).numel() * right[-1]
        dequantized += event.name == DEQUANTIZED
    return operations / 1e9, dequantized


def rows(rounds: int = ROUNDS) -> list[list[object]]:
    """Returns a row for each candidate."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ids = torch.randint(1, WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    steps = {name: Candidate(name, ids) for name in (HOOKS, HOOKS_RECOMPUTE, *PIPELINES)}
    wanted = steps[HOOKS].gradients()
    for name, step in steps.items():
        found = step.gradients()
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            off = float((found[key] - value).abs().max() / value.abs().max())
            assert off < OFF, (name, key, off)
    counts = {name: counted(step) for name, step in steps.items()}
    times = {name: timing(each) for name, each in samples(steps, rounds).items()}
    first = times[HOOKS_RECOMPUTE].median
    return [
        [name, times[name].ms(), times[name].median / first, f"{counts[name][0]:.2f}", counts[name][1]]
        for name in steps
    ]


HEADERS: Sequence[str] = (
    *("step", "ms: median [p20, p80]", "time / device_map with recomputation"),
    *("products, GFLOP", "weights dequantized"),
)


def main() -> None:
    newest = {"PYTHONPATH": str(ROOT / "build" / "newest")}
    report(globals(), HEADERS, process.call("bench.compare.qlora:rows", environment=newest))
