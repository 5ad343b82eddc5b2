"""The operators that eager PyTorch dispatches on a GPU, beside those of gpipe_fast's traces; needs no GPU.

`cuda_operators_table.py` runs this with the CUDA runtime that is not there (`tests/fake_cuda/runtime.cpp`):
PyTorch then sees GPUs of compute capability 9.0, and chooses kernels for them. Tensors are fake, so no kernel
runs.

Compared are, in order, the operators that compute what a training step leaves behind: outputs, gradients and
buffers, of one micro-batch. Left out are views, uninitialised memory, and what nobody reads.
"""

from __future__ import annotations

import copy
import difflib
import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import FakeCopyMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpipe_fast import keyed_rng
from gpipe_fast.lower.alias import is_view
from gpipe_fast.lower.arena import ALIGNMENTS
from gpipe_fast.lower.checkpoint import NO_RECOMPUTE
from gpipe_fast.lower.lower import lower
from gpipe_fast.lower.program import Call, Home, When
from gpipe_fast.lower.split import split
from gpipe_fast.trace import fake
from gpipe_fast.trace.refuse import Untraceable
from gpipe_fast.trace.trace import Joint, Setting, trace
from tests.equivalence import census, test_census, test_paper_models
from tests.equivalence.census_layers import PYTHON, RECIPES

DEVICE = torch.device("cuda:0")
aten = torch.ops.aten

Make = Callable[[], tuple[nn.Sequential, Tensor]]


class Mode(NamedTuple):
    """How a configuration computes."""

    parameters: torch.dtype
    autocast: torch.dtype | None = None
    training: bool = True
    gradients: bool = True

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Around the forward."""
        autocast = torch.autocast("cuda", self.autocast, self.autocast is not None, cache_enabled=False)
        with autocast, torch.set_grad_enabled(self.gradients):
            yield


MODES = {
    "fp32": Mode(torch.float32),
    "bf16": Mode(torch.bfloat16),
    "fp16": Mode(torch.float16),
    "autocast to bf16": Mode(torch.float32, torch.bfloat16),
    "autocast to fp16": Mode(torch.float32, torch.float16),
    "evaluation": Mode(torch.float32, training=False),
    "inference": Mode(torch.float32, training=False, gradients=False),
}


@dataclass(frozen=True)
class Operators:
    """Names of operators, in order."""

    forward: list[str]
    backward: list[str]


@dataclass(frozen=True)
class Verdict:
    """What became of one configuration.

    Attributes:
        name: of the configuration.
        mode: of `MODES`.
        reason: why it is not traced, or None.
        differs: lines of a diff of eager's operators and those of the trace.
        lowered: of the trace's operators and those of the programs for one micro-batch.
    """

    name: str
    mode: str
    reason: str | None = None
    differs: tuple[str, ...] = ()
    lowered: tuple[str, ...] = ()


# Models that make tensors on the CPU, wherever they are.
_ON_THE_CPU = {"random numbers"}


def _configurations() -> dict[str, Make]:
    def of_recipe(name: str) -> tuple[nn.Sequential, Tensor]:
        recipe = RECIPES[name]
        return census.model_of(recipe), census.inputs_of(recipe, 2)["contiguous"]

    def of_paper(name: str) -> tuple[nn.Sequential, Tensor]:
        make, batch = test_paper_models.SMALL[name]
        return make(), batch()[:2]

    found: dict[str, Make] = {n: lambda n=n: of_recipe(n) for n in RECIPES if n not in PYTHON}
    found["BatchNorm2d without statistics"] = lambda: (
        nn.Sequential(census.Scale(1.25), nn.BatchNorm2d(3, track_running_stats=False), nn.ReLU()),
        torch.randn(2, 3, 5, 5),
    )
    found |= {
        f"model: {n}": lambda n=n: test_census._model(n) for n in test_census.MODELS if n not in _ON_THE_CPU
    }
    found |= {f"paper: {n}": lambda n=n: of_paper(n) for n in test_paper_models.SMALL}
    return found | _of_torchvision()


def _of_torchvision() -> dict[str, Make]:
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):  # RuntimeError: torchvision was built for another build of torch
        return {}
    from bench import census as of_models
    from bench import sequences
    from tests.equivalence import test_census_models as models

    def sequence(name: str, model: nn.Module, x: Tensor) -> tuple[nn.Sequential, Tensor]:
        layers = sequences.as_sequence(model, x.shape[-2:])
        assert layers is not None, name
        return layers, x

    def of_sample(name: str) -> tuple[nn.Sequential, Tensor]:
        x = of_models.inputs(name, 2)
        assert isinstance(x, Tensor)
        return sequence(name, sequences.construct(name), x)

    def of_small(name: str) -> tuple[nn.Sequential, Tensor]:
        make, shape, _ = models.SMALL[name]
        return sequence(name, sequences.enlivened(make()), torch.randn(2, *shape))

    found: dict[str, Make] = {f"torchvision: {n}": lambda n=n: of_sample(n) for n in models.SAMPLE}
    return found | {f"torchvision: {n}": lambda n=n: of_small(n) for n in models.SMALL}


CONFIGURATIONS = _configurations()
# Models of torchvision, which take long, in two modes.
ALL = [
    (mode, name)
    for mode in MODES
    for name in CONFIGURATIONS
    if not name.startswith("torchvision") or mode in ("fp32", "autocast to fp16")
]

# Eager's names, and those that a functional graph has for the same kernels.
_SAME_KERNEL = {
    "_native_batch_norm_legit": "native_batch_norm",
    "_native_batch_norm_legit_functional": "native_batch_norm",
    "_native_batch_norm_legit_no_training": "native_batch_norm",
}
# Uninitialised memory, and constants.
_COMPUTES_NOTHING = {
    "detach",
    "empty",
    "empty_like",
    "empty_strided",
    "lift_fresh",
    "lift_fresh_copy",
    "new_empty",
    "new_empty_strided",
    "scalar_tensor",
}


def _name(op: OpOverload[Any, Any], arguments: Sequence[Any]) -> str:
    """One for an operator and its in-place and functional variants; of batch norm, what it chooses."""
    name = op._schema.name.split("::")[1]
    name = name if name.startswith("__") else name.removesuffix("_")
    if name in ("_batch_norm_with_update", "_batch_norm_with_update_functional"):
        tensors = (*arguments[:3], *arguments[3:5])
        return "cudnn_batch_norm" if _takes_cudnn(*tensors, arguments[6]) else "native_batch_norm"
    if name == "batch_norm_backward":
        _, x, weight, mean, variance = arguments[:5]
        chosen = _takes_cudnn(x, weight, torch.empty(1), mean, variance, arguments[8])
        return "cudnn_batch_norm_backward" if chosen else "native_batch_norm_backward"
    return _SAME_KERNEL.get(name, name)


def _takes_cudnn(*arguments: Any) -> bool:
    *tensors, eps = arguments
    backend = torch._C._select_batch_norm_backend(*tensors, True, eps)  # type: ignore[attr-defined]
    return bool(backend == torch._C._BatchNormBackend.Cudnn)  # type: ignore[attr-defined]


def _storages(values: Any) -> set[int]:
    return {t.untyped_storage()._cdata for t in tree_leaves(values) if isinstance(t, Tensor)}


class _Recorder(TorchDispatchMode):
    """Notes operators, and whose memory they read and write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[str, set[int], set[int]]] = []
        self.half = 0  # the calls before the backward
        self._kept: list[Any] = []  # so that no address is used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._kept.append((args, kwargs, result))
        read, written = _storages((args, kwargs)), _storages(result)
        if torch.Tag.inplace_view in func.tags:
            read, written = set(), set()
        elif func._schema.is_mutable:
            written |= _storages(_written(func, args, kwargs or {}))
        elif written <= read:
            read, written = set(), set()  # a view
        self.calls.append((_name(func, args), read, written))
        return result

    def operators(self, results: Iterable[Tensor | None]) -> Operators:
        """Those that lead to some tensors."""
        live, found = _storages(list(results)), Operators([], [])
        for index, (name, read, written) in reversed([*enumerate(self.calls)]):
            if written & live:
                live |= read
                if name not in _COMPUTES_NOTHING:
                    (found.forward if index < self.half else found.backward).insert(0, name)
        return found


def _written(func: OpOverload[Any, Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    return [given.get(a.name) for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]


class _Devices(TorchDispatchMode):
    """Answers where a fake tensor is, before other modes wonder what is asked."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        return func(*args, **(kwargs or {}))


def eager(model: nn.Sequential, x: Tensor, mode: Mode) -> Operators:
    """What autograd dispatches in a step of the plain loop, for one micro-batch."""
    faking = FakeTensorMode(allow_non_fake_inputs=True)
    with FakeCopyMode(faking):
        model = copy.deepcopy(model)
    x = faking.from_tensor(x).requires_grad_(x.is_floating_point())
    recorder = _Recorder()
    with faking, recorder, keyed_rng(model, key=0), _Devices(), mode.entered():
        output = model(x)
    recorder.half = len(recorder.calls)
    outputs = [t for t in tree_leaves(output) if isinstance(t, Tensor)]
    differentiable = [t for t in outputs if t.requires_grad]
    leaves = [t for t in (*model.parameters(), x) if t.requires_grad]
    gradients: Sequence[Tensor | None] = ()
    with faking:
        tangents = [torch.empty_like(t) for t in differentiable]
        with recorder:
            if differentiable:
                gradients = torch.autograd.grad(differentiable, leaves, tangents, allow_unused=True)
    return recorder.operators((*outputs, *gradients, *model.buffers()))


def joint_of(model: nn.Sequential, x: Tensor, mode: Mode) -> Joint | Untraceable:
    """The trace of the same as one stage; real kernels, which know their layouts, are not asked."""
    x = x.detach().requires_grad_(x.is_floating_point())
    with (
        mock.patch.object(fake, "_is_doubtful", return_value=False),
        mode.entered(),
    ):
        return trace(list(model), [x], setting=Setting(device=DEVICE))


def traced(joint: Joint) -> Operators:
    """What a joint graph calls."""
    found = Operators([], [])
    for node in _live(joint):
        name = _name(node.target, fx.map_arg(node.args, lambda n: n.meta["val"]))
        if name not in _COMPUTES_NOTHING:
            is_backward = node.meta.get("partitioner_tag") == "is_backward"
            (found.backward if is_backward else found.forward).append(name)
    return found


def _live(joint: Joint) -> list[Any]:
    """The calls that lead to its results, but views."""
    live, found = {node.node for node in joint.outputs}, []
    for node in reversed(joint.module.graph.nodes):
        if node in live:
            live.update(node.all_input_nodes)
            op = node.target
            if isinstance(op, OpOverload) and not is_view(op) and op is not aten._unsafe_view.default:
                found.append(node)
    return found[::-1]


# What lowering leaves out, or calls otherwise: copies, and a ReLU by its own kernel.
_COPIES = {"clone", "copy", "copy_", "_to_copy", "lift_fresh_copy"}


def beside_lowered(joint: Joint) -> tuple[str, ...]:
    """How the calls of a stage's programs for a first micro-batch differ from the trace's; order aside.

    Programs have their scratch memory where an allocator of a GPU might have put it.
    """
    parts = split(joint, NO_RECOMPUTE)
    graphs = [parts.forward_saving] + ([parts.backward] if parts.backward is not None else [])
    programs = [lower(graph) for graph in graphs]
    scratch = [value.index for program in programs for value in program.values if value.home is Home.ARENA]
    assert all(offset % ALIGNMENTS["cuda"] == 0 for offset in scratch), scratch
    steps = [step for program in programs for step in program.steps]
    calls = [step.op for step in steps if isinstance(step, Call) and step.when is not When.LATER]
    ours = Counter(op._schema.name.split("::")[1] for op in calls)
    ours["relu"] += ours.pop("clamp_min", 0)
    live = _live(joint)
    expected = Counter(node.target._schema.name.split("::")[1] for node in live)
    expected["relu"] += expected.pop("clamp_min", 0)
    return tuple(
        f"{name} x{ours[name] - expected[name]:+}"
        for name in sorted({*ours, *expected} - _COPIES - _COMPUTES_NOTHING)
        if ours[name] != expected[name]
    )


def examine(name: str, mode: str) -> Verdict:
    """Compares one configuration."""
    how = MODES[mode]
    torch.manual_seed(0)
    model, x = CONFIGURATIONS[name]()
    model = model.to(how.parameters).to(DEVICE).train(how.training)
    x = (x.to(how.parameters) if x.is_floating_point() else x).to(DEVICE)
    joint = joint_of(model, x, how)
    if isinstance(joint, Untraceable):
        return Verdict(name, mode, joint.reason)
    ours, expected = traced(joint), eager(model, x, how)
    differs = [
        f"{direction}: {line}"
        for direction in ("forward", "backward")
        for line in difflib.ndiff(getattr(expected, direction), getattr(ours, direction))
        if line[0] in "+-"
    ]
    return Verdict(name, mode, None, tuple(differs), beside_lowered(joint))


def main() -> None:
    """Prints verdicts as JSON, of configurations, each a mode, a slash and a name."""
    warnings.simplefilter("ignore")
    for word in sys.argv[2:]:  # the first is the library of operators, which are not computed here
        mode, name = word.split("/", 1)
        print(json.dumps(asdict(examine(name, mode))), flush=True)


if __name__ == "__main__":
    main()
