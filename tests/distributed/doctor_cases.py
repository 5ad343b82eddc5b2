"""What the ranks of tests of ``gpipe-fast doctor`` run."""

from __future__ import annotations

import json
import os
import signal
from typing import Any
from unittest import mock

import torch.distributed as dist

import gpipe_fast
from gpipe_fast.command import main
from gpipe_fast.distributed import torchrun


def doctor(port: int, size: int, seconds: float = 20.0) -> tuple[int, Any, str]:
    """Returns the exit status, the report of rank 0, and what was written to stderr."""
    torchrun = {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    torchrun |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with mock.patch.dict(os.environ, torchrun), mock.patch("builtins.print") as printed:
        status = main(["doctor", "--json", f"--timeout={seconds}"])
    texts = {call.kwargs.get("file") is not None: call.args[0] for call in printed.call_args_list}
    return status, json.loads(texts.get(False, "null")), texts.get(True, "")


def with_an_older_version(port: int) -> tuple[int, Any, str]:
    with mock.patch.object(gpipe_fast, "__version__", "0.0.1" if dist.get_rank() == 1 else "0.1.0"):
        return doctor(port, dist.get_world_size(), 5.0)


def with_a_failing_edge(port: int) -> tuple[int, Any, str]:
    """Ranks 1 and 2 cannot connect."""
    make = torchrun.gloo_group

    def connect(store: Any, end: int, size: int, timeout: float) -> Any:
        if (dist.get_rank(), end) == (1, 0):  # the edge to rank 2; to rank 0 it is the other end
            raise RuntimeError("no route")
        return make(store, end, size, timeout)

    with mock.patch.object(torchrun, "gloo_group", connect):
        return doctor(port, dist.get_world_size(), 5.0)


def with_a_rank_that_hangs(port: int) -> tuple[int, Any, str]:
    """Rank 1 stops when it is about to measure."""

    def stop(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    if dist.get_rank() == 1:
        with mock.patch.object(torchrun._Examination, "_edges", stop):
            return doctor(port, 3, 2.0)
    return doctor(port, 3, 2.0)
