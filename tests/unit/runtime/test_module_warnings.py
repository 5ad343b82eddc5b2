"""Warnings that a module raises once, here about attention with dropout, which runs unfused on a GPU."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from gpipe_fast import GPipe, doctor
from gpipe_fast.randomness import random


def _encoder(dropout: float) -> nn.Sequential:
    layers = (nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True) for _ in range(2))
    return nn.Sequential(nn.Linear(8, 8), *layers)


@pytest.fixture
def keyed_as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes attention draw by key as on a GPU, although it runs on the CPU."""
    make = random.KeyedRandomMode.__init__

    def make_unfused(mode: random.KeyedRandomMode, *args: Any, **named: Any) -> None:
        make(mode, *args, **named)
        mode._attention = random._UnfusedAttention()

    monkeypatch.setattr(random.KeyedRandomMode, "__init__", make_unfused)
    monkeypatch.setattr(random, "_is_on_gpu", lambda query: True)


@pytest.mark.usefixtures("keyed_as_on_gpu")
def test_attention_with_dropout_warns_once() -> None:
    pipe, x = GPipe(_encoder(0.1), [1, 2], chunks=8), torch.randn(8, 5, 8)
    with pytest.warns(UserWarning, match=r"stage 1, layer 1 .* and 1 more: attention with dropout") as warned:
        pipe(x).sum().backward()
    assert len(warned) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe(x[:, :4]).sum().backward()
    assert "avoidable costs\n  stage 1, layer 1" in doctor(pipe)


@pytest.mark.usefixtures("keyed_as_on_gpu")
def test_attention_without_dropout_does_not_warn() -> None:
    pipe, x = GPipe(_encoder(0.0), [1, 2], chunks=8), torch.randn(8, 5, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe(x).sum().backward()
    assert "costs more" not in doctor(pipe)
