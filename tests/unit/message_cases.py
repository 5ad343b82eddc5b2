"""Mistakes that trigger the errors of gpipe_fast: arguments, devices, balances and reports."""

from __future__ import annotations

import functools
import os
import runpy
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from gpipe_fast import GPipe, _extension, command, doctor, replicate, simulate, switches, tune, verify
from gpipe_fast.balance import balance_by_cost, balance_by_size, balance_by_time, profile_layers, table
from gpipe_fast.fuse import cubins
from gpipe_fast.layers.device_memory import check_partitions_fit
from gpipe_fast.lower.checkpoint import check_saved_fraction
from gpipe_fast.lower.launch import launch_kernel
from gpipe_fast.recording import Event, Recording
from gpipe_fast.reports.compare import compare
from gpipe_fast.runtime import connections
from gpipe_fast.runtime.cache import LIMIT_VARIABLE
from gpipe_fast.runtime.plan import check_placed
from gpipe_fast.runtime.segments import Segments
from gpipe_fast.runtime.stage import Stage
from gpipe_fast.schedule import bubble, fill_drain
from gpipe_fast.schedule.actions import Action
from gpipe_fast.schedule.schedule import Schedule
from gpipe_fast.trace.triton_calls import call_triton_kernel


@dataclass(frozen=True)
class Case:
    """A trigger of one error or warning, the received value in its text, and a word of its advice."""

    received: str
    advice: str
    trigger: Callable[[], object]


def case(received: str, advice: str, function: Any, *args: Any, **kwargs: Any) -> Case:
    return Case(received, advice, functools.partial(function, *args, **kwargs))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def features(batch: int = 8) -> Tensor:
    return torch.linspace(-1, 1, batch * 6).reshape(batch, 6)


X = features()


def pipe(*layers: nn.Module, **options: Any) -> GPipe:
    """Returns a pipeline of these layers in one stage, by default of five layers in two stages."""
    balance = [len(layers)] if layers else [2, 3]
    return GPipe(nn.Sequential(*layers) if layers else mlp(), **{"balance": balance, "chunks": 2, **options})


def call(*args: Any, layers: tuple[nn.Module, ...] = (), **options: Any) -> object:
    return pipe(*layers, **options)(*args)


class WithTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.eye(2).to_sparse())


class Keeps(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = x
        return x


def loss_on_what_is_kept() -> None:
    layers = nn.Linear(6, 6), Keeps(), nn.Linear(6, 1)
    output = call(X, layers=layers, balance=[2, 1])
    (output + layers[1].kept.sum()).sum().backward()


def do(method: str, *args: Any, memory: Any = None, **options: Any) -> object:
    """Calls a method of a pipeline with a mini-batch."""
    return getattr(pipe(memory=memory), method)(X, *args, **options)


def do_without_layers(method: str) -> object:
    return getattr(GPipe(nn.Sequential(), []), method)(X)


def under(patch: Any, function: Callable[..., object], *args: Any, **options: Any) -> object:
    with patch:
        return function(*args, **options)


def variable(name: str, value: str) -> Any:
    return mock.patch.dict(os.environ, {name: value})


WHILE_LAYERS_RUN = mock.patch.object(Segments, "try_lock", return_value=False)


def assign(name: str, value: object) -> None:
    setattr(pipe(), name, value)


# Arguments of GPipe and of its calls


def change_devices_while_recording() -> None:
    model = pipe()
    with model.recording():
        model.balance = [1, 1, 3]


def call_with_a_global_hook(backend: str) -> None:
    def spy(*args: object) -> None: ...

    handle = nn.modules.module.register_module_forward_hook(spy)
    try:
        call(X, backend=backend)
    finally:
        handle.remove()


def tune_a_model(**options: Any) -> None:
    tune(GPipe.from_model(mlp(), args=(X,), chunks=2), X, **options)


EXTENSION = str(_extension.__file__)
NO_EXTENSION = mock.patch.dict("sys.modules", {"gpipe_fast._C": None})
OTHER_TORCH = mock.patch.object(torch, "__version__", "1.0.0")
NAMED = OrderedDict(recording=nn.Linear(2, 2))
REPEATED = nn.Linear(6, 6)

ARGUMENTS = [
    case(torch.__version__, "outside the source tree", under, NO_EXTENSION, runpy.run_path, EXTENSION),
    case("torch 1.0.0", "run `make`", under, OTHER_TORCH, runpy.run_path, EXTENSION),
    case("got 'much'", "number of MiB of at least 0", under, variable(LIMIT_VARIABLE, "much"), pipe),
    case("got 'fusion'", "by commas", under, variable(switches.VARIABLE, "templates,fusion"), pipe),
    case("='aten'", "='auto'", under, variable(switches.VARIABLE, "capture"), pipe, backend="aten"),
    case("got 'many'", "unset it", under, variable(cubins.WORKERS_VARIABLE, "many"), cubins.num_workers),
    case("the node of a launch", "lowered, not called", launch_kernel, None, ()),
    case("the node of a kernel's launch", "replaced, not called", call_triton_kernel, None, (), ()),
    case("got 0.5", "'auto'", pipe, chunks=0.5),
    case("got 4", "devices=", lambda: GPipe(mlp(), [2, 3], ["cpu"] * 2, 2)),  # type: ignore[arg-type]
    case("got 'sometimes'", "'except_last'", pipe, checkpoint="sometimes"),
    case("checkpoint has 3 values", "one for each stage", pipe, checkpoint=[0.5, 1, 0]),
    case("got str", "pass torch.optim.AdamW", do, "memory", optimizer="adam"),
    case("no layers", "pass some to GPipe", do_without_layers, "memory"),
    case("for the model's own", "memory_limit = None", do, "memory", memory="1GiB", device="cuda"),
    case("a backward reached an input of stage 0, layer 1", "return the tensor", loss_on_what_is_kept),
    case("got '20 apples'", "offload", pipe, memory="20 apples"),
    case("memory has 3 values", "one for each device", pipe, memory=["1GiB"] * 3),
    case("with memory='1GiB'", "pass checkpoint", setattr, pipe(memory="1GiB"), "capture", True),
    case("memory is 10 bytes on cpu", "more chunks", call, X, memory="10B"),
    case("tune with memory='1GiB'", "model.train()", lambda: tune(pipe().eval(), X, memory="1GiB")),
    case("made by GPipe.from_model", "pass memory to GPipe.from_model", tune_a_model, memory="1GiB"),
    case("got torch.float16", "torch.float32", pipe, grad_dtype=torch.float16),
    case("got 'fast'", "'pinned'", pipe, transport="fast"),
    case("capture is one of", "got 2", pipe, capture=2),
    case("got 'x'", "one integer for each input", pipe, batch_dim="x"),
    case("layer 0 (WithTable) has 'table' of layout torch.sparse_coo", "plain attribute", pipe, WithTable()),
    case("is empty", "pass one integer", pipe, batch_dim=()),
    case("got Linear", "must be nn.Sequential", GPipe, nn.Linear(2, 2)),
    case("1 of its 2 layers", "deepcopy", pipe, REPEATED, REPEATED),
    case("got 3", "pass devices", pipe, balance=3),
    case("['2', 3]", "positive integer", pipe, balance=["2", 3]),
    case("sum of balance: 3", "number of layers of each stage", pipe, balance=[2, 1]),
    case("[5, 0]", "every stage needs a layer", pipe, balance=[5, 0]),
    case("got int", "at least one tensor", call, 3),
    case("got no argument", "model(x)", call),
    case("got int, str", "at least one tensor", call, 3, "x"),
    case("model(..., ...)", "it takes (input", call, X, 1),
    case("got meta", "pass x.to('cpu')", call, X.to("meta")),
    case("all tensors are replicated", "without gpipe_fast.replicate", call, replicate(X)),
    case("[8, 6], [3, 6]", "wrap inputs", call, features(8), features(3)),
    case("got a tensor of layout torch.sparse_coo", "to_dense", call, X.to_sparse()),
    case("got a 0-dimensional tensor", "gpipe_fast.replicate", call, torch.tensor(1.0)),
    case("got set", "may be nested in tuples", call, {1}),
    case("got length 2: (0, 1)", "expected length 1", call, X, batch_dim=(0, 1)),
    case("named 'recording'", "rename the layer", lambda: GPipe(nn.Sequential(NAMED), [1])),
    case("got str", "integers", lambda: pipe()["x"]),  # type: ignore[index]
    case("partitions", "set balance instead", assign, "partitions", 3),
    case("got '1GiB'", "set memory_limit", assign, "memory", "1GiB"),
    case("got 'cuda', and the stages are on cpu", "set model.devices", lambda: pipe().cuda()),
    case("cannot be assigned, added or removed", "create a new GPipe", lambda: pipe().__delitem__(0)),
    case("devices ['cpu', 'cpu', 'cpu']", "leave the model.recording()", change_devices_while_recording),
    case("got 0.5", "positive integer or None", assign, "threads_per_stage", 0.5),
    case("spy", "remove the hook", call_with_a_global_hook, "aten"),
    case("got 2 arguments", "takes one positional argument", lambda: GPipe(nn.Sequential(), [])(1, 2)),
    case("torch.func.vmap", "plain Sequential", lambda: torch.func.vmap(pipe())(X[None])),
]

# Devices and memory

GPU = torch.device("cuda:0")


def place(layer_bytes: int, total: int, free: int, stages: int = 2) -> None:
    """Places stages of one layer each on a GPU with so many bytes in total and free."""
    layers = [[("0", nn.Linear(layer_bytes // 4, 1, bias=False))] for _ in range(stages)]
    with mock.patch.object(torch.cuda, "mem_get_info", return_value=(free, total)):
        check_partitions_fit(layers, [GPU] * stages)


def share_a_buffer() -> None:
    first, second = nn.BatchNorm1d(6), nn.BatchNorm1d(6)
    second.running_mean = first.running_mean
    call(X, layers=(first, second), balance=[1, 1])


NO_ROUTE = mock.patch.object(_extension, "route", return_value=("pinned", ""))
FAULTY_ROUTE = mock.patch.object(_extension, "route", return_value=("pinned", "bytes arrive changed"))
REPLICATED = mock.patch("gpipe_fast.runtime.plan._replicated_parameters", return_value=[0])
MIB = 1 << 20
ON_META = nn.Linear(6, 2, device="meta")

DEVICES = [
    case("got 'cpu'", "devices=['cpu'] * K", pipe, devices="cpu"),
    case("got None", "such as 'cpu'", pipe, devices=[None, None]),
    case("got 'cpux'", "such as 'cpu'", pipe, devices=["cpu", "cpux"]),
    case("devices: 1, partitions: 2", "a device for each stage", pipe, devices=["cpu"]),
    case("got mps", "pass devices such as", pipe, devices=["mps", "mps"]),
    case("got 'meta'", "pass device='cuda'", do, "explain", device="meta"),
    case("got Tensor", "also=[x]", do, "prepare", also=X),
    case("another thread runs layers", "wait until", under, WHILE_LAYERS_RUN, do, "explain", device="cuda"),
    case("cuda:99", "CUDA_VISIBLE_DEVICES", pipe, devices=["cpu", "cuda:99"]),
    case("layer '0' (Linear)", "use a larger device", place, 4 * MIB, 7 * MIB, 7 * MIB),
    case("layer '0' (Linear)", "to_empty", profile_layers, mlp().to("meta"), X),
    case("'weight' on the meta device", "load_weights", call, X, layers=(ON_META,)),
    case("stages 0, 1", "another balance", place, 4 * MIB, 9 * MIB, 9 * MIB),
    case("stages 0, 1", "free memory there", place, 4 * MIB, 16 * MIB, 7 * MIB),
    case("stages 0 and 1", "use 'auto'", under, NO_ROUTE, pipe, transport="peer"),
    case("layers 0 to 1", "in one stage", under, REPLICATED, call, X, backend="eager"),
    case("'weight' on cpu", "move the whole layer", check_placed, [Stage([nn.Linear(2, 2)], 0, GPU)]),
    case("of shape [6]", "in one stage", share_a_buffer),
]


def connect_gpus() -> None:
    connections._warn_of.cache_clear()
    with FAULTY_ROUTE:
        connections.connections_of(
            [1, 1], [GPU, torch.device("cuda:1")], [nn.Identity(), nn.Identity()], "auto"
        )


WARNINGS_OF_DEVICES = [case("cuda:0 and cuda:1", "in the BIOS", connect_gpus)]

# Balance and profiling

BALANCE = [
    case("got 'x'", "a finite number", balance_by_size, 2, mlp(), X, param_scale="x"),
    case("got 'best'", "'variance'", balance_by_cost, 2, [1, 2], objective="best"),
    case("got 3", "a number for each layer", balance_by_cost, 2, 3),
    case("got 2.0", "positive integer", balance_by_cost, 2.0, [1, 2]),
    case("0 < 1", "positive integer", balance_by_cost, 0, [1, 2]),
    case("2 < 3", "at most one partition for each layer", balance_by_cost, 3, [1, 2]),
    case("layer 1 must be a finite number, got nan", "", balance_by_cost, 1, [1, float("nan")]),
    case("got None", "seconds", balance_by_time, 2, mlp(), X, timeout=None),
    case("got 0", "positive integer", profile_layers, mlp(), X, threads=0),
    case("got Linear", "must be nn.Sequential", balance_by_time, 2, nn.Linear(2, 2), X),
    case("layer '0'", "run the module once", balance_by_time, 1, nn.Sequential(nn.LazyLinear(2)), X),
    case("got meta", "only on CPU and CUDA", balance_by_time, 2, mlp(), X, device="meta"),
    case("got Linear", "LayerProfile", table, [nn.Linear(1, 1)]),
    case("layer '0' (Linear)", "shapes cannot be multiplied", balance_by_time, 2, mlp(), torch.ones(8, 5)),
    case("got 'auto'", "positive integer", balance_by_size, 2, mlp(), X, chunks="auto"),
    case("got tuple", "at least one tensor", balance_by_size, 2, mlp(), ()),
    case("on the meta device", "one with data", balance_by_size, 2, mlp(), X.to("meta")),
]

# Reports, recordings and schedules


def record_twice() -> None:
    model = pipe()
    with model.recording(), model.recording():
        pass


def scheduled(*rows: str, slots: int = 2) -> Schedule:
    return Schedule.parse("\n".join(rows), slots=slots)


def report_with_an_updating_hook() -> None:
    model = pipe()
    next(model.parameters()).register_post_accumulate_grad_hook(lambda parameter: None)
    model.report(X)


def run_command(*arguments: str) -> None:
    """Runs the command, and raises the error that it would print."""
    options = command._parser().parse_args(arguments)
    options.run(options)


def stages_on(*devices: str) -> Any:
    return mock.Mock(pipeline=mock.Mock(devices=[torch.device(name) for name in devices]))


def report_of_a_file(text: str, *arguments: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model_of_a_test.py"
        file.write_text(text)
        run_command("report", f"{file}:make", *arguments)


_MAKES_A_MODEL = """
import gpipe_fast, torch
make = lambda: (gpipe_fast.GPipe(torch.nn.Sequential(torch.nn.Linear(2, 2)), [1]), torch.ones(2, 2))
"""


def recording_of(action: str) -> Recording:
    recording = Recording()
    recording.stages = ((Event(Action.parse(action), False, 0.0, 1.0),),)
    return recording


ACTIONS = tuple(map(Action.parse, ("0F0", "0F1", "0F2")))
OTHER_ORDER = "0F0,0SEND_F0,0F1,0SEND_F1", "1RECV_F1,1F1,1RECV_F0,1F0"
WAITING = (
    "0F0,0SEND_F0,0RECV_B0,0B0,0F1,0SEND_F1,0RECV_B1,0B1",
    "1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1",
)

REPORTS = [
    case("got Linear", "wrap it", doctor, nn.Linear(1, 1)),
    case("holds no step", "model.recording()", Recording().bubble),
    case("being recorded already", "leave the first", record_twice),
    case("got Linear", "wrap it", verify, nn.Linear(1, 1), X, torch.sum),
    case("got int", "loss_fn=", verify, pipe(), X, 3),
    case("got float", "with torch", verify, pipe(), X, lambda y: float(y.sum())),
    case("got shape [8, 4]", ".mean()", verify, pipe(), X, lambda y: y),
    case("requires_grad=False", "require gradients", verify, pipe(nn.Tanh()), X, torch.sum),
    case("'2X0'", "expected a form like 2F0", Action.parse, "2X0"),
    case("got 0 stages", "at least one", bubble, 0, 1),
    case("not whole", "stage 0 does", recording_of("0F1").report),
    case("got 'x.gif'", ".html, .json", recording_of("0F0").report().save, "x.gif"),
    case("got Linear", "wrap the model", tune, nn.Linear(1, 1)),
    case("got 0", "seconds must be a positive number", tune, pipe(), X, seconds=0),
    case("computes its own loss", "pass the model's labels", tune_a_model, loss_fn=torch.sum),
    case("chooses the devices of --check", "add --check", run_command, "doctor", "--devices", "cpu"),
    case("got --devices cpu", "--devices cpu cpu", run_command, "doctor", "--check", "--devices", "cpu"),
    case("got 'train.py'", "expected FILE.py:FUNCTION", run_command, "report", "train.py"),
    case("no file missing.py", "", run_command, "report", "missing.py:make"),
    case("No module named 'missing'", "pass the path of a file", run_command, "report", "missing:make"),
    case("has no function 'make'", "", report_of_a_file, "x = 1"),
    case("got stages on cpu, cuda:0", "one device for all", compare, stages_on("cpu", "cuda:0"), X),
    case("failed: ZeroDivisionError", "", report_of_a_file, "make = lambda: 1 / 0"),
    case("too large", "", run_command, "simulate", "--forward=1e308", "--json"),
    case("got 'one'", "such as 2 or 1,2.5", command._numbers, "one"),
    case("returned a tuple of int", "must return (model, x)", report_of_a_file, "make = lambda: (1, 2)"),
    case("--save x.gif", "the path must end in", report_of_a_file, _MAKES_A_MODEL, "--save", "x.gif"),
    case("got -1", "at least 0", run_command, "simulate", "--forward=-1"),
    case("got 'foo'", "gpipe, 1f1b", simulate, "foo", 2, 2),
    case("got 0", "num_devices must be at least 1", simulate, num_devices=0),
    case("target was passed", "pass loss_fn", do, "report", target=X),
    case("has a post-accumulate-grad hook", "remove the hook", report_with_an_updating_hook),
    case("so there is nothing to report", "pass some", do_without_layers, "report"),
    case("2 values for 3 stages", "or one each", simulate, "gpipe", 3, 4, forward=[1, 2]),
    case("must be finite and at least 0, got -1", "", simulate, "gpipe", 3, 4, backward=-1),
    case("got weights=3 and backward=2", "as backward", simulate, "gpipe", 3, 4, weights=3, backward=2),
    case("got 0 and 0", "bandwidth positive", simulate, "gpipe", 3, 4, bandwidth=0, latency=0),
    case("got 'some'", "'except_last'", simulate, "gpipe", 3, 4, checkpoint="some"),
    case("num_stages must be at least 1, got 0", "", fill_drain, 0, 2),
    case("1RECV_F1 would receive from 0SEND_F0", "keeps its order", scheduled, *OTHER_ORDER),
    case("0F1 comes after 0B0", "", lambda: scheduled("0F0,0B0,0F1,0B1").forward_part()),
    case("no backwards", "", lambda: scheduled("0F0,0F1").backward_part()),
    case("with 2 slots: 0RECV_B0 waits for 1SEND_B0", "", scheduled, *WAITING),
    case("0F2 belongs to none of the 2", "", Schedule, (ACTIONS,), 2, 2),
    case("stage 0 does 0F0 0F0", "has to do 0F0", scheduled, "0F0,0F0"),
    case("got 2", "within 0 and 1", check_saved_fraction, 2),
]


OF_ARGUMENTS = [*ARGUMENTS, *DEVICES, *BALANCE, *REPORTS]
