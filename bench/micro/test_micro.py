"""What parts of gpipe_fast cost: a call, programs, draws, a layer in Python, the engine, first calls."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from torch import nn

from bench import process
from bench.comparison import Comparison, Opened, Outcome, Series
from bench.micro import draws, engine, execution, first_call, interpreted, signature
from bench.models.gpt import blocks
from bench.models.mlp import mlp

ELEMENTS = 1 << 16
PROGRAMS = {
    "both": ("both, eager with checkpoint", "both, eager without recompute"),
    "forward": ("forward, boxed", "forward, eager"),
    "backward": ("backward, boxed", "backward, eager without recompute"),
}
OPERATORS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "Linear": (nn.Linear(256, 256), (256, 256)),
    "LayerNorm": (nn.LayerNorm(256), (256, 256)),
    "GELU": (nn.GELU(), (256, 256)),
    "Softmax": (nn.Softmax(-1), (256, 256)),
    "Conv2d": (nn.Conv2d(16, 16, 3, padding=1), (8, 16, 32, 32)),
}
MIXED = "the layer in Python, the others lowered"


def call(num_modules: int, stack: ExitStack) -> Opened:
    stack.enter_context(torch.no_grad())
    return signature.parts(num_modules), None


def program(small: bool, names: tuple[str, ...], stack: ExitStack) -> Opened:
    torch.manual_seed(0)
    layers, x = (mlp(), torch.randn(8, 64)) if small else (blocks(2), torch.randn(2, 128, 256))
    found = execution.candidates(layers, x)
    return {name: found[name] for name in names}, None


def operator(name: str, stack: ExitStack) -> Opened:
    layer, shape = OPERATORS[name]
    found = execution.candidates([layer], torch.randn(shape))
    return {each: found[each] for each in ("both", *PROGRAMS["both"])}, None


def draw(name: str, stack: ExitStack) -> Opened:
    torch_draw, keyed, mean, std = draws.DRAWS[name]
    draws.check(name, keyed, mean, std)
    return {"keyed": partial(keyed, ELEMENTS), "torch": partial(torch_draw, ELEMENTS)}, None


def in_python(stack: ExitStack) -> Opened:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in mlp()]
    found = interpreted.candidates(layers, [4, 4, 4, 4], torch.randn(64, 64), "never")
    return {MIXED: found.pop(MIXED), **found}, found[interpreted.LOOP].gradients()


def engine_steps() -> dict[str, Outcome]:
    with tempfile.TemporaryDirectory() as folder:
        samples = engine.run(engine.build(Path(folder)), engine.ROUNDS, engine.STEPS)
    return {f"{k} stages, {m} micro-batches": Outcome(times=s.steps) for (k, m), s in samples.items()}


def first_calls(model: str) -> dict[str, Outcome]:
    found = process.call("bench.micro.first_call:calls", model)
    return {
        what: Outcome(times=[1e6 * found[step][1] for step in steps])
        for what, steps in first_call.CALLS[model].items()
    }


COMPARISONS = [
    *(
        Comparison(
            f"call of {n} modules",
            [signature.WHOLE, signature.PYTHON, signature.CHECK],
            partial(call, n),
            calls=20,
            sampled=True,
        )
        for n in signature.SIZES
    ),
    *(
        Comparison(
            f"program of {'2 x (Linear, ReLU)' if small else '2 GPT blocks'}, {what}",
            [what, *others],
            partial(program, small, (what, *others)),
            calls=200 if small else 1,
            sampled=what == "both",
        )
        for small in (True, False)
        for what, others in PROGRAMS.items()
    ),
    *(
        Comparison(f"program of {name}", ["both", *PROGRAMS["both"]], partial(operator, name), calls=20)
        for name in OPERATORS
    ),
    *(
        Comparison(
            f"{name} draws", ["keyed", "torch"], partial(draw, name), calls=10, sampled=name == "normal"
        )
        for name in draws.DRAWS
    ),
    Comparison(
        "a layer in Python",
        [MIXED, interpreted.LOOP, "without the layer, all lowered", "all in Python", "torchgpipe"],
        in_python,
        calls=10,
    ),
    Series(
        "step of the engine",
        [f"{k} stages, {m} micro-batches" for k in (2, 4) for m in (8, 64)],
        engine_steps,
        sampled=True,
    ),
    *(
        Series(
            f"first calls of {model}", list(calls), partial(first_calls, model), sampled=model == "lengths"
        )
        for model, calls in first_call.CALLS.items()
    ),
]


def test_micro(measured: Outcome) -> None:
    """Measures a candidate of `COMPARISONS`."""
