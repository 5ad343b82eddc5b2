"""One mini-batch through the executor, as one node of the autograd graph."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from gpipe_fast._extension import MiniBatch, StageRun


class Run:
    """The executor's side of one mini-batch.

    Programs and their memory serve one mini-batch at a time: whoever runs them holds ``turn``.
    """

    def __init__(
        self, stages: list[StageRun], key: int, differentiable: bool, turn: AbstractContextManager[object]
    ) -> None:
        self.turn = turn
        self.stages = stages
        self.differentiable = differentiable
        self.native = MiniBatch(stages, key)
        self.sizes: list[int] = []

    def forward(self, microbatches: Sequence[Tensor]) -> Tensor:
        """Runs all stages on all micro-batches and joins what comes out."""
        with self.turn:
            outputs = self.native.forward([[m] for m in microbatches])
        self.sizes = [len(o) for (o,) in outputs]
        return torch.cat([o for (o,) in outputs])

    def backward(self, gradient: Tensor, keep: bool) -> tuple[Tensor | None, list[Tensor | None]]:
        """The gradients of the input and of every parameter; ``keep`` allows another backward."""
        with self.turn:
            inputs, parameters = self.native.backward([[g] for g in gradient.split(self.sizes)], keep)
        parts = [m[0] for m in inputs if m and m[0] is not None]
        return torch.cat(parts) if parts else None, [p for stage in parameters for p in stage]


class Step(torch.autograd.Function):
    """One mini-batch as one node of the autograd graph."""

    @staticmethod
    def forward(ctx: Any, run: Run, num_microbatches: int, input: Tensor, *parameters: Tensor) -> Tensor:
        """Cuts the input, so that its gradient is one tensor."""
        # Saved so that autograd notices an in-place change of any of them before the backward.
        ctx.save_for_backward(input, *parameters)
        ctx.run = run
        output = run.forward(input.chunk(num_microbatches))
        if not run.differentiable:
            ctx.mark_non_differentiable(output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """As ``Run.backward``, after autograd's check that nothing was changed in place."""
        if torch.is_grad_enabled():
            raise RuntimeError("a pipeline's backward cannot be differentiated; pass create_graph=False")
        _ = ctx.saved_tensors
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        input_gradient, parameter_gradients = ctx.run.backward(gradient, keep)
        return None, None, input_gradient, *parameter_gradients
