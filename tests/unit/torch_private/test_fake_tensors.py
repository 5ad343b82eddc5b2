"""Fake tensors: made of meta tensors, and told from real ones."""

from __future__ import annotations

import torch

from gpipe_fast.torch_private.fake_tensors import FakeTensorMode, from_meta, is_traced


def test_a_fake_tensor_has_the_metadata_of_a_meta_tensor() -> None:
    meta = torch.empty(3, 4, dtype=torch.float16, device="meta").T
    fake = from_meta(FakeTensorMode(), meta, torch.device("cuda", 1))
    assert (fake.shape, fake.stride(), fake.dtype) == (meta.shape, meta.stride(), meta.dtype)
    assert fake.device == torch.device("cuda", 1)


def test_tensors_of_a_trace_are_told_from_real_ones() -> None:
    assert not is_traced(torch.empty(2))
    assert not is_traced(torch.empty(2, device="meta"))
    with FakeTensorMode():
        assert is_traced(torch.empty(2))
    assert is_traced(torch._to_functional_tensor(torch.empty(2)))
