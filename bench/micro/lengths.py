"""Steps of models of transformers with further sequence lengths, and 200 of them beside the plain model.

Two stages on the CPU, one thread each; each model in a process of its own. Small models, so that the time is
that of the calls and not of the products. The plain model runs the same micro-batches one after the other.
"""

from __future__ import annotations

import functools
import random
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import nn

from bench import process
from bench.measure import report

CHUNKS, BATCH, WORDS, LONGEST = 4, 8, 64, 128
NUM_LENGTHS, NUM_STEPS, LAST = 10, 200, 50
_SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": WORDS}
_UNTIED = {"tie_word_embeddings": False, "max_position_embeddings": LONGEST}
_GPT2 = {"n_embd": 64, "n_layer": 12, "n_head": 4, "vocab_size": WORDS, "n_positions": LONGEST}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama, 4 blocks": ("LlamaForCausalLM", {"num_hidden_layers": 4, **_SIZES, **_UNTIED}),
    "Llama, 24 blocks": ("LlamaForCausalLM", {"num_hidden_layers": 24, **_SIZES, **_UNTIED}),
    "Qwen3, 12 blocks": (
        "Qwen3ForCausalLM",
        {"num_hidden_layers": 12, "head_dim": 16, "num_key_value_heads": 4, **_SIZES, **_UNTIED},
    ),
    "GPT-2, 12 blocks": ("GPT2LMHeadModel", {**_GPT2, "tie_word_embeddings": False}),
    "BERT, 12 blocks": ("BertForMaskedLM", {"num_hidden_layers": 12, **_SIZES, **_UNTIED}),
}


def _seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def measured(name: str) -> tuple[list[float], list[float], float]:
    """Returns the seconds of steps with new lengths, ratios to the plain model, and that for one length."""
    import transformers

    from gpipe_fast import GPipe

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    model_class, sizes = MODELS[name]
    made: Any = getattr(transformers, model_class)
    plain: nn.Module = made(made.config_class(**sizes)).train()
    draw = random.Random(0)

    def batch(length: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(1, WORDS, (BATCH, length))
        return {"input_ids": ids, "labels": ids}

    lengths = draw.sample(range(8, LONGEST), NUM_LENGTHS)
    begin = time.perf_counter()
    model: Any = GPipe.from_model(plain, kwargs=batch(lengths[0]), devices=["cpu"] * 2, chunks=CHUNKS)
    first = time.perf_counter() - begin
    model.threads_per_stage = 1
    news = [_seconds(functools.partial(model.step, **batch(length))) for length in lengths]
    news[0] += first

    def loop(given: dict[str, torch.Tensor]) -> None:
        for ids in given["input_ids"].chunk(CHUNKS):
            (model.plain()(input_ids=ids, labels=ids).loss / CHUNKS).backward()

    def ratio(length: int) -> float:
        given = batch(length)
        return _seconds(lambda: model.step(**given)) / _seconds(lambda: loop(given))

    ratios = [ratio(draw.randrange(8, LONGEST)) for _ in range(NUM_STEPS)]
    return news, ratios, median(ratio(LONGEST // 2) for _ in range(LAST))


def main() -> None:
    rows: list[list[object]] = []
    for name in MODELS:
        news, ratios, steady = process.call("bench.micro.lengths:measured", name)
        further = [median(news[3:]), max(news[3:])]
        rows.append([name, *news[:3], *further, median(ratios[:LAST]), median(ratios[-LAST:]), steady])
    headers = "model | first, s | second, s | third, s | further, s | slowest of these, s"
    step = f"step / loop, first {LAST} | step / loop, last {LAST} of {NUM_STEPS} | step / loop, one length"
    report(globals(), f"{headers} | {step}", rows)
