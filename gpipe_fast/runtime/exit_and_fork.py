"""Process exit and fork: waits for traces, closes pipelines at exit, resets them in the child of a fork."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from pathlib import Path

import torch

from gpipe_fast._extension import Pipeline, PythonWorkers
from gpipe_fast.runtime.stage import TRACING_LOCK
from gpipe_fast.torch_private.fake_tensors import set_stand_in_for_cuda

_open_pipelines: weakref.WeakSet[Pipeline] = weakref.WeakSet()


def open_pipeline(num_stages: int, python_workers: PythonWorkers, transport: str) -> Pipeline:
    """Makes a pipeline that is closed at exit, unless it has been destroyed before.

    Args:
        num_stages: the number of stages.
        python_workers: the registry of workers that are running Python, which Ctrl-C interrupts.
        transport: how boundary tensors are copied between GPUs.
    """
    pipeline = Pipeline(num_stages, python_workers, transport)
    _open_pipelines.add(pipeline)
    return pipeline


# The maximum number of seconds that an exit or a fork waits until no other thread traces.
_MAX_TRACE_SECONDS = 60.0
# Seconds for other threads to finish with Python after a run; a closed pipeline blocks their next run.
_GRACE_SECONDS = 0.05
# The maximum number of seconds to wait for threads that are still running then.
_MAX_SECONDS = 2.0


@atexit.register
def _close_all() -> None:
    pipelines = list(_open_pipelines)
    for pipeline in pipelines:
        pipeline.close()
    # A thread whose run has ended may still wait for the GIL to return to Python. At finalization the
    # interpreter terminates such a thread inside C++ frames that cannot be unwound: the process aborts.
    # Autograd's threads, one for each GPU, and gloo's also release Python objects after their work has ended.
    # No thread may trace or begin a call any more.
    if pipelines:
        _stop_traces()
        deadline = time.monotonic() + _MAX_SECONDS
        time.sleep(_GRACE_SECONDS)
        while _other_threads_run() and time.monotonic() < deadline:
            time.sleep(_GRACE_SECONDS)


def _other_threads_run() -> bool:
    """Returns whether another thread of this process runs or waits for a core; False without /proc."""
    own, threads = str(threading.get_native_id()), Path("/proc/self/task")
    for thread in threads.iterdir() if threads.is_dir() else ():
        # A thread may have ended since.
        with contextlib.suppress(OSError):
            state = (thread / "stat").read_text().rpartition(")")[2].split()[0]
            if thread.name != own and state == "R":
                return True
    return False


def _stop_traces() -> None:
    """Waits for the trace of another thread, whose locks would stay locked in the child of a fork.

    Before Python 3.12, every ``functools.cached_property`` has one for all instances (python/cpython#87634).
    """
    TRACING_LOCK.acquire(timeout=_MAX_TRACE_SECONDS)


def _allow_traces() -> None:
    if TRACING_LOCK._is_owned():  # type: ignore[attr-defined]  # not if Ctrl-C has ended the wait
        TRACING_LOCK.release()


def _after_fork_in_child() -> None:
    if not TRACING_LOCK._is_owned():  # type: ignore[attr-defined]
        TRACING_LOCK._at_fork_reinit()  # type: ignore[attr-defined]
    _allow_traces()
    for pipeline in list(_open_pipelines):
        pipeline.after_fork()
    # The child's intra-op thread pool is created on first use. Concurrent first uses by several workers race,
    # and some fail with "Invalid thread pool!", so this call creates the pool.
    if _open_pipelines:
        torch.set_num_threads(torch.get_num_threads())


os.register_at_fork(before=_stop_traces, after_in_parent=_allow_traces, after_in_child=_after_fork_in_child)


# PyTorch's autograd counts the devices on its first backward, and starts a thread for each except the CPU.
# The fake GPU of a trace would be counted, too: the child of a fork could then run no backward, and would
# wait 10 s at exit for a thread that it does not have. This backward makes autograd count before any trace.
# On a machine with GPUs, it need not, and `is_available` would keep the children of a fork from using them.
if not torch.cuda.device_count():
    with torch.inference_mode(False), torch.enable_grad():
        torch.ones((), requires_grad=True).backward()
    set_stand_in_for_cuda()
