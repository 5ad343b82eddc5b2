"""Explains a call of a model: compiles its stages, perhaps for a device that the machine lacks."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gpipe_fast import progress, switches
from gpipe_fast.explanation.explanation import Explanation
from gpipe_fast.explanation.programs import explain_programs
from gpipe_fast.explanation.stages import ProgramExplanation, StageExplanation
from gpipe_fast.fuse import availability
from gpipe_fast.layers.structure import layer_title
from gpipe_fast.lower.checkpoint import FULL_RECOMPUTE, NO_RECOMPUTE, SavedFraction, has_recompute
from gpipe_fast.runtime.compile import CompilationFailure
from gpipe_fast.runtime.compiled import CompiledStage
from gpipe_fast.runtime.planner import Call, Planner
from gpipe_fast.runtime.stage import Stage
from gpipe_fast.torch_private.fake_tensors import FakeTensorMode
from gpipe_fast.trace.absent_device import backward_without_gpu

_ON_CPU = (
    "Nothing is fused, because the stage is on the CPU, where PyTorch's operators run. To see what would be "
    "fused on a GPU, which this machine need not have, call explain with device='cuda'."
)
_ASSUMED = (
    "The machine has no GPU: a GPU of compute capability 9.0 with 132 multiprocessors (H100) is assumed. "
    "Attention is by the operator that PyTorch prefers there: cuDNN's in 16 bits, else the memory-efficient "
    "one. Results have the memory layouts of PyTorch's fake kernels. No operator has run."
)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor like another one, on another device; for a fake mode."""
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return fake.requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def on_absent_device(call: Call, device: torch.device) -> Iterator[Call]:
    """Returns a call with its inputs on a GPU that the machine need not have, and lets it be traced there.

    Autocast for the CPU counts as autocast for the GPU.
    """
    with FakeTensorMode():
        inputs = call.inputs._replace(tensors=[_moved(x, device) for x in call.inputs.tensors])
        given = tuple(_moved(x, device) for x in call.given)
    with _autocast_on_gpu(), backward_without_gpu():
        yield replace(call, inputs=inputs, given=given)


@contextlib.contextmanager
def _autocast_on_gpu() -> Iterator[None]:
    """Takes the CPU's autocast mode for the GPU's, since PyTorch enables no autocast for an absent GPU."""
    if torch.is_autocast_enabled("cuda") or not torch.is_autocast_enabled("cpu"):
        yield
        return
    dtype = torch.get_autocast_dtype("cuda")
    torch.set_autocast_dtype("cuda", torch.get_autocast_dtype("cpu"))
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", dtype)


def explain_call(planner: Planner, call: Call, device: torch.device | None) -> Explanation:
    """Explains a call.

    Args:
        planner: the model's planner, or one of stages on the device that is named.
        call: the call.
        device: the device that is named; None for the devices of the stages.
    """
    stages = planner.stages
    with contextlib.ExitStack() as stack:
        stack.enter_context(progress.first_call([len(s.layers) for s in stages], what="an explanation"))
        if device is not None:
            call = stack.enter_context(on_absent_device(call, device))
        compiled = None
        if planner.backend != "eager" and any(stage.device.type != "cpu" for stage in stages):
            call.state.update_key()  # under these modes
            compiled = planner.compile(call)
        fractions = call.saved_fractions
        found = tuple(
            _explained(index, stage, compiled, fractions[index]) for index, stage in enumerate(stages)
        )
        settings = _settings(fractions)
    devices = ", ".join(dict.fromkeys(str(stage.device) for stage in stages))
    assumes = device is not None and not torch.cuda.is_available()
    return Explanation(devices, settings, (_ASSUMED,) if assumes else (), found)


def _settings(fractions: Sequence[Sequence[SavedFraction]]) -> str:
    """Returns the precision, the micro-batches and the mode of a call in words."""
    kinds = ("cuda", "cpu")
    autocast = [str(torch.get_autocast_dtype(k)) for k in kinds if torch.is_autocast_enabled(k)]
    dtype = f", autocast to {autocast[0].removeprefix('torch.')}" if autocast else ""
    number = len(fractions[0])
    recomputed = sum(any(map(has_recompute, each)) for each in zip(*fractions, strict=True))
    mode = "" if torch.is_grad_enabled() else ", without gradients"
    if recomputed:
        mode = f", {recomputed} of them recomputed"
    return f"{number} micro-batch{'es' if number > 1 else ''}{mode}{dtype}"


def _explained(
    index: int,
    stage: Stage,
    compiled: Sequence[Sequence[CompiledStage]] | CompilationFailure | None,
    fractions: Sequence[SavedFraction],
) -> StageExplanation:
    if stage.device.type == "cpu":
        return _described(index, stage, _ON_CPU)
    if compiled is None:
        note = "Nothing is fused, because all layers run in Python: backend='eager'."
        return _described(index, stage, note + _saving_note(fractions))
    if isinstance(compiled, CompilationFailure):
        note = _failure_note(index, stage, compiled)
        is_here = compiled.stage_index == index
        return _described(index, stage, note + (_saving_note(fractions) if is_here else ""))
    progress.step("splitting", stage.first_layer, len(stage.layers))
    programs = [
        program
        for fraction, number in Counter(fractions).items()
        for program in explain_programs(compiled[0][index], fraction, number)
    ]
    return _described(index, stage, _why_unfused(stage), programs)


def _described(
    index: int, stage: Stage, note: str, programs: Sequence[ProgramExplanation] = ()
) -> StageExplanation:
    names = tuple(type(layer).__name__ for layer in stage.layers)
    return StageExplanation(index, names, stage.first_layer, str(stage.device), note, tuple(programs))


def _failure_note(index: int, stage: Stage, failure: CompilationFailure) -> str:
    reason = failure.untraceable
    if failure.stage_index != index:
        return (
            f"Unknown until the first call, because a layer of stage {failure.stage_index} runs in Python, "
            "and what it returns is known only then."
        )
    where = "a layer"
    if reason.layer is not None:
        where = layer_title(stage.first_layer + reason.layer, stage.layers[reason.layer])
    return (
        f"{where[0].upper()}{where[1:]} runs in Python, because {reason.reason}. Nothing is fused in it. The "
        "layers around it are fused, but how is known only when the first call shows what it returns."
    )


def _saving_note(fractions: Sequence[SavedFraction]) -> str:
    """Returns what a share of activations means to layers in Python; nothing if there is no such share."""
    if not any(FULL_RECOMPUTE < fraction < NO_RECOMPUTE for fraction in fractions):
        return ""
    return " With a share below 1 of the activations, layers in Python save nothing and are recomputed."


def _why_unfused(stage: Stage) -> str:
    if not stage.options.fuse:
        return "Nothing is fused, because the model has fuse=False."
    if switches.is_disabled("fuse"):
        return f"Nothing is fused, because {switches.VARIABLE} contains 'fuse'."
    if torch.are_deterministic_algorithms_enabled():
        return "Nothing is fused, because only deterministic algorithms are allowed."
    if not availability.has_triton():
        return "Nothing is fused, because the package triton is not installed; install it, and explain again."
    if availability.fusion_of(stage.device, stage.options.is_absent) is None:
        return "Nothing is fused: kernels need CUDA 12.8, and a GPU of compute capability 8.0 or higher."
    return ""
