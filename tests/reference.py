"""The plain micro-batch loop that a pipeline is compared with, and the comparison, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

import gpipe_fast
from gpipe_fast import GPipe

SEED = 7

# Everything a training step leaves behind, by name: output, gradients, buffers. None: no gradient.
Result = dict[str, Tensor | None]


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Puts parameters and buffers back, and drops gradients, when the block ends."""
    before = [(t, t.detach().clone()) for t in (*model.parameters(), *model.buffers())]
    buffers = [(module, name, b) for module in model.modules() for name, b in module._buffers.items()]
    try:
        yield
    finally:
        for module, name, buffer in buffers:
            if getattr(module, name) is not buffer:  # some layers replace them
                setattr(module, name, buffer)
        with torch.no_grad():
            for tensor, value in before:
                tensor.copy_(value)
                tensor.grad = None


def plain_loop(model: nn.Sequential, x: Tensor, chunks: int) -> Tensor:
    """What every pipeline must equal; draws random numbers by key, as a pipeline does."""
    torch.manual_seed(SEED)
    with gpipe_fast.keyed_rng(model):
        return torch.cat([model(c) for c in x.chunk(chunks)])


def pipeline(pipe: GPipe, x: Tensor, budget: float | None = None) -> Tensor:
    """One call of ``pipe`` that saves this share of activations, by default as ``pipe.checkpoint`` says."""
    torch.manual_seed(SEED)
    if budget is None:
        return pipe(x)
    before, pipe.checkpoint = pipe.checkpoint, budget
    try:
        return pipe(x)
    finally:
        pipe.checkpoint = before


def gradient_like(output: Tensor, microbatch: Tensor | None = None) -> Tensor:
    """A gradient with nothing that could hide an error, its dimensions in memory ordered as ``microbatch``'s.

    By default they are ordered as the output's, which is how losses make gradients.
    """
    generator = torch.Generator().manual_seed(SEED)
    noise = torch.randn(output.shape, generator=generator, dtype=torch.float32)
    like = output if microbatch is None else microbatch
    order = sorted(range(like.dim()), key=lambda d: (-like.stride(d), d))
    laid_out = torch.empty([output.shape[d] for d in order], dtype=output.dtype, device=output.device)
    return laid_out.permute([order.index(d) for d in range(like.dim())]).copy_(noise)


def leaf(x: Tensor, requires_grad: bool = True) -> Tensor:
    """The tensor as a leaf with its strides; integers take no gradient."""
    return x.detach().requires_grad_(requires_grad and (x.is_floating_point() or x.is_complex()))


def collect(model: nn.Module, x: Tensor, output: Tensor, gradient: Tensor | None = None) -> Result:
    """Runs the backward, and copies what the step left behind."""
    if output.requires_grad:
        output.backward(gradient_like(output) if gradient is None else gradient)
    result: Result = {"output": output.detach().clone(), "input gradient": x.grad}
    result |= {f"gradient of {n}": _copy(p.grad) for n, p in model.named_parameters()}
    result |= {f"buffer {n}": b.clone() for n, b in model.named_buffers()}
    return result


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


def loop_step(
    model: nn.Sequential, x: Tensor, chunks: int, input_gradient: bool = True, gradient: Tensor | None = None
) -> Result:
    """One training step of the plain loop; the model is left as it was."""
    with restored(model):
        x = leaf(x, input_gradient)
        return collect(model, x, plain_loop(model, x, chunks), gradient)


def pipeline_step(
    pipe: GPipe,
    x: Tensor,
    budget: float | None = None,
    input_gradient: bool = True,
    gradient: Tensor | None = None,
) -> Result:
    """One training step of a pipeline; the model is left as it was."""
    with restored(pipe):
        x = leaf(x, input_gradient)
        return collect(pipe, x, pipeline(pipe, x, budget), gradient)


def unequal(ours: Result, expected: Result) -> list[str]:
    """Names of what differs in a bit, in shape, or in being there at all."""
    assert ours.keys() == expected.keys()
    return [name for name in expected if not _equal(ours[name], expected[name])]


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def error(result: Result, truth: Result) -> dict[str, float]:
    """Largest absolute error of each tensor against the same step computed in float64."""
    return {
        name: float((value.double() - exact.double()).abs().max()) if value.numel() else 0.0
        for name, value in result.items()
        if value is not None and (exact := truth[name]) is not None
    }


def check_step(
    model: nn.Sequential,
    x: Tensor,
    chunks: int = 4,
    balance: list[int] | None = None,
    budgets: tuple[float | None, ...] = (0.0, 0.5, 1.0),
    input_gradient: bool = True,
) -> None:
    """Asserts that a pipeline's training step is the plain loop's, bit for bit, at every budget."""
    expected = loop_step(model, x, chunks, input_gradient)
    pipe = GPipe(model, balance or [len(model)], chunks=chunks)
    for budget in budgets:
        assert unequal(pipeline_step(pipe, x, budget, input_gradient), expected) == [], f"budget {budget}"
