"""Training runs of a pipeline and of the plain loop: `Run` says what they cross, `differences` compares."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from gpipe_fast import GPipe, keyed_rng
from gpipe_fast.gpipe import CHECKPOINT_MODES
from gpipe_fast.layers.skip import Namespace
from gpipe_fast.layers.structure import Replicated
from gpipe_fast.schedule import SCHEDULES
from tests import models
from tests.contracts.contract_1_same_bits import layers as menu
from tests.contracts.contract_1_same_bits.layers import INPUTS, MENU, OUTPUTS, TOKENS, Layers
from tests.contracts.contract_1_same_bits.torch_layers import RECIPES, inputs_of, model_of
from tests.internals import inject_delays
from tests.reference import gradient_like
from tests.untraceable import WIDTH

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
BACKENDS = ("auto", "eager", "aten")
HOOKS = ("forward", "forward pre", "full backward", "parameter")
AUTOCAST = ("off", "bfloat16")
LAYOUTS = ("contiguous", "permuted", "channels_last", "gaps", "unaligned")
CHECKPOINTS = (*CHECKPOINT_MODES, 0.1, 0.25, 0.5, 0.75, 0.9)
# A call and a backward, or a step in the order of a schedule.
WAYS = ("call", *SCHEDULES)
_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Outputs, gradients, parameters and buffers of a training run, by step and name.
Result = dict[str, Tensor | None]


def _total(losses: Iterable[Tensor]) -> Tensor:
    return torch.stack([loss.double() for loss in losses]).sum()


# Losses of output tensors by name; their gradients have different memory layouts.
LOSSES: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "squares": lambda ys: _total((i + 1) * y.double().square().mean() for i, y in enumerate(ys)),
    "expanded": lambda ys: _total(y.sum() for y in ys),
    "first": lambda ys: ys[0].double().square().sum(),
    "transposed": lambda ys: _total(y.transpose(0, -1).contiguous().sin().sum() for y in ys),
    "with gaps": lambda ys: _total(torch.cat([y, y.detach()], -1).sin().sum() for y in ys),
}


@dataclass(frozen=True)
class Step:
    """One step: what changes from step to step, and nothing of what was traced before may be used wrongly."""

    batch: int = 3
    chunks: int = 2
    length: int = 3  # of random sequences of layers
    checkpoint: Any = "never"
    way: str = "call"
    loss: str = "noise"
    layout: str = "contiguous"
    training: bool = True
    grad: bool = True
    freezes: bool = False  # the first parameter
    fails: bool = False  # after a call with an invalid input


@dataclass(frozen=True)
class Run:
    """One training run; every string is a key of a table in this file or in `layers`.

    Attributes:
        subject: a key of `SUBJECTS`; or empty: ``layers`` between those of ``inputs`` and ``outputs``.
        skips: (stash, pop): indices of the layers before which they are inserted.
        delays: whether actions are delayed by random times.
    """

    seed: int = 0
    subject: str = ""
    inputs: str = "tensor"
    layers: tuple[str, ...] = ()
    skips: tuple[tuple[int, int], ...] = ()
    outputs: str = "tensor"
    balance: tuple[int, ...] = (2,)
    backend: str = "auto"
    dtype: str = "float32"
    autocast: str = "off"
    input_gradient: bool = True
    frozen: float = 0.0
    hooks: tuple[str, ...] = ()
    optimizer: str = "SGD"
    accumulate: bool = False
    delays: bool = False
    steps: tuple[Step, ...] = (Step(), Step(), Step())

    def build(self) -> Layers:
        """Returns new layers, with the same parameters at every call."""
        torch.manual_seed(self.seed)
        layers = SUBJECTS[self.subject].make() if self.subject else self._sequence()
        draw = random.Random(self.seed)
        for layer in layers:
            for parameter in layer.to(DTYPES[self.dtype]).parameters():
                if self.frozen:
                    parameter.requires_grad_(draw.random() >= self.frozen)
        return layers

    def _sequence(self) -> Layers:
        skip_layers: list[Layers] = [[] for _ in range(len(self.layers) + 1)]
        for first, last in self.skips:
            namespace = Namespace()
            skip_layers[first].append(menu.StashSine().isolate(namespace))
            skip_layers[last].append(menu.PopAndAdd().isolate(namespace))
        merged = itertools.zip_longest(skip_layers, (MENU[name]() for name in self.layers), fillvalue=[])
        inner = [layer for skips, entry in merged for layer in (*skips, *entry)]
        return [*INPUTS[self.inputs].layers(), *inner, *OUTPUTS[self.outputs]()]

    def arguments(self, number: int) -> tuple[tuple[Any, ...], dict[str, Any], list[Tensor]]:
        """Returns the arguments of a step, and the tensors among them that may get a gradient."""
        step = self.steps[number]
        if self.subject:
            subject = SUBJECTS[self.subject]
            x = inputs_of(subject.shape, subject.integers, step.batch, number)
            tensors = [_laid_out(x, step.layout)]
            leaves = tensors if x.is_floating_point() else []
            args: tuple[Any, ...] = (tensors[0],)
            kwargs: dict[str, Any] = {}
        else:
            generator = torch.Generator().manual_seed(1000 * self.seed + number)

            def noise(*size: int) -> Tensor:
                found = torch.randn(size, generator=generator, dtype=torch.float64).to(DTYPES[self.dtype])
                return _laid_out(found, step.layout)

            leaves = [noise(step.batch, step.length, WIDTH) for _ in range(2)] + [noise(1, WIDTH, WIDTH)[0]]
            tokens = torch.randint(TOKENS, (step.batch, step.length), generator=generator)
            args, kwargs = INPUTS[self.inputs].call(*leaves, tokens)
        # The plain step would add zeros to the gradient of an input, once for each micro-batch.
        needed = self.input_gradient and step.grad and step.way == "call"
        return args, kwargs, [leaf.requires_grad_(needed) for leaf in leaves]


def _laid_out(x: Tensor, layout: str) -> Tensor:
    if layout == "permuted" or (layout == "channels_last" and x.dim() == 3):
        return x.transpose(1, -1).contiguous().transpose(1, -1)
    if layout == "channels_last" and x.dim() > 3:
        kind = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        return x.contiguous(memory_format=kind)
    if layout in ("gaps", "channels_last"):
        return torch.stack([x, x], -1)[..., 0]
    if layout == "unaligned":
        return torch.cat([x.flatten()[:1], x.flatten()])[1:].view_as(x)
    return x


@dataclass(frozen=True)
class Subject:
    """A model.

    Attributes:
        make: constructs its layers.
        shape: the shape of a sample.
        integers: if not 0, samples hold integers below it.
    """

    make: Callable[[], Iterable[nn.Module]]
    shape: tuple[int, ...]
    integers: int = 0


def _channels_last(make: Callable[[], nn.Module], size: int) -> Subject:
    """Convolves square images in channels_last memory format; strides of single pixels are ambiguous."""

    def make_layers() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(16, 12, 1, bias=False), make(), nn.Tanh(), nn.Flatten())
        return model.to(memory_format=torch.channels_last)

    return Subject(make_layers, (16, size, size))


TORCH = {
    f"torch.nn: {name}": Subject(lambda r=r: model_of(r), r.shape, r.integers) for name, r in RECIPES.items()
}
_IMAGE_LAYERS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm2d(12),
    "group norm": lambda: nn.GroupNorm(4, 12),
    "instance norm after padding": lambda: nn.Sequential(nn.ZeroPad2d(1), nn.InstanceNorm2d(12)),
    "average pool": lambda: nn.AvgPool2d(3, 1, 1),
    "upsampling": lambda: nn.Upsample(scale_factor=2),
    "transposed convolution": lambda: nn.ConvTranspose2d(12, 3, 3, stride=2),
}
OTHERS = {
    f"channels_last: {name}, {size} pixels wide": _channels_last(make, size)
    for name, make in _IMAGE_LAYERS.items()
    for size in (1, 5)
}
OTHERS |= {
    name: Subject(make, tuple(batch(1).shape[1:]), 0 if batch(1).is_floating_point() else TOKENS)
    for name, (make, batch) in models.MODELS.items()
}
SUBJECTS = TORCH | OTHERS
# A backward of its own for each micro-batch adds up several uses in another order.
_SEVERAL_USES = {"weight used repeatedly", "weight and its transpose", "tied within", "GRU", "bidirectional"}
_SEVERAL_USES |= {"sparse gradients"}  # of a row
_SUBJECTS_OF_SEVERAL_USES = {"spectral norm", "torch.nn: RNN", "torch.nn: GRU"}
# Numbers of samples and chunks: even ones, single samples, and uneven ones.
_SIZES = [(8, 4), (8, 8), (7, 4)]
# Batch norm needs two values per channel in every micro-batch.
_SIZES_OF_SINGLE_PIXELS = [(8, 4), (8, 4), (8, 3)]


def draw_of(subject: str, seed: int) -> Run:
    """Returns a run of a model: one micro-batch, uneven ones, steps and inference, in other layouts."""
    r = random.Random(f"{subject} {seed}")
    balance = _draw_balance(r, len(list(SUBJECTS[subject].make())))
    shares = [_draw_checkpoint(r, len(balance)) for _ in range(3)]
    layouts = [r.choice(LAYOUTS[:3]) for _ in range(4)]
    ways = ("call",) if subject in _SUBJECTS_OF_SEVERAL_USES else WAYS
    sizes = _SIZES_OF_SINGLE_PIXELS if subject == "channels_last: batch norm, 1 pixels wide" else _SIZES
    uneven = sizes[-1]
    steps = [
        Step(2, 1, checkpoint=shares[0]),
        Step(*uneven, checkpoint=shares[1], layout=layouts[0], loss=r.choice(["noise", *LOSSES])),
        Step(*r.choice(sizes), checkpoint=shares[2], layout=layouts[1], way=r.choice(ways)),
        Step(*uneven, layout=layouts[2], training=False, grad=r.random() < 0.7),
    ]
    backend = r.choice(["auto", "auto", "eager"])
    return Run(
        seed, subject, balance=balance, input_gradient=r.random() < 0.6, delays=r.random() < 0.3,
        steps=tuple(steps), backend=backend,
    )  # fmt: skip


def draw(seed: int) -> Run:
    """Returns a run of a random sequence of layers."""
    r = random.Random(seed)
    inputs = r.choice([*INPUTS, "tensor", "tokens"])
    outputs = r.choice([*OUTPUTS, "tensor", "tensor"])
    layers, num_layers = _draw_layers(r, len(INPUTS[inputs].layers()) + len(OUTPUTS[outputs]()))
    skips = _draw_skips(random.Random(f"skips of {seed}"), len(layers))
    in_python, is_sparse = any(name in menu.RUN_IN_PYTHON for name in layers), "sparse gradients" in layers
    balance = _draw_balance(r, num_layers + 2 * len(skips))
    hooks = tuple(hook for hook in HOOKS if r.random() < 0.15)
    frozen = r.choice([0.0, 0.0, 0.3, 0.8])
    first = Step(
        batch=r.randint(1, 13),
        chunks=r.randint(1, 9),
        length=r.randint(2, 5),  # batch norm needs at least two values per channel
        layout=r.choice(["contiguous", "contiguous", *LAYOUTS]),
        checkpoint=_draw_checkpoint(r, len(balance)),
        training=r.random() < 0.8,
        grad=r.random() < 0.9,
        loss=r.choice(["noise", *LOSSES]),
    )
    can_step = first.grad and not frozen and not hooks and _SEVERAL_USES.isdisjoint(layers)
    way = r.choice(["call", *WAYS]) if can_step else "call"
    steps = [_changed(r, first, way, len(balance), inputs) for _ in range(r.randint(3, 4))]
    return Run(
        seed,
        "",
        inputs,
        layers,
        skips,
        outputs,
        balance,
        backend=r.choice(["auto", "auto", "eager"] if in_python else ["auto", "auto", "aten", "eager"]),
        # PyTorch has no kernel that adds sparse bfloat16 tensors.
        dtype=r.choice(["float32", "float64"] if is_sparse else ["float32", "float32", *DTYPES]),
        autocast=r.choice(["off", "off", *AUTOCAST]),
        input_gradient=r.random() < 0.5,
        frozen=frozen,
        hooks=hooks,
        optimizer="SGD" if is_sparse else r.choice(["SGD", "AdamW"]),
        accumulate=r.random() < 0.2,
        delays=r.random() < 0.2,
        steps=tuple(steps),
    )


CHANGES = ("nothing", "batch", "length", "checkpoint", "chunks", "eval", "freezes", "loss", "fails", "layout")


def _changed(r: random.Random, step: Step, way: str, num_stages: int, inputs: str) -> Step:
    """Returns a step that differs in one way."""
    change = r.choice(["nothing", *CHANGES])
    other: dict[str, Any] = {
        "batch": {"batch": step.batch % 13 + 1},
        "length": {"length": step.length + 1},
        "checkpoint": {"checkpoint": _draw_checkpoint(r, num_stages)},
        "chunks": {"chunks": step.chunks % 9 + 1},
        "eval": {"training": False},
        "freezes": {"freezes": way == "call"},
        "loss": {"loss": r.choice([*LOSSES])},
        "fails": {"fails": inputs == "tensor"},
        "layout": {"layout": r.choice(LAYOUTS)},
    }.get(change, {})
    return Step(**{**vars(step), "way": way, **other})


def _draw_checkpoint(r: random.Random, num_stages: int) -> Any:
    return r.choice([*CHECKPOINTS, tuple(r.choice(CHECKPOINTS) for _ in range(num_stages))])


def _draw_layers(r: random.Random, num_other_layers: int) -> tuple[tuple[str, ...], int]:
    """Returns layer names and the total number of layers, three to nine; at most two run in Python."""
    num_wanted, names = r.randint(3, 9) - num_other_layers, list[str]()
    python = [r.choice([*menu.RUN_IN_PYTHON]) for _ in range(r.choice([0, 0, 1, 2]))]
    remaining = num_wanted - sum(len(MENU[name]()) for name in python)
    while remaining > 0:
        name = r.choice([*menu.LOWERED])
        if (size := len(MENU[name]())) <= remaining:
            names.append(name)
            remaining -= size
    for name in python:
        names.insert(r.randint(0, len(names)), name)
    return tuple(names), num_other_layers + sum(len(MENU[name]()) for name in names)


def _draw_skips(r: random.Random, num_entries: int) -> tuple[tuple[int, int], ...]:
    """Returns no skip connections for half of the runs, else one to three."""
    if r.random() < 0.5 or not num_entries:
        return ()
    gaps = range(num_entries + 1)
    return tuple((min(pair), max(pair)) for pair in (r.sample(gaps, 2) for _ in range(r.randint(1, 3))))


def _draw_balance(r: random.Random, num_layers: int) -> tuple[int, ...]:
    num_stages = r.randint(1, min(4, num_layers))
    ends = [0, *sorted(r.sample(range(1, num_layers), num_stages - 1)), num_layers]
    return tuple(end - begin for begin, end in itertools.pairwise(ends))


class Inner(nn.Sequential):
    """A Sequential whose first layer may have several arguments."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        first, *others = self
        value = first(*args, **kwargs)
        for layer in others:
            value = layer(value)
        return value


class PlainLoop(nn.Sequential):
    """The plain loop over micro-batches."""

    chunks = 1

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self.of_microbatches(*args, **kwargs)
        return tree_map(lambda *v: torch.cat(v) if isinstance(v[0], Tensor) else v[0], *outputs)

    def of_microbatches(self, *args: Any, **kwargs: Any) -> list[Any]:
        inner = Inner(*self)
        leaves, spec = tree_flatten((args, kwargs), is_leaf=_is_replicated)
        # Chunks every leaf once: chunking it repeatedly would add zero-padded gradients.
        parts = [leaf.chunk(self.chunks) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        with keyed_rng(inner):
            outputs = []
            for m in range(max(len(part) for part in parts if isinstance(part, tuple))):
                part_args, part_kwargs = tree_unflatten([_part_of(part, m) for part in parts], spec)
                outputs.append(inner(*part_args, **part_kwargs))
        return outputs

    def step(self, args: Any, kwargs: Any, way: str, divisor: int) -> Callable[[], Tensor]:
        """Returns a step's backward: those of the micro-batches in the order of the schedule."""
        losses = [squares(output) / divisor for output in self.of_microbatches(*args, **kwargs)]

        def backward() -> Tensor:
            before = [(p, p.grad) for p in self.parameters()]
            self.zero_grad()
            for loss in reversed(losses) if way == "gpipe" else losses:
                loss.backward()
            for p, gradient in before:
                if gradient is not None:
                    p.grad = gradient if p.grad is None else gradient + p.grad
            return sum(losses[1:], losses[0]).detach()

        return backward


def _part_of(part: Any, m: int) -> Any:
    if isinstance(part, tuple):
        return part[m]
    return part.value if isinstance(part, Replicated) else part


def _is_replicated(value: Any) -> bool:
    return isinstance(value, Replicated)


def squares(output: Any) -> Tensor:
    """The loss of a step."""
    tensors = [o for o in tree_leaves(output) if isinstance(o, Tensor) and o.is_floating_point()]
    return torch.stack([(i + 1) * o.float().square().sum() for i, o in enumerate(tensors)]).sum()


def _scaled(value: Any, factor: float) -> Any:
    def scale(v: Any) -> Any:
        return v * factor if isinstance(v, Tensor) and v.is_floating_point() else v

    return tree_map(scale, value, is_leaf=_is_replicated)


def _register_hooks(model: nn.Module, names: Iterable[str]) -> None:
    """Registers hooks that change their arguments."""
    if "forward" in names:
        model.register_forward_hook(lambda module, args, output: _scaled(output, 0.75))
    if "forward pre" in names:
        model.register_forward_pre_hook(
            lambda module, args, kwargs: _scaled((args, kwargs), 0.5), with_kwargs=True
        )
    if "full backward" in names:
        model.register_full_backward_hook(
            lambda module, inputs, outputs: tuple(None if g is None else g * 3 for g in inputs)
        )
    if "parameter" in names:
        for parameter in [p for p in model.parameters() if p.requires_grad][:2]:
            parameter.register_hook(lambda g: None if g is None else g * 2)


def _run_backward(output: Any, loss: str) -> None:
    roots = [o for o in tree_leaves(output) if isinstance(o, Tensor) and o.requires_grad]
    if roots and loss == "noise":
        torch.autograd.backward(roots, [gradient_like(o) for o in roots])
    elif roots:
        LOSSES[loss](roots).backward()


def train(model: GPipe | PlainLoop, run: Run) -> Result:
    """Runs all steps; returns what each of them leaves behind."""
    result: Result = {}
    _register_hooks(model, run.hooks)
    make = torch.optim.SGD if run.optimizer == "SGD" else torch.optim.AdamW
    trained = [*model.parameters()]
    optimizer = make(trained, lr=0.01) if trained else None
    torch.manual_seed(run.seed)
    if isinstance(model, GPipe) and run.delays:
        inject_delays(model, run.seed, 300)
    for number, step in enumerate(run.steps):
        model.chunks = step.chunks
        model.train(step.training)
        if isinstance(model, GPipe):
            model.checkpoint = step.checkpoint
            if step.fails:
                with torch.random.fork_rng(), pytest.raises((RuntimeError, ValueError)):
                    model(torch.zeros(4, 3, WIDTH + 1, dtype=DTYPES[run.dtype]))
        if step.freezes:
            next(model.parameters()).requires_grad_(False)
        if not run.accumulate:
            model.zero_grad()
        found = _one_step(model, run, number)
        found |= {f"gradient of {n}": p.grad for n, p in model.named_parameters()}
        if optimizer is not None:
            optimizer.step()
        found |= {n: p.detach() for n, p in model.named_parameters()}
        found |= {f"buffer {n}": b for n, b in model.named_buffers()}
        found["generator"] = torch.get_rng_state()
        result |= {f"step {number}: {n}": None if v is None else v.clone() for n, v in found.items()}
    return result


def _one_step(model: GPipe | PlainLoop, run: Run, number: int) -> Result:
    step, (args, kwargs, leaves) = run.steps[number], run.arguments(number)
    cast = torch.autocast("cpu", torch.bfloat16, enabled=run.autocast != "off", cache_enabled=False)
    if step.way != "call":
        if isinstance(model, GPipe):
            model.schedule = step.way
            with cast:
                return {"loss": model.step(*args, **kwargs, loss_fn=squares, normalizer=step.batch)}
        with cast:
            backward = model.step(args, kwargs, step.way, step.batch)
        return {"loss": backward()}
    with cast, torch.set_grad_enabled(step.grad):
        output = model(*args, **kwargs)
    _run_backward(output, step.loss)
    constants = str(tree_map(lambda v: ... if isinstance(v, Tensor) else v, output))
    found: Result = {"constants": torch.tensor(list(constants.encode()))}
    found |= {f"output {i}": o.detach() for i, o in enumerate(tree_leaves(output)) if isinstance(o, Tensor)}
    return found | {f"gradient of input {i}": x.grad for i, x in enumerate(leaves)}


def equal_bits(a: Tensor | None, b: Tensor | None) -> bool:
    """Returns whether all bits are equal, including the sign of zero; all NaNs count as equal."""
    if a is None or b is None:
        return a is b
    if (a.dtype, a.shape, a.layout) != (b.dtype, b.shape, b.layout):
        return False
    if a.is_sparse:
        a, b = a.to_dense(), b.to_dense()
    bits = _INTEGER_OF_SIZE[a.element_size()]
    return bool(((a.contiguous().view(bits) == b.contiguous().view(bits)) | (a.isnan() & b.isnan())).all())


def differences(ours: Result, expected: Result) -> list[str]:
    """Returns the names of the tensors that differ."""
    assert ours.keys() == expected.keys()
    return [name for name in expected if not equal_bits(ours[name], expected[name])]


def train_both(run: Run) -> tuple[Result, Result]:
    """Trains a pipeline and the plain loop, and returns both results."""
    baseline = PlainLoop(*run.build())
    pipe = GPipe(nn.Sequential(*run.build()), list(run.balance), backend=run.backend)
    try:
        expected = train(baseline, run)
    except RuntimeError as error:
        if "could not create a primitive" in str(error):
            pytest.skip(f"PyTorch has no kernel for this processor: {error}")
        raise
    return train(pipe, run), expected
