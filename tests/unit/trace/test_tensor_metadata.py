"""The metadata of tensors: as a tensor's, and with numbers in place of formulas."""

from __future__ import annotations

import pytest
import torch

from gpipe_fast.trace.formulas import CannotExpressError
from gpipe_fast.trace.tensor_metadata import AnyTensor, TensorMetadata


def metadata_of(tensor: torch.Tensor) -> TensorMetadata:
    return TensorMetadata.of(tensor, tensor.shape, tensor.stride(), tensor.storage_offset())


@pytest.mark.parametrize("dtype", [torch.float16, torch.int64, torch.complex64])
def test_metadata_has_what_the_tensor_has(dtype: torch.dtype) -> None:
    tensor = torch.empty(60, dtype=dtype)[12:].view(6, 8)[:, 1:5].T
    found = metadata_of(tensor)
    for name in ("shape", "dtype", "device", "layout"):
        assert getattr(found, name) == getattr(tensor, name)
    for name in (
        "stride",
        "storage_offset",
        "numel",
        "element_size",
        "is_floating_point",
        "is_conj",
        "is_neg",
    ):
        assert getattr(found, name)() == getattr(tensor, name)()
    assert isinstance(found, AnyTensor)
    assert not found.has_formula
    assert found.at(()).shape == found.shape


def test_tensors_that_are_more_than_their_memory_have_no_metadata() -> None:
    complex_ = torch.ones(2, dtype=torch.complex64)
    for tensor in (torch.ones(2).to_sparse(), complex_.conj(), complex_.conj().imag):
        with pytest.raises(CannotExpressError):
            TensorMetadata.of(tensor, (2,), (1,), 0)
