"""Sparse parameters and buffers are refused; layers that make sparse tensors, or keep them, work."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
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


@pytest.mark.parametrize("convert", [Tensor.to_sparse, Tensor.to_sparse_csr, Tensor.to_mkldnn])
def test_a_buffer_that_gets_sparse_later_is_refused(convert: Callable[[Tensor], Tensor]) -> None:
    layers = nn.Sequential(nn.Linear(8, 8), Product(is_made=True), nn.Linear(8, 8))
    model, x = GPipe(layers, [1, 2], chunks=2), torch.randn(8, 8)
    expected = model(x)
    layers[1].register_buffer("table", convert(MATRIX))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"layer 1 \(Product\) has 'table' of layout"):
            model(x)
    del layers[1].table
    assert torch.equal(model(x), expected)
