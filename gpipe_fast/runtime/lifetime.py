"""C++ pipelines in the life of a process: its exit, at which none may still run, and its forks."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref

import torch

from gpipe_fast._extension import Interpreted, Pipeline

_open: weakref.WeakSet[Pipeline] = weakref.WeakSet()


def open_pipeline(
    num_stages: int, interpreted: Interpreted | None = None, transport: str = "auto"
) -> Pipeline:
    """Makes a pipeline that is closed at exit, if it is still there.

    Args:
        num_stages: how many.
        interpreted: where its workers are noted that run layers in Python, which Ctrl-C then ends.
        transport: how boundary tensors go between GPUs.
    """
    pipeline = Pipeline(num_stages, interpreted or Interpreted(), transport)
    _open.add(pipeline)
    return pipeline


# Seconds in which daemon threads come back from runs, at the latest for the next one, which holds them.
_GRACE = 0.05


@atexit.register
def _close_all() -> None:
    pipelines = list(_open)
    for pipeline in pipelines:
        pipeline.close()
    # A thread whose run has ended may still wait for the GIL, to return to Python. Once the interpreter is
    # gone it would be ended where it waits, inside of C++ that cannot be unwound, and so would the process.
    if pipelines and threading.active_count() > 1:
        time.sleep(_GRACE)


def _after_fork() -> None:
    for pipeline in list(_open):
        pipeline.after_fork()
    # PyTorch makes its intra-op pool anew when a child first asks for it; of several workers that ask at once
    # some would get none ("Invalid thread pool!").
    if _open:
        torch.set_num_threads(torch.get_num_threads())


os.register_at_fork(after_in_child=_after_fork)


# PyTorch's autograd counts the devices when it first runs, and makes a thread for each but the CPU. Tracing
# fakes a GPU, which would be counted: the children of a fork could then run no backward, and waited 10 s at
# their exit for a thread that they do not have. So it counts before anything is traced.
if not torch.cuda.is_available():
    with torch.inference_mode(False), torch.enable_grad():
        torch.ones((), requires_grad=True).backward()
