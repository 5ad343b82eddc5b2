"""A program that test_interrupted_first_call.py runs: Ctrl-C at many places of one first call.

A first call counts the places. At each chosen place of another one the process forks a child, which receives
the signal there, while the parent goes on to the next place.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Hashable
from types import FrameType

import torch
from torch import nn

from gpipe_fast import GPipe
from tests.reference import loop_step, pipeline_step, unequal
from tests.unit.test_interrupted_first_call import M, features, pipe

DEADLINE_SECONDS = 60


def dispatch_place(frame: FrameType, number: int) -> Hashable:
    """Every call of a ``__torch_dispatch__``: most are called by C++."""
    return number if frame.f_code.co_name == "__torch_dispatch__" else None


def function_place(frame: FrameType, number: int) -> Hashable:
    """The first call of every function by every other function."""
    return frame.f_code, frame.f_back and frame.f_back.f_code


PLACES = {"dispatch": dispatch_place, "functions": function_place}


class Sweep:
    """A profile function that forks at every ``stride``-th place from ``first`` on, and notes what failed.

    With a stride of 0 it only counts the places.
    """

    def __init__(self, kind: str, first: int, stride: int) -> None:
        self.find_place, self.first, self.stride = PLACES[kind], first, stride
        self.num_events = self.num_children = 0
        self.places: set[Hashable] = set()
        self.problems: list[str] = []
        self.is_child = False

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Looks at an event of Python."""
        if event != "call":
            return
        self.num_events += 1
        place = self.find_place(frame, self.num_events)
        if place is None or place in self.places:
            return
        self.places.add(place)
        if self.stride and len(self.places) % self.stride == self.first:
            self.fork(frame)

    def fork(self, frame: FrameType) -> None:
        """Forks a child that receives the signal here, and waits for its end."""
        self.num_children += 1
        child = os.fork()
        if child == 0:
            sys.setprofile(None)
            self.is_child = True
            signal.alarm(DEADLINE_SECONDS)
            signal.raise_signal(signal.SIGINT)
            return
        _, status = os.waitpid(child, 0)
        if status:
            name = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
            self.problems.append(f"{name}: status {os.waitstatus_to_exitcode(status)}")


def end_child(model: GPipe, checks: bool) -> None:
    """Ends a child whose call was interrupted: with status 0 if the next step has the plain loop's bits."""
    status = 1
    try:
        x = features()
        ours = pipeline_step(model, x, input_gradient=False) if checks else {}
        layers = nn.Sequential(*model)
        status = 2 if checks and unequal(ours, loop_step(layers, x, M, input_gradient=False)) else 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def first_call(sweep: Sweep, checks: bool) -> None:
    """Makes a model and calls it, with an interrupt in each child of the sweep."""
    model, x = pipe(), features()
    try:
        sys.setprofile(sweep)
        model(x)
        if sweep.is_child:
            time.sleep(DEADLINE_SECONDS)
    except KeyboardInterrupt:
        end_child(model, checks)
    finally:
        sys.setprofile(None)


def main(kind: str, count: str, first: str) -> None:
    """Prints the places whose child failed, and the number of children."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    first_call(Sweep(kind, 0, 0), checks=False)  # imports
    counting = Sweep(kind, 0, 0)
    first_call(counting, checks=False)
    sweep = Sweep(kind, 0, max(1, len(counting.places) // int(count)))
    sweep.first = int(first) % sweep.stride
    first_call(sweep, checks=kind == "functions")
    print("\n".join([*sweep.problems, f"{sweep.num_children} children"]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
