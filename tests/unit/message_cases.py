"""Mistakes that trigger the errors of gpipe_fast: arguments, devices, balances and reports."""

from __future__ import annotations

import functools
import os
import runpy
import sys
import tempfile
import warnings
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
from gpipe_fast.balance.device_memory import check_partitions_fit
from gpipe_fast.lower.checkpoint import check_saved_fraction
from gpipe_fast.picture import draw
from gpipe_fast.recording import Event, Recording, Report
from gpipe_fast.runtime.cache import LIMIT_VARIABLE
from gpipe_fast.runtime.plan import check_placed
from gpipe_fast.runtime.segments import Segments
from gpipe_fast.runtime.stage import Stage
from gpipe_fast.schedule import bubble, fill_drain
from gpipe_fast.schedule.actions import Action
from gpipe_fast.schedule.schedule import Schedule


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


def pipe(*layers: nn.Module, **options: Any) -> GPipe:
    """Returns a pipeline of these layers in one stage, by default of five layers in two stages."""
    balance = [len(layers)] if layers else [2, 3]
    return GPipe(nn.Sequential(*layers) if layers else mlp(), **{"balance": balance, "chunks": 2, **options})


def call(*args: Any, layers: tuple[nn.Module, ...] = (), **options: Any) -> object:
    return pipe(*layers, **options)(*args)


class Keeps(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = x
        return x


def loss_on_what_is_kept() -> None:
    layers = nn.Sequential(nn.Linear(2, 2), Keeps(), nn.Linear(2, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output = GPipe(layers, [2, 1], devices=["cpu"] * 2, chunks=1)(torch.ones(2, 2))
    (output.sum() + layers[1].kept.sum()).backward()


def explain(device: str) -> object:
    return pipe().explain(features(), device=device)


def explain_while_layers_run() -> None:
    with mock.patch.object(Segments, "try_lock", return_value=False):
        explain("cuda")


def prepare_also(value: Any) -> None:
    pipe().prepare(features(), also=value)


def assign(name: str, value: object) -> None:
    setattr(pipe(), name, value)


# Arguments of GPipe and of its calls


def load_extension(**changes: Any) -> None:
    with mock.patch.multiple(torch, **changes) if changes else mock.patch.dict("sys.modules", _C_IS_MISSING):
        runpy.run_path(str(_extension.__file__))


_C_IS_MISSING = {"gpipe_fast._C": None}


def with_plans_limited_to(value: str) -> None:
    with mock.patch.dict(os.environ, {LIMIT_VARIABLE: value}):
        pipe()


def with_disabled(value: str, **options: Any) -> None:
    with mock.patch.dict(os.environ, {switches.VARIABLE: value}):
        pipe(**options)


def model_with_a_layer_named(name: str) -> GPipe:
    return GPipe(nn.Sequential(OrderedDict({name: nn.Linear(2, 2)})), [1])


def delete_a_layer() -> None:
    del pipe()[0]


def change_devices_while_recording() -> None:
    model = pipe()
    with model.recording():
        model.balance = [1, 1, 3]


def call_with_a_global_hook(backend: str) -> None:
    def spy(*args: object) -> None: ...

    handle = nn.modules.module.register_module_forward_hook(spy)
    try:
        call(features(), backend=backend)
    finally:
        handle.remove()


REPEATED = nn.Linear(6, 6)

ARGUMENTS = [
    case(torch.__version__, "outside the source tree", load_extension),
    case("torch 1.0.0", "run `make`", load_extension, __version__="1.0.0"),
    case("got 'much'", "number of MiB of at least 0", with_plans_limited_to, "much"),
    case("got '-1'", "number of MiB of at least 0", with_plans_limited_to, "-1"),
    case("got 'fusion'", "separated by commas", with_disabled, "templates,fusion"),
    case("backend='aten'", "backend='auto'", with_disabled, "capture", backend="aten"),
    case("got 0.5", "'auto'", pipe, chunks=0.5),
    case("got 4", "devices=", lambda: GPipe(mlp(), [2, 3], ["cpu"] * 2, 2)),  # type: ignore[arg-type]
    case("got 'sometimes'", "'except_last'", pipe, checkpoint="sometimes"),
    case("got 1.5", "a number from 0 to 1", pipe, checkpoint=1.5),
    case("got [0.5, True]", "for each stage", pipe, checkpoint=[0.5, True]),
    case("checkpoint has 3 values", "one for each stage", pipe, checkpoint=[0.5, 1, 0]),
    case("got str", "pass torch.optim.AdamW", lambda: pipe().memory(features(), optimizer="adam")),
    case("no layers", "pass some to GPipe", lambda: GPipe(nn.Sequential(), []).memory(features())),
    case(
        "memory holds for the model's own devices",
        "model.memory_limit = None",
        lambda: pipe(memory="1GiB").memory(features(), device="cuda"),
    ),
    case("a backward reached an input of stage 0, layer 1", "return the tensor", loss_on_what_is_kept),
    case(
        "got device='cuda:0', too",
        "leave one of them out",
        lambda: pipe().memory(features(), measure=True, device="cuda"),
    ),
    case("got '20 apples'", "offload", pipe, memory="20 apples"),
    case("memory has 3 values", "one for each device", pipe, memory=["1GiB"] * 3),
    case("memory is 10 bytes on cpu", "more chunks", lambda: pipe(memory="10B")(features())),
    case("tune with memory='1GiB'", "model.train()", lambda: tune(pipe().eval(), features(), memory="1GiB")),
    case("made by GPipe.from_model", "pass memory to GPipe.from_model", lambda: tune_a_model_within_memory()),
    case("got torch.float16", "torch.float32", pipe, grad_dtype=torch.float16),
    case("got 'fast'", "'pinned'", pipe, transport="fast"),
    case("got 'fast'", "'eager'", pipe, backend="fast"),
    case("got 'x'", "one integer for each input", pipe, batch_dim="x"),
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
    case("model(..., ...)", "it takes (input", call, features(), 1),
    case("got meta", "pass x.to('cpu')", call, features().to("meta")),
    case("all tensors are replicated", "without gpipe_fast.replicate", call, replicate(features())),
    case("[8, 6], [3, 6]", "wrap inputs", call, features(8), features(3)),
    case("got a tensor of layout torch.sparse_coo", "to_dense", call, features().to_sparse()),
    case("got a 0-dimensional tensor", "gpipe_fast.replicate", call, torch.tensor(1.0)),
    case("got set", "may be nested in tuples", call, {1}),
    case("got length 2: (0, 1)", "expected length 1", call, features(), batch_dim=(0, 1)),
    case("named 'recording'", "rename the layer", model_with_a_layer_named, "recording"),
    case("got str", "integers", lambda: pipe()["x"]),  # type: ignore[index]
    case("partitions", "set balance instead", assign, "partitions", 3),
    case("got 'cuda', and the stages are on cpu", "set model.devices", lambda: pipe().cuda()),
    case("cannot be assigned, added or removed", "create a new GPipe", delete_a_layer),
    case(
        "devices ['cpu', 'cpu', 'cpu']", "leave the model.recording() block", change_devices_while_recording
    ),
    case("got 0.5", "positive integer or None", assign, "threads_per_stage", 0.5),
    case("spy", "remove the hook", call_with_a_global_hook, "aten"),
    case("got 2 arguments", "takes one positional argument", lambda: GPipe(nn.Sequential(), [])(1, 2)),
    case("torch.func.vmap", "plain Sequential", lambda: torch.func.vmap(pipe())(features()[None])),
]

# Devices and memory

GPU = torch.device("cuda:0")


def place(layer_bytes: int, total: int, free: int, stages: int = 2) -> None:
    """Places stages of one layer each on a GPU with so many bytes in total and free."""
    layers = [[("0", nn.Linear(layer_bytes // 4, 1, bias=False))] for _ in range(stages)]
    with mock.patch.object(torch.cuda, "mem_get_info", return_value=(free, total)):
        check_partitions_fit(layers, [GPU] * stages)


def connect_without_peer_access() -> None:
    with mock.patch.object(_extension, "route", return_value=None):
        pipe(transport="peer")


def move_a_shared_parameter() -> None:
    with mock.patch("gpipe_fast.runtime.plan._replicated_parameters", return_value=[0]):
        call(features(), backend="eager")


def share_a_buffer() -> None:
    first, second = nn.BatchNorm1d(6), nn.BatchNorm1d(6)
    second.running_mean = first.running_mean
    call(features(), layers=(first, second), balance=[1, 1])


MIB = 1 << 20

DEVICES = [
    case("got 'cpu'", "devices=['cpu'] * K", pipe, devices="cpu"),
    case("got None", "such as 'cpu'", pipe, devices=[None, None]),
    case("got 'cpux'", "such as 'cpu'", pipe, devices=["cpu", "cpux"]),
    case("devices: 1, partitions: 2", "a device for each stage", pipe, devices=["cpu"]),
    case("got mps", "pass devices such as", pipe, devices=["mps", "mps"]),
    case("got 'meta'", "pass device='cuda'", explain, "meta"),
    case("got 'cpu:7x'", "such as 'cpu'", explain, "cpu:7x"),
    case("got Tensor", "also=[x]", prepare_also, features()),
    case("another thread runs layers", "wait until its call has ended", explain_while_layers_run),
    case("cuda:99", "CUDA_VISIBLE_DEVICES", pipe, devices=["cpu", "cuda:99"]),
    case("layer '0' (Linear)", "use a larger device", place, 4 * MIB, 7 * MIB, 7 * MIB),
    case("layer '0' (Linear)", "to_empty", profile_layers, mlp().to("meta"), features()),
    case(
        "'weight' on the meta device", "load_weights", call, features(), layers=(nn.Linear(6, 2).to("meta"),)
    ),
    case("stages 0, 1", "another balance", place, 4 * MIB, 9 * MIB, 9 * MIB),
    case("stages 0, 1", "free memory there", place, 4 * MIB, 16 * MIB, 7 * MIB),
    case("stages 0 and 1", "use 'auto'", connect_without_peer_access),
    case("layers 0 to 1", "in one stage", move_a_shared_parameter),
    case("'weight' on cpu", "move the whole layer", check_placed, [Stage([nn.Linear(2, 2)], 0, GPU)]),
    case("of shape [6]", "in one stage", share_a_buffer),
]

# Balance and profiling

BALANCE = [
    case("got 'x'", "a finite number", balance_by_size, 2, mlp(), features(), param_scale="x"),
    case("got 'best'", "'variance'", balance_by_cost, 2, [1, 2], objective="best"),
    case("got 3", "a number for each layer", balance_by_cost, 2, 3),
    case("got 2.0", "positive integer", balance_by_cost, 2.0, [1, 2]),
    case("0 < 1", "positive integer", balance_by_cost, 0, [1, 2]),
    case("2 < 3", "at most one partition for each layer", balance_by_cost, 3, [1, 2]),
    case("layer 1 must be a finite number, got nan", "", balance_by_cost, 1, [1, float("nan")]),
    case("got None", "seconds", balance_by_time, 2, mlp(), features(), timeout=None),
    case("got 0", "positive integer", profile_layers, mlp(), features(), threads=0),
    case("got Linear", "must be nn.Sequential", balance_by_time, 2, nn.Linear(2, 2), features()),
    case("layer '0'", "run the module once", balance_by_time, 1, nn.Sequential(nn.LazyLinear(2)), features()),
    case("got meta", "only on CPU and CUDA", balance_by_time, 2, mlp(), features(), device="meta"),
    case("got Linear", "LayerProfile", table, [nn.Linear(1, 1)]),
    case("layer '0' (Linear)", "shapes cannot be multiplied", balance_by_time, 2, mlp(), torch.ones(8, 5)),
    case("got 'auto'", "positive integer", balance_by_size, 2, mlp(), features(), chunks="auto"),
    case("got tuple", "at least one tensor", balance_by_size, 2, mlp(), ()),
    case("on the meta device", "one with data", balance_by_size, 2, mlp(), features().to("meta")),
]

# Reports, recordings and schedules


def record_twice() -> None:
    model = pipe()
    with model.recording(), model.recording():
        pass


def verify_frozen_layers() -> object:
    return verify(pipe(nn.Tanh()), features(), torch.sum)


def scheduled(*rows: str, slots: int = 2) -> Schedule:
    return Schedule.parse("\n".join(rows), slots=slots)


def report_of_a_step() -> Report:
    event = Event(Action.parse("0F0"), False, 0.0, 1.0)
    recording = Recording()
    recording.stages = ((event,),)
    return recording.report()


def save_without_pillow() -> None:
    with mock.patch.dict(sys.modules, {"PIL": None, "PIL.Image": None}):
        report_of_a_step().save("x.png")


def report_with_an_updating_hook() -> None:
    model = pipe()
    next(model.parameters()).register_post_accumulate_grad_hook(lambda parameter: None)
    model.report(features())


def tune_a_model_with_a_loss() -> None:
    tune(GPipe.from_model(mlp(), args=(features(),), chunks=2), features(), loss_fn=torch.sum)


def tune_a_model_within_memory() -> None:
    tune(GPipe.from_model(mlp(), args=(features(),), chunks=2), features(), memory="1GiB")


def run_command(*arguments: str) -> None:
    """Runs the command, and raises the error that it would print."""
    options = command._parser().parse_args(arguments)
    options.run(options)


def report_of_a_file(text: str, *arguments: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model_of_a_test.py"
        file.write_text(text)
        run_command("report", f"{file}:make", *arguments)


_MAKES_A_MODEL = """
import torch
import gpipe_fast

def make():
    return gpipe_fast.GPipe(torch.nn.Sequential(torch.nn.Linear(2, 2)), [1], chunks=1), torch.ones(2, 2)
"""


def part_of_a_step() -> Recording:
    recording = Recording()
    recording.stages = ((Event(Action.parse("0F1"), False, 0.0, 1.0),),)
    return recording


def one_action_too_many() -> Schedule:
    return Schedule((tuple(map(Action.parse, ("0F0", "0F1", "0F2"))),), 2, 2)


REPORTS = [
    case("got Linear", "wrap it", doctor, nn.Linear(1, 1)),
    case("got int", "with model.recording()", draw, 3),
    case("got 'x.png'", ".svg", draw, Recording(), "x.png"),
    case("holds no step", "call the model inside its block", draw, Recording()),
    case("holds no step", "model.recording()", Recording().bubble),
    case("being recorded already", "leave the first", record_twice),
    case("got Linear", "wrap it", verify, nn.Linear(1, 1), features(), torch.sum),
    case("got int", "loss_fn=", verify, pipe(), features(), 3),
    case("got float", "with torch", verify, pipe(), features(), lambda y: float(y.sum())),
    case("got shape [8, 4]", ".mean()", verify, pipe(), features(), lambda y: y),
    case("requires_grad=False", "require gradients", verify_frozen_layers),
    case("'2X0'", "expected a form like 2F0", Action.parse, "2X0"),
    case("got 0 stages", "at least one", bubble, 0, 1),
    case("not whole", "stage 0 does", part_of_a_step().report),
    case("got 'x.gif'", ".html, .svg, .png, .json", report_of_a_step().save, "x.gif"),
    case("needs Pillow", "pip install pillow", save_without_pillow),
    case("got Linear", "wrap the model", tune, nn.Linear(1, 1)),
    case("got 0", "seconds must be a positive number", tune, pipe(), features(), seconds=0),
    case("computes its own loss", "pass the model's labels", tune_a_model_with_a_loss),
    case("chooses the devices of --check", "add --check", run_command, "doctor", "--devices", "cpu"),
    case("there is no cuda:99", "devices that PyTorch sees", run_command, "doctor", "--devices", "cuda:99"),
    case("got --devices cpu", "--devices cpu cpu", run_command, "doctor", "--check", "--devices", "cpu"),
    case("got 'train.py'", "expected FILE.py:FUNCTION", run_command, "report", "train.py"),
    case("no file missing.py", "", run_command, "report", "missing.py:make"),
    case("No module named 'missing'", "pass the path of a file", run_command, "report", "missing:make"),
    case("has no function 'make'", "", report_of_a_file, "x = 1"),
    case("failed: ZeroDivisionError", "", report_of_a_file, "make = lambda: 1 / 0"),
    case("too large", "", run_command, "simulate", "--forward=1e308", "--json"),
    case("got 'one'", "such as 2 or 1,2.5", command._numbers, "one"),
    case("returned int", "must return (model, x)", report_of_a_file, "make = int"),
    case("returned a tuple of int", "must return (model, x)", report_of_a_file, "make = lambda: (1, 2)"),
    case(
        "--save x.gif",
        "the path must end in one of them",
        report_of_a_file,
        _MAKES_A_MODEL,
        "--save",
        "x.gif",
    ),
    case("got -1", "at least 0", run_command, "simulate", "--forward=-1"),
    case("got 'foo'", "gpipe, 1f1b", simulate, "foo", 2, 2),
    case("got 0", "num_devices must be at least 1", simulate, num_devices=0),
    case("got nan", "", simulate, latency=float("nan")),
    case("target was passed", "pass loss_fn", lambda: pipe().report(features(), target=features())),
    case("has a post-accumulate-grad hook", "remove the hook", report_with_an_updating_hook),
    case("so there is nothing to report", "pass some", lambda: GPipe(nn.Sequential(), []).report(features())),
    case("2 values for 3 stages", "or one each", simulate, "gpipe", 3, 4, forward=[1, 2]),
    case("must be finite and at least 0, got -1", "", simulate, "gpipe", 3, 4, backward=-1),
    case("got weights=3 and backward=2", "as backward", simulate, "gpipe", 3, 4, weights=3, backward=2),
    case("got 0 and 0", "bandwidth positive", simulate, "gpipe", 3, 4, bandwidth=0, latency=0),
    case("got 'some'", "'except_last'", simulate, "gpipe", 3, 4, checkpoint="some"),
    case("num_stages must be at least 1, got 0", "", fill_drain, 0, 2),
    case(
        "1RECV_F1 would receive from 0SEND_F0",
        "keeps its order",
        scheduled,
        "0F0,0SEND_F0,0F1,0SEND_F1",
        "1RECV_F1,1F1,1RECV_F0,1F0",
    ),
    case("0F1 comes after 0B0", "", lambda: scheduled("0F0,0B0,0F1,0B1").forward_part()),
    case("no backwards", "", lambda: scheduled("0F0,0F1").backward_part()),
    case(
        "with 2 slots: 0RECV_B0 waits for 1SEND_B0",
        "",
        scheduled,
        "0F0,0SEND_F0,0RECV_B0,0B0,0F1,0SEND_F1,0RECV_B1,0B1",
        "1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1",
    ),
    case("0F2 belongs to none of the 2 micro-batches", "", one_action_too_many),
    case("stage 0 does 0F0 0F0", "has to do 0F0", scheduled, "0F0,0F0"),
    case("got 2", "within 0 and 1", check_saved_fraction, 2),
]

OF_ARGUMENTS = [*ARGUMENTS, *DEVICES, *BALANCE, *REPORTS]
