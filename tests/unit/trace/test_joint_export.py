"""Operators of which a trace records other ones than PyTorch's decomposition would."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from tests.reference import check_step, plain_loop
from tests.untraceable import FunctionLayer

SQUARE = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))

VALUES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "svdvals": lambda f, x: x * torch.linalg.svdvals(x)[:, None],
    "eigvalsh": lambda f, x: x * torch.linalg.eigvalsh(x.mT @ x)[:, None],
    "eigvalsh of the upper part": lambda f, x: x * torch.linalg.eigvalsh(x, UPLO="U")[:, None],
    "eigvals": lambda f, x: x * torch.linalg.eigvals(x.detach()).abs()[:, None],
    "matrix_norm": lambda f, x: x * torch.linalg.matrix_norm(x, 2)[:, None, None],
    "nuclear norm": lambda f, x: x * torch.linalg.matrix_norm(x, "nuc")[:, None, None],
    "of a constant": lambda f, x: x * torch.linalg.svdvals(SQUARE) * torch.linalg.eigvalsh(SQUARE),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_are_computed_by_the_algorithm_of_eager_mode(name: str) -> None:
    model, x = nn.Sequential(FunctionLayer(VALUES[name])), torch.randn(4, 6, 6)
    for input_gradient in (True, False):
        check_step(model, x, 2, input_gradient=input_gradient, budgets=(1.0,))
    with torch.no_grad():
        assert torch.equal(GPipe(model, [1], chunks=2)(x), plain_loop(model, x, 2))
