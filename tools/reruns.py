"""Which layers in Python may run twice: what is lost if all may, or none, instead of those proved harmless.

`gpipe_fast/trace/repeatable.py` reads the bytecode of a layer in Python, and proves that a second run has no
effects; else its activations are saved. Here all layers run twice, or none does, beside those proved.

{PROGRAMS} generated layers have one or two of {KINDS} kinds of effects, such as a counter, a list that grows,
and Python's random numbers; some are harmless; outputs depend on them or not. Outputs, gradients and effects
of a pipeline with such a layer are compared with the plain loop's. checkpoint='always', M = {CHUNKS}, eager.
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import io
import itertools
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatch
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from bench import process, resident
from bench.measure import Table, report
from gpipe_fast import GPipe
from gpipe_fast.runtime import python_layers
from gpipe_fast.trace.repeatable import LayersState
from tools.census import FAMILIES, OPTIONS

PROVED, ALL, NONE = "those proved", "all", "none"
PROGRAMS, CHUNKS, MEMORY_CHUNKS = 400, 4, 8
# The allocator returns freed tensors to the system, so that the process has the memory that is in use.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
EQUAL, TWICE, WRONG = "equal", "effects twice", "gradients silently wrong"
# By kind: statements of __init__; of forward, which set `e` to a number; and the effect, to compare.
EFFECTS = {
    "nothing": ("pass", "e = 1.5", "0"),
    "counter": ("self.n = 0", "self.n += 1; e = self.n", "layer.n"),
    "growing list": ("self.log = []", "self.log.append(1); e = len(self.log)", "layer.log"),
    "random": ("pass", "e = random.random()", "random.getstate()"),
    "own random": ("self.rng = random.Random(3)", "e = self.rng.random()", "layer.rng.getstate()"),
    "iterator": ("self.ids = itertools.count(1)", "e = next(self.ids)", "repr(layer.ids)"),
    "last input": ("self.last = 0.0", "e = self.last; self.last = x.mean().item()", "layer.last"),
    "average": ("self.mean = 0.5", "e = self.mean = self.mean / 2 + x.mean().item()", "layer.mean"),
    "memo": ("self.memo = {}", "e = self.memo.setdefault(tuple(x.shape), 2.0)", "layer.memo"),
    "growing cache": ("self.kept = {}", "e = self.kept[len(self.kept)] = len(self.kept)", "layer.kept"),
    "global counter": ("pass", "global G; G += 1; e = G", "G"),
    "global list": ("pass", "SEEN.append(1); e = len(SEEN)", "len(SEEN)"),
    "print": ("pass", "print(1, file=OUT); e = 1.5", "OUT.getvalue()"),
    "buffer": (
        "self.register_buffer('b', torch.zeros(()))",
        "self.b += 1; e = float(self.b)",
        "layer.b.item()",
    ),
    "tensor": ("self.t = torch.zeros(())", "self.t += 1; e = float(self.t)", "layer.t.item()"),
    "frozen parameter": (
        "self.p = nn.Parameter(torch.ones(()), requires_grad=False)",
        "self.p.mul_(1.1); e = float(self.p)",
        "layer.p.item()",
    ),
    "getattr": ("self.s = 1.5", "e = getattr(self, 's')", "0"),
    "schedule": ("self.rate = 0.1", "e = self.rate = min(0.9, self.rate + 0.1)", "layer.rate"),
    "object": ("self.box = Box()", "self.box.n += 1; e = self.box.n", "layer.box.n"),
    "own generator": (
        "self.g = torch.Generator().manual_seed(1)",
        "e = float(torch.rand((), generator=self.g))",
        "layer.g.get_state().sum().item()",
    ),
}
KINDS = len(EFFECTS)
_USES = ("x = x * (1 + e)", "x = torch.tanh(x) + x * e", "x = x.pow(2) * e")
_BODY = ("x = self.linear(x)", "x = torch.tanh(x)", "x = x if x.sum() > 0 else x.sin()")
TRANSFORMERS = (
    "albert bart bert bloom clip_text_model deberta-v2 distilbert electra falcon gemma gpt2 gpt_neox llama "
    "mistral opt phi qwen2 roberta t5 vit"
)


class Box:
    """An object with a counter."""

    n = 0


class Program:
    """A generated layer.

    Attributes:
        is_proved: whether a second run of it is proved harmless; set by `outcome`.
    """

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        names = [[*EFFECTS][seed % KINDS], draw.choice([*EFFECTS])][: 1 + (draw.random() < 0.3)]
        kinds = [EFFECTS[name] for name in dict.fromkeys(names)]
        body = [draw.choice(_BODY) for _ in range(draw.randint(1, 3))]
        for _, statements, _ in kinds:
            use = draw.choice(_USES) if draw.random() < 0.6 else "pass"
            body.insert(draw.randint(0, len(body)), f"{statements}; {use}")
        lines = ["class Own(nn.Module):", " def __init__(self):", "  super().__init__()"]
        lines += ["  self.linear = nn.Linear(6, 6)", *(f"  {kind[0]}" for kind in kinds)]
        lines += [" def forward(self, x):", *(f"  {line}" for line in body), "  return x"]
        self.source, self._effects = "\n".join(lines), [kind[2] for kind in kinds]

    def outcome(self, call: Callable[[nn.Sequential, Tensor], Tensor]) -> tuple[list[Tensor], list[object]]:
        """Returns the output and the gradients of a step, and its effects."""
        scope: dict[str, Any] = {"Box": Box, "G": 0, "OUT": io.StringIO(), "SEEN": []}
        scope |= {"itertools": itertools, "nn": nn, "random": random, "torch": torch}
        exec(self.source, scope)
        torch.manual_seed(0)
        random.seed(0)
        model = nn.Sequential(nn.Linear(6, 6), scope["Own"](), nn.Linear(6, 6))
        self.is_proved = LayersState([model[1]]).is_repeatable
        y = call(model, torch.randn(8, 6))
        y.square().sum().backward()
        found = [y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
        return found, [eval(each, scope | {"layer": model[1]}) for each in self._effects]


def _rerunning(choice: str) -> contextlib.AbstractContextManager[object]:
    """Lets all layers run twice, or none, in a block."""

    class Decided(LayersState):
        def __init__(self, layers: Iterable[nn.Module]) -> None:
            super().__init__(())
            self.is_repeatable = choice == ALL

    decided = LayersState if choice == PROVED else Decided
    return mock.patch.object(python_layers, "LayersState", decided)


def _plain(model: nn.Sequential, x: Tensor) -> Tensor:
    return torch.cat([model(each) for each in x.chunk(CHUNKS)])


def _pipeline(model: nn.Sequential, x: Tensor) -> Tensor:
    y: Tensor = GPipe(model, [1, 2], chunks=CHUNKS, checkpoint="always", backend="eager")(x)
    return y


def program_rows(count: int) -> Iterator[list[object]]:
    """Yields a row for each choice: how many programs equal the plain loop, and how others differ."""
    programs = [Program(seed) for seed in range(count)]
    expected = [each.outcome(_plain) for each in programs]
    for choice in (PROVED, ALL, NONE):
        found = collections.Counter[str]()
        with _rerunning(choice):
            for program, (tensors, effects) in zip(programs, expected, strict=True):
                own, own_effects = program.outcome(_pipeline)
                is_right = all(map(torch.equal, own, tensors))
                found[WRONG if not is_right else EQUAL if own_effects == effects else TWICE] += 1
        twice = {PROVED: sum(each.is_proved for each in programs), ALL: count, NONE: 0}
        yield [choice, twice[choice], *(found[each] for each in (EQUAL, TWICE, WRONG))]


class _LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(256, 256, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner(x)[0]
        return output


def _gpt2() -> nn.Sequential:
    transformers = importlib.import_module("transformers")
    example: Any = importlib.import_module("examples.transformers_gpt2.__main__")
    sizes = {"n_embd": 256, "n_layer": 8, "n_head": 8, "vocab_size": 1000}
    config = transformers.GPT2Config(embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0, **sizes)
    layers: nn.Sequential = example.gpt2_layers(transformers.GPT2LMHeadModel(config))
    return layers


def _models() -> dict[str, tuple[str, Callable[[], nn.Sequential], Callable[[], Tensor]]]:
    """Returns models with their backend, and a mini-batch of each."""
    from bench.micro.interpreted import FiniteCheck
    from bench.models.gpt import blocks
    from bench.models.resnet import resnet
    from bench.models.unet import unet
    from examples.gpt.__main__ import gpt

    def tokens() -> Tensor:
        return torch.randint(256, (32, 128))

    def images() -> Tensor:
        return torch.randn(32, 3, 96, 96)

    def checked() -> nn.Sequential:
        layers = blocks(8)
        return nn.Sequential(*layers[:6], FiniteCheck(), *layers[6:])

    return {
        "8 GPT blocks, traced, and a check in Python": ("auto", checked, lambda: torch.randn(32, 128, 256)),
        "8 LSTMs": (
            "auto",
            lambda: nn.Sequential(*(_LSTM() for _ in range(8))),
            lambda: torch.randn(64, 64, 256),
        ),
        "ResNet, all in Python": ("eager", lambda: resnet((2, 2, 2, 2), 10), images),
        "U-Net, all in Python": ("eager", lambda: unet(2, 16, 3), images),
        "examples/gpt, all in Python": ("eager", lambda: gpt(256, 8, 8, 128), tokens),
        "GPT-2 of transformers, all in Python": ("eager", _gpt2, tokens),
    }


def peak(name: str, choice: str) -> float:
    """Returns the MiB that the third step of a model adds to this process at most."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    backend, make, sample = _models()[name]
    layers, x, found = make(), sample(), 0.0
    half = (len(layers) + 1) // 2
    options: dict[str, Any] = {"chunks": MEMORY_CHUNKS, "checkpoint": "always", "backend": backend}
    with _rerunning(choice):
        model = GPipe(layers, [half, len(layers) - half], devices=["cpu"] * 2, **options)
        model.threads_per_stage = 1
        for _ in range(3):
            before = resident.present()
            resident.reset_peak()
            model(x).square().mean().backward()
            found = resident.peak() - before
            model.zero_grad(set_to_none=False)
    return found


def memory_rows() -> Iterator[list[object]]:
    """Yields a row for each model: the memory of a step by choice."""
    for name in _models():
        megabytes = {
            each: process.call("tools.reruns:peak", name, each, environment=ALLOCATOR)
            for each in (PROVED, ALL, NONE)
        }
        ratios = [f"{value:.0f} ({value / megabytes[PROVED]:.2f})" for value in megabytes.values()]
        yield [name, *ratios]


def _of_torchvision() -> Iterator[nn.Module]:
    models = importlib.import_module("torchvision.models")
    for name in FAMILIES.split():
        options = next(options for pattern, options in OPTIONS.items() if fnmatch(name, pattern))
        yield models.get_model(name, weights=None, **options)


def _of_transformers() -> Iterator[nn.Module]:
    transformers = importlib.import_module("transformers")
    with torch.device("meta"):
        for name in TRANSFORMERS.split():
            yield transformers.AutoModel.from_config(transformers.AutoConfig.for_model(name))


def class_row(name: str, models: Iterable[nn.Module]) -> list[object]:
    """Returns how many models, and classes of modules outside of torch.nn, are proved harmless."""
    whole, classes = [], dict[type, bool]()
    for model in models:
        whole.append(LayersState([model]).is_repeatable)
        for module in model.modules():
            if not type(module).__module__.startswith("torch.nn") and type(module) not in classes:
                classes[type(module)] = LayersState([module]).is_repeatable
    return [name, f"{sum(whole)} of {len(whole)}", f"{sum(classes.values())} of {len(classes)}"]


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    memory = "Memory that a step adds to the process at most, in MiB, and divided by that of those proved. "
    memory += f"Two stages on the CPU, M = {MEMORY_CHUNKS}, checkpoint='always'."
    names = "Models and classes of modules outside of torch.nn that are proved harmless; random weights."
    rows = [class_row("torchvision", _of_torchvision()), class_row("transformers", _of_transformers())]
    tables = [
        Table("Memory", ["model", PROVED, ALL, NONE], list(memory_rows()), memory),
        Table("What is proved", ["library", "models", "classes"], rows, names),
    ]
    headers = ["which run twice", "layers", EQUAL, TWICE, WRONG]
    report(globals(), headers, list(program_rows(PROGRAMS)), tables)
