"""Makes a pipelined model of a user's model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from torch import nn

from gpipe_fast.arguments import checked_checkpoint, checked_chunks, checked_schedule
from gpipe_fast.distributed.ranks import Ranks
from gpipe_fast.from_model.blocks import Blocks
from gpipe_fast.from_model.calls import Calls, MakePipeline
from gpipe_fast.from_model.outputs import LOSSES
from gpipe_fast.from_model.pipelined import Pipelined, pipelined
from gpipe_fast.lower.checkpoint import CheckpointChoice
from gpipe_fast.schedule import ScheduleChoice
from gpipe_fast.user_warning import warn_user

# Packages whose modules have quantized weights.
_QUANTIZERS = (
    "bitsandbytes",
    "torchao",
    "auto_gptq",
    "gptqmodel",
    "awq",
    "hqq",
    "optimum.quanto",
    "aqlm",
    "eetq",
)


def make_pipelined(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    blocks: Blocks | None,
    balance: Iterable[int] | None,
    num_devices: int | None,
    chunks: int | Literal["auto"],
    checkpoint: CheckpointChoice,
    schedule: ScheduleChoice,
    loss: str,
    make_pipeline: MakePipeline,
    ranks: Ranks | None,
) -> Any:
    """Returns the pipelined model; the arguments are those of `GPipe.from_model`."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    if isinstance(model, Pipelined):
        raise ValueError(
            f"this {type(model).__name__} is pipelined already; call model.plain() for a plain one"
        )
    if not isinstance(args, tuple):
        raise TypeError(f"args must be a tuple of positional arguments, got {type(args).__name__}; pass (x,)")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise TypeError(f"kwargs must be a dict of keyword arguments, got {type(kwargs).__name__}")
    if loss not in LOSSES:
        raise ValueError(f"loss is not one of {', '.join(map(repr, LOSSES))}, got {loss!r}")
    if not args and not kwargs:
        raise ValueError(
            "from_model records a call of the model; pass its arguments, as args=(x,) or "
            "kwargs=dict(input_ids=ids, labels=ids); tensors on the meta device do"
        )
    _refuse_hooks_of_accelerate(model)
    _refuse_quantized(model)
    setting, schedule = checked_checkpoint(checkpoint), checked_schedule(schedule)
    if getattr(model, "is_gradient_checkpointing", False):
        model.gradient_checkpointing_disable()  # type: ignore[operator]
        setting = "always"
        warn_user("the model's gradient checkpointing becomes checkpoint='always'")
    sizes = None if balance is None else list(balance)
    chunks = checked_chunks(chunks)
    settings = loss, chunks, setting, schedule
    calls = Calls(model, blocks, sizes, num_devices, *settings, make_pipeline, ranks)
    calls.prepare(model, args, kwargs or {})
    return pipelined(model, calls)


def _refuse_hooks_of_accelerate(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if hasattr(module, "_hf_hook"):
            raise ValueError(
                f"{name or type(model).__name__} has a hook of accelerate, as device_map='auto' leaves; load "
                "the model without device_map, or call accelerate.hooks.remove_hook_from_submodules(model)"
            )


def _refuse_quantized(model: nn.Module) -> None:
    for name, module in model.named_modules():
        package = type(module).__module__
        tensors = (*module._parameters.values(), *module._buffers.values())
        if (
            package.startswith(_QUANTIZERS)
            or package.startswith(("torch.ao.nn.quantized", "torch.nn.quantized"))
            or any(t is not None and (t.is_quantized or hasattr(t, "quant_state")) for t in tensors)
            or (module is model and getattr(model, "is_quantized", False))
        ):
            raise ValueError(
                f"{name or 'the model'} ({type(module).__name__}) is quantized, and stages train the weights "
                "that they have; load the model without quantization, as in bfloat16"
            )
