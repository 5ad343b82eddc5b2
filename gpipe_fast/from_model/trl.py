"""TRL's fused head: since TRL 1.16, trainers ask a model for log-probabilities of the labels.

They replace the model's forward by a function that calls the backbone and the head itself, so a pipeline
would not run. The function here takes its place: it calls the pipeline, and computes the same from its
logits.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# The class of labels that do not count, as TRL has it.
_IGNORED = -100


def in_place_of_fused_head(wrapper: Any) -> Any:
    """Returns what takes the place of TRL's fused head; another wrapper of a forward itself."""
    function = getattr(wrapper, "__func__", wrapper)
    if not isinstance(function, FunctionType) or function.__code__.co_name != "_fused_forward":
        return wrapper
    given = inspect.getclosurevars(function).nonlocals
    forward, output_class = given["original_forward"], function.__globals__["FusedCausalLMOutput"]
    temperature, outputs = given.get("temperature", 1.0), given.get("outputs", ())
    return _with_log_probs(forward, output_class, temperature, outputs)


def _with_log_probs(
    forward: Callable[..., Any], output_class: type, temperature: float, outputs: tuple[str, ...]
) -> Callable[..., Any]:
    @functools.wraps(forward)
    def with_log_probs(
        *args: Any,
        fused_lm_head: bool = False,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Any = None,
        **kwargs: Any,
    ) -> Any:
        given = {
            "labels": labels,
            "shift_labels": shift_labels,
            "num_items_in_batch": num_items_in_batch,
        }
        if not fused_lm_head:
            return forward(*args, **kwargs, **{k: v for k, v in given.items() if v is not None})
        logits = forward(*args, **kwargs).logits
        if shift_labels is None:
            assert labels is not None
            logits, shift_labels = logits[:, :-1], labels[:, 1:]
        targets = shift_labels.to(logits.device)
        counts, targets = targets != _IGNORED, targets.clamp(min=0)
        logits = logits.float() / temperature
        log_softmax = F.log_softmax(logits, dim=-1)
        log_probs = log_softmax.gather(-1, targets[..., None])[..., 0].where(counts, 0)
        number = counts.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        with torch.no_grad():
            others: dict[str, Callable[[], Tensor]] = {
                "entropy": lambda: -(log_softmax.exp() * log_softmax).sum(-1),
                "log_sum_sq_probs": lambda: (2 * log_softmax).logsumexp(-1),
                "mean_logits": lambda: logits.mean(-1),
                "is_top1": lambda: logits.argmax(-1) == targets,
            }
            found = {name: others[name]().masked_fill(~counts, 0) for name in outputs if name in others}
        loss = -log_probs.sum() / number
        return output_class(loss=loss, log_probs=log_probs, label_mask=counts, **found)

    return with_log_probs
