"""A prepared call: the plan of a mini-batch with all that its run needs, besides the inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from gpipe_fast._extension import Pipeline
from gpipe_fast.randomness.random import MinibatchKey, minibatch_key
from gpipe_fast.runtime.plan import PlannedCall
from gpipe_fast.runtime.stage import TRACING_LOCK
from gpipe_fast.runtime.state import ModuleState


class PreparedCall(NamedTuple):
    """A call that is ready to run.

    Attributes:
        plan: the plan.
        pipeline: the C++ pipeline that runs it.
        parameters: the parameters of all layers.
        buffers: the buffers of all layers.
        state: what tells whether a layer in Python changes other layers; None if no layer runs in Python.
    """

    plan: PlannedCall
    pipeline: Pipeline
    parameters: Sequence[Tensor]
    buffers: Sequence[Tensor]
    state: ModuleState | None

    def key(self, draw: Callable[[], int] = minibatch_key) -> int | MinibatchKey:
        """Returns the mini-batch's key; if it is known only at run time whether one is needed, draws it then.

        A plan without random operators does not advance PyTorch's generator.
        """
        if self.plan.draws is None:
            return MinibatchKey(draw=draw)
        return draw() if self.plan.draws else 0

    def check_unchanged(self) -> None:
        """Checks that no layer in Python has changed what other layers read.

        Raises:
            RuntimeError: a layer has.
        """
        if self.state is None:
            return
        with TRACING_LOCK:  # a trace by another thread replaces parameters meanwhile
            is_changed = self.state.is_changed()
        if is_changed:
            raise RuntimeError(
                "a layer that runs in Python changed what other layers read, during the call; these may "
                "have run without the change; pass backend='eager' to GPipe to run all layers in Python"
            )
