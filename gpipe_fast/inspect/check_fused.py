"""A self-test of fused kernels: one small stage with and without them on a GPU, both against float64."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gpipe_fast import switches
from gpipe_fast.fuse import left_out
from gpipe_fast.fuse.availability import fusion_of
from gpipe_fast.gpipe import GPipe
from gpipe_fast.inspect.fused import replaced_by_graph

CHUNKS = 2
# The third mini-batch is captured, and the fourth is replayed.
STEPS = 4
# A result's error may be this many times that of the stage without fused kernels, or this many roundings of
# the result's largest element. A wrong kernel's error is many thousands of roundings.
MAX_RATIO, MAX_ROUNDINGS = 4.0, 16.0


@dataclass(frozen=True)
class FusedCheck:
    """The result of `check_fused`.

    Attributes:
        ok: False if fused kernels gave wrong results, were left out, or were not used where they should be.
        result: the result in words.
    """

    ok: bool
    result: str


def check_fused(layers: nn.Sequential, x: Tensor, device: torch.device) -> FusedCheck:
    """Trains one stage with and without fused kernels, and compares both with the stage in float64.

    Args:
        layers: the layers of the stage, on the CPU, in float32; they are copied. Fused kernels should
            replace some of their operators.
        x: a mini-batch, on the CPU.
        device: the device of the stage.
    """
    reason = reason_to_skip(device)
    if reason is not None:
        return FusedCheck(True, f"skipped: {reason}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = _pipeline(layers, device, fuse=True)
            found, plain, exact = (
                _results(each, x.to(device, dtype))
                for each, dtype in (
                    (model, x.dtype),
                    (_pipeline(layers, device, fuse=False), x.dtype),
                    (_pipeline(copy.deepcopy(layers).double(), device, fuse=False), torch.float64),
                )
            )
    except Exception as error:
        return FusedCheck(False, f"FAILED: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
    if left_out.names():
        return FusedCheck(False, f"WRONG, or not compiled or loaded: {', '.join(left_out.names())}")
    replaced = sum(len(each) for _, _, each in replaced_by_graph(model))
    if not replaced:
        return FusedCheck(False, "NOT USED: no operators of the stage were replaced")
    return _compare(found, plain, exact, replaced)


def reason_to_skip(device: torch.device) -> str | None:
    """Returns why stages on a device use no fused kernels, or None."""
    if device.type == "cpu":
        return "stages on the CPU have none"
    if switches.is_disabled("fuse"):
        return f"{switches.VARIABLE} contains 'fuse'"
    if fusion_of(device) is None:
        return "they need Triton, CUDA 12.8 and GPUs of compute capability 8.0"
    if torch.are_deterministic_algorithms_enabled():
        return "only deterministic algorithms are allowed"
    return None


def _pipeline(layers: nn.Sequential, device: torch.device, fuse: bool) -> GPipe:
    own = copy.deepcopy(layers)
    return GPipe(own, [len(own)], devices=[device], chunks=CHUNKS, checkpoint="always", fuse=fuse)


def _results(model: GPipe, x: Tensor) -> list[Tensor]:
    """Returns the output and all gradients of the last step."""
    for _ in range(STEPS):
        torch.manual_seed(0)
        model.zero_grad()
        own = x.detach().requires_grad_()
        own.grad = None
        output = model(own)
        output.backward(torch.linspace(-1, 1, output.numel(), device=x.device).view_as(output).to(x.dtype))
    gradients = [own.grad, *(parameter.grad for parameter in model.parameters())]
    return [t.detach().double() for t in (output, *gradients) if t is not None]


def _compare(
    found: Sequence[Tensor], plain: Sequence[Tensor], exact: Sequence[Tensor], replaced: int
) -> FusedCheck:
    worst = 0.0
    for ours, theirs, right in zip(found, plain, exact, strict=True):
        rounding = torch.finfo(torch.float32).eps * float(right.abs().max())
        error, expected = (float((each - right).abs().max()) for each in (ours, theirs))
        share = error / max(MAX_RATIO * expected, MAX_ROUNDINGS * rounding)
        # NaN is never less than or equal.
        worst = worst if share <= worst else share
    text = f"the largest error is {worst:.2g} times the error allowed ({replaced} replacements)"
    return FusedCheck(worst <= 1, text if worst <= 1 else f"WRONG: {text}")
