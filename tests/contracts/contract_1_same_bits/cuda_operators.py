"""Compares the operators that eager PyTorch dispatches on a GPU with those of gpipe_fast's traces.

No GPU is needed: `cuda_operators_table.py` runs this file with a fake CUDA runtime
(`tests/fake_cuda/runtime`). PyTorch then sees GPUs of compute capability 9.0 and chooses their kernels.
Tensors are fake, so no kernel runs.

The comparison covers, in order, the operators that compute one micro-batch's outputs, gradients and buffers.
Views, uninitialised memory and dead code are omitted.
"""

from __future__ import annotations

import copy
import difflib
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
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
from gpipe_fast.torch_private.operators import is_view_op
from gpipe_fast.trace import fake
from gpipe_fast.trace.joint_graph import JointGraph
from gpipe_fast.trace.layers_function import TraceContext
from gpipe_fast.trace.trace import trace
from gpipe_fast.trace.traceability import Untraceable
from tests.contracts.contract_1_same_bits.layers import LOWERED
from tests.contracts.contract_1_same_bits.torch_layers import (
    RECIPES,
    RUN_IN_PYTHON,
    TrainableScale,
    inputs_of,
    model_of,
)
from tests.models import MODELS, test_paper_models
from tests.untraceable import WIDTH

DEVICE = torch.device("cuda:0")
aten = torch.ops.aten

MakeModelAndInput = Callable[[], tuple[nn.Sequential, Tensor]]


class Mode(NamedTuple):
    """Dtypes and modes that a model is run with."""

    parameters: torch.dtype
    autocast: torch.dtype | None = None
    training: bool = True
    gradients: bool = True

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Enters the autocast and gradient modes; use it around the forward."""
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
    """Names of the dispatched operators, in order."""

    forward: list[str]
    backward: list[str]


@dataclass(frozen=True)
class Verdict:
    """The result of one configuration.

    Attributes:
        name: the configuration's name.
        mode: a key of `MODES`.
        reason: why the model was not traced, or None.
        differs: lines of the diff between eager's operators and the trace's.
    """

    name: str
    mode: str
    reason: str | None = None
    differs: tuple[str, ...] = ()


def _configurations() -> dict[str, MakeModelAndInput]:
    def make_recipe(name: str) -> tuple[nn.Sequential, Tensor]:
        recipe = RECIPES[name]
        return model_of(recipe), inputs_of(recipe.shape, recipe.integers, 2)

    def make_paper_model(name: str) -> tuple[nn.Sequential, Tensor]:
        make, batch = test_paper_models.SMALL[name]
        return make(), batch()[:2]

    found: dict[str, MakeModelAndInput] = {
        n: lambda n=n: make_recipe(n) for n in RECIPES if n not in RUN_IN_PYTHON
    }
    found["BatchNorm2d without statistics"] = lambda: (
        nn.Sequential(TrainableScale(1.25), nn.BatchNorm2d(3, track_running_stats=False), nn.ReLU()),
        torch.randn(2, 3, 5, 5),
    )
    found |= {f"model: {n}": lambda m=make, b=batch: (m(), b(7)) for n, (make, batch) in MODELS.items()}
    found |= {
        f"layers: {n}": lambda make=make: (nn.Sequential(*make()), torch.randn(2, 5, WIDTH))
        for n, make in LOWERED.items()
    }
    found |= {f"paper: {n}": lambda n=n: make_paper_model(n) for n in test_paper_models.SMALL}
    return found


CONFIGURATIONS = _configurations()
ALL_CONFIGURATIONS = [(mode, name) for mode in MODES for name in CONFIGURATIONS]

# Operators that eager and functional graphs name differently, mapped to the name of their common kernel.
_SAME_KERNEL = {
    "_native_batch_norm_legit": "native_batch_norm",
    "_native_batch_norm_legit_functional": "native_batch_norm",
    "_native_batch_norm_legit_no_training": "native_batch_norm",
}
# Operators that allocate uninitialised memory or return constants.
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


def _kernel_name(op: OpOverload[Any, Any], arguments: Sequence[Any]) -> str:
    """Returns a name that in-place and functional variants share; for batch norm, the chosen kernel's."""
    name = op._schema.name.split("::")[1]
    name = name if name.startswith("__") else name.removesuffix("_")
    if name in ("_batch_norm_with_update", "_batch_norm_with_update_functional"):
        tensors = (*arguments[:3], *arguments[3:5])
        return "cudnn_batch_norm" if _uses_cudnn(*tensors, arguments[6]) else "native_batch_norm"
    if name == "batch_norm_backward":
        _, x, weight, mean, variance = arguments[:5]
        chosen = _uses_cudnn(x, weight, torch.empty(1), mean, variance, arguments[8])
        return "cudnn_batch_norm_backward" if chosen else "native_batch_norm_backward"
    return _SAME_KERNEL.get(name, name)


def _uses_cudnn(*arguments: Any) -> bool:
    *tensors, eps = arguments
    backend = torch._C._select_batch_norm_backend(*tensors, True, eps)  # type: ignore[attr-defined]
    return bool(backend == torch._C._BatchNormBackend.Cudnn)  # type: ignore[attr-defined]


def _storages(values: Any) -> set[int]:
    return {t.untyped_storage()._cdata for t in tree_leaves(values) if isinstance(t, Tensor)}


class _Recorder(TorchDispatchMode):
    """Records operators and the storages that they read and write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[str, set[int], set[int]]] = []
        self.num_forward_calls = 0  # the number of calls before the backward
        self._keep_alive: list[Any] = []  # keeps tensors alive, so that no storage address is reused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._keep_alive.append((args, kwargs, result))
        read, written = _storages((args, kwargs)), _storages(result)
        if torch.Tag.inplace_view in func.tags:
            read, written = set(), set()
        elif func._schema.is_mutable:
            written |= _storages(_written_arguments(func, args, kwargs or {}))
        elif written <= read:
            read, written = set(), set()  # a view
        self.calls.append((_kernel_name(func, args), read, written))
        return result

    def operators(self, results: Iterable[Tensor | None]) -> Operators:
        """Returns the operators on which these tensors depend."""
        live, found = _storages(list(results)), Operators([], [])
        for index, (name, read, written) in reversed([*enumerate(self.calls)]):
            if written & live:
                live |= read
                if name not in _COMPUTES_NOTHING:
                    (found.forward if index < self.num_forward_calls else found.backward).insert(0, name)
        return found


def _written_arguments(func: OpOverload[Any, Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    arguments_by_name = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    return [
        arguments_by_name.get(a.name)
        for a in func._schema.arguments
        if a.alias_info and a.alias_info.is_write
    ]


class _FakeDeviceMode(TorchDispatchMode):
    """Returns the device of a fake tensor before other dispatch modes see the query."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        return func(*args, **(kwargs or {}))


def eager_operators(model: nn.Sequential, x: Tensor, mode: Mode, draws: bool) -> Operators:
    """Returns the operators that autograd dispatches for one micro-batch of the plain loop that may draw."""
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    with FakeCopyMode(fake_mode):
        model = copy.deepcopy(model)
    x = fake_mode.from_tensor(x).requires_grad_(x.is_floating_point())
    recorder = _Recorder()
    # Its hooks would turn off fast paths of inference, where layers rarely draw.
    keyed = keyed_rng(model, key=0) if mode.training or draws else nullcontext()
    with fake_mode, recorder, keyed, _FakeDeviceMode(), mode.enter():
        output = model(x)
    recorder.num_forward_calls = len(recorder.calls)
    outputs = [t for t in tree_leaves(output) if isinstance(t, Tensor)]
    # Under `no_grad`, a view of a fake tensor that needs gradients claims to need them, and has no grad_fn.
    differentiable = [t for t in outputs if t.requires_grad and mode.gradients]
    leaves = [t for t in (*model.parameters(), x) if t.requires_grad]
    gradients: Sequence[Tensor | None] = ()
    with fake_mode:
        tangents = [torch.empty_like(t) for t in differentiable]
        # On this thread: autograd's thread of the GPU would still release Python objects after `grad` has
        # returned, and abort the process if that ended before.
        with recorder, torch.autograd.set_multithreading_enabled(False):
            if differentiable:
                gradients = torch.autograd.grad(differentiable, leaves, tangents, allow_unused=True)
    return recorder.operators((*outputs, *gradients, *model.buffers()))


def trace_joint(model: nn.Sequential, x: Tensor, mode: Mode) -> JointGraph:
    """Traces the model as one stage, without checking the strides of fake results with real kernels."""
    x = x.detach().requires_grad_(x.is_floating_point())
    with (
        mock.patch.object(fake, "_may_differ_from_real", return_value=False),
        mode.enter(),
    ):
        return trace(list(model), [x], trace_context=TraceContext(device=DEVICE))


def traced_operators(joint: JointGraph) -> Operators:
    """Returns the operators of a joint graph."""
    found = Operators([], [])
    for node in _live_nodes(joint):
        name = _kernel_name(node.target, fx.map_arg(node.args, lambda n: n.meta["val"]))
        if name not in _COMPUTES_NOTHING:
            is_backward = node.meta.get("partitioner_tag") == "is_backward"
            (found.backward if is_backward else found.forward).append(name)
    return found


def _live_nodes(joint: JointGraph) -> list[Any]:
    """Returns the nodes on which the graph's results depend, without views."""
    live, found = {node.node for node in joint.outputs}, []
    for node in reversed(joint.module.graph.nodes):
        if node in live:
            live.update(node.all_input_nodes)
            op = node.target
            if isinstance(op, OpOverload) and not is_view_op(op) and op is not aten._unsafe_view.default:
                found.append(node)
    return found[::-1]


def examine(name: str, mode: str) -> Verdict:
    """Compares the operators of one configuration in one mode."""
    how = MODES[mode]
    torch.manual_seed(0)
    model, x = CONFIGURATIONS[name]()
    model = model.to(how.parameters).to(DEVICE).train(how.training)
    x = (x.to(how.parameters) if x.is_floating_point() else x).to(DEVICE)
    try:
        joint = trace_joint(model, x, how)
    except Untraceable as error:
        return Verdict(name, mode, error.reason)
    ours = traced_operators(joint)
    expected = eager_operators(model, x, how, any("keyed" in each for each in ours.forward))
    differs = [
        f"{direction}: {line}"
        for direction in ("forward", "backward")
        for line in difflib.ndiff(getattr(expected, direction), getattr(ours, direction))
        if line[0] in "+-"
    ]
    return Verdict(name, mode, None, tuple(differs))


def main() -> None:
    """Prints a verdict as JSON for each command-line argument of the form mode/name."""
    warnings.simplefilter("ignore")
    for word in sys.argv[2:]:  # the first argument is the operator library, which is not needed here
        mode, name = word.split("/", 1)
        print(json.dumps(asdict(examine(name, mode))), flush=True)


if __name__ == "__main__":
    main()
