"""One function of a kernel family as benchmarks see it: the inputs, PyTorch's operators, and ours.

All that is compared has one form: a function's outputs, then the gradients of the inputs that have one. For a
recomputed segment that is its backward: PyTorch computes the forward again, and then the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.accuracy import Results, doubles, excess
from gpipe_fast.kernels.launch import Config

Function = Callable[..., Any]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """One function of a kernel family.

    Attributes:
        name: begins with the family's word, as the names of its variants do.
        inputs: tensors of about so many elements, of a dtype, on a device ('cpu', 'cuda' or 'meta').
        differentiated: the indices of the inputs that have gradients; none for what is no differentiable
            function.
        plain: the function of the inputs, in PyTorch's operators as they run on a GPU: such as
            `torch.native_dropout`, where `dropout` would become others elsewhere.
        ours: what PyTorch computes from ``plain``, by the public function: of inputs and output gradients.
        launched: the launcher behind it, whose launches are counted; of the same arguments.
        overwritten: the indices of the inputs, and after them of the gradients, in whose place ``ours``
            writes.
        exact: in place of ``plain``, what results are compared with, where that draws random numbers, or does
            not take float64.
        liger: in place of ``plain``, by Liger-Kernel; see `bench.liger`.
        moved: the bytes read and written, of inputs and gradients, where launches do not show them (a kernel
            that is given addresses).
        memory_bound: its time is that of reading and writing.
    """

    name: str
    inputs: Callable[[int, torch.dtype, str], list[Tensor]]
    differentiated: Sequence[int]
    plain: Function
    ours: Function
    launched: Function
    overwritten: Sequence[int] = ()
    exact: Function | None = None
    liger: Function | None = None
    moved: Callable[[Sequence[Tensor], Sequence[Tensor]], int] | None = None
    memory_bound: bool = True

    def gradients(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Random ones of the outputs; that of a loss is 1."""
        if not self.differentiated:
            return []
        outputs = _listed(self.plain(*(t.to("meta") for t in inputs)))
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
        """Outputs and gradients by autograd, of ``plain`` or another function."""
        leaves = [t.detach().requires_grad_(i in self.differentiated) for i, t in enumerate(inputs)]
        outputs = _listed((function or self.plain)(*leaves))
        found: Sequence[Tensor] = ()
        if self.differentiated:
            found = torch.autograd.grad(outputs, [leaves[i] for i in self.differentiated], gradients)
        return [t.detach() for t in (*outputs, *found)]

    def fused(self, inputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """The same by ours."""
        return _listed(self.ours(*inputs, *gradients))


@dataclass(frozen=True)
class Judge:
    """What a case must compute from some inputs, and how well PyTorch does."""

    eager: Results
    truth: Results

    @classmethod
    def of(cls, case: Case, inputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> Judge:
        """From copies of the inputs."""
        function = case.exact or case.plain
        given, incoming = ([t for t in doubles(each) if t is not None] for each in (inputs, gradients))
        truth = case.unfused(given, incoming, function)
        return cls(case.unfused(copied(inputs), gradients, function), truth)

    def excess(self, found: Results) -> float:
        """The largest error, as a share of what is allowed; infinite for what has another form."""
        try:
            return max(excess(found, self.eager, self.truth), default=0.0)
        except (AssertionError, ValueError):
            return float("inf")


@dataclass(frozen=True)
class Shape:
    """One shape class of a kernel.

    Attributes:
        inputs: of a case, for which its launcher takes this class.
        candidates: the configurations to try.
    """

    inputs: Callable[[torch.dtype, str], list[Tensor]]
    candidates: Sequence[Config]


@dataclass(frozen=True)
class Tuning:
    """What can be tuned of a kernel.

    Attributes:
        kernel: its name, as its launcher gives it to `gpipe_fast.kernels.launch.tuned`.
        case: what is timed.
        shapes: by the name of the shape class, as its launcher gives it.
    """

    kernel: str
    case: Case
    shapes: Mapping[str, Shape]


def copied(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Each in memory of its own."""
    return [t.clone() for t in tensors]


def _listed(found: Any) -> list[Any]:
    return [found] if isinstance(found, Tensor) else list(found)
