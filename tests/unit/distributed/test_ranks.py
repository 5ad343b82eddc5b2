"""Ranks: which tensors have memory, and which ranks exchange tensors. Needs one process."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gpipe_fast import GPipe
from gpipe_fast.distributed.mesh import grid_of
from gpipe_fast.distributed.ranks import Ranks, edges_of, nccl_group
from tests.contracts.contract_1_same_bits.test_skip_connections import make_model as skipping
from tests.distributed.launch import needs_gloo
from tests.internals import stages_of
from tests.models import mlp

pytestmark = needs_gloo


def rank_of(rank: int, layers: nn.Sequential, balance: list[int]) -> GPipe:
    ranks = Ranks(rank, len(balance), dist.HashStore(), timeout=1.0)
    return GPipe(layers, balance, mesh=ranks)  # type: ignore[arg-type]


def test_an_interrupt_after_a_run_has_succeeded_does_not_fail_the_next() -> None:
    store = dist.HashStore()
    first, second = (Ranks(rank, 2, store, timeout=1.0) for rank in range(2))

    def wait(*args: object) -> str:
        second.succeed()
        raise KeyboardInterrupt

    with mock.patch.object(first, "_wait", wait), pytest.raises(KeyboardInterrupt), first.reporting():
        first.succeed()
    assert first._number == second._number == 1


def test_other_errors_of_a_gather_are_not_worded_as_a_loss() -> None:
    failing = mock.patch("gpipe_fast.distributed.ranks.gather_rows", side_effect=RuntimeError("no memory"))
    with failing, pytest.raises(RuntimeError, match=r"^no memory$"):
        Ranks(0, 1, dist.HashStore(), timeout=1.0, num_replicas=2).with_whole([], [])


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this build of PyTorch has no NCCL")
def test_transfers_of_nccl_take_few_multiprocessors() -> None:
    options_of = dist.ProcessGroupNCCL.Options
    with mock.patch.object(dist, "ProcessGroupNCCL") as made:
        made.Options = options_of
        nccl_group("store", 1, 2, 30.0, max_blocks=4)
    store, rank, size, options = made.call_args.args
    assert (store, rank, size) == ("store", 1, 2)
    assert options._timeout.total_seconds() == 30
    assert options.is_high_priority_stream
    assert (options.config.min_ctas, options.config.max_ctas) == (1, 4)


def test_ranks_that_are_not_ready_are_named() -> None:
    store = dist.HashStore()
    store.set("0/ready/2", "")
    with pytest.raises(RuntimeError, match=r"rank 0 has waited for 0\.1 s for ranks \[1, 3\], which have"):
        Ranks(0, 4, store, timeout=0.1)._wait_until_ready()


def test_errors_name_ranks_as_torch_distributed_does() -> None:
    store = dist.HashStore()
    failed, other, waits = (
        Ranks(index % 2, 2, store, 0.1, replica=index // 2, num_replicas=2, names=[4, 6, 9, 12])
        for index in (2, 1, 0)
    )
    with pytest.raises(RuntimeError, match=r"rank 4 has waited for 0\.1 s for ranks \[6, 9, 12\]"):
        waits._wait_until_ready()
    assert failed.fail("ValueError: no")
    with pytest.raises(RuntimeError, match="rank 9 has failed, so no rank changed anything: ValueError: no"):
        other.fail("TypeError: later")


def on_meta(pipe: GPipe) -> list[bool]:
    return [parameter.is_meta for parameter in pipe.parameters()]


@pytest.mark.parametrize("built_on", ["cpu", "meta"])
def test_weights_of_the_own_stage_are_loaded(built_on: str) -> None:
    source = mlp().state_dict()
    for method in ("load_weights", "load_state_dict"):
        with torch.device(built_on):
            layers = mlp()
        pipe = rank_of(1, layers, [2, 3])
        getattr(pipe, method)(source)
        assert on_meta(pipe) == [True] * 2 + [False] * 4
        assert torch.equal(pipe[4].weight, source["4.weight"])


def test_tied_layers_of_another_stage_stay_tied() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    layers[2].weight = layers[1].weight
    pipe = rank_of(0, layers, [1, 2])
    assert pipe[1].weight is pipe[2].weight
    assert pipe[1].weight.is_meta


def test_edges_connect_neighbours_and_the_ends_of_skips() -> None:
    pipe = rank_of(0, skipping(), [2, 3, 3])
    neighbours = {(0, 1), (1, 0), (1, 2), (2, 1)}
    skips = {
        (i, j)
        for i, a in enumerate(stages_of(pipe))
        for j, b in enumerate(stages_of(pipe))
        for n in a.stashes
        if n in b.pops
    }
    assert (0, 2) in skips
    edges = neighbours | skips | {(b, a) for a, b in skips}
    assert edges_of(stages_of(pipe), 3) == edges
    # With stages 0 and 2 in one process, tensors between these stay there.
    assert edges_of(stages_of(pipe), 2) == edges - {(0, 2), (2, 0)}


def test_dimensions_of_a_mesh() -> None:
    """Stages lie along 'pp' and replicas along 'dp_replicate', in any order; those of size 1 do not count."""
    names, shape = ("dp_shard", "dp_replicate", "cp", "pp"), (1, 2, 1, 3)

    def mesh(names: tuple[str, ...], ranks: Tensor) -> Any:
        found = {"ndim": ranks.dim(), "shape": tuple(ranks.shape), "mesh_dim_names": names}
        return mock.Mock(spec=DeviceMesh, mesh=ranks, **found)

    ranks = torch.arange(6).view(shape)
    assert grid_of(mesh(names, ranks)) == [[0, 1, 2], [3, 4, 5]]
    reverse = tuple(reversed(range(len(shape))))
    assert grid_of(mesh(names[::-1], ranks.permute(reverse))) == [[0, 1, 2], [3, 4, 5]]
    for unambiguous in (("pp",), ()):
        assert grid_of(mesh(unambiguous, torch.arange(2, 5))) == [[2, 3, 4]]
    # By replica and shard, and by stage.
    both = torch.arange(8).view(2, 2, 2)
    assert grid_of(mesh(("pp", "tp", "dp_replicate"), both)) == [[0, 4], [2, 6], [1, 5], [3, 7]]
    assert grid_of(mesh(("tp",), torch.arange(2))) == [[0], [1]]
    with pytest.raises(ValueError, match=r"\('dp',\) of sizes \(3,\), and none is called 'pp'"):
        grid_of(mesh(("dp",), torch.arange(3)))


def test_a_run_that_is_done_cannot_fail_any_more() -> None:
    """The outcome arrives between a rank's last look at it and its next step."""
    store = dist.HashStore()
    ranks = Ranks(0, 2, store, timeout=1.0)
    store.set("0/outcome", "done")
    ranks.poll()

    def times_out(name: str, _: object) -> str:
        store.set(f"1/{name}", "done")
        raise RuntimeError("has waited")

    ranks.succeed()
    with mock.patch.object(ranks, "_wait", side_effect=times_out):
        ranks.succeed()
    store.set("2/outcome", '{"rank": 1, "error": "refused", "lost": ""}')
    with pytest.raises(RuntimeError, match="rank 1 has failed, so no rank changed anything: refused"):
        ranks.succeed()


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        ("sending to stage 5, in another process, failed: that process has ended", "8"),
        ("receiving from stage 1, in another process, failed: that process has ended", "7"),
        ("rank 6 has waited for 10.0 s for ranks [7, 8], which have ended or take longer", "7, 8"),
        ("rank 6 cannot connect to rank 7, which has ended, or takes longer", "7"),
    ],
)
def test_the_rank_that_is_lost_is_named(error: str, lost: str) -> None:
    """Three stages go round on ranks that are called 6, 7 and 8."""
    store = dist.HashStore()
    first, second = (Ranks(index, 3, store, timeout=1.0, names=(6, 7, 8)) for index in (0, 1))
    for index in range(3):
        store.set(f"0/here/{index}", "")  # slow ones; the error is all that is known
    assert first.fail(error)
    text = f"rank {lost} is lost, as rank 6 has found, so no rank changed anything: {error}"
    with pytest.raises(RuntimeError, match=re.escape(text)):
        second.poll()


def test_a_rank_that_waits_for_the_lost_one_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 6 waits for rank 7, which waits for rank 8 and notices the failure."""
    monkeypatch.setattr("gpipe_fast.distributed.ranks._GRACE_SECONDS", 0.0)
    store = dist.HashStore()
    first, second = (Ranks(index, 3, store, timeout=1.0, names=(6, 7, 8)) for index in (0, 1))
    store.set("0/here/1", "")
    error = "receiving from stage 1, in another process, failed: that process has ended, or takes longer"
    with pytest.raises(RuntimeError, match=f"rank 8 is lost: {error}"):
        first.fail(error)
    with pytest.raises(RuntimeError, match="rank 8 is lost, as rank 6 has found, so no rank changed"):
        second.fail("receiving from stage 2, in another process, failed: that process has ended")


def test_losses_are_those_of_the_same_shard_of_each_replica() -> None:
    store, last = dist.HashStore(), []
    for replica, shard in ((0, 0), (0, 1), (1, 0), (1, 1)):
        first, second = (
            Ranks(index, 2, store, 1.0, replica=replica, num_replicas=2, shard=shard, num_shards=2)
            for index in (0, 1)
        )
        second.offer_losses([torch.tensor(10.0 * replica + shard)])
        last.append(first)
    for ranks in last:
        ranks._number = 1  # the run has succeeded
        shard = ranks._shard
        assert ranks.losses([]) == [[torch.tensor(float(shard))], [torch.tensor(10.0 + shard)]]
