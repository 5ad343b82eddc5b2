"""Training runs of a pipeline and of the plain loop: `Run` says what they cross, `differences` compares."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from gpipe_fast import GPipe, keyed_rng
from gpipe_fast.layers.structure import Replicated
from gpipe_fast.schedule import SCHEDULES
from gpipe_fast.skip import Namespace
from tests import models
from tests.contracts.contract_1_same_bits import layers as menu
from tests.contracts.contract_1_same_bits.layers import INPUTS, MENU, OUTPUTS, TOKENS, Layers, swapped
from tests.contracts.contract_1_same_bits.torch_layers import RECIPES, inputs_of, model_of
from tests.internals import inject_delays
from tests.reference import gradient_like
from tests.untraceable import WIDTH

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
BACKENDS = ("auto", "eager", "aten")
HOOKS = ("forward", "forward pre", "full backward", "parameter")
AUTOCAST = ("off", "bfloat16")
LAYOUTS = ("contiguous", "permuted", "channels_last", "gaps", "unaligned")
# A call and its backward; two backwards; of two calls, the last one's first; none of the first of two calls;
# or by `torch.autograd.grad`. Or a step in the order of a schedule, an evaluation, or a stream.
CALLS = ("call", "two backwards", "crossed calls", "dropped call", "autograd.grad")
WAYS = (*CALLS, *SCHEDULES, "evaluate", "stream")
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}
# What changes before a step. An invalid call fails, and changes nothing.
CHANGES = ("", "freeze", "unfreeze", "invalid call", "copy", "load", "assign", "attributes", "balance")
_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Outputs, gradients, parameters and buffers of a training run, by step and name.
Result = dict[str, Tensor | None]


def _total(losses: Iterable[Tensor]) -> Tensor:
    return torch.stack([loss.double() for loss in losses]).sum()


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


# Losses of output tensors by name; their gradients have different memory layouts.
LOSSES: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "squares": lambda ys: _total((i + 1) * y.double().square().mean() for i, y in enumerate(ys)),
    "expanded": lambda ys: _total(y.sum() for y in ys),
    "first": lambda ys: ys[0].double().square().sum(),
    "transposed": lambda ys: _total(y.transpose(0, -1).contiguous().sin().sum() for y in ys),
    "with gaps": lambda ys: _total(torch.cat([y, y.detach()], -1).sin().sum() for y in ys),
}


@dataclass(frozen=True)
class StepLoss:
    """A loss of a step.

    Attributes:
        make: returns the function for the step of a number.
        target: returns the target for an output of this shape, or None if there is none.
        total: the sum of the losses of a micro-batch, for the step of a number; or their mean.
        divisor: what the sum is divided by, for a target and a batch size; None for a mean over samples.
        is_normalizer: whether `divisor` is passed; else the pipeline finds it.
    """

    make: Callable[[int], Any]
    target: Callable[[tuple[int, ...], torch.Generator], Any]
    total: Callable[[int], Callable[..., Tensor]]
    divisor: Callable[[Any, int], Any]
    is_normalizer: bool = False


def squares(output: Any) -> Tensor:
    tensors = [_real(o) for o in tree_leaves(output) if isinstance(o, Tensor)]
    tensors = [o for o in tensors if o.is_floating_point()]
    return torch.stack([(i + 1) * o.float().square().sum() for i, o in enumerate(tensors)]).sum()


def _closure(number: int) -> Callable[[Any, Any], Tensor]:
    factor = 1.0 + number % 3

    def weighted(output: Any, target: Any) -> Tensor:
        rows = [
            _real(o).flatten(1).double().sin().sum(1) for o in tree_leaves(output) if isinstance(o, Tensor)
        ]
        return torch.stack([(row * target["weights"]).sum() for row in rows]).sum() * factor

    return weighted


def _classes(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    target = torch.randint(shape[1], (shape[0], *shape[2:]), generator=generator)
    return torch.where(torch.arange(target.numel()).view_as(target) % 5 == 3, -100, target)


def _noise(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator)


def _of_elements(module: nn.Module, function: Any) -> StepLoss:
    return StepLoss(
        lambda number: module if number % 2 else function,
        _noise,
        lambda number: function,
        lambda target, batch: None,
    )


def _sum_of_classes(output: Tensor, target: Tensor) -> Tensor:
    # In float16, a sum may overflow where the mean does not.
    return F.cross_entropy(
        output.float() if output.dtype == torch.float16 else output, target, reduction="sum"
    )


# Losses of steps by name; only the first two are for several outputs.
STEP_LOSSES = {
    "squares": StepLoss(
        lambda n: squares, lambda s, g: None, lambda n: squares, lambda t, batch: batch, True
    ),
    "closure": StepLoss(
        _closure,
        lambda shape, generator: {"weights": torch.rand(shape[0], generator=generator).double() + 0.5},
        _closure,
        lambda target, batch: target["weights"].sum(),
        True,
    ),
    "cross entropy": StepLoss(
        lambda number: nn.CrossEntropyLoss() if number % 2 else F.cross_entropy,
        _classes,
        lambda number: _sum_of_classes,
        lambda target, batch: (target != -100).sum(),
    ),
    "mean square": _of_elements(nn.MSELoss(), F.mse_loss),
    "Huber": _of_elements(nn.HuberLoss(delta=0.3), functools.partial(F.huber_loss, delta=0.3)),
    "sum of errors": StepLoss(
        lambda number: nn.L1Loss(reduction="sum"),
        _noise,
        lambda number: nn.L1Loss(reduction="sum"),
        lambda target, batch: 1,
    ),
}
LOSSES_OF_ANY = ("squares", "closure")


@dataclass(frozen=True)
class Step:
    """One step: what changes from step to step, and nothing of what was traced before may be used wrongly.

    Attributes:
        length: of random sequences of layers.
        way: one of `WAYS`.
        loss: a key of `LOSSES`, or "noise": random gradients; of steps, a key of `STEP_LOSSES`.
        mode: a key of `MODES`; of steps, evaluations and streams, only that of inference counts.
        change: one of `CHANGES`.
    """

    batch: int = 3
    chunks: int = 2
    length: int = 3
    checkpoint: Any = "never"
    way: str = "call"
    loss: str = "noise"
    layout: str = "contiguous"
    training: bool = True
    mode: str = "grad"
    change: str = ""
    dtype: str = "float32"


@dataclass(frozen=True)
class Run:
    """One training run; every string is a key of a table in this file or in `layers`.

    Attributes:
        subject: a key of `SUBJECTS`; or empty: ``layers`` between those of ``inputs`` and ``outputs``.
        skips: (stash, pop): indices of the layers before which they are inserted.
        batch_dim: 0, or 1: the first two dimensions are swapped outside of the layers.
        delays: whether actions are delayed by random times.
    """

    seed: int = 0
    subject: str = ""
    inputs: str = "tensor"
    layers: tuple[str, ...] = ()
    skips: tuple[tuple[int, int], ...] = ()
    outputs: str = "tensor"
    balance: tuple[int, ...] = (2,)
    batch_dim: int = 0
    backend: str = "auto"
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
            for parameter in layer.to(DTYPES[self.steps[0].dtype]).parameters():
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
        swaps: list[Layers] = [swapped(), swapped()] if self.batch_dim else [[], []]
        return [*swaps[0], *INPUTS[self.inputs].layers(), *inner, *OUTPUTS[self.outputs](), *swaps[1]]

    def arguments(self, number: int, item: int = 0) -> tuple[tuple[Any, ...], dict[str, Any], list[Tensor]]:
        """Returns the arguments of a call of a step, and the tensors among them that may get a gradient."""
        step = self.steps[number]
        # Without gradients, a pipeline does not tell its layers which inputs require them.
        needed = self.input_gradient and step.mode == "grad" and step.way not in ("stream", "evaluate")
        if self.subject:
            subject = SUBJECTS[self.subject]
            x = inputs_of(subject.shape, subject.integers, step.batch, number)
            tensors = [_laid_out(x, step.layout)]
            leaves = tensors if x.is_floating_point() else []
            args: tuple[Any, ...] = (tensors[0],)
            kwargs: dict[str, Any] = {}
        else:
            generator = torch.Generator().manual_seed(1000 * self.seed + 10 * number + item)

            def noise(*size: int) -> Tensor:
                found = torch.randn(size, generator=generator, dtype=torch.float64)
                return _laid_out(found.to(DTYPES[step.dtype]), step.layout)

            leaves = [noise(step.batch, step.length, WIDTH) for _ in range(2)] + [noise(1, WIDTH, WIDTH)[0]]
            tokens = torch.randint(TOKENS, (step.batch, step.length), generator=generator)
            for leaf in leaves:
                leaf.requires_grad_(needed)
            if self.batch_dim:
                return (leaves[0].transpose(0, 1),), {}, leaves
            args, kwargs = INPUTS[self.inputs].call(*leaves, tokens)
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

    chunks, batch_dim = 1, 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs), is_leaf=_is_replicated)
        # Chunks every leaf once: chunking it repeatedly would add zero-padded gradients.
        outputs = self.of_microbatches([self._split(leaf) for leaf in leaves], spec)
        return tree_map(
            lambda *v: torch.cat(v, self.batch_dim) if isinstance(v[0], Tensor) else v[0], *outputs
        )

    def of_microbatches(self, parts: list[Any], spec: Any) -> list[Any]:
        inner, outputs = Inner(*self), list[Any]()
        with keyed_rng(inner):
            for m in range(max(len(part) for part in parts if isinstance(part, tuple))):
                args, kwargs = tree_unflatten([_part_of(part, m) for part in parts], spec)
                outputs.append(inner(*args, **kwargs))
        return outputs

    def _split(self, leaf: Any) -> Any:
        return tuple(leaf.chunk(self.chunks, self.batch_dim)) if isinstance(leaf, Tensor) else leaf

    def step(
        self,
        args: Any,
        kwargs: Any,
        loss: Callable[..., Tensor],
        target: Any,
        divisor: Any,
        whole: Callable[..., Tensor] | None = None,
    ) -> tuple[list[Tensor], Callable[[str], None]]:
        """Returns the losses, and what runs the backwards of the micro-batches in the order of a schedule.

        Args:
            args: positional arguments of the layers.
            kwargs: their keyword arguments.
            loss: the sum of the losses of a micro-batch, or their mean.
            target: the target; None if there is none.
            divisor: what the sum is divided by; None for a mean.
            whole: the loss of the mini-batch, for a single micro-batch.
        """
        leaves, spec = tree_flatten((args, kwargs), is_leaf=_is_replicated)
        parts = [self._split(leaf) for leaf in leaves]
        if (
            torch.is_grad_enabled()
        ):  # each micro-batch has its own inputs, so that nothing is added to their gradients
            for i, leaf in enumerate(leaves):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    parts[i] = tuple(p.detach().requires_grad_() for p in parts[i])
        outputs = self.of_microbatches(parts, spec)
        if len(outputs) == 1 and whole is not None:
            loss, divisor = whole, 1
        targets = [
            None if target is None else _microbatch(target, self.chunks, m) for m in range(len(outputs))
        ]
        pairs = list(zip(outputs, targets, strict=True))
        sums = [loss(output) if own is None else loss(output, own) for output, own in pairs]
        # The losses of micro-batches are added up in float32 at least.
        sums = [total.float() if total.element_size() < 4 else total for total in sums]
        if divisor is None:
            sizes = [len(tree_leaves(own)[0]) for own in targets]
            times = [
                torch.tensor(sum(sizes) / size, dtype=total.dtype)
                for size, total in zip(sizes, sums, strict=True)
            ]
            losses = [total / each for total, each in zip(sums, times, strict=True)]
        else:
            losses = [total / divisor for total in sums]

        def backward(schedule: str) -> None:
            before = [(p, p.grad) for p in self.parameters()]
            self.zero_grad()
            for loss in reversed(losses) if schedule == "gpipe" else losses:
                loss.backward()
            for p, gradient in before:
                if gradient is not None:
                    p.grad = gradient if p.grad is None else gradient + p.grad
            found = [
                (leaf, torch.cat([p.grad for p in part], self.batch_dim))
                for leaf, part in zip(leaves, parts, strict=True)
                if isinstance(leaf, Tensor) and leaf.requires_grad and part[0].grad is not None
            ]
            # Together: the gradient of a tensor of which two inputs are views would be added to zeros.
            torch.autograd.backward([leaf for leaf, _ in found], [gradient for _, gradient in found])

        return losses, backward


def _microbatch(target: Any, chunks: int, m: int) -> Any:
    return tree_map(lambda t: t.chunk(chunks)[m], target)


def _part_of(part: Any, m: int) -> Any:
    if isinstance(part, tuple):
        return part[m]
    return part.value if isinstance(part, Replicated) else part


def _is_replicated(value: Any) -> bool:
    return isinstance(value, Replicated)


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


def _loss_of(output: Any, loss: str) -> tuple[list[Tensor], list[Tensor | None]]:
    """Returns what a backward starts from, and the gradients."""
    roots = [o for o in tree_leaves(output) if isinstance(o, Tensor) and o.requires_grad]
    if not roots or loss == "noise":
        return roots, [gradient_like(o) for o in roots]
    return [LOSSES[loss]([_real(o) for o in roots])], [None]


def _run_backward(output: Any, loss: str, retain_graph: bool = False) -> None:
    roots, gradients = _loss_of(output, loss)
    if roots:
        torch.autograd.backward(roots, gradients, retain_graph=retain_graph)


def _change(model: GPipe | PlainLoop, run: Run, number: int) -> GPipe | PlainLoop:
    """Changes a model before a step, or returns a changed copy."""
    step = run.steps[number]
    if step.change == "freeze":
        next(model.parameters()).requires_grad_(False)
    elif step.change == "unfreeze":
        model.requires_grad_(True)
    elif step.change == "copy":
        model = copy.deepcopy(model)
    elif step.change in ("load", "assign"):
        state = {n: v * 0.75 if v.is_floating_point() else v.clone() for n, v in model.state_dict().items()}
        model.load_state_dict(state, assign=step.change == "assign")
    elif step.change == "attributes":
        for module in model.modules():
            if hasattr(module, "change"):
                module.change(number)
    elif isinstance(model, GPipe) and step.change == "balance":
        model.balance = [*model.balance[1:], model.balance[0]]
    elif isinstance(model, GPipe) and step.change == "invalid call":
        with torch.random.fork_rng(), pytest.raises((RuntimeError, ValueError, AssertionError)):
            model(torch.zeros(4, 3, WIDTH + 1, dtype=DTYPES[step.dtype]))
    return model.to(DTYPES[step.dtype])


def train(model: GPipe | PlainLoop, run: Run) -> Iterator[Result]:
    """Yields what each step leaves behind."""
    _register_hooks(model, run.hooks)
    make = torch.optim.SGD if run.optimizer == "SGD" else torch.optim.AdamW
    optimizer: torch.optim.Optimizer | None = None
    dtype = run.steps[0].dtype
    torch.manual_seed(run.seed)
    for number, step in enumerate(run.steps):
        model = _change(model, run, number)
        if optimizer is None or step.change or step.dtype != dtype:
            trained, dtype = [*model.parameters()], step.dtype
            optimizer = make(trained, lr=0.01) if trained else None
        model.chunks = step.chunks
        model.train(step.training)
        if isinstance(model, GPipe):
            model.checkpoint = step.checkpoint
            if run.delays:
                inject_delays(model, run.seed, 300)
        if not run.accumulate:
            model.zero_grad()
        found = _one_step(model, run, number)
        found |= {f"gradient of {n}": p.grad for n, p in model.named_parameters()}
        if optimizer is not None:
            optimizer.step()
        found |= {n: p.detach() for n, p in model.named_parameters()}
        found |= {f"buffer {n}": b for n, b in model.named_buffers()}
        found["generator"] = torch.get_rng_state()
        yield {f"step {number}: {n}": None if v is None else v.clone() for n, v in found.items()}


def _one_step(model: GPipe | PlainLoop, run: Run, number: int) -> Result:
    step = run.steps[number]
    if step.way in CALLS:
        return _call(model, run, number)
    return _stream(model, run, number) if step.way == "stream" else _step(model, run, number)


def _cast(run: Run) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=run.autocast != "off", cache_enabled=False)


def _call(model: GPipe | PlainLoop, run: Run, number: int) -> Result:
    step, (args, kwargs, leaves) = run.steps[number], run.arguments(number)
    outputs = []
    # In inference mode, `matmul` rounds differently under any dispatch mode, such as the one that draws by
    # key, because transposed parameters require no gradient then.
    mode = "no_grad" if isinstance(model, PlainLoop) and step.mode == "inference" else step.mode
    with _cast(run), MODES[mode]():
        outputs.append(model(*args, **kwargs))
        if step.way in ("crossed calls", "dropped call"):
            args, kwargs, more = run.arguments(number, 1)
            leaves += more
            outputs.append(model(*args, **kwargs))
    found: Result = {}
    if step.way == "autograd.grad":
        roots, gradients = _loss_of(outputs[0], step.loss)
        wanted = [t for t in (*leaves, *model.parameters()) if t.requires_grad]
        if roots and wanted:
            results = torch.autograd.grad(roots, wanted, gradients, allow_unused=True)
            found |= {f"result {i}": g for i, g in enumerate(results)}
    else:
        if step.way == "two backwards":
            _run_backward(outputs[0], step.loss, retain_graph=True)
        for output in reversed(outputs[1:] if step.way == "dropped call" else outputs):
            _run_backward(output, step.loss)
    return found | _described(outputs) | {f"gradient of input {i}": x.grad for i, x in enumerate(leaves)}


def _described(outputs: Any) -> Result:
    constants = str(tree_map(lambda v: ... if isinstance(v, Tensor) else v, outputs))
    found: Result = {"constants": torch.tensor(list(constants.encode()))}
    tensors = [o for o in tree_leaves(outputs) if isinstance(o, Tensor)]
    return found | {f"output {i}": o.detach() for i, o in enumerate(tensors)}


def _stream(model: GPipe | PlainLoop, run: Run, number: int) -> Result:
    calls = [run.arguments(number, item)[:2] for item in range(3)]
    with _cast(run), _without_gradients(model, run.steps[number]):
        if isinstance(model, PlainLoop):
            return _described([model(*args, **kwargs) for args, kwargs in calls])
        items = [kwargs if kwargs and not args else args for args, kwargs in calls]
        return _described(list(model.stream(items, depth=(None, 1, 2)[number % 3])))


def _without_gradients(model: GPipe | PlainLoop, step: Step) -> AbstractContextManager[Any]:
    is_inference = step.mode == "inference" and isinstance(model, GPipe)
    return torch.inference_mode() if is_inference else torch.no_grad()


def _step(model: GPipe | PlainLoop, run: Run, number: int) -> Result:
    step, (args, kwargs, leaves) = run.steps[number], run.arguments(number)
    loss, generator = STEP_LOSSES[step.loss], torch.Generator().manual_seed(number)
    shape = (step.batch, step.length, 3 if run.outputs == "head" else WIDTH)
    target = loss.target(shape, generator)
    if isinstance(target, Tensor) and target.is_floating_point():
        target = target.to(DTYPES[step.dtype])
    divisor, is_step = loss.divisor(target, step.batch), step.way != "evaluate"
    if isinstance(model, GPipe):
        model.schedule = step.way if is_step else model.schedule
        options = {"loss_fn": loss.make(number), "normalizer": divisor if loss.is_normalizer else None}
        with _cast(run), contextlib.nullcontext() if is_step else _without_gradients(model, step):
            found = (model.step if is_step else model.evaluate)(*args, **kwargs, target=target, **options)
    else:
        with _cast(run), torch.set_grad_enabled(is_step):
            whole = None if loss.is_normalizer else loss.make(number)
            losses, backward = model.step(args, kwargs, loss.total(number), target, divisor, whole)
        found = sum(losses[1:], losses[0]).detach()
        if is_step:
            backward(step.way)
    return {"loss": found} | {f"gradient of input {i}": x.grad for i, x in enumerate(leaves)}


def equal_bits(a: Tensor | None, b: Tensor | None) -> bool:
    """Returns whether all bits are equal, including the sign of zero; all NaNs count as equal."""
    if a is None or b is None:
        return a is b
    if (a.dtype, a.shape, a.layout) != (b.dtype, b.shape, b.layout):
        return False
    if a.is_sparse:
        a, b = a.to_dense(), b.to_dense()
    a, b = _real(a), _real(b)
    bits = _INTEGER_OF_SIZE[a.element_size()]
    return bool(((a.contiguous().view(bits) == b.contiguous().view(bits)) | (a.isnan() & b.isnan())).all())


def differences(ours: Result, expected: Result) -> list[str]:
    """Returns the names of the tensors that differ."""
    assert ours.keys() == expected.keys()
    return [name for name in expected if not equal_bits(ours[name], expected[name])]


def train_both(run: Run) -> tuple[Result, Result]:
    """Trains a pipeline and the plain loop, and returns both results.

    They end before a step that fails in the plain loop, such as one without a kernel for its dtype; the
    pipeline must refuse it, too.
    """
    baseline = PlainLoop(*run.build())
    pipe = GPipe(nn.Sequential(*run.build()), list(run.balance), backend=run.backend, batch_dim=run.batch_dim)
    baseline.batch_dim = run.batch_dim
    expected, ours, failure = list[Result](), list[Result](), None
    try:
        expected.extend(train(baseline, run))
    except Exception as error:
        failure = error
    steps = train(pipe, run)
    ours.extend(itertools.islice(steps, len(expected)))
    if failure is not None:
        with pytest.raises(Exception):  # noqa: B017 which one it is depends on what runs first
            next(steps)
    return tuple({n: v for step in result for n, v in step.items()} for result in (ours, expected))
