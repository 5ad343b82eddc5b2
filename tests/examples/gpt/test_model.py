"""The demo's model: causality."""

from __future__ import annotations

import pytest
import torch

from tests.examples.gpt.tiny import tiny, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_model_sees_only_the_past() -> None:
    model = tiny_model(tiny())
    tokens = torch.randint(1, 256, (1, 16))
    later = tokens.clone()
    later[:, 7:] = 0
    assert torch.equal(model(tokens)[:, :7], model(later)[:, :7])
    assert not torch.equal(model(tokens)[:, 7], model(later)[:, 7])
