"""Sparse parameters and buffers are refused; layers that make sparse tensors, or keep them, work."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.reference import check_step

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
MATRIX = (torch.eye(8) + torch.ones(8, 8).triu(5)).requires_grad_(False)


class Product(nn.Module):
    """Multiplies by a sparse matrix, which is an attribute, or made of two buffers in each call."""

    def __init__(self, is_made: bool) -> None:
        super().__init__()
        matrix = MATRIX.to_sparse()
        self.register_buffer("indices", matrix.indices())
        self.register_buffer("values", matrix.values())
        self.matrix = None if is_made else matrix

    def forward(self, x: Tensor) -> Tensor:
        matrix = self.matrix
        if matrix is None:
            matrix = torch.sparse_coo_tensor(self.indices, self.values, (8, 8))
        return (matrix @ x.t()).t()


@pytest.mark.parametrize("is_made", [False, True])
def test_what_the_error_advises_works(is_made: bool) -> None:
    layers = nn.Sequential(nn.Linear(8, 8), Product(is_made), nn.Linear(8, 8))
    check_step(layers, torch.randn(8, 8), balance=[1, 2])
