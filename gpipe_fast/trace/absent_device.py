"""Stand-ins for a GPU that the machine need not have: autograd's streams, and the choice of attention."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gpipe_fast._extension import run_backward
from gpipe_fast.torch_private.autograd import engine, engine_replaced


@contextlib.contextmanager
def backward_without_gpu() -> Iterator[None]:
    """Lets this thread run backwards of fake tensors on a GPU if there is none.

    Autograd's engine asks CUDA for the streams of the tensors' device, and fails.
    """
    original = engine()
    if torch.cuda.is_available() or isinstance(original, _Engine):
        yield
        return
    with engine_replaced(_Engine(original)):
        yield


class _Engine:
    """Autograd's engine, except that this thread's `torch.autograd.grad` runs without streams."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._thread = threading.get_ident()
        self._callbacks: list[Callable[[], object]] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(
        self,
        tensors: Sequence[Any],
        gradients: Sequence[Tensor | None],
        keep_graph: bool,
        create_graph: bool,
        inputs: Sequence[Any],
        *args: Any,
        **kwargs: Any,
    ) -> Sequence[Tensor | None]:
        """Returns the gradients of inputs, as the engine does."""
        given = (*tensors, *inputs)
        on_gpu = all(isinstance(t, Tensor) and t.device.type == "cuda" for t in given)
        if not inputs or create_graph or not on_gpu or threading.get_ident() != self._thread:
            original: Sequence[Tensor | None] = self._engine.run_backward(
                tensors, gradients, keep_graph, create_graph, inputs, *args, **kwargs
            )
            return original
        outer, self._callbacks = self._callbacks, []
        try:
            found = run_backward(tensors, gradients, inputs)
            for callback in self._callbacks:
                callback()
        finally:
            self._callbacks = outer
        return found

    def queue_callback(self, callback: Callable[[], object]) -> None:
        """Calls a function after the backward that is running."""
        if self._callbacks is None or threading.get_ident() != self._thread:
            self._engine.queue_callback(callback)
        else:
            self._callbacks.append(callback)


def choose_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,  # the operators see it from the numbers of heads
) -> Tensor | None:
    """Computes attention by the operator that PyTorch prefers on a GPU of compute capability 9.0.

    PyTorch asks the device which operators it supports, and falls back to products and a softmax without one.

    Returns:
        The result; None for products and a softmax.
    """
    aten, enabled = torch.ops.aten, torch.backends.cuda
    tensors, size = (query, key, value), query.shape[-1]
    if (
        dropout_p > 0
        or any(t.dim() != 4 or not t.numel() or t.dtype != query.dtype for t in tensors)
        or (attn_mask is not None and attn_mask.requires_grad)
    ):
        return None
    half = query.dtype in (torch.float16, torch.bfloat16)
    saves = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    bias = attn_mask
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        nothing = torch.zeros((), dtype=query.dtype, device=query.device)
        bias = torch.where(attn_mask, nothing, float("-inf"))
    square = value.shape[-1] == size and query.shape[-2] > 1 and key.shape[-2] > 1
    if half and enabled.cudnn_sdp_enabled() and square and size <= 128 and size % 8 == 0:
        found = aten._scaled_dot_product_cudnn_attention(
            query, key, value, bias, saves, dropout_p, is_causal, False, scale=scale
        )
    elif half and enabled.flash_sdp_enabled() and bias is None and size <= 256 and size % 8 == 0 and square:
        found = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )
    elif enabled.mem_efficient_sdp_enabled() and size % (8 if half else 4) == 0:
        if bias is not None:
            bias = bias.expand(*query.shape[:-1], key.shape[-2])
        found = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, saves, dropout_p, is_causal, scale=scale
        )
    else:
        return None
    result: Tensor = found[0]
    return result
