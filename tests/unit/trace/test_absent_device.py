"""Stand-ins for a GPU that the machine lacks: its backwards, and its choice of attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpipe_fast.torch_private.autograd import engine
from gpipe_fast.torch_private.fake_tensors import FakeTensorMode
from gpipe_fast.trace.absent_device import backward_without_gpu, choose_attention

HALF, FLOAT = torch.bfloat16, torch.float32


def qkv(dtype: torch.dtype, size: int = 64, length: int = 16) -> list[Tensor]:
    shape = 2, 4, length, size
    return [torch.empty(shape, dtype=dtype, device="cuda", requires_grad=True) for _ in range(3)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has a GPU")
def test_backwards_of_fake_tensors_need_no_gpu() -> None:
    before = engine()
    with FakeTensorMode(allow_non_fake_inputs=True), backward_without_gpu():
        x = torch.empty(3, 4, device="cuda", requires_grad=True)
        (gradient,) = torch.autograd.grad((x * x).sum(), x)
        assert (gradient.shape, gradient.device.type) == (x.shape, "cuda")
        with backward_without_gpu():
            inner = engine()
        assert engine() is inner
    assert engine() is before
    y = torch.ones(2, requires_grad=True)
    with backward_without_gpu():
        assert torch.autograd.grad((2 * y).sum(), y)[0].tolist() == [2, 2]


def operator_of(tensors: list[Tensor], **options: object) -> str | None:
    """Returns the operator that is chosen; None for products and a softmax."""
    found = choose_attention(*tensors, **options)  # type: ignore[arg-type]
    if found is None:
        return None
    assert found.shape == (*tensors[0].shape[:-1], tensors[2].shape[-1])
    names = ("Cudnn", "Flash", "Efficient")
    return next(name for name in names if found.grad_fn is not None and name in type(found.grad_fn).__name__)


def test_attention_is_chosen_by_dtype_and_size() -> None:
    with FakeTensorMode():
        assert operator_of(qkv(HALF)) == "Cudnn"
        assert operator_of(qkv(HALF, size=256)) == "Flash"
        assert operator_of(qkv(FLOAT)) == "Efficient"
        assert operator_of(qkv(FLOAT, size=6)) is None
        assert operator_of(qkv(HALF), dropout_p=0.1) is None
        assert operator_of([t[0] for t in qkv(HALF)]) is None


def test_backends_that_are_switched_off_are_not_chosen() -> None:
    with FakeTensorMode():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            assert operator_of(qkv(HALF)) == "Flash"
        with sdpa_kernel(SDPBackend.MATH):
            assert operator_of(qkv(HALF)) is None
