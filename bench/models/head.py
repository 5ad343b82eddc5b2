"""The last stage of a language model: norm, logits and loss."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Head(nn.Module):
    """Returns the mean cross-entropy of hidden states and targets, a scalar.

    Args:
        width: the width of the hidden states.
        vocab: the number of classes.
        upcast: whether the logits are cast to fp32 first, as transformers' losses do. Otherwise `log_softmax`
            returns the dtype of the logits; under autocast both forms cast.
    """

    def __init__(self, width: int, vocab: int, upcast: bool = False) -> None:
        super().__init__()
        self.norm, self.logits = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.upcast = upcast

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        """Returns the loss.

        Args:
            inputs: hidden states of shape (batch, length, width), and targets of shape (batch, length).
        """
        x, targets = inputs
        logits = self.logits(self.norm(x))
        if self.upcast:
            logits = logits.float()
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))
