"""Operators that run alone, on tensors with given shapes, strides and dtypes."""

from __future__ import annotations

import torch

from gpipe_fast.lower.operator_examples import Spec, as_in_a_program, examples


def test_examples_have_the_layout_and_values_that_operators_accept() -> None:
    gaps, index = Spec((2, 3), (8, 1), torch.float64), Spec((4,), (1,), torch.long)
    (first, (second, number)), named = examples(([gaps, (index, 0.1)], {"out": gaps}), "cpu")
    assert (first.shape, first.stride(), first.dtype) == (torch.Size([2, 3]), (8, 1), torch.float64)
    assert first.untyped_storage().nbytes() == 8 * (8 + 3)
    assert bool((first == 0.5).all())
    assert second.tolist() == [0, 0, 0, 0]
    assert number == 0.1
    assert named["out"].stride() == (8, 1)
    overlapping = Spec((3, 2), (0, 1), torch.bool).example("cpu")
    assert overlapping.untyped_storage().nbytes() == 2


def test_operators_run_without_autograd_and_autocast() -> None:
    a = torch.ones(2, 2, requires_grad=True)
    with torch.inference_mode(), torch.autocast("cpu"), as_in_a_program():
        found = a @ a
    assert (found.dtype, found.requires_grad, found.is_inference()) == (torch.float32, False, False)
