"""Uses of `GPipe` with a mesh that raise errors. Two ranks are two pipelines of one process."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from gpipe_fast import GPipe, _extension, shard, tune
from gpipe_fast.distributed import torchrun
from gpipe_fast.distributed.mesh import (
    check_replicas,
    check_shards,
    checked_timeout,
    grid_of,
    own_device,
    ties_of,
)
from gpipe_fast.distributed.ranks import Ranks
from gpipe_fast.distributed.timed_store import TimedStore
from gpipe_fast.distributed.torchrun import RankInfo
from gpipe_fast.from_model.tensor_plan import apply_plan
from gpipe_fast.layers.sharded import GradientPart, check_unchanged_in_backward
from gpipe_fast.layers.structure import ONE_TENSOR
from gpipe_fast.runtime.compiled import CompiledStage
from gpipe_fast.runtime.processes import ONE_PROCESS
from gpipe_fast.schedule import SCHEDULES, Schedule
from gpipe_fast.schedule.unbuffered import check_unbuffered
from gpipe_fast.trace.joint_graph import GraphPort, GraphRole, PortTensor
from gpipe_fast.training.losses import loss_layer, loss_of
from gpipe_fast.training.update import _check_same, checked_update
from tests.internals import runner_of, stages_of
from tests.unit.message_cases import WHILE_LAYERS_RUN, case, features, mlp, run_command, under
from tests.unit.message_cases_of_models import Model, two_blocks, with_function_between
from tests.untraceable import FunctionLayer


def ranks(timeout: float = 0.2) -> list[Ranks]:
    store = dist.HashStore()
    return [Ranks(index, 2, store, timeout) for index in range(2)]


def behind_a_lost_one() -> None:
    """Rank 0 waits for rank 1, which waits for rank 2 and has noticed the failure."""
    store = dist.HashStore()
    store.set("0/here/1", "")
    with mock.patch("gpipe_fast.distributed.ranks._GRACE_SECONDS", 0.0):
        Ranks(0, 3, store, 0.2).fail(
            "receiving from stage 1, in another process, failed: that process has ended, or takes longer "
            "than the argument timeout of GPipe allows"
        )


def model_of_experts() -> nn.Module:
    model = nn.Module()
    model.experts, model.tp_plan = nn.Linear(2, 2), {"experts": "moe_tp_experts"}  # type: ignore[assignment]
    return model


def few_heads() -> nn.Module:
    model = nn.Module()
    model.config = mock.Mock(spec_set=["num_attention_heads", "num_key_value_heads"])  # type: ignore[assignment]
    model.config.num_attention_heads, model.config.num_key_value_heads = 8, 2
    model.attention, model.tp_plan = nn.Linear(2, 2), {"attention": "colwise"}  # type: ignore[assignment]
    return model


def pipe(*layers: nn.Module, **options: Any) -> GPipe:
    """Returns the pipeline of the first of two ranks."""
    model = nn.Sequential(*layers) if layers else mlp()
    return GPipe(model, **{"balance": [1, len(model) - 1], "chunks": 2, "mesh": ranks()[0], **options})


def mesh(*names: str) -> Any:
    return mock.Mock(spec=DeviceMesh, ndim=len(names), shape=(2,) * len(names), mesh_dim_names=names)


def tied() -> object:
    first, last = nn.BatchNorm1d(6), nn.BatchNorm1d(6)
    last.running_mean = first.running_mean
    return pipe(first, nn.ReLU(), last)


@contextlib.contextmanager
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def replicate_by_ddp(model: nn.Module) -> None:
    with group_of_one():
        DistributedDataParallel(model)


def assign(name: str, value: Any) -> None:
    setattr(pipe(), name, value)


def clip_others() -> None:
    model = pipe()
    optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(3))])
    model.step(features(), target=torch.zeros(8, 4), loss_fn=F.mse_loss, optimizer=optimizer, max_norm=1.0)


def other_arguments() -> None:
    with mock.patch.object(Ranks, "_connect"):
        for chunks, own in zip((2, 4), ranks(), strict=True):
            each = pipe(mesh=own, chunks=chunks)
            runner = runner_of(each)
            call = runner.prepared_call(runner.checked_inputs((features(),), {}), training=True)
            own.begin(call.pipeline, call.call, call.plan, runner.stages)


def outside() -> None:
    group = mock.Mock(spec=dist.ProcessGroup)
    with (
        mock.patch.object(dist, "get_rank", return_value=2),
        mock.patch.object(dist, "get_process_group_ranks", return_value=[0, 1]),
    ):
        Ranks.of_mesh(group, timeout=1.0, devices=None)


def sharded(shard: Callable[..., nn.Module]) -> None:
    with group_of_one():
        layers = mlp()
        shard(layers[0], mesh=init_device_mesh("cpu", (1,)))
        GPipe(layers, [1, 4])


def distribute(layer: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return distribute_module(layer, mesh)


def check_layer(layer: nn.Module, ranks: list[int], device: str = "cpu", partial: bool = False) -> None:
    """Checks a layer whose parameters are DTensors over rank 0."""
    with group_of_one():
        distribute(layer, init_device_mesh("cpu", (1,)))
        if partial:
            terms = DTensor.from_local(torch.ones(4, 6), layer.weight.device_mesh, [Partial()])  # type: ignore[arg-type, union-attr]
            layer.weight = nn.Parameter(terms)
        check_shards([layer], ranks, ranks, torch.device(device))


def returned() -> None:
    with group_of_one():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        layers = nn.Sequential(nn.Linear(6, 4), nn.Tanh())
        parallelize_module(layers[0], mesh, ColwiseParallel(use_local_output=False))
        GPipe(layers, [1, 1], mesh=mesh)(features())


def dropping() -> None:
    with group_of_one():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        layers = nn.Sequential(nn.Sequential(nn.Linear(6, 4), nn.Dropout()))
        parallelize_module(layers[0], mesh, {"0": ColwiseParallel(use_local_output=False)})
        GPipe(layers, [1], mesh=mesh)(features())


def scaled() -> None:
    with group_of_one():
        layer = distribute(nn.Linear(6, 4), init_device_mesh("cpu", (1,)))
        checked_update(nn.Sequential(layer), None, torch.amp.GradScaler("cpu"), None)


def changed_before_backward() -> None:
    with group_of_one():
        weight = distribute(nn.Linear(6, 4), init_device_mesh("cpu", (1,))).weight
        output = torch.zeros(2, requires_grad=True).exp()
        check_unchanged_in_backward([output], [weight])  # type: ignore[list-item]
        with torch.no_grad():
            weight.mul_(2)  # type: ignore[operator, union-attr]
        output.sum().backward()


def other_placements() -> None:
    port = GraphPort(GraphRole.PARAMETER_GRADIENT, 0, placements=(Partial(),))
    stage = mock.Mock(sharded_gradients={0: GradientPart((Replicate(),), (4,))}, first_layer=1)
    traced = mock.Mock(**{"ports.outputs": [PortTensor(port, torch.zeros(4))]})
    own = mock.Mock(stage=stage, traced=traced, **{"segment_key.parameters": (0,)})
    CompiledStage._note_sharded_gradients(own)


def tied_shards() -> None:
    with group_of_one():
        first, last = nn.Linear(6, 4), nn.Linear(6, 4)
        distribute(first, init_device_mesh("cpu", (1,)))
        last.weight = first.weight
        ties_of([nn.Sequential(first), nn.Sequential(last)])


def foreign_group() -> None:
    with group_of_one():
        Ranks(0, 1, dist.HashStore(), 0.2, names=[3]).own_group(0, dist.group.WORLD.group_name)  # type: ignore[union-attr]


def in_rows(name: str = "fsdp", again: bool = False, replicas: Any = (0,), lost: str = "") -> None:
    """Divides a layer over rank 0, which has one replica of several."""
    with group_of_one():
        dimension = init_device_mesh("cpu", (1,), mesh_dim_names=(name,))
        layers = shard(nn.Sequential(nn.Linear(6, 4)), dimension)
        if again:
            shard(layers, dimension)
        check_shards(layers, [0], replicas, torch.device("cpu"))
        if lost:
            own = Ranks(0, 1, dist.HashStore(), 0.2, num_replicas=2)
            with mock.patch("gpipe_fast.distributed.ranks.gather_rows", side_effect=RuntimeError(lost)):
                own.with_whole([*layers.parameters()], [*layers.parameters()])


def other_collectives() -> None:
    ranks = Ranks(0, 1, dist.HashStore(), 0.2, num_shards=2)
    ranks._store.set("0/collectives/0/0", '[5, {"collective 0 of 0F": "all_reduce"}]')
    ranks._check_collectives(mock.Mock(saved_fractions=[[1.0]]), mock.Mock(compiled=()))


def other_start() -> None:
    store = dist.HashStore()
    for replica in range(2):
        layers = mlp()
        with torch.no_grad():
            layers[0].weight += replica
        own = Ranks(0, 2, store, 0.2, replica=replica, num_replicas=2)
        own._check_equal(0, stages_of(pipe(*layers, mesh=own))[0])


def other_tie() -> None:
    store = dist.HashStore()
    for rank in range(2):
        layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        layers[2].weight = layers[0].weight
        with torch.no_grad():
            layers[0].weight.fill_(rank)
        own = Ranks(rank, 2, store, 0.2)
        stages = stages_of(GPipe(layers, [1, 2], mesh=own))
        with contextlib.suppress(RuntimeError) if rank == 0 else contextlib.nullcontext():
            own._check_ties(stages)  # the first rank waits in vain


def other_failed() -> None:
    first, second = ranks()
    first.fail("ValueError: no data")
    second.poll()


def backward_and_call() -> None:
    first, second = ranks()
    first.begin_backward(3)
    with mock.patch.object(Ranks, "_digests_of", return_value={"call/0": ("digest", {})}):
        second.begin(mock.Mock(), mock.Mock(), mock.Mock(compiled=()), [])


def backwards_in_other_orders() -> None:
    for forward, own in zip((3, 2), ranks(), strict=True):
        own.begin_backward(forward)


def moves(model: Any, x: Tensor, early: bool = False, labels: Tensor | None = None) -> Tensor:
    """Uses a parameter before the blocks, or after them; the loss has weights of classes."""
    if early:
        x = x + model.bias
    x = two_blocks(model, x)
    if not early:
        x = x + model.bias
    return x if labels is None else F.cross_entropy(x, labels, model.classes)


LABELS = torch.arange(4)


def made(model: Model | None = None, **options: Any) -> Any:
    """Returns a model of the first of two ranks."""
    model = model or Model(moves)
    model.register_buffer("classes", torch.ones(4))
    options = {"args": (torch.ones(4, 4),), "mesh": ranks()[0]} | options
    return GPipe.from_model(model, chunks=2, balance=[1, 1], **options)


def branch_on_bias(model: Any, x: Tensor) -> Tensor:
    return x if model.bias[0] > 0 else -x


def other_inputs() -> None:
    for number, own in enumerate(ranks()):
        own.check_inputs(functools.partial("{} targets".format, number))


def backward_and_recording() -> None:
    first, second = ranks()
    first.begin_backward(3)
    second.exchange({})


def examination(rank: int) -> torchrun._Examination:
    return torchrun._Examination(rank, 2, TimedStore(dist.HashStore(), 0.1), 0.1)


def without_a_report() -> None:
    with mock.patch.object(torchrun._Examination, "_edges", return_value=[]):
        own = examination(1)
        own._store.set("rank/0", json.dumps(dict.fromkeys(RankInfo.__annotations__, "")))
        own.run(lambda _: None)


def unconnected() -> None:
    own, _ = ranks()
    with mock.patch.object(dist, "ProcessGroupGloo", side_effect=RuntimeError("refused")):
        own._group(1, 0)


def with_a_store(seconds: float, check: Any) -> None:
    TimedStore(mock.Mock(check=check), seconds).check(["key"])


LOST = mock.Mock(side_effect=dist.DistNetworkError("Broken pipe"))


def in_python() -> object:
    return pipe(nn.Linear(6, 6), FunctionLayer(lambda x: x if x.sum() > 0 else -x))(features())


def cells(*texts: str) -> str:
    """Returns a row of a schedule: each text for six micro-batches."""
    return ",".join(text.format(m) for text in texts for m in range(6))


RECEIVED_AHEAD = Schedule.parse(
    "\n".join([cells("0F{0},0SEND_F{0}"), cells("1RECV_F{0}", "1F{0},1SEND_F{0}"), cells("2RECV_F{0},2F{0}")])
)
OTHER_ORDER = Schedule.parse("""
0F0,0SEND_F0,0F1,0SEND_F1
1RECV_F0,1RECV_F1,1F1,1SEND_F1,1F0,1SEND_F0
2RECV_F1,2F1,2RECV_F0,2F0
""")
NO_CHANNELS = mock.patch.object(_extension, "make_channels", None)
NOWHERE = mock.patch.dict(os.environ, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})
NO_NUMBERS = dict.fromkeys(("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), "one")


def largest_of_replicas() -> None:
    """Measures a loss whose number of all targets replicas cannot add up."""
    y, t = torch.ones(4, 3), torch.ones(4)
    layer = loss_layer(
        loss_of(lambda y, t: y.sum() / t.max()), ONE_TENSOR, [0], False, 0, torch.device("cpu")
    )
    layer.prepare([y.requires_grad_()], [t, None])
    layer.measure(torch.zeros(64), [t], 4, Ranks(0, 1, dist.HashStore(), 0.2, num_replicas=2))


FOUR = mock.Mock(**{"size.return_value": 4})
SHARDS = Ranks(0, 1, dist.HashStore(), 0.2, num_shards=2)

OF_RANKS = [
    case("got a model with a mesh", "a dimension 'dp_replicate'", lambda: replicate_by_ddp(pipe())),
    case("capture=True with a mesh", "without mesh", assign, "capture", True),
    case("memory='1GiB' with a mesh", "a number for each stage", pipe, memory="1GiB"),
    case("lacks", "pass mesh=None", under, NO_CHANNELS, grid_of, mock.Mock(spec=dist.ProcessGroup)),
    case("got str", "pass init_device_mesh(", pipe, mesh="pp"),
    case("('dp_replicate',) of sizes (2,)", "pass mesh_dim_names=", pipe, mesh=mesh("dp_replicate")),
    case("{'cp': 2}", "make a mesh of these", pipe, mesh=mesh("dp_replicate", "cp", "pp")),
    case("whole in each replica or divided", "pass one of", pipe, mesh=mesh("dp_replicate", "fsdp")),
    case("over the dimension 'fsdp' alone, got ", "pass mesh['fsdp']", in_rows, "tp"),
    case("the parameter '0.weight' is a DTensor already", "without DTensors", in_rows, again=True),
    case("(Shard(dim=0),) over the ranks [0]", "got mesh['fsdp']", in_rows, replicas=[0, 1]),
    case(
        "gathers parameters from ranks [1] along 'fsdp'", "a larger timeout", in_rows, lost="gloo/transport"
    ),
    case("has num_key_value_heads=2, which 4 processes", "divides 2", apply_plan, few_heads(), FOUR),
    case("ranks [0, 1] of torch.distributed, but this process is rank 2", "only those", outside),
    case("'weight' of layer 0 (Linear) differs between rank 0 and rank 2", "the same seed", other_start),
    case("tied copies of 'weight' of layer 0 (Linear) differ on ranks 0 and 1", "the same seed", other_tie),
    case("layer 0 (FSDPLinear) is sharded by fully_shard", "gpipe_fast.shard(", sharded, fully_shard),
    case("layer 0 (Linear) has the DTensor 'weight'", "pass GPipe mesh=", sharded, distribute),
    case("has the buffer 'running_mean'", "full_tensor()", check_layer, nn.BatchNorm1d(6), [0]),
    case("over the ranks [0]", "pass GPipe mesh=", check_layer, nn.Linear(6, 4), [3]),
    case("(Partial(sum),)", "Replicate()", check_layer, nn.Linear(6, 4), [0], partial=True),
    case("on cpu for a stage on cuda:0", "'cuda', ", check_layer, nn.Linear(6, 4), [0], "cuda:0"),
    case(
        "on cuda:0, and processes exchange",
        "'nccl'",
        check_layer,
        nn.Linear(6, 4, device="meta"),
        [0],
        "cuda:0",
    ),
    case("2 processes along 'tp'", "first call parallelize_module", check_shards, [], [0, 1], [], None),
    case("the stage returns a DTensor", "use_local_output=True", returned),
    case("draws random numbers for a DTensor", "to_local()", dropping),
    case("got a model with DTensors", "bfloat16", scaled),
    case("shape [4, 6] is at version 1", "expected version 0", changed_before_backward),
    case("(Replicate(),)", "by redistribute", other_placements),
    case("stage 1 has a collective of the group 'g'", "pass GPipe mesh=", ONE_PROCESS.own_group, 1, "g"),
    case("stages [0, 1] share a DTensor of shape [4, 6]", "in one stage", tied_shards),
    case("of the ranks [0], which", "dimension 'tp' only", foreign_group),
    case("run other collectives than those of rank 5", "do the same on both", other_collectives),
    case("rank 2 is lost", "timeout of GPipe", behind_a_lost_one),
    case("ranks [1] along 'tp'", "a larger timeout", lambda: SHARDS.fail("gloo/transport/tcp/pair.cc")),
    case("got 0", "must be a positive number", checked_timeout, 0),
    case("3 on cuda:0", "'nccl'", check_replicas, 3, torch.device("cuda:0"), False),
    case("3 stages, but mesh has 2", "one stage for each", pipe, balance=[1, 1, 3]),
    case("has 3 devices, but mesh has 2", "such as devices='cuda'", own_device, ["cpu"] * 3, "cpu", 0, 2),
    case("backend='eager'", "pass backend='auto'", pipe, backend="eager"),
    case("share the buffer '0.running_mean', which is also '2.running_mean'", "choose a balance", tied),
    case("cannot be copied", "save model.state_dict()", lambda: copy.deepcopy(pipe())),
    case("[2, 3]", "make a new GPipe", assign, "balance", [2, 3]),
    case("on rank 0 of 2", "call model.report", lambda: tune(pipe(), features())),
    case("got list", "call model(x)", lambda: pipe().stream([])),
    case("rank 1 updates with 0.1, and rank 0 with 0.2", "the same scale", _check_same, [0.2, 0.1]),
    case("of shape [3]", "use another optimizer", clip_others),
    case("'0.p0' is in processes [1]", "only calls", lambda: made()(torch.ones(4, 4), early=True)),
    case("lead to 1 targets here, and to 0 targets there", "pass the same inputs", other_inputs),
    case("'bias' of a Model", "blocks=...", lambda: made(with_function_between(branch_on_bias))),
    case("weights of classes", "compute the loss from", made, args=(torch.ones(4, 4), False, LABELS)),
    case(
        "['moe_tp_experts'], as for experts", "parallelize_module(model", apply_plan, model_of_experts(), None
    ),
    case("that is no sum", "pass normalizer=", largest_of_replicas),
    case("got a mesh of 2", "without mesh", lambda: made().plain_loop(torch.ones(4, 4))),
    case("cannot be copied", "save model.state_dict()", lambda: copy.deepcopy(made())),
    case("differ in chunks: here 4, there 2", "make the same calls", other_arguments),
    case("rank 0 has failed", "no data", other_failed),
    case("for 0.2 s for ranks [1]", "larger timeout", lambda: pipe()(features())),
    case("rank 1 calls the pipeline, but another rank runs the backward of", "order", backward_and_call),
    case("rank 1 runs the backward of run 2", "in the same order", backwards_in_other_orders),
    case("another rank runs the backward of run 3", "and recordings", backward_and_recording),
    case("'one'", "must be numbers", under, mock.patch.dict(os.environ, NO_NUMBERS), run_command, "doctor"),
    case("ranks [1] of 2", "same MASTER_ADDR", lambda: examination(0).run(lambda _: None)),
    case("has not found rank 0 at MASTER_ADDR=127.0.0.1", "must be", under, NOWHERE, torchrun._store, 1, 0.1),
    case("0.8 s for the report of rank 0", "start all ranks again", without_a_report),
    case("0.2 s for rank 1", "start all ranks again", lambda: list(examination(0)._backends(0, 1))),
    case("cannot connect to rank 1", "argument timeout of GPipe", unconnected),
    case("for 0.1 s", "start all processes again", with_a_store, 0.1, lambda _: threading.Event().wait(20)),
    case("Broken pipe", "start all processes again", with_a_store, 9.0, LOST),
    case("layer 1 (FunctionLayer)", "all layers must be traced", in_python),
    case("layers cannot be traced", "wait until its", under, WHILE_LAYERS_RUN, lambda: pipe()(features())),
    case("stages [0, 2]", "stages of one process", check_unbuffered, SCHEDULES["interleaved"](4, 4)),
    case("0SEND_F5 waits for 1SEND_F0", "receives later", check_unbuffered, RECEIVED_AHEAD, [(0, 2)]),
    case("0SEND_F0 sends a skip tensor", "same order", check_unbuffered, OTHER_ORDER, [(0, 2)]),
]
