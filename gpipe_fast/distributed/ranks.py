"""Ranks: the processes of a pipeline and of its replicas, which agree on every run and its outcome.

All ranks make the same runs in the same order, so they number them alike. In a store of torch.distributed,
run n has these keys, of which the first rank to come writes the digests and the outcome. A column is the
ranks that have one part each of all stages: there is one for each replica and shard::

    n/call      the digest of what all replicas have in common, or whose backward it is: a rank with another
                one fails; none without replicas. Ends in 'new' if the plan of the first rank is new
    n/call/c    the digest of the plan of column c, for its ranks, or whose backward it is; likewise.
                Behind a digest is what the update takes, what a new plan computes and, but in n/call, the
                seed of the first run
    n/shards/i  the digest of what the shards of replica i have in common; none without shards
    n/inputs/i  what the ranks of replica i find in the elements of inputs, if all of them read these
    n/done      the number of ranks that have succeeded
    n/outcome   'done', written by the last of them; or which rank failed first, and why
    n/collectives/i/p  what the ranks of replica i with the stages of process p exchange in a new plan
    n/start/s/d     checksums of the parameters of shard d of stage s in the first replica, before groups are
                made; n/start/s/of/i: of those that all shards of replica i have
    n/tie/c/t/s     the checksum of the copy of tied parameter t in stage s of column c
    n/ready/r   set by rank r before groups are made or clocks compared, which cannot be ended early, and in
                runs of new plans, for which some ranks compile longer than others
    n/count/c   what the ranks of column c, by its last stage, add to a sum over replicas: the divisor of the
                loss of a step, or what else its loss measures of the mini-batch
    n/loss/c    the losses of a step of column c, from its last stage
    n/update/r  what the update of the step before needs from rank r, and
    n/share/r   what it shares of a recording with the others of its replica: in pieces, r/0, r/1 ...
    n/here/r    set by rank r after another rank was lost
    n/work/r    counts while rank r compiles for long: ranks that wait for it go on waiting
    plan/h      the description of the plan with digest h, for the message of a rank that has another
    ended/r     the latest run for whose end rank r has waited, for error messages

A rank changes gradients and buffers only after the outcome 'done', so they change in all ranks or in none.
A process that an error ends, anywhere, is a rank that has failed.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import json
import re
import sys
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial, reduce
from itertools import combinations
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from gpipe_fast._extension import Channels, Pipeline, make_channels
from gpipe_fast.devices import Device
from gpipe_fast.distributed.agreement import (
    Description,
    describe_call,
    describe_code,
    describe_collectives,
    describe_inputs,
    describe_model,
    difference,
    digest_of,
    shortened,
)
from gpipe_fast.distributed.clocks import Offset, offset_to_first
from gpipe_fast.distributed.mesh import (
    check_balance,
    check_not_shared,
    check_replicas,
    check_settings,
    check_shards,
    default_kind,
    grid_of,
    num_shards_of,
    own_device,
    ties_of,
    uses_nccl,
)
from gpipe_fast.distributed.timed_store import TimedStore
from gpipe_fast.layers.quantized import stored_tensors
from gpipe_fast.layers.sharded import gather_rows, is_gathered, is_sharded
from gpipe_fast.layers.structure import layer_title
from gpipe_fast.runtime.cache import Cache
from gpipe_fast.runtime.plan import PlannedCall
from gpipe_fast.runtime.planner import Call
from gpipe_fast.runtime.processes import Processes
from gpipe_fast.runtime.settings import Settings
from gpipe_fast.runtime.stage import Stage, Tie
from gpipe_fast.torch_private.collectives import group_of, register_group, unregister_group
from gpipe_fast.torch_private.environment import default_store
from gpipe_fast.trace.joint_graph import parameters_of

if TYPE_CHECKING:
    from gpipe_fast.distributed.mesh import Mesh

# What gloo says in a collective if another process has ended, or does not answer. Errors of transfers between
# stages, which quote it, say so.
_LOST = re.compile("(?!.*(in another process|along 'fsdp')).*gloo/transport", re.DOTALL)
_DONE, _UNSET = "done", "unset"
# Seconds between two looks at the outcome in a wait for another key; and the maximum from one look at the
# key to the next, which is a tenth of the time waited: a wait of the store itself cannot be ended early, and
# logs when it is over.
_POLL_SECONDS, _MAX_SLEEP_SECONDS = 0.1, 0.002
# The seconds after a rank has lost another one in which the others say that they are there.
_GRACE_SECONDS = 4.0
# The maximum number of blocks of a transfer's kernel, which by default depends on the links. NCCL has buffers
# for each, of 4 MiB by default (NCCL_BUFFSIZE). The number has not been measured.
_MAX_NCCL_BLOCKS = 4
# The maximum number of plans whose digests are kept.
_MAX_DIGESTS = 64

# Keys of a run that each replica has.
_OF_REPLICA = "shards", "inputs"
# Runs that are no calls; a digest does not begin so.
_NO_CALL = "the "
_BACKWARD, _EXCHANGE = f"{_NO_CALL}backward of run ", f"{_NO_CALL}end of a recording"
# What the ranks of a replica have in common in their first run; after a failure they may draw other seeds.
_SEED = "the mini-batch's seed (torch.manual_seed)"
_NOTHING_ASKED: Mapping[str, str] = {}
# The end of the digest of a run for whose plan all ranks wait.
_NEW = " new"
# The name under which the rank that comes first tells its number.
_FIRST = "rank"
# The maximum length of a value in the store, which refuses those of 8 MiB.
_MAX_LENGTH = 2**22
# The ranks of this process that are in use.
_every: weakref.WeakSet[Ranks] = weakref.WeakSet()
# By key in the store, a digest and what it is a digest of.
_Digests = dict[str, tuple[str, Description]]

# The number of pipelines of the same processes, which all of them make in the same order.
_numbers: Counter[str] = Counter()


_CPU = torch.device("cpu")


def gloo_group(store: Any, rank: int, size: int, timeout: float) -> Any:
    """Returns this process's end of a group."""
    return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout))


def nccl_group(store: Any, rank: int, size: int, timeout: float, max_blocks: int | None = None) -> Any:
    """As `gloo_group`. A transfer that takes longer than the timeout ends the process.

    Kernels of transfers take multiprocessors from the layers, and wait there for the other end. So they have
    streams of high priority, on which they begin before other kernels, and those that layers do not wait for
    have few blocks.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timedelta(seconds=timeout)
    if max_blocks is not None:
        options.config.min_ctas, options.config.max_ctas = 1, max_blocks
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _warm_up(groups: Mapping[tuple[int, int], Any], own: Collection[int], device: torch.device) -> None:
    """Makes the connections of groups of NCCL, which the first transfer of each would do.

    Both ends block until then, so the order of the groups is the same on all ranks.
    """
    for (sender, _), group in groups.items():
        byte = [torch.zeros(1, dtype=torch.uint8, device=device)]
        (group.send(byte, 1, 0) if sender in own else group.recv(byte, 0, 0)).wait()


def _unregister(names: Iterable[str]) -> None:
    for name in names:
        unregister_group(name)


def _within(prefix: str, store: Any) -> Any:
    """Returns the part of a store of torch.distributed whose keys have a prefix."""
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]


class Ranks(Processes):
    """The processes of one pipeline. Stages go round: stage s is on rank s mod P.

    Attributes:
        timeout: the maximum time, in seconds, to wait for another process.
        num_shards: the number of processes that have the same stages of the same replica.
        device: the device of this process's stage.
    """

    is_mesh = True
    _title = "gpipe_fast"  # the first part of the names of groups of collectives

    def __init__(
        self,
        index: int,
        size: int,
        store: Any,
        timeout: float,
        device: torch.device = _CPU,
        by_nccl: bool = False,
        replica: int = 0,
        num_replicas: int = 1,
        names: Sequence[int] | None = None,
        shard: int = 0,
        num_shards: int = 1,
    ) -> None:
        """Makes the ranks of a pipeline, of which this is number ``column * size + index``.

        A replica has ``num_shards`` columns: ``column = replica * num_shards + shard``.

        Args:
            index: as for `Processes`.
            size: as for `Processes`.
            store: a store of torch.distributed, which the ranks of no other pipeline have.
            timeout: as above.
            device: as above.
            by_nccl: as for `Processes`.
            replica: as for `Processes`.
            num_replicas: as for `Processes`.
            names: the numbers that the ranks have in torch.distributed, which errors name; None for the same.
            shard: which part of the sharded parameters this process has.
            num_shards: as above.
        """
        self.index, self.size, self.timeout = index, size, timeout
        self.replica, self.num_replicas = replica, num_replicas
        self._shard, self.num_shards = shard, num_shards
        self._column, self._num_columns = replica * num_shards + shard, num_replicas * num_shards
        self.rank = self._column * size + index
        self._names: Sequence[int] = range(size * self._num_columns) if names is None else names
        # By the name that programs have: the stage, the name in its layers, and the group, if it is made.
        self._collectives: dict[str, tuple[int, str, Any]] = {}
        weakref.finalize(self, _unregister, self._collectives)
        self._store = TimedStore(store, timeout)
        self.device, self.by_nccl = device, by_nccl
        # The ranks of a replica that have each parameter, in all pipelines.
        self._homes: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._clock_group: Any = None  # of the ranks of the replica, to compare their clocks
        self._replica_group: Any = None  # of the ranks with these stages in all replicas
        self._number = 0  # of the next run
        self._has_reported = False  # whether the error that is under way was reported
        # The channels, if any, and the pipeline that has them. It refers to this object, in C++.
        self._channels: Channels | None = None
        self._channels_of: Callable[[], Pipeline | None] = lambda: None
        self._edges: set[tuple[int, int]] = set()  # that the channels have
        self._gathered: list[tuple[int, str]] = []  # keys of this rank, with the numbers of their runs
        self._digests: Cache[int, tuple[PlannedCall, _Digests]] = Cache(_MAX_DIGESTS)
        _every.add(self)

    @classmethod
    def of_mesh(cls, mesh: Mesh | Ranks, timeout: float, devices: Iterable[Device] | Device | None) -> Ranks:
        """Returns the ranks of one more pipeline of a mesh, whose processes make pipelines in one order.

        A pipeline with a loss passes the ranks of the pipeline without, and so do those of one model.

        Raises:
            TypeError: ``mesh`` or ``devices`` has another type.
            ValueError: ``mesh`` or ``devices`` does not fit, or this process is not in the mesh.
            RuntimeError: there is no gloo.
        """
        if isinstance(mesh, Ranks):
            return mesh
        grid = grid_of(mesh)
        members = [rank for replica in grid for rank in replica]
        own = dist.get_rank()
        if own not in members:
            raise ValueError(
                f"mesh has the ranks {members} of torch.distributed, but this process is rank {own}; only "
                "those of the mesh make the pipeline"
            )
        size, num_shards = len(grid[0]), num_shards_of(mesh)
        column, index = divmod(members.index(own), size)
        replica, shard = divmod(column, num_shards)
        num_replicas = len(grid) // num_shards
        device = own_device(devices, default_kind(mesh), index, size)
        by_nccl = device.type == "cuda" and uses_nccl(mesh)
        check_replicas(num_replicas, device, by_nccl)
        name = f"gpipe_fast/{'-'.join(map(str, members))}"
        title = f"{name}/{_numbers[name]}"
        store = _within(title, default_store())
        _numbers[name] += 1
        replicas = replica, num_replicas
        ranks = cls(index, size, store, timeout, device, by_nccl, *replicas, members, shard, num_shards)
        ranks._title = title
        return ranks

    def check_settings(self, settings: Settings) -> None:
        """As for `Processes`."""
        check_settings(settings)

    def check_balance(self, balance: Sequence[int]) -> None:
        """As for `Processes`."""
        check_balance(balance, self.size)

    def check_partitions(self, partitions: Sequence[nn.Module]) -> list[Tie]:
        """As for `Processes`."""
        check_not_shared(partitions, self.size)
        self.check_homes(partitions)
        layers = [layer for partition in partitions for layer in partition.children()]
        self.check_shards(layers)
        return ties_of(partitions)

    def check_shards(self, layers: Sequence[nn.Module]) -> None:
        """As for `Processes`."""
        groups = self._named(self._shards()), self._named(self._replicas())
        check_shards(layers, *groups, self.device, self.by_nccl)

    def check_homes(self, partitions: Sequence[nn.Module]) -> None:
        """Checks that each parameter belongs to stages of the same ranks as in other pipelines.

        Otherwise one rank would change a parameter without the others, or a rank would need what it has not.

        Raises:
            ValueError: another pipeline has a parameter in other ranks.
        """
        for parameter, (name, home) in self._homes_of(partitions).items():
            known = self._homes.get(parameter, home)
            if known != home:
                raise ValueError(
                    f"the parameter {name!r} is in processes {sorted(known)} of the mesh, but this kind of "
                    f"call needs it in processes {sorted(home)}; make only calls that use it in the same "
                    "stages, or make another model for them"
                )

    def note_homes(self, partitions: Sequence[nn.Module]) -> None:
        """As for `Processes`."""
        for parameter, (_, home) in self._homes_of(partitions).items():
            self._homes[parameter] = home

    def _homes_of(self, partitions: Sequence[nn.Module]) -> dict[Tensor, tuple[str, frozenset[int]]]:
        """Returns the name of each parameter and the ranks of its stages."""
        found: dict[Tensor, tuple[str, frozenset[int]]] = {}
        for stage, partition in enumerate(partitions):
            for name, parameter in partition.named_parameters():
                first, home = found.get(parameter, (name, frozenset()))
                found[parameter] = first, home | {stage % self.size}
        return found

    def refuse(self, what: str, instead: str) -> NoReturn:
        """As for `Processes`."""
        raise ValueError(f"{what} needs all stages in one process, got a mesh of {self.size}; {instead}")

    def check_inputs(self, found: Callable[[], str]) -> None:
        """As for `Processes`."""
        own = found()
        first = self._store.compare_set(self._key(f"inputs/{self.replica}"), "", own).decode()
        if first != own:
            raise RuntimeError(
                f"rank {self._name} calls the model with other inputs than another rank, which came first: "
                f"they lead to {shortened(own)} here, and to {shortened(first)} there; pass the same "
                "inputs on all ranks, with their elements"
            )

    def compiling(self) -> AbstractContextManager[None]:
        """As for `Processes`."""
        return self._store.at_work(self._key(f"work/{self.rank}"))

    def begin(
        self,
        pipeline: Pipeline,
        call: Call,
        plan: PlannedCall,
        stages: Sequence[Stage],
        asked: Mapping[str, str] = _NOTHING_ASKED,
        seed: int = 0,
    ) -> None:
        """As for `Processes`."""
        new = _NEW if self._digests.lookup(id(plan)) is None else ""
        waits_for: set[int] = set()
        for key, (digest, description) in self._digests_of(call, plan, stages).items():
            own = {**asked}
            if self._number == 0 and key != "call":
                own[_SEED] = str(seed)
            if new and not key.startswith("shards/"):  # whose parts may have other operators
                own |= describe_code(plan)
            text = f"{digest}{json.dumps({**own, _FIRST: str(self._name)})}{new}"
            first = self._store.compare_set(self._key(key), "", text).decode()
            if first.startswith(_NO_CALL):
                raise RuntimeError(
                    f"rank {self._name} calls the pipeline, but another rank runs {first}; make calls, "
                    "backwards and recordings in the same order on all ranks"
                )
            # The first rank decides for all, so that none waits for one that goes on.
            if first.endswith(_NEW):
                waits_for.update(self._own_column() if key == f"call/{self._column}" else self._everyone())
            first, brace, rest = first.removesuffix(_NEW).partition("{")
            theirs = json.loads(brace + rest)
            other = theirs.pop(_FIRST)
            if first != digest:
                own, theirs = description, json.loads(self._store.get(f"plan/{first}"))
            else:
                own = {name: value for name, value in own.items() if name in theirs}
                theirs = {name: value for name, value in theirs.items() if name in own}
            if own == theirs:
                continue
            raise RuntimeError(
                f"rank {self._name} calls the pipeline with other arguments than rank {other}, which came "
                f"first: they differ in {difference(own, theirs)}; make the same calls on "
                "all ranks"
            )
        if new and self.num_shards > 1:
            self._check_collectives(call, plan)
        edges = edges_of(stages, self.size)
        if self._channels_of() is not pipeline or not edges <= self._edges:
            self._connect(pipeline, stages, edges)
        elif waits_for:
            self._wait_until_ready(waits_for)
        self._connect_collectives()

    def begin_backward(self, forward: int) -> None:
        """Prepares a run that is the backward of the run ``forward``.

        Raises:
            RuntimeError: another rank runs something else.
        """
        self._begin(f"{_BACKWARD}{forward}")

    def _begin(self, own: str) -> None:
        for key in self._call_keys():
            first = self._store.compare_set(self._key(key), "", own).decode()
            if first != own:
                theirs = f"runs {first}" if first.startswith(_NO_CALL) else "calls the pipeline"
                raise RuntimeError(
                    f"rank {self._name} runs {own}, but another rank {theirs}; make calls, backwards and "
                    "recordings in the same order on all ranks"
                )

    def poll(self) -> None:
        """Checks, during a run, that no other rank has failed.

        Raises:
            RuntimeError: one has.
        """
        outcome = self._read("outcome")
        if outcome not in (_UNSET, _DONE):  # done, if this rank waits for that
            self._share(f"here/{self.rank}", "")
            self._raise(outcome)

    def succeed(self) -> int:
        """Ends a run that has succeeded here, waits for the other ranks, and returns the number of the run.

        Raises:
            RuntimeError: another rank has failed, or does not answer.
        """
        if self._store.add(self._key("done"), 1) == len(self._everyone()):
            outcome = self._store.compare_set(self._key("outcome"), "", _DONE).decode()
        else:
            self._store.set(f"ended/{self.rank}", str(self._number))
            try:
                outcome = self._wait("outcome", self._running)
            except RuntimeError as error:
                if self.fail(str(error)):
                    raise
                outcome = _DONE
        if outcome != _DONE:
            silent = self._silent(outcome)
            self._end()
            self._raise(outcome, silent)
        if self.index == 0 and self._number > 0:  # all ranks have read these
            names = ["done", "outcome", "call"] if self._column == 0 else []
            names += [f"{name}/{self.replica}" for name in _OF_REPLICA if self._shard == 0]
            names += [f"{name}/{self._column}" for name in ("call", "count", "loss")]
            for name in names:
                self._store.delete_key(f"{self._number - 1}/{name}")
        while self._gathered and self._gathered[0][0] < self._number:
            self._store.delete_key(self._gathered.pop(0)[1])
        self._number += 1
        return self._number - 1

    def fail(self, error: str) -> bool:
        """Ends a run that has failed here, and tells the other ranks.

        Returns:
            Whether it has failed: if this rank waited for the outcome, it may have become 'done' meanwhile.

        Raises:
            RuntimeError: another rank has failed before, for another reason; or a collective has failed.
        """
        lost = self.num_shards > 1 and _LOST.match(error) is not None
        if lost:
            error = self._lost_in("exchanges tensors with", self._shards(), "tp", error)
        own = json.dumps({"rank": self.rank, "error": error, "lost": self._lost(error)})
        with contextlib.suppress(RuntimeError):  # the process that has the store may have ended
            own = self._store.compare_set(self._key("outcome"), "", own).decode()
        if own == _DONE:
            return False
        silent = self._silent(own)
        self._end()
        if json.loads(own)["rank"] != self.rank:
            self._raise(own, silent)
        # A sum does not say with which replica it has failed.
        is_unnamed = bool(silent) and (silent != self._lost(error) or "with a replica" in error)
        if lost or is_unnamed:
            raise RuntimeError(f"rank {silent} is lost: {error}" if is_unnamed else error)
        return True

    def _silent(self, outcome: str) -> str:
        """Returns the numbers of the ranks that are lost; an outcome may name ranks that wait for these.

        In a chain of ranks of which each waits for the next, any wait may be the first to be too long. So all
        ranks that are not lost say so.
        """
        named = json.loads(outcome)["lost"].split(", ")
        silent = list[str]()
        with contextlib.suppress(RuntimeError):  # the process that has the store may have ended
            end = time.monotonic() + _GRACE_SECONDS
            if named != [""]:
                self._share(f"here/{self.rank}", "")
                silent = self._not_here()
            while silent and (len(silent) > 1 or silent != named) and time.monotonic() < end:
                time.sleep(_MAX_SLEEP_SECONDS)
                silent = self._not_here()
        return ", ".join([rank for rank in silent if rank in named] or silent)

    def _not_here(self) -> list[str]:
        missing = [rank for rank in self._everyone() if self._read(f"here/{rank}") == _UNSET]
        return [*map(str, self._named(missing))]

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """As for `Processes`."""
        self._has_reported = False
        try:
            yield
        except BaseException as error:
            if not self._has_reported and not self.fail(f"{type(error).__name__}: {error}"):
                self._end()  # the run has succeeded in all ranks, which go on to the next
            raise

    def with_whole(self, parameters: Sequence[Tensor], parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """As for `Processes`."""
        found = list(parts)
        numbers = [n for n, each in enumerate(parameters) if is_gathered(each) and not each.is_meta]
        try:
            with torch.inference_mode(False):  # whose tensors cannot become the data of others
                whole = gather_rows([parameters[n] for n in numbers], self._replica_group)
        except RuntimeError as error:
            # Of NCCL, any error of a collective.
            if _LOST.match(str(error)) is None and not isinstance(error, dist.DistBackendError):
                raise
            lost = self._lost_in("gathers parameters from", self._replicas(), "fsdp", error)
            raise RuntimeError(lost) from error
        for number, tensor in zip(numbers, whole, strict=True):
            # Autograd compares gradients with the shape before the change.
            found[number] = parts[number].view_as(parts[number])
            found[number].data = tensor
        return found

    def _lost_in(self, does: str, ranks: Iterable[int], dim: str, error: object) -> str:
        """Returns the message for the failure of a collective of this rank with others."""
        others = self._named(rank for rank in ranks if rank != self.rank)
        return (
            f"rank {self._name} {does} ranks {others} along {dim!r}, which have ended or take longer than "
            f"{self.timeout} s; if steps may take that long, pass a larger timeout to GPipe: {error}"
        )

    def offer_losses(self, losses: Sequence[Tensor]) -> None:
        """As for `Processes`."""
        self._offer("loss", losses)

    def losses(self, own: Sequence[Tensor]) -> list[list[Tensor]]:
        """As for `Processes`."""
        keys = [f"{self._number - 1}/loss/{column}" for column in self._columns()]
        # A rank offers before it succeeds, and all have succeeded.
        return [
            list(own) if own and replica == self.replica else self._decoded(self._store.get(key))
            for replica, key in enumerate(keys)
        ]

    def sum_of_counts(self, count: float | Tensor) -> float | Tensor:
        """As for `Processes`."""
        if self.num_replicas == 1:
            return count
        own = count if isinstance(count, Tensor) else torch.tensor(count, dtype=torch.float64, device="cpu")
        self._offer("count", own.reshape(-1).unbind())
        found = []
        for column in self._columns():
            sender = (column + 1) * self.size - 1
            text = self._wait(f"count/{column}", partial(list, (sender,)))
            theirs = own if column == self._column else torch.stack(self._decoded(text)).view(own.shape)
            found.append(theirs)
        total: Tensor = reduce(torch.add, found)
        return total.to(count.device) if isinstance(count, Tensor) else total.item()

    def gather(self, name: str, own: Any) -> list[Any]:
        """As for `Processes`."""
        text = base64.b64encode(zlib.compress(json.dumps(own, separators=(",", ":")).encode(), 1)).decode()
        number = -(-len(text) // _MAX_LENGTH)
        for i in range(number):
            piece = text[i * _MAX_LENGTH : (i + 1) * _MAX_LENGTH]
            self._share(f"{name}/{self.rank}/{i}", f"{number} {piece}")
        return [self._gathered_from(rank, name) for rank in self._own_column()]

    def _gathered_from(self, rank: int, name: str) -> Any:
        text, number, i = "", 1, 0
        while i < number:
            count, _, piece = self._wait(f"{name}/{rank}/{i}", partial(list, (rank,))).partition(" ")
            text, number, i = text + piece, int(count), i + 1
        return json.loads(zlib.decompress(base64.b64decode(text)))

    def exchange(self, own: Any) -> list[tuple[Offset, Any]]:
        """As for `Processes`."""
        self._begin(_EXCHANGE)
        found = self.gather("share", [self._offset(), own])
        self.succeed()
        return [(Offset(*offset), value) for offset, value in found]

    def _offset(self) -> Offset:
        """Returns the offset of this process's clock to that of the first rank of its replica."""
        if self.size == 1:
            return Offset(0, 0)
        others = [rank for rank in self._own_column() if rank != self.rank]
        self._wait_until_ready()  # because a message cannot be ended early either
        if self._clock_group is None:
            name = f"clocks/{self._column}"
            self._clock_group = self._joined(gloo_group, name, self.index, self.size, others)
        with self._connecting(others):
            return offset_to_first(self._clock_group, self.index)

    def _everyone(self) -> range:
        return range(self.size * self._num_columns)

    def _own_column(self) -> range:
        """Returns the ranks that have the stages of this replica, with the same shards as this rank."""
        return range(self._column * self.size, (self._column + 1) * self.size)

    def _columns(self) -> range:
        """Returns the columns of all replicas that have the same shards as this rank."""
        return range(self._shard, self._num_columns, self.num_shards)

    def _shards(self) -> list[int]:
        """Returns the ranks that have the stages of this rank, in this replica."""
        first = self.replica * self.num_shards
        return [column * self.size + self.index for column in range(first, first + self.num_shards)]

    def _replicas(self) -> list[int]:
        """Returns the ranks that have the stages and shards of this rank, in all replicas."""
        step = self.size * self.num_shards
        return [rank for rank in self._everyone() if rank % step == self.rank % step]

    def _offer(self, name: str, values: Sequence[Tensor]) -> None:
        """Sets a key of this column, in the current run, to 0-dimensional tensors of one dtype."""
        exact = [each.hex() for each in torch.stack([*values]).double().tolist()]  # one copy to the host
        dtype = str(values[0].dtype).removeprefix("torch.")
        self._store.set(self._key(f"{name}/{self._column}"), json.dumps([dtype, exact]))

    def _decoded(self, text: str | bytes) -> list[Tensor]:
        """Returns the tensors of an offer."""
        dtype, exact = json.loads(text)
        numbers = [float.fromhex(each) for each in exact]
        values = torch.tensor(numbers, dtype=getattr(torch, dtype), device="cpu")
        return list(values.to(self.device, non_blocking=True).unbind())

    def _key(self, name: str) -> str:
        return f"{self._number}/{name}"

    def _end(self) -> None:
        # Without references, groups close their connections: a collective that waits for this process fails.
        _unregister(self._collectives)
        for own, (stage, name, _) in self._collectives.items():
            self._collectives[own] = stage, name, None
        self._has_reported, self._channels, self._channels_of = True, None, lambda: None
        self._clock_group = self._replica_group = None
        self._number += 1

    @property
    def _name(self) -> int:
        """The number of this process in torch.distributed."""
        return self._names[self.rank]

    def _named(self, ranks: Iterable[int]) -> list[int]:
        """Returns the numbers of ranks in torch.distributed."""
        return [self._names[rank] for rank in ranks]

    def _raise(self, outcome: str, silent: str = "") -> NoReturn:
        found = json.loads(outcome)
        failed, lost = self._names[found["rank"]], silent or found["lost"]
        what = f"rank {lost} is lost, as rank {failed} has found" if lost else f"rank {failed} has failed"
        raise RuntimeError(f"{what}, so no rank changed anything: {found['error']}")

    def _lost(self, error: str) -> str:
        """Returns the numbers of the ranks that an error of this rank is about; empty if it is about none."""
        stage = re.search(r"(?:sending to|receiving from) stage (\d+), in another process, failed", error)
        if stage is not None:
            return str(self._names[self._column * self.size + int(stage[1]) % self.size])
        if re.search("summing the gradients of this stage with a replica, in another process, failed", error):
            others = (column * self.size + self.index for column in self._columns())
            return ", ".join(str(self._names[rank]) for rank in others if rank != self.rank)
        ranks = re.search(
            r"(?:(?:for|from) ranks \[|connect to rank )(\d+(?:, \d+)*)\]?, which ha(?:s|ve) ended", error
        )
        return "" if ranks is None else ranks[1]

    def _running(self) -> list[int]:
        """Returns the ranks that have not ended the run."""
        keys = {rank: f"ended/{rank}" for rank in self._everyone()}
        return [
            rank
            for rank, key in keys.items()
            if not self._store.check([key]) or int(self._store.get(key)) < self._number
        ]

    def _read(self, name: str) -> str:
        """Returns the value of a key of the run, or `_UNSET`, in one round trip."""
        # Sets nothing: an unset key is set only if the expected value is empty.
        return str(self._store.compare_set(self._key(name), _UNSET, _UNSET).decode())

    def _wait(self, name: str, missing: Callable[[], list[int]]) -> str:
        """Waits until a key of the run is set, and returns its value.

        Args:
            name: the name of the key.
            missing: returns the ranks that are waited for.
        """
        begin = polled = looked = time.monotonic()
        counts: dict[int, int] = {}
        while (value := self._read(name)) == _UNSET:
            now = time.monotonic()
            if now - polled > _POLL_SECONDS:
                self.poll()
                polled = now
            if now - begin > self.timeout:
                before, counts = counts, {r: self._store.add(self._key(f"work/{r}"), 0) for r in missing()}
                if any(count > before.get(rank, 0) for rank, count in counts.items()):
                    begin = now
                    continue
                raise RuntimeError(
                    f"rank {self._name} has waited for {self.timeout} s for ranks {self._named(missing())}, "
                    "which have ended or take longer; if steps may take that long, pass a larger timeout to "
                    "GPipe"
                )
            time.sleep(max(0.0, min((now - begin) / 10, _MAX_SLEEP_SECONDS) - (now - looked)))
            looked = time.monotonic()
        return value

    def _call_keys(self) -> list[str]:
        """Returns the keys by which the ranks of a column, of a replica, and all agree on a run."""
        of_shards = [f"shards/{self.replica}"] if self.num_shards > 1 else []
        return [f"call/{self._column}", *of_shards, *(["call"] if self.num_replicas > 1 else [])]

    def _digests_of(self, call: Call, plan: PlannedCall, stages: Sequence[Stage]) -> _Digests:
        """Returns the digests of a plan, with descriptions that other ranks may read from then on."""
        known = self._digests.lookup(id(plan))
        if known is None:
            describes = {"call": describe_model, f"shards/{self.replica}": describe_inputs}
            texts = {k: describes.get(k, describe_call)(call, plan, stages) for k in self._call_keys()}
            digests = {key: (digest_of(text), text) for key, text in texts.items()}
            for digest, text in digests.values():
                self._store.set(f"plan/{digest}", json.dumps(text))
            known = self._digests[id(plan)] = plan, digests
        return known[1]

    def _connect(self, pipeline: Pipeline, stages: Sequence[Stage], edges: set[tuple[int, int]]) -> None:
        """Makes a group for each pair of stages in two processes that exchange tensors, in each direction,
        and one of the replicas of this stage.

        The groups are made in the same order on all ranks, so no two wait for each other.

        Raises:
            RuntimeError: replicas have different parameters.
        """
        own = self.stages_of(len(stages))
        for stage in own:
            self._check_equal(stage, stages[stage])
        self._wait_until_ready()
        self._check_ties(stages)
        assert make_channels is not None
        groups = {}
        for edge in sorted(edges):
            if edge[0] in own or edge[1] in own:
                groups[edge] = self._group(*edge)
        if self.by_nccl:
            self._store.call(_warm_up, groups, own, self.device)
        replicas = None
        if self.num_replicas > 1:
            others = [rank for rank in self._replicas() if rank != self.rank]
            name = f"replicas/{self._shard}/{self.index}"
            replicas = self._joined_collectives(name, self.replica, self.num_replicas, others)
        self._replica_group = replicas
        self._channels = make_channels(set(own), groups, self.timeout, self.by_nccl, replicas)
        pipeline.set_peers(self._channels, self)
        for *_, group in self._collectives.values():
            self._abandon_too(group)
        self._channels_of, self._edges = weakref.ref(pipeline), edges

    def _wait_until_ready(self, ranks: Collection[int] | None = None) -> None:
        """Waits until ranks, by default all of them, are about to make groups or to run a new plan."""
        self._share(f"ready/{self.rank}", "")
        names = {rank: f"ready/{rank}" for rank in ranks or self._everyone()}
        for name in names.values():
            self._wait(name, lambda: [r for r, each in names.items() if self._read(each) == _UNSET])

    def _group(self, sender: int, receiver: int) -> Any:
        """Connects two stages of two processes."""
        ends = sender % self.size, receiver % self.size
        other = self._column * self.size + ends[self.index == ends[0]]
        make = partial(nccl_group, max_blocks=_MAX_NCCL_BLOCKS) if self.by_nccl else gloo_group
        return self._joined(make, f"{self._column}/{sender}-{receiver}", ends.index(self.index), 2, [other])

    def _joined_collectives(self, name: str, rank: int, size: int, others: Sequence[int]) -> Any:
        """Returns a group of this process and other ranks, for collectives of tensors on the own device."""
        group = self._joined(nccl_group if self.by_nccl else gloo_group, name, rank, size, others)
        if self.by_nccl:
            with self._connecting(others):
                self._store.call(lambda: group.allreduce([torch.zeros(1, device=self.device)]).wait())
        return group

    def _abandon_too(self, group: Any) -> None:
        """Lets a failure end the collectives of a group, for which devices wait."""
        if self._channels is not None and group is not None:
            self._channels.abandon_too(group._get_backend(self.device))

    def own_group(self, stage: int, name: str) -> str:
        """As for `Processes`."""
        own, here = f"{self._title}/{stage}/{name}", self._named(self._shards())
        over = dist.get_process_group_ranks(group_of(name))
        if not set(over) <= set(here):
            raise ValueError(
                f"stage {stage} has a collective of the ranks {over}, which do not all run this stage: ranks "
                f"{here} do; let layers use the group of the mesh's dimension 'tp' only"
            )
        self._collectives.setdefault(own, (stage, name, None))
        return own

    def _check_collectives(self, call: Call, plan: PlannedCall) -> None:
        """Checks that the ranks with the stages of this rank run the same collectives, so that all end.

        If each stage has the same actions in the same order on all of these ranks, and each action the same
        collectives, then the ranks of a group wait for each other as if they were one; and of one rank for
        each stage, the schedule is known not to deadlock.
        """
        own = describe_collectives(call, plan, self.stages_of(len(call.saved_fractions)))
        key = self._key(f"collectives/{self.replica}/{self.index}")
        text = self._store.compare_set(key, "", json.dumps([self._name, own])).decode()
        self._gathered.append((self._number, key))
        rank, theirs = json.loads(text)
        if own != theirs:
            raise RuntimeError(
                f"the layers of rank {self._name} run other collectives than those of rank {rank}, which "
                f"waits for them: they differ in {difference(own, theirs)}; let them do the same on both"
            )

    def _connect_collectives(self) -> None:
        """Makes the groups of collectives that are not made yet, in one order on all of their ranks."""
        missing = {own: each for own, each in self._collectives.items() if each[-1] is None}
        if missing:
            self._wait_until_ready(self._shards())
        for own, (stage, name, _) in sorted(missing.items()):
            names = dist.get_process_group_ranks(group_of(name))
            ranks = [self._names.index(each) for each in names]
            others = [rank for rank in ranks if rank != self.rank]
            position = f"collectives/{stage}/{'-'.join(map(str, names))}/{name}"
            backend = self._joined_collectives(position, ranks.index(self.rank), len(ranks), others)
            group = register_group(own, self._store.store, backend, self.device)
            self._collectives[own] = stage, name, group
            self._abandon_too(group)

    def _joined(
        self, make: Callable[..., Any], name: str, rank: int, size: int, others: Sequence[int]
    ) -> Any:
        """Returns a group of this process and other ranks."""
        store = _within(f"{self._number}/{name}", self._store.store)
        with self._connecting(others):
            return self._store.call(make, store, rank, size, self.timeout)

    @contextlib.contextmanager
    def _connecting(self, others: Sequence[int]) -> Iterator[None]:
        """Names these ranks in the message of an error of the block."""
        try:
            yield
        except RuntimeError as error:
            names = ", ".join(map(str, self._named(others)))
            raise RuntimeError(
                f"rank {self._name} cannot connect to rank {names}, which has ended, or takes longer "
                f"than the argument timeout of GPipe allows: {error}"
            ) from error

    def _check_ties(self, stages: Sequence[Stage]) -> None:
        """Checks that the copies of a parameter are equal, which would stay different forever."""
        own, ties = {*self.stages_of(len(stages))}, stages[0].options.ties
        copies = [
            {stage: f"tie/{self._column}/{n}/{stage}" for stage, _ in tie} for n, tie in enumerate(ties)
        ]
        for tie, keys in zip(ties, copies, strict=True):
            for stage, index in tie:
                if stage in own:
                    checksum = _checksum(parameters_of(stages[stage].layers)[index])
                    self._share(keys[stage], str(checksum))
        for tie, keys in zip(ties, copies, strict=True):
            if own.isdisjoint(keys):
                continue
            (first, index), *_ = tie
            rank_of = {stage: self._column * self.size + stage % self.size for stage in keys}
            found = {s: self._wait(key, partial(list, (rank_of[s],))) for s, key in keys.items()}
            other = next((stage for stage in keys if found[stage] != found[first]), None)
            if other is not None:
                ranks = " and ".join(map(str, self._named((rank_of[first], rank_of[other]))))
                title = _name_of(parameters_of(stages[first].layers)[index], stages[first])
                raise RuntimeError(
                    f"ranks must start with the same parameters, but the tied copies of {title} differ on "
                    f"ranks {ranks}; build the layers with the same seed, or load the same weights in all"
                )

    def _share(self, name: str, value: str) -> None:
        """Sets a key of the run, until the next run has ended."""
        key = self._key(name)
        self._store.set(key, value)
        self._gathered.append((self._number, key))

    def _check_equal(self, index: int, stage: Stage) -> None:
        """Checks that the first replica has the same parameters, which would stay different forever.

        All shards of a replica need the same of those that are not sharded.
        """
        parameters = parameters_of(stage.layers)
        if self.num_shards > 1:
            whole = [each for each in parameters if is_gathered(each) or not is_sharded(each)]
            first, key = self._shards()[0], f"start/{index}/of/{self.replica}"
            self._check_same(key, first, stage, whole, "the processes along 'tp'")
        if self.num_replicas > 1:
            whole = [each for each in parameters if not is_gathered(each)]
            first, key = self._replicas()[0], f"start/{index}/{self._shard}"
            self._check_same(key, first, stage, whole, "replicas")

    def _check_same(self, key: str, first: int, stage: Stage, parameters: Sequence[Tensor], who: str) -> None:
        """Checks that a rank, the first of some, has the same parameters as this one of them."""
        own = [_checksum(each) for each in parameters]
        if self.rank == first:
            self._store.set(self._key(key), json.dumps(own))
            return
        theirs = json.loads(self._wait(key, lambda: [first]))
        for parameter, a, b in zip(parameters, own, theirs, strict=True):
            if a != b:
                raise RuntimeError(
                    f"{who} must start with the same parameters, but {_name_of(parameter, stage)} differs "
                    f"between rank {self._names[first]} and rank {self._name}; build the layers with the "
                    "same seed, or load the same weights in all of them"
                )


def _name_of(parameter: Tensor, stage: Stage) -> str:
    return next(
        f"{name!r} of {layer_title(number, layer)}"
        for number, layer in enumerate(stage.layers, stage.first_layer)
        for name, each in layer.named_parameters()
        if each is parameter
    )


def _checksum(parameter: Tensor) -> int:
    return sum(int(_words(part.detach()).sum(dtype=torch.int64)) for part in stored_tensors(parameter))


def _words(tensor: Tensor) -> Tensor:
    """Returns the memory of a tensor as integers."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return tensor.contiguous().view(-1).view(sizes.get(tensor.element_size(), torch.int64))


@atexit.register
def _report_end() -> None:
    """Tells the other ranks which error ends this process, before its connections close."""
    error = getattr(sys, "last_value", None)  # set by Python for an error that nobody has caught
    for ranks in [] if error is None else list(_every):
        with contextlib.suppress(RuntimeError):
            ranks.fail(f"its process has ended with {type(error).__name__}: {error}")


def edges_of(stages: Sequence[Stage], size: int) -> set[tuple[int, int]]:
    """Returns the pairs of stages in two of ``size`` processes that exchange tensors in a direction:
    neighbours, ends of skips, ties.
    """
    pairs: Iterable[tuple[int, int]] = [(i, i + 1) for i in range(len(stages) - 1)]
    ends = {number: i for i, stage in enumerate(stages) for number in stage.stashes}
    skips = [(ends[n], i) for i, stage in enumerate(stages) for n in stage.pops if n in ends]
    ties = stages[0].options.ties
    tied = [pair for tie in ties for pair in combinations([stage for stage, _ in tie], 2)]
    between = [(a, b) for a, b in (*pairs, *skips, *tied) if (b - a) % size]
    return {edge for a, b in between for edge in ((a, b), (b, a))}
