"""The names of types are those that Triton's own launcher gives arguments."""

from __future__ import annotations

import pytest
import torch
from triton.runtime.jit import mangle_type

from gpipe_fast.lower.launch import _ELEMENTS, number_type, pointer_type


@pytest.mark.parametrize("dtype", _ELEMENTS, ids=str)
def test_pointers_have_the_types_of_triton(dtype: torch.dtype) -> None:
    assert pointer_type(dtype) == mangle_type(torch.empty(1, dtype=dtype))
    assert pointer_type(dtype, constant=True) == pointer_type(dtype).replace("*", "*k")


@pytest.mark.parametrize(
    "number", [True, 0, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**63 - 1, 2**63, 0.5], ids=str
)
def test_numbers_have_the_types_of_triton(number: float) -> None:
    assert number_type(number) == mangle_type(number)


def test_a_dtype_that_triton_lacks_has_no_type() -> None:
    assert pointer_type(torch.complex64) == pointer_type(torch.complex64, constant=True) == ""
