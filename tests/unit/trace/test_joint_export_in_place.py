"""Layers that change a view in place compute the bits of eager mode, whatever view and operator."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.reference import check_step

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTH = 48

# Of a matrix with an odd number of rows, and WIDTH columns.
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda y: y,
    "left half": lambda y: y[:, : WIDTH // 2],
    "odd part": lambda y: y[:, 5:38],
    "every second column": lambda y: y[:, ::2],
    "every second row": lambda y: y[::2],
    "row": lambda y: y[1],
    "column": lambda y: y[:, 1],
    "narrow": lambda y: y.narrow(1, 3, 17),
    "diagonal": lambda y: y.diagonal(),
    "transposed": lambda y: y.t(),
    "part of transposed": lambda y: y.t()[3:20],
    "unflattened, transposed": lambda y: y.unflatten(1, (4, -1)).transpose(1, 2),
    "unflattened, middle": lambda y: y.unflatten(1, (4, -1))[:, 1],
    "permuted, sliced": lambda y: y.view(-1, 3, 4, 4).permute(2, 0, 3, 1)[1:, :, 1:],
    "with unit dimensions": lambda y: y[:, None, :, None].squeeze(1),
    "movedim": lambda y: y.unflatten(1, (4, -1)).movedim(0, 2),
    "expanded to its size": lambda y: y.expand(-1, -1),
    "expanded by a unit dimension": lambda y: y.expand(1, -1, -1),
    "part, expanded": lambda y: y[::2].expand(-1, WIDTH),
    "expand_as": lambda y: y[:, 3:9].expand_as(y[:, 3:9]),
    "broadcast_to": lambda y: y.unsqueeze(0).broadcast_to(1, *y.shape),
    "windows": lambda y: y.unfold(1, 4, 4),
    "windows with gaps": lambda y: y.unfold(1, 3, 7),
    "windows of rows": lambda y: y.unfold(0, 2, 3),
    "windows of part": lambda y: y[:, 2:40].unfold(1, 5, 6),
    "as_strided": lambda y: y.as_strided((y.shape[0], 5), (WIDTH, 2)),
    "as_strided with an offset": lambda y: y.as_strided((5, 7), (1, 6), 3),
    "detached part": lambda y: y.detach()[:, 3:9],
    "data": lambda y: y.data[:, ::3],
    "unsafe chunk": lambda y: y.unsafe_chunk(3, 1)[1],
    "unsafe split": lambda y: torch.unsafe_split(y, 5, 1)[2],
    "unsafe split with sizes": lambda y: y.unsafe_split_with_sizes([10, 17, 21], 1)[1],
}
# PyTorch follows no change of an `as_strided` of a view (its issue 104505), and takes the results of
# `unsafe_split` for tensors with memory of their own.
RUN_IN_PYTHON = {"windows of part", "unsafe chunk", "unsafe split", "unsafe split with sizes"}
OPERATORS: dict[str, Callable[[Tensor], object]] = {
    "sigmoid": lambda v: v.sigmoid_(),
    "tanh": lambda v: v.tanh_(),
    "exp": lambda v: v.exp_(),
    "mul": lambda v: v.mul_(1.1),
    "add": lambda v: v.add_(torch.full_like(v, 0.3)),
    "silu": lambda v: F.silu(v, inplace=True),
    "elu": lambda v: F.elu(v, inplace=True),
    "mish": lambda v: F.mish(v, inplace=True),
    "erf": lambda v: v.erf_(),
    "pow": lambda v: v.abs_().add_(0.1).pow_(1.3),
    "log": lambda v: v.square_().add_(0.1).log_(),
    "atan": lambda v: v.atan_(),
    "addcdiv": lambda v: v.addcdiv_(torch.ones_like(v), torch.full_like(v, 3.0)),
    "lerp": lambda v: v.lerp_(torch.ones_like(v), 0.3),
    "copy": lambda v: v.copy_(torch.full_like(v, 3.0).exp()),
    "masked fill": lambda v: v.masked_fill_(v > 0.2, 0.5),
    "cumulative sum": lambda v: v.cumsum_(0),
    "item": lambda v: v.__setitem__((0, ...), 2.0),
    "two": lambda v: v.sigmoid_().sub_(v.tanh()),
}


class ChangesView(nn.Module):
    def __init__(self, view: str, operator: str) -> None:
        super().__init__()
        self.view, self.operator = VIEWS[view], OPERATORS[operator]

    def forward(self, x: Tensor) -> Tensor:
        y = x.cos() * 1.0  # does not start the memory that a program plans for its values
        changed = self.view(y)
        self.operator(changed)
        return y + changed.tanh().sum() + changed.sum(0).sigmoid().mean()


def _is_refused_in_eager_mode(model: nn.Module, x: Tensor) -> bool:
    try:
        torch.autograd.grad(model(x).sum(), [*model.parameters()])
    except RuntimeError as error:
        return "modified" in str(error) or "more than one element" in str(error)
    return False


@pytest.mark.sampled(50)
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("view", VIEWS)
def test_a_change_of_a_view(view: str, operator: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), ChangesView(view, operator)), torch.randn(14, WIDTH)
    if _is_refused_in_eager_mode(model, x[:7]):
        pytest.skip("eager mode refuses this change")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore" if view in RUN_IN_PYTHON else "error", message=".*runs in Python")
        check_step(model, x, chunks=2, budgets=(0.0, 1.0))


class Cells(nn.Module):
    def __init__(self, kind: type[nn.RNNCellBase], width: int) -> None:
        super().__init__()
        self.cell = kind(width, width)

    def forward(self, x: Tensor) -> Tensor:
        state = self.cell(x.tanh(), self.cell(x))
        return torch.cat(state, -1) if isinstance(state, tuple) else state


@pytest.mark.sampled(12)
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 17])
@pytest.mark.parametrize("width", [3, 8, 16, 17, 33])
@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_a_recurrent_cell(kind: type[nn.RNNCellBase], width: int, rows: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), Cells(kind, width))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*runs in Python")
        check_step(model, torch.randn(2 * rows, width), chunks=2, budgets=(0.0, 1.0))


# Operators in place that change sizes or strides.
RESHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose": lambda y: y.transpose_(1, 2),
    "first and last": lambda y: y.transpose_(0, -1).transpose(0, -1),
    "twice": lambda y: (y.transpose_(0, 1) + 0).transpose_(0, 1),
    "swap axes": lambda y: y.swapaxes_(-1, -2),
    "swap dimensions": lambda y: y.swapdims_(1, 2).mul_(3),
    "t": lambda y: y.sum(1).t_().cos().t(),
    "t of a product": lambda y: y @ y.flatten(0, 1)[:4].sin().t_(),
    "squeeze": lambda y: y.sum(1, keepdim=True).squeeze_(1),
    "squeeze dimensions": lambda y: y.sum((1, 2), keepdim=True).squeeze_((1, 2)),
    "unsqueeze": lambda y: y.unsqueeze_(1) * 2,
    "unsqueeze and index": lambda y: y.unsqueeze_(0)[0].clamp_(-1, 1),
    "as_strided": lambda y: y.as_strided_((len(y), 4, 3), (12, 1, 4)),
    "as_strided with gaps": lambda y: y.as_strided_((len(y), 2), (12, 5), 3),
    "detach": lambda y: y.sin().detach_() + y,
    "affine grid": lambda y: F.affine_grid(y[:, :2, :3], [len(y), 1, 4, 4], align_corners=False),
}


class Reshapes(nn.Module):
    def __init__(self, name: str, then_changes: bool) -> None:
        super().__init__()
        self.reshape, self.then_changes = RESHAPES[name], then_changes

    def forward(self, x: Tensor) -> Tensor:
        found = self.reshape(x.view(-1, 3, 4).cos() * 2)
        return found.sin().mul_(0.5) if self.then_changes else found


@pytest.mark.parametrize("then_changes", [False, True])
@pytest.mark.parametrize("name", RESHAPES)
def test_a_change_of_sizes_or_strides(name: str, then_changes: bool) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(WIDTH, 12), Reshapes(name, then_changes)), torch.randn(14, WIDTH)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*runs in Python")
        check_step(model, x, chunks=2, budgets=(0.0, 1.0))


class DoubleAndView(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x.roll(1, 1)[:, 2:6]


class ChangesFirst(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        pair[0].add_(1)
        return pair


class Product(nn.Linear):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] * super().forward(pair[1])


def test_a_stage_that_changes_one_input_reads_the_others_where_they_are() -> None:
    """A copy would begin at a multiple of 64 bytes, on which the last bits of a product depend."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 8), DoubleAndView(), ChangesFirst(), Product(4, 8, bias=False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_step(layers, torch.randn(4, 8), balance=[2, 2], chunks=2)
