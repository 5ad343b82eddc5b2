"""A pipeline takes part in the loss of TRL's trainers, which ask for log-probabilities of the labels."""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_fast import GPipe

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
WORDS = 11


@dataclass
class FusedCausalLMOutput:
    """As TRL has it."""

    loss: Tensor | None = None
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    mean_logits: Tensor | None = None
    is_top1: Tensor | None = None
    label_mask: Tensor | None = None


@dataclass
class Logits:
    logits: Tensor


class Decoder(nn.Module):
    """A small model with blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, WORDS)

    def forward(self, input_ids: Tensor) -> Logits:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = x + block(x).tanh()
        return Logits(self.head(x))


def add_fused_lm_head(model: nn.Module, temperature: float, outputs: tuple[str, ...]) -> None:
    """Replaces a forward in the way of TRL 1.16, and as that one does, calls no forward of the model."""
    original_forward = model.forward

    @functools.wraps(type(model).forward)
    def _fused_forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return original_forward(*args, **kwargs)
        raise AssertionError(f"no pipeline runs: {temperature}, {outputs}, {FusedCausalLMOutput}")

    model.forward = types.MethodType(_fused_forward, model)  # type: ignore[method-assign]


OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_of_labels_come_from_the_pipeline(shifted: bool, temperature: float) -> None:
    ids = torch.randint(WORDS, (7, 5), generator=torch.Generator().manual_seed(1))
    labels = torch.where(ids > 7, -100, ids)
    plain = Decoder()
    model = GPipe.from_model(plain, (ids,), devices=["cpu"] * 2, balance=[2, 2], chunks=3)
    add_fused_lm_head(model, temperature, OUTPUTS)
    torch.testing.assert_close(model(ids).logits, plain(ids).logits)

    given = {"shift_labels": F.pad(labels[:, 1:], (0, 1), value=-100)} if shifted else {"labels": labels}
    found = model(ids, fused_lm_head=True, **given)
    found.loss.backward()
    gradients = [p.grad for p in plain.parameters()]
    plain.zero_grad()

    logits, targets = plain(ids).logits / temperature, labels[:, 1:]
    logits = logits[:, :-1]
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    torch.testing.assert_close(found.loss, loss)
    torch.testing.assert_close(gradients, [p.grad for p in plain.parameters()])

    counts, log_softmax = targets != -100, logits.log_softmax(-1)
    expected = {
        "log_probs": -F.cross_entropy(logits.transpose(1, 2), targets, reduction="none"),
        "entropy": torch.distributions.Categorical(logits=logits).entropy(),
        "log_sum_sq_probs": log_softmax.exp().square().sum(-1).log(),
        "mean_logits": logits.mean(-1),
        "is_top1": logits.argmax(-1) == targets,
        "label_mask": counts,
    }
    for name, value in expected.items():
        ours = getattr(found, name)
        ours = ours[:, :-1] if shifted else ours
        torch.testing.assert_close(ours, value.where(counts, torch.zeros_like(value)), msg=name)


def test_the_number_of_items_divides_the_loss() -> None:
    ids = torch.randint(WORDS, (6, 5), generator=torch.Generator().manual_seed(1))
    model = GPipe.from_model(Decoder(), (ids,), devices=["cpu"] * 2, balance=[2, 2], chunks=3)
    add_fused_lm_head(model, 1.0, ("log_probs",))
    found = model(ids, fused_lm_head=True, labels=ids, num_items_in_batch=torch.tensor(10))
    torch.testing.assert_close(found.loss * 10, -found.log_probs.sum())
    assert found.entropy is None
