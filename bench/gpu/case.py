"""Benchmark cases: a function of a kernel family with its inputs, in PyTorch's operators and in our kernels.

All compared results have the same form: the outputs of a function, then the gradients of its differentiated
inputs. This is the backward of a recomputed segment: PyTorch recomputes the forward, then computes gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.gpu.accuracy import Results, error_ratio, to_float64

Function = Callable[..., Any]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class KernelCase:
    """One function of a kernel family.

    Attributes:
        name: the name of the case. Begins with the family's word, like the names of the family's variants.
        inputs: makes input tensors from the approximate number of elements, a dtype, and a device ('cpu',
            'cuda' or 'meta').
        differentiated: the indices of the inputs with gradients; empty if the function is not differentiable.
        baseline: the function in the PyTorch operators that run on a GPU.
        ours: the public function that computes outputs and gradients from inputs and output gradients.
        launched: the launcher that ``ours`` calls, with the same arguments; its launches are counted.
        overwritten: the indices of the tensors that ``ours`` overwrites, counting inputs, then gradients.
        moved: computes the bytes read and written from inputs and gradients, if launches do not show them.
        memory_bound: whether memory traffic determines the run time.
    """

    name: str
    inputs: Callable[[int, torch.dtype, str], list[Tensor]]
    differentiated: Sequence[int]
    baseline: Function
    ours: Function
    launched: Function
    overwritten: Sequence[int] = ()
    moved: Callable[[Sequence[Tensor], Sequence[Tensor]], int] | None = None
    memory_bound: bool = True

    def gradients(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Returns random gradients of the outputs; the gradient of a scalar output (a loss) is 1."""
        if not self.differentiated:
            return []
        outputs = _as_list(self.baseline(*(t.to("meta") for t in inputs)))
        device = inputs[0].device
        return [
            torch.randn(out.shape, dtype=out.dtype, device=device)
            if out.dim()
            else torch.ones((), dtype=out.dtype, device=device)
            for out in outputs
        ]

    def unfused(
        self, inputs: Sequence[Tensor], gradients: Sequence[Tensor], function: Function | None = None
    ) -> list[Tensor]:
        """Returns outputs and gradients by autograd, for ``baseline`` or for ``function``."""
        leaves = [t.detach().requires_grad_(i in self.differentiated) for i, t in enumerate(inputs)]
        outputs = _as_list((function or self.baseline)(*leaves))
        found: Sequence[Tensor] = ()
        if self.differentiated:
            found = torch.autograd.grad(outputs, [leaves[i] for i in self.differentiated], gradients)
        return [t.detach() for t in (*outputs, *found)]

    def fused(self, inputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Returns outputs and gradients by our kernels."""
        return _as_list(self.ours(*inputs, *gradients))


@dataclass(frozen=True)
class AccuracyCheck:
    """Checks results of a case against float64, relative to the error of PyTorch's results.

    Attributes:
        eager: PyTorch's results in the case's dtype.
        exact_results: the results in float64.
    """

    eager: Results
    exact_results: Results

    @classmethod
    def of(cls, case: KernelCase, inputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> AccuracyCheck:
        """Computes the results from copies of the inputs."""
        given, incoming = ([t for t in to_float64(each) if t is not None] for each in (inputs, gradients))
        return cls(case.unfused(clone_all(inputs), gradients), case.unfused(given, incoming))

    def error_ratio(self, found: Results) -> float:
        """Returns the largest error as a fraction of the allowed one; infinite for wrong shapes or dtypes."""
        try:
            return max(error_ratio(found, self.eager, self.exact_results), default=0.0)
        except (AssertionError, ValueError):
            return float("inf")


def clone_all(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns a clone of each tensor."""
    return [t.clone() for t in tensors]


def _as_list(found: Any) -> list[Any]:
    return [found] if isinstance(found, Tensor) else list(found)
