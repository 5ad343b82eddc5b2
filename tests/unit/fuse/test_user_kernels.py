"""Users' own Triton kernels: what is compiled and launched, and why a layer runs in Python instead."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from gpipe_fast.fuse.user_kernels import with_launches
from gpipe_fast.lower.launch import KernelLaunch, is_launch
from gpipe_fast.trace.joint_graph import JointGraph
from gpipe_fast.trace.symbolic import Template, equal
from gpipe_fast.trace.symbols import SymbolicMode
from gpipe_fast.trace.trace import trace
from gpipe_fast.trace.traceability import Untraceable
from gpipe_fast.trace.triton_calls import TritonCall
from tests.conftest import HAS_TRITON
from tests.fake_cuda.build import can_build
from tests.fake_cuda.process import run

if not HAS_TRITON:
    pytest.skip("needs Triton", allow_module_level=True)

import triton
from torch.library import wrap_triton
from triton.backends.compiler import GPUTarget

from tests.fake_cuda import user_kernels


class Driver:
    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Loader:
    """Compiles nothing; the tensors of these tests are on the CPU."""

    device = torch.device("cpu")

    def __init__(self, failure: str = "") -> None:
        self.failure = failure

    def failures(self, launches: Sequence[KernelLaunch]) -> list[str]:
        return [self.failure] * len(launches)


class Layer(nn.Module):
    """Calls a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.fixture(autouse=True)
def _driver() -> Any:
    active = triton.runtime.driver._active
    triton.runtime.driver.set_active(Driver())
    yield
    triton.runtime.driver._active = active


def joint_of(layer: nn.Module, batch: int = 4) -> JointGraph:
    joint = trace([layer], [torch.empty(batch, 8, requires_grad=True)])
    assert isinstance(joint, JointGraph), joint
    return joint


def launches_of(layer: nn.Module) -> list[Any]:
    """Returns the arguments of each launch."""
    found = with_launches(joint_of(layer), Loader())  # type: ignore[arg-type]
    return [node.args for node in found.module.graph.nodes if is_launch(node)]


def reason_of(layer: nn.Module, loader: Any) -> str:
    with pytest.raises(Untraceable) as caught:
        with_launches(joint_of(layer), loader)
    assert caught.value.layer == 0
    return caught.value.reason.partition("cannot be launched from C++: ")[2]


def shift(x: Tensor, y: Tensor, **given: Any) -> None:
    values = {"shift": x, "stride": 1, "count": x.numel(), "seed": 0, "NEGATIVE": False, "ROUNDS": 1} | given
    grid = values.pop("grid", (2,))
    wrap_triton(user_kernels.shift_kernel)[grid](y, **values)


def shifted(**given: Any) -> Layer:
    """Returns a layer that changes a copy of its input by a launch with these arguments."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            y = given.get("view", lambda y: y)(x.clone())
            others = {name: value for name, value in given.items() if name not in ("view", "is_shared")}
            shift(y if given.get("is_shared") else x, y, **others)
            return y

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            return dy.sum().expand(4, 8)

    return Layer(Function.apply)


def test_a_launch_is_specialized_as_by_triton() -> None:
    forward, backward = launches_of(user_kernels.ScaledSiLU(8))
    launch, arguments, *_ = forward
    assert launch.signature == (
        ("x", "*fp32"), ("w", "*fp32"), ("y", "*fp32"), ("count", "i32"), ("width", "i32"), ("scale", "fp32"),
    )  # fmt: skip
    assert launch.constants == (("SIZE", 16),)
    assert (launch.divisible, launch.aligned, launch.outputs) == (("count",), (0, 1, 2), (2,))
    assert (launch.grid, launch.num_warps, launch.num_stages) == ((2, 1, 1), 4, 3)
    assert arguments[2:] == (None, 32, 8, 0.5)  # y is uninitialized, so nothing is copied to it
    launch, arguments, *_ = backward
    assert (launch.outputs, launch.num_warps, arguments[3]) == ((3, 4), 2, None)
    assert arguments[4].target is torch.ops.aten.zeros_like.default


def test_integers_that_are_one_are_constants_unless_the_kernel_says_otherwise() -> None:
    ((launch, *_),) = launches_of(shifted(seed=1))
    assert dict(launch.constants) == {"NEGATIVE": False, "ROUNDS": 1, "SIZE": 16, "stride": 1}
    assert dict(launch.signature)["seed"] == "i32"
    ((launch, *_),) = launches_of(shifted(seed=2**40, stride=3, count=True))
    assert dict(launch.signature) == {
        "x": "*fp32", "shift": "*fp32", "stride": "i32", "count": "u1", "seed": "i64",
    }  # fmt: skip
    assert launch.divisible == ()


def test_an_autotuner_chooses_among_its_configurations() -> None:
    passed: list[dict[str, Any]] = []

    def choose(call: TritonCall, grids: Any, arguments: dict[str, Any]) -> None:
        passed.append(arguments)
        call.kernel.best_config = call.kernel.configs[1]

    with mock.patch.object(TritonCall, "launch", choose), mock.patch("torch.cuda.device"):
        ((launch, *_),) = launches_of(user_kernels.Shifted(is_tuned=True))
    assert (launch.grid, launch.num_warps, launch.num_stages) == ((2, 1, 1), 8, 2)
    assert dict(launch.constants)["ROUNDS"] == 2
    assert torch.equal(passed[0]["x"], torch.zeros(4, 8))
    with (
        mock.patch.object(TritonCall, "launch", side_effect=ValueError("no device")),
        mock.patch("torch.cuda.device"),
    ):
        reason = reason_of(user_kernels.Shifted(is_tuned=True), Loader())
    assert reason == "its 2 configurations cannot be timed (ValueError: no device)"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"maxnreg": 64}, "the launch sets maxnreg"),
        ({"seed": (1, 2)}, "its argument seed is of type tuple"),
        ({"grid": (1.5,)}, "its grid is (1.5, 1, 1)"),
        ({"view": lambda y: y[:1].expand(4, 8)}, "it writes x, some of whose elements are the same"),
        ({"is_shared": True}, "its arguments x and shift share memory that it writes"),
    ],
)
def test_a_launch_that_a_program_cannot_do_has_a_reason(given: dict[str, Any], reason: str) -> None:
    assert reason_of(shifted(**given), Loader()) == reason


def test_a_kernel_that_does_not_compile_has_a_reason() -> None:
    assert reason_of(shifted(), Loader("no such thing")) == "no such thing"


def test_a_refused_kernel_runs_in_python_with_a_warning() -> None:
    def launch(*given: Any, **options: Any) -> None:
        x, w, y, _, _, scale, *_ = given
        y.copy_(scale * w * nn.functional.silu(x))

    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), user_kernels.ScaledSiLU(8), nn.Linear(8, 8)]
    model = GPipe(nn.Sequential(*layers), [3], devices=["cpu"], chunks=2)
    x = torch.randn(4, 8)
    with (
        torch.no_grad(),
        warnings.catch_warnings(record=True) as caught,
        mock.patch.object(user_kernels.forward_kernel, "run", launch),
    ):
        warnings.simplefilter("always")
        output = model(x)
    plain = user_kernels.PlainScaledSiLU(8)
    assert torch.allclose(output, layers[2](plain(layers[0](x))))
    (text,) = [str(w.message) for w in caught]
    assert "layer 1 (ScaledSiLU)" in text
    assert (
        "its Triton kernel forward_kernel cannot be launched from C++: its device is no CUDA device" in text
    )


def test_one_template_covers_all_sizes() -> None:
    layer = user_kernels.ScaledSiLU(8)
    inputs = [torch.empty(6, 8, requires_grad=True)]
    mode = SymbolicMode(inputs, [(True, False)])
    joint, symbols = trace([layer], mode.inputs, mode=mode), mode.symbols()
    assert isinstance(joint, JointGraph)
    assert symbols is not None
    template = Template(joint, symbols)
    for batch in (4, 7):
        instance = template.at([(batch, 8)], [(8, 1)], ())
        assert instance is not None
        assert equal(joint_of(layer, batch), instance.joint)
        launches = with_launches(instance.joint, Loader())  # type: ignore[arg-type]
        assert isinstance(launches, JointGraph)
        launch = next(n.args[0] for n in launches.module.graph.nodes if is_launch(n))
        assert isinstance(launch, KernelLaunch)
        assert launch.grid == (-(-8 * batch // 16), 1, 1)


@pytest.mark.sampled(1)
@pytest.mark.skipif(not can_build(), reason="needs an extension built with CUDA, and the toolkit's headers")
@pytest.mark.parametrize("case", ["recomputing", "captured"])
def test_a_pipeline_launches_a_users_kernels(libraries: tuple[Path, Path], case: str) -> None:
    found = json.loads(run("user_kernel_cases.py", libraries, case)[-1])
    assert found["error"] < 1e-6
    own = {name for name in found["launches"] if not name.startswith("generated.")}
    assert {name.partition(".")[2] for name in own} == {"forward_kernel", "backward_kernel", "shift_kernel"}
    assert (found["failures"], found["warnings"]) == ([], [])
