"""Runs a function in several processes that form a group of torch.distributed on this machine."""

from __future__ import annotations

import multiprocessing
import subprocess
import traceback
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.programs import ROOT, run_python

needs_gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this build of PyTorch has no gloo"
)

# A rank that takes longer hangs. Errors that are expected come within the timeouts of the pipelines.
MAX_SECONDS = 600.0


class RankFailed(Exception):
    """The error of a rank, with its traceback."""


def run_ranks(
    number: int,
    case: Callable[..., Any],
    *args: Any,
    hangs: Collection[int] = (),
    backend: str = "gloo",
    timeout: float = 60.0,
    has_store: bool = False,
) -> list[Any]:
    """Returns what ``case(*args)`` returns in each of several processes; None for a process that ended early.

    Args:
        number: the number of processes.
        case: what each calls.
        args: its arguments.
        hangs: processes that are not waited for.
        backend: of the group.
        timeout: of the group, in seconds.
        has_store: whether the store of the group is in the process of rank 0, which may then not end early.

    Raises:
        RankFailed: a process has raised an error, or hangs.
    """
    # In this process, so that any rank may end early; the system chooses the port.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # Processes are forked from one that has imported everything, and runs no threads.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["gpipe_fast", case.__module__])
    ends = []
    processes = []
    for rank in range(number):
        here, there = context.Pipe(duplex=False)
        process = context.Process(
            target=_enter,
            args=(rank, number, backend, store.port, timeout, has_store, there, case, args),
            daemon=True,
        )
        process.start()
        there.close()
        ends.append(here)
        processes.append(process)
    try:
        results = [("", None) if rank in hangs else _result(end) for rank, end in enumerate(ends)]
        errors = [f"rank {rank}: {error}" for rank, (error, _) in enumerate(results) if error]
        if errors:
            raise RankFailed("\n".join(errors))
        return [value for _, value in results]
    finally:
        for process in processes:
            process.kill()
            process.join()


_PROGRAM = """
from datetime import timedelta
import torch.distributed as dist
from tests.distributed import cases
store = dist.TCPStore("127.0.0.1", {port}, is_master=False, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank={rank}, world_size={number})
{statement}
"""


def run_programs(number: int, statement: str) -> list[str]:
    """Runs a statement with `cases` in several programs; returns what each writes to stderr."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def run(rank: int) -> str:
        text = _PROGRAM.format(port=store.port, rank=rank, number=number, statement=statement)
        return run_python("-c", text, timeout=MAX_SECONDS).stderr

    with ThreadPoolExecutor(number) as pool:
        return list(pool.map(run, range(number)))


def run_as_torchrun(number: int, *arguments: str, cwd: Path = ROOT) -> str:
    """Runs a program in several processes with the variables of torchrun; returns what they print."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"WORLD_SIZE": str(number), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}

    def run(rank: int) -> subprocess.CompletedProcess[str]:
        return run_python(*arguments, cwd=cwd, RANK=str(rank), LOCAL_RANK=str(rank), **shared)

    with ThreadPoolExecutor(number) as pool:
        ranks = list(pool.map(run, range(number)))
    assert [rank.returncode for rank in ranks] == [0] * number, "".join(rank.stderr[-3000:] for rank in ranks)
    return "".join(rank.stdout for rank in ranks)


def _result(end: Connection) -> tuple[str, Any]:
    if not wait([end], MAX_SECONDS):
        return "it hangs", None
    try:
        error, value = end.recv()
    except EOFError:
        return "", None
    return error, value


def _enter(
    rank: int,
    number: int,
    backend: str,
    port: int,
    timeout: float,
    has_store: bool,
    end: Connection,
    case: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    if has_store and rank == 0:
        own = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        store.set("port", str(own.port))
        store = own
    elif has_store:
        store = dist.TCPStore("127.0.0.1", int(store.get("port")), is_master=False, wait_for_workers=False)
    limit = timedelta(seconds=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=number, timeout=limit)
    try:
        end.send(("", case(*args)))
    except BaseException:
        end.send((traceback.format_exc(), None))
    dist.destroy_process_group()
