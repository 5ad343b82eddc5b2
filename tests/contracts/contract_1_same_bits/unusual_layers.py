"""Layers with unusual strides, complex numbers, in-place operators, autograd and Python state, by name.

Every entry maps a tensor of shape (batch, length, WIDTH) to another one, like those of `layers`; a stage may
end between the layers of an entry.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tests.contracts.contract_1_same_bits.torch_layers import RECIPES, Recipe
from tests.contracts.contract_1_same_bits.torch_layers import RUN_IN_PYTHON as TORCH_IN_PYTHON
from tests.untraceable import WIDTH, FunctionLayer

Layers = list[nn.Module]
HALF = WIDTH // 2


def of(*functions: Callable[..., Any]) -> Callable[[], Layers]:
    """Returns a constructor of layers that call these functions with a linear layer."""
    return lambda: [FunctionLayer(function) for function in functions]


def wide(x: Tensor) -> Tensor:
    """Returns a tensor of a dtype that has complex numbers, factorisations and Fourier transforms."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def bounded(function: Callable[[nn.Module, Tensor], Tensor]) -> Callable[[], Layers]:
    """Returns a constructor of a layer that adds a bounded result, computed in a wide dtype, to its input."""
    return of(lambda f, x: x + function(f, wide(f(x))).tanh().to(x.dtype))


def windows(f: nn.Module, x: Tensor) -> Tensor:
    """Reads overlapping windows of one storage."""
    h = f(x).flatten(1)
    h = torch.cat([h, h[:, :HALF]], 1)
    size, (row, _) = (len(x), x.shape[1], 2, WIDTH), h.stride()
    return torch.as_strided(h, size, (row, WIDTH, HALF, 1)).sum(2)


def rotate(f: nn.Module, given: Any) -> Any:
    """Turns pairs of channels by angles; all layers of a model pass on two views of one tensor."""
    x, (sin, cos) = given
    q = f(x).view(*x.shape[:-1], 2, HALF)
    repeat = torch.repeat_interleave
    turned = q * repeat(cos[:, :, None], 2, 3) + q.flip(-1) * repeat(sin[:, :, None], 2, 3)
    return x + turned.flatten(-2), (sin, cos)


def angles(f: nn.Module, x: Tensor) -> Any:
    return x, torch.split(f(x)[..., :HALF], HALF // 2, -1)


def sinkhorn(f: nn.Module, x: Tensor) -> Tensor:
    y = f(x).log_softmax(-1)
    for _ in range(2):
        y = y.transpose(1, 2).contiguous().log_softmax(-1).transpose(1, 2).contiguous().log_softmax(-1)
    return y.exp()


def column_major(f: nn.Module, x: Tensor) -> Tensor:
    y = f(x).flatten(0, 1).log_softmax(-1)
    return torch.einsum("bd,dk->kb", y, f.weight).tanh().t().unflatten(0, x.shape[:2])


VIEWS: dict[str, Callable[[], Layers]] = {
    "transposed between": of(lambda f, x: f(x).transpose(1, 2), lambda f, x: f(x.transpose(1, 2))),
    "batch inside": of(lambda f, x: f(x).transpose(0, 1).contiguous().transpose(0, 1)),
    "halves of one tensor": of(
        lambda f, x: f(x).split(HALF, -1), lambda f, pair: torch.cat([pair[1].sin(), pair[0]], -1)
    ),
    "rotary angles": of(angles, rotate, rotate, rotate, lambda f, given: given[0].tanh()),
    "overlapping windows": of(windows),
    "unfold": of(lambda f, x: F.pad(f(x), (0, 0, 1, 1)).unfold(1, 3, 1).amax(-1)),
    "expanded number": of(lambda f, x: x * f.bias[0].expand(x.shape)),
    "diagonal": of(lambda f, x: (f(x).unsqueeze(-1) * x.unsqueeze(-2)).diagonal(dim1=-2, dim2=-1).sin()),
    "copying reshape": of(lambda f, x: f(x).transpose(1, 2).reshape(len(x), -1).view_as(x)),
    "bits": of(lambda f, x: x * (1 + _bits(f(x)).to(x.dtype))),
    "column-major gradients": of(column_major),
    "Sinkhorn": of(sinkhorn),
    "softmax, transposed": of(lambda f, x: f(x).flatten(0, 1).softmax(0).t().contiguous().t().view_as(x)),
    "input and its view": of(
        lambda f, x: (x, x[..., :HALF], x.transpose(1, 2)),
        lambda f, p: f(p[0]) + p[1].repeat(1, 1, 2) * p[2].transpose(1, 2).tanh(),
    ),
    "same tensor twice": of(
        lambda f, x: (h := f(x), h), lambda f, p: (p[0], p[1]), lambda f, p: p[0] * p[1].tanh()
    ),
    "einsum": of(lambda f, x: torch.einsum("bld,dk->kbl", f(x), f.weight).permute(1, 2, 0)),
    "views of a parameter": of(
        lambda f, x: (x, f.weight.t()[None].expand(len(x), -1, -1)), lambda f, p: torch.bmm(*p).tanh()
    ),
    "zero channels": of(lambda f, x: torch.cat([f(x), F.linear(x, f.weight[:0])], -1)),
}


def _bits(x: Tensor) -> Tensor:
    return (
        x.detach().contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]) & 1
    )


def written(function: Callable[[nn.Module, Tensor, Tensor], object]) -> Callable[[], Layers]:
    """Returns a constructor of a layer that changes a tensor of its own in place."""

    def write(f: nn.Module, x: Tensor) -> Tensor:
        h: Tensor = f(x) * 1
        function(f, h, x)
        return h

    return of(write)


def swap_halves(f: nn.Module, h: Tensor, x: Tensor) -> None:
    left = h[..., :HALF].clone()
    h[..., :HALF] = h[..., HALF:]
    h[..., HALF:] = left


def copied(f: nn.Module, x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    y[..., ::2], y[..., 1::2] = f(x)[..., ::2], x[..., 1::2]
    return y


IN_PLACE: dict[str, Callable[[], Layers]] = {
    "in place: view": written(lambda f, h, x: h[:, :, ::2].mul_(2).sin_()),
    "in place: transposed view": written(
        lambda f, h, x: h.transpose(1, 2)[:, 1:].add_(x.transpose(1, 2)[:, 1:])
    ),
    "in place: halves swapped": written(swap_halves),
    "in place: index": written(lambda f, h, x: h.index_add_(2, torch.tensor([1, 3, 1]), x[..., :3])),
    "in place: mask": written(lambda f, h, x: h.masked_fill_(x > 0, 0.5)),
    "in place: put": written(
        lambda f, h, x: h.__setitem__((slice(None), torch.tensor([0, 1])), x[:, :2].tanh())
    ),
    "empty, filled": of(copied),
    "changes its input": of(lambda f, x: f(x), lambda f, x: x.mul_(2).tanh_()),
    "changes a view of its input": of(lambda f, x: f(x), lambda f, x: (x[..., ::2].neg_(), x)[1]),
    "changes its input, reads the other": of(
        lambda f, x: (f(x), x), lambda f, p: (p[0].add_(1), p[1] * 2), lambda f, p: p[0] * p[1].tanh()
    ),
}


def spectrum(f: nn.Module, x: Tensor) -> Tensor:
    z = torch.fft.rfft(wide(f(x)), dim=-1)
    return torch.fft.irfft(z * z.conj().sin(), WIDTH, dim=-1)


def to_complex(f: nn.Module, x: Tensor) -> Tensor:
    return torch.complex(wide(f(x)), wide(x))


def from_complex(z: Tensor, like: nn.Module) -> Tensor:
    return (z.real + z.imag).tanh().to(like.weight.dtype)


def conj_real_in_place(f: nn.Module, x: Tensor) -> Tensor:
    z = to_complex(f, x).conj() * 1
    return x + z.real.add_(1).tanh().to(x.dtype)


COMPLEX: dict[str, Callable[[], Layers]] = {
    "conj real, in place": of(conj_real_in_place),
    "spectrum": of(lambda f, x: (spectrum(f, x).tanh() + wide(x)).to(x.dtype)),
    "complex between": of(to_complex, lambda f, z: z * z.conj() + z, lambda f, z: from_complex(z, f)),
    "conj between": of(
        lambda f, x: to_complex(f, x).conj(),
        lambda f, z: (z.conj(), z),
        lambda f, p: from_complex(p[0] * p[1], f),
    ),
}


def well_conditioned(f: nn.Module, x: Tensor) -> Tensor:
    return wide(f.weight).t() @ wide(f.weight) + 2 * torch.eye(WIDTH, dtype=wide(x).dtype)


OPERATORS: dict[str, Callable[[], Layers]] = {
    "gather": bounded(lambda f, x: x.gather(-1, x.argsort(-1)) + x.take_along_dim(x.argsort(1), 1)),
    "sort": bounded(lambda f, x: x.sort(-1).values * x.topk(3, -1).values.sum(-1, True)),
    "median and kthvalue": bounded(
        lambda f, x: x - x.median(-1, True).values * x.kthvalue(2, -1, True).values
    ),
    "cumulative": bounded(lambda f, x: x.cumsum(1) + x.logcumsumexp(-1) + x.cummax(1).values),
    "baddbmm": bounded(lambda f, x: torch.baddbmm(x, x, wide(f.weight).expand(len(x), -1, -1), beta=0.5)),
    "solve": bounded(lambda f, x: torch.linalg.solve(well_conditioned(f, x), x, left=False)),
    "Cholesky and QR": bounded(
        lambda f, x: (
            x @ torch.linalg.cholesky(well_conditioned(f, x)) @ torch.linalg.qr(well_conditioned(f, x)).R
        )
    ),
    "where and clamp": bounded(lambda f, x: torch.where(x > 0, x, x.exp()).clamp(-1, x.detach().amax())),
    "grid_sample": bounded(lambda f, x: _grid_sampled(x)),
    "scatter_reduce": bounded(
        lambda f, x: (
            x.scatter_reduce(-1, x.argsort(-1) // 2, x * 2, "amax") + x.index_select(-1, x[0, 0].argsort())
        )
    ),
    "index_put": bounded(lambda f, x: x.index_put((torch.tensor([0]),), x[:1] * 2, accumulate=True)),
    "attention, masked": bounded(
        lambda f, x: F.scaled_dot_product_attention(x, x, x, torch.ones(x.shape[1], x.shape[1]).tril().bool())
    ),
    "attention, causal": bounded(
        lambda f, x: (
            F.scaled_dot_product_attention(*[x.unflatten(-1, (2, -1)).transpose(1, 2)] * 3, is_causal=True)
            .transpose(1, 2)
            .flatten(-2)
        )
    ),
    "gumbel softmax": bounded(lambda f, x: F.gumbel_softmax(x, hard=True) * x),
    "bernoulli": bounded(lambda f, x: x * torch.bernoulli(x.detach().sigmoid())),
    "normal and integers": bounded(
        lambda f, x: x + torch.normal(0.0, 1.0, x.shape, dtype=x.dtype) * torch.randint(3, x.shape)
    ),
    "dtypes": of(
        lambda f, x: (f(x).double().sin().float() * (x > 0)).to(x.dtype) + f(x).to(torch.bfloat16).to(x.dtype)
    ),
    "integers between": of(
        lambda f, x: (f(x), x.argmax(-1), x > 0, x.int()),
        lambda f, p: p[0] * p[2] + F.embedding(p[1], f.weight) + p[3].clamp(-1, 1),
    ),
    "loop over the length": of(lambda f, x: _recurrence(f, x)),
    "branch on a size": of(lambda f, x: f(x) if len(x) % 2 else x.sin()),
    "branch on strides": of(lambda f, x: f(x) if x.is_contiguous() else f(x).sin()),
    "branch on modes": of(
        lambda f, x: f(x) * (2 if torch.is_grad_enabled() else 3) * (1 if f.training else 0.5)
    ),
    "branch on requires_grad": of(lambda f, x: f(x) * (2 if x.requires_grad else 3)),
    "constants": of(lambda f, x: x + torch.arange(WIDTH, dtype=x.dtype) * torch.tensor(0.1) + math.pi),
    "autocast inside": of(lambda f, x: _autocast(f, x)),
}


def _grid_sampled(x: Tensor) -> Tensor:
    theta = torch.tensor([[[0.8, 0.1, 0.0], [0.0, 0.9, 0.1]]], dtype=x.dtype).expand(len(x), 2, 3)
    grid = F.affine_grid(theta, (len(x), 1, *x.shape[1:]), align_corners=False)
    return F.grid_sample(x[:, None], grid, align_corners=False)[:, 0]


def _recurrence(f: nn.Module, x: Tensor) -> Tensor:
    h, outputs = x[:, 0], []
    for t in range(x.shape[1]):
        h = (h * 0.5 + x[:, t]).tanh()
        outputs.append(h)
    return f(torch.stack(outputs, 1))


def _autocast(f: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        y = f(x)
    return y.to(x.dtype)


class Several(torch.autograd.Function):
    """Several inputs and outputs, of which one has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, factor: float) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(x, y)
        ctx.factor = factor
        index = x.argmax(-1)
        ctx.mark_non_differentiable(index)
        return x * y, x + factor * y, index

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (x, y), (a, b, _) = ctx.saved_tensors, gradients
        gradient_of_x = a * y + b if ctx.needs_input_grad[0] else None
        return gradient_of_x, a * x + ctx.factor * b if ctx.needs_input_grad[1] else None, None


class WithContext(torch.autograd.Function):
    """Has `setup_context`, saves its output, and its gradient is expanded."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sigmoid()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return (gradient * y).mean(-1, keepdim=True).expand_as(y)


class Dirty(torch.autograd.Function):
    """Changes its input in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Straight(torch.autograd.Function):
    """Rounds, and passes on the gradient itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 4).round() / 4

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def several(f: nn.Module, x: Tensor) -> Any:
    a, b, index = Several.apply(f(x), x, 0.5)
    return a, b, index


def no_grad_inside(f: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = f(x).sigmoid()
    return x * target + f(x)


AUTOGRAD: dict[str, Callable[[], Layers]] = {
    "several outputs of a function": of(
        several, lambda f, p: p[0].tanh() + p[1] * F.embedding(p[2], f.weight)
    ),
    "setup_context": of(lambda f, x: WithContext.apply(f(x))),
    "dirty function": of(lambda f, x: Dirty.apply(f(x) * 1)),
    "straight-through": of(lambda f, x: Straight.apply(f(x))),
    "no_grad inside": of(no_grad_inside),
    "detached part": of(lambda f, x: f(x.detach()) + x.tanh().detach() * x),
    "vmap": of(lambda f, x: torch.func.vmap(lambda row: row * row.sum().tanh())(f(x))),
    "gradient inside": of(lambda f, x: x * torch.func.grad(lambda y: y.sin().square().sum())(f(x))),
}


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


def symmetric() -> Layers:
    linear = nn.Linear(WIDTH, WIDTH)
    parametrize.register_parametrization(linear, "weight", Symmetric())
    return [linear]


class OddParameters(nn.Module):
    """Parameters that are transposed, have gaps, share one storage, are empty, or are not used."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.randn(WIDTH * WIDTH + 2 * WIDTH) / 3
        self.weight = nn.Parameter(flat[: WIDTH * WIDTH].view(WIDTH, WIDTH).t())
        self.bias = nn.Parameter(flat[WIDTH * WIDTH :: 2])
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.empty(0, WIDTH))
        self.unused = nn.ParameterDict({"a": torch.randn(3)})
        self.list = nn.ParameterList([torch.randn(WIDTH), torch.randn(WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias) * self.scale + self.empty.sum(0)
        return torch.addcmul(y, *self.list).tanh()


class OddBuffers(nn.Module):
    """Buffers of integers and booleans, one of which another shares; writes them in training."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("mask", torch.arange(WIDTH) % 3 > 0, persistent=False)
        self.register_buffer("queue", torch.zeros(4, WIDTH))
        self.register_buffer("none", None)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * self.mask - self.queue.to(x.dtype)[self.count % 4]
        if self.training:
            self.queue.index_copy_(0, (self.count % 4)[None], y.detach()[0, :1].to(self.queue.dtype))
            self.count.add_(1)
        return y.tanh()


PARAMETERS: dict[str, Callable[[], Layers]] = {
    "symmetric weight": symmetric,
    "odd parameters": lambda: [OddParameters()],
    "odd buffers": lambda: [OddBuffers()],
}


class Changing(nn.Module):
    """Reads a value from Python, which `change` changes between steps."""

    def __init__(self, make: Callable[[float], Any]) -> None:
        super().__init__()
        self.linear, self.make = nn.Linear(WIDTH, WIDTH), make
        self.value = make(1.0)

    def change(self, number: int) -> None:
        self.value = self.make(1.0 + number % 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * self.value
        return y


class ReplacesParameter(nn.Module):
    """Changes which parameter and which buffer it has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))

    def change(self, number: int) -> None:
        self.linear.bias = (
            nn.Parameter(self.linear.bias.detach() + number) if self.linear.bias is not None else None
        )
        self.scale = torch.full_like(self.scale, 1.0 + number % 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * self.scale
        return y


# Two kinds of many; contract_5_nothing_stale has the others.
STATE: dict[str, Callable[[], Layers]] = {
    "attribute": lambda: [Changing(float)],
    "tensor as an attribute": lambda: [Changing(torch.tensor)],
    "replaced parameter": lambda: [ReplacesParameter()],
}


def resized(x: Tensor, *shape: int) -> Tensor:
    """Returns rows of another shape: repeats or drops elements."""
    size = math.prod(shape)
    flat = x.reshape(len(x), -1)
    return flat.repeat(1, -(-size // flat.shape[1]))[:, :size].reshape(len(x), *shape)


class OfRecipe(nn.Module):
    """A layer of torch.nn between changes of the shape."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.layer, self.call = recipe.make(), recipe.call
        self.shape, self.integers = recipe.shape, recipe.integers
        if any(isinstance(p, nn.parameter.UninitializedTensorMixin) for p in self.parameters()):
            with torch.no_grad():
                self(torch.randn(2, 3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = resized(x, *self.shape)
        if self.integers:
            h = (h.detach().abs() * 100).long() % self.integers
        y = self.layer(h) if self.call is None else self.call(self.layer, h)
        y = y if y.dim() and len(y) == len(x) else y.reshape(1, -1)
        return x + resized(y, *x.shape[1:]).tanh().to(x.dtype)


OF_TORCH = {f"nn.{name}": lambda recipe=recipe: [OfRecipe(recipe)] for name, recipe in RECIPES.items()}
UNUSUAL = VIEWS | IN_PLACE | COMPLEX | OPERATORS | AUTOGRAD | PARAMETERS | STATE
IN_PYTHON = {f"nn.{name}" for name in TORCH_IN_PYTHON}
IN_PYTHON |= {"solve", "Cholesky and QR", "where and clamp", "dirty function", "odd buffers"}
