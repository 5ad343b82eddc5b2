"""Multi-tensor kernels for gradients: one launch accumulates, unscales and checks many for inf and NaN.

With accumulators A, gradients G and the inverse S of a loss scale, computed in fp32 and rounded once::

    accumulate_              A += G                                      bytes per element: 2 i_A + i_G
    unscale_                 G *= S,    found_inf = 1 if any G was inf or NaN               2 i_G
    accumulate_and_check_    A += S G,  found_inf = 1 if any A then is inf or NaN           2 i_A + i_G

for itemsizes i_A and i_G. The second equals the unscaling of `torch.amp.GradScaler`. The third finds infinite
and NaN gradients, and overflow in accumulators.

One launch processes all tensors of a dtype pair through an address table; see `addresses`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpipe_fast.kernels import reference
from gpipe_fast.kernels.addresses import TensorPair, address_table, group_spans
from gpipe_fast.kernels.launch import Config, Variant, kernels_available, launch, tuned

_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

# Configurations by the maximum total number of elements; the first entry that is large enough applies.
CONFIGS = {
    1 << 22: Config({"BLOCK": 1024}),
    1 << 62: Config({"BLOCK": 4096}, num_warps=8),
}


def choose(num_elements: int) -> Config:
    """Returns the configuration for tensors with ``num_elements`` elements in total."""
    max_elements = next(bound for bound in CONFIGS if num_elements <= bound)
    return tuned("multi_tensor", f"elements<={max_elements}", CONFIGS[max_elements])


@triton.jit
def _any_not_finite(x):
    return tl.max((~(tl.abs(x) < float("inf"))).to(tl.int32))


@triton.jit
def _accumulate_block(p_a, p_g, count, scale, CHECK: tl.constexpr, BLOCK: tl.constexpr):
    """Accumulates one block. Returns 1 if CHECK is set and a result is inf or NaN, else 0."""
    offsets = tl.arange(0, BLOCK)
    mask = offsets < count
    a = tl.load(p_a + offsets, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(p_g + offsets, mask=mask, other=0.0).to(tl.float32)
    rounded = (a + g * scale).to(p_a.dtype.element_ty)
    tl.store(p_a + offsets, rounded, mask=mask)
    found = 0
    if CHECK:
        found = _any_not_finite(rounded.to(tl.float32))
    return found


@triton.jit
def _unscale_block(p_g, count, scale, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    mask = offsets < count
    g = tl.load(p_g + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(p_g + offsets, (g * scale).to(p_g.dtype.element_ty), mask=mask)
    return _any_not_finite(g)


@triton.jit
def _aligned(address, TYPE: tl.constexpr, WIDEST: tl.constexpr):
    """Returns a pointer with an alignment hint: 16 bytes of the widest type, as many elements of the others.

    16 bytes of a narrower type would need another register layout, and a conversion through shared memory.
    """
    BYTES: tl.constexpr = 16 * TYPE.primitive_bitwidth // WIDEST.primitive_bitwidth
    return tl.multiple_of(address.to(tl.pointer_type(TYPE)), BYTES)


@triton.jit
def _accumulate(
    p_table, p_scale, p_found, num_programs,
    A: tl.constexpr, G: tl.constexpr, CHECK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    a = tl.load(p_table + program)
    g = tl.load(p_table + num_programs + program)
    count = tl.load(p_table + 2 * num_programs + program)
    scale = 1.0
    if CHECK:
        scale = tl.load(p_scale)
    WIDEST: tl.constexpr = A if A.primitive_bitwidth > G.primitive_bitwidth else G
    if (count == BLOCK) & (((a | g) & 15) == 0):
        p_a, p_g = _aligned(a, A, WIDEST), _aligned(g, G, WIDEST)
        # With count = BLOCK the compiler sees that the mask is always true.
        found = _accumulate_block(p_a, p_g, BLOCK, scale, CHECK, BLOCK)
    else:
        p_a, p_g = a.to(tl.pointer_type(A)), g.to(tl.pointer_type(G))
        found = _accumulate_block(p_a, p_g, count, scale, CHECK, BLOCK)
    if CHECK:
        # The race is benign: all programs that store write the same value.
        tl.store(p_found, 1.0, mask=found > 0)


@triton.jit
def _unscale(p_table, p_scale, p_found, num_programs, G: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    g = tl.load(p_table + program)
    count = tl.load(p_table + 2 * num_programs + program)
    scale = tl.load(p_scale)
    if (count == BLOCK) & ((g & 15) == 0):
        found = _unscale_block(_aligned(g, G, G), BLOCK, scale, BLOCK)
    else:
        found = _unscale_block(g.to(tl.pointer_type(G)), count, scale, BLOCK)
    tl.store(p_found, 1.0, mask=found > 0)


def _prepare(
    device: torch.device, dtypes: tuple[torch.dtype, torch.dtype], spans: list[TensorPair]
) -> tuple[Config, Tensor]:
    """Returns the configuration and the address table of a launch."""
    config = choose(sum(numel for _, _, numel in spans))
    sizes = (dtypes[0].itemsize, dtypes[1].itemsize)
    return config, address_table(device, config.blocks["BLOCK"], sizes, tuple(spans))


def launch_accumulate(
    accumulators: Sequence[Tensor], gradients: Sequence[Tensor], scale: Tensor | None, found: Tensor | None
) -> None:
    """Adds all gradients, with one launch per dtype pair. With a scale, also scales and checks them."""
    spans, others = group_spans(accumulators, gradients, _TYPES)
    for dtypes, group in spans.items():
        config, table = _prepare(accumulators[0].device, dtypes, group)
        programs = table.shape[1]
        constants = {"A": _TYPES[dtypes[0]], "G": _TYPES[dtypes[1]], "CHECK": scale is not None}
        launch(_accumulate, (programs,), config, table, scale, found, programs, **constants)
    rest = [accumulators[i] for i in others], [gradients[i] for i in others]
    if scale is None or found is None:
        reference.accumulate_(*rest)
    else:
        reference.accumulate_and_check_(*rest, scale, found)


def launch_unscale(gradients: Sequence[Tensor], scale: Tensor, found: Tensor) -> None:
    """Multiplies all gradients by the scale and sets ``found`` for inf and NaN, with one launch per dtype."""
    spans, others = group_spans(gradients, gradients, _TYPES)
    for dtypes, group in spans.items():
        config, table = _prepare(gradients[0].device, dtypes, group)
        programs = table.shape[1]
        launch(_unscale, (programs,), config, table, scale, found, programs, G=_TYPES[dtypes[0]])
    reference.unscale_([gradients[i] for i in others], scale, found)


def variants() -> dict[str, Variant]:
    """Returns every configuration in the variants that are checked without a GPU."""
    found = {}
    types = {"fp32": tl.float32, "bf16": tl.bfloat16}
    table = {"p_table": "*i64", "num_programs": "i32"}
    places = {"p_scale": "*fp32", "p_found": "*fp32"}
    for config in CONFIGS.values():
        for g in types:
            name = f"multi_tensor unscale, {g}, {config}"
            found[name] = Variant(_unscale, table | places, {"G": types[g]}, config, ("p_table",))
            for a in types:
                constants = {"A": types[a], "G": types[g]}
                plain = {**constants, "CHECK": False, "p_scale": None, "p_found": None}
                name = f"multi_tensor accumulate, {g} into {a}, {config}"
                found[name] = Variant(_accumulate, table, plain, config, ("p_table",))
                checked = {**constants, "CHECK": True}
                name = f"multi_tensor accumulate and check, {g} into {a}, {config}"
                found[name] = Variant(_accumulate, table | places, checked, config, ("p_table",))
    return found


# Unlike other families' ops, these are opaque to tracers, because traced tensors have no addresses.
@torch.library.custom_op("gpipe_fast::multi_tensor_accumulate_", mutates_args={"accumulators"})
def _accumulate_op(accumulators: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    if kernels_available(*accumulators):
        launch_accumulate(accumulators, gradients, None, None)
    else:
        reference.accumulate_(accumulators, gradients)


@torch.library.custom_op(
    "gpipe_fast::multi_tensor_accumulate_and_check_", mutates_args={"accumulators", "found_inf"}
)
def _accumulate_and_check_op(
    accumulators: Sequence[Tensor], gradients: Sequence[Tensor], inverse_scale: Tensor, found_inf: Tensor
) -> None:
    run = launch_accumulate if kernels_available(*accumulators) else reference.accumulate_and_check_
    run(accumulators, gradients, inverse_scale, found_inf)


@torch.library.custom_op("gpipe_fast::multi_tensor_unscale_", mutates_args={"gradients", "found_inf"})
def _unscale_op(gradients: Sequence[Tensor], inverse_scale: Tensor, found_inf: Tensor) -> None:
    run = launch_unscale if kernels_available(*gradients) else reference.unscale_
    run(gradients, inverse_scale, found_inf)


def accumulate_(accumulators: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Computes ``accumulators[i] += gradients[i]`` for all i, with one launch per dtype pair.

    Adds in fp32 and rounds once, like `Tensor.add_`. Pairs with different strides or with gaps between their
    elements are added by PyTorch, one by one.

    Args:
        accumulators: fp32, fp16 or bf16 tensors of any shapes on one device; written to. They must not
            overlap.
        gradients: fp32, fp16 or bf16 tensors on the same device, each with its accumulator's shape.

    Raises:
        ValueError: numbers, shapes, dtypes or devices do not match, or a tensor requires a gradient.
        RuntimeError: a CUDA graph is being captured.
    """
    _check(accumulators, gradients)
    if accumulators:
        _accumulate_op(accumulators, gradients)


def unscale_(gradients: Sequence[Tensor], inverse_scale: Tensor, found_inf: Tensor | None = None) -> Tensor:
    """Computes ``gradients[i] *= inverse_scale`` for all i, and records whether any element was inf or NaN.

    Equals the unscaling of `torch.amp.GradScaler`. The host reads nothing.

    Args:
        gradients: fp32, fp16 or bf16 tensors of any shapes on one device; written to. They must not overlap.
        inverse_scale: one fp32 element on that device.
        found_inf: one fp32 element on that device, set to 1 if an inf or NaN is found, else unchanged. By
            default a new tensor that starts at 0.

    Returns:
        found_inf, of shape (1) if it is new.

    Raises:
        ValueError: shapes, dtypes or devices do not match, or a gradient requires a gradient.
        RuntimeError: a CUDA graph is being captured.
    """
    found = inverse_scale.new_zeros(1) if found_inf is None else found_inf
    _check(gradients, gradients, inverse_scale, found)
    if gradients:
        _unscale_op(gradients, inverse_scale, found)
    return found


def accumulate_and_check_(
    accumulators: Sequence[Tensor],
    gradients: Sequence[Tensor],
    inverse_scale: Tensor,
    found_inf: Tensor | None = None,
) -> Tensor:
    """Computes ``accumulators[i] += inverse_scale * gradients[i]`` and records inf or NaN in the results.

    An infinite or NaN gradient makes its accumulator infinite or NaN, so it is found; overflow in an
    accumulator is found as well.

    Args:
        accumulators: as in `accumulate_`; written to.
        gradients: as in `accumulate_`.
        inverse_scale: as in `unscale_`.
        found_inf: as in `unscale_`.

    Returns:
        found_inf, of shape (1) if it is new.

    Raises:
        ValueError: as in `accumulate_` and `unscale_`.
        RuntimeError: a CUDA graph is being captured.
    """
    found = inverse_scale.new_zeros(1) if found_inf is None else found_inf
    _check(accumulators, gradients, inverse_scale, found)
    if accumulators:
        _accumulate_and_check_op(accumulators, gradients, inverse_scale, found)
    return found


def _check(accumulators: Sequence[Tensor], gradients: Sequence[Tensor], *scalars: Tensor) -> None:
    if len(accumulators) != len(gradients):
        raise ValueError(
            f"each accumulator needs one gradient, got {len(accumulators)} accumulators and "
            f"{len(gradients)} gradients"
        )
    device = next(iter((*scalars, *accumulators))).device if accumulators or scalars else None
    for index, (a, g) in enumerate(zip(accumulators, gradients, strict=True)):
        if a.shape != g.shape:
            raise ValueError(
                f"gradient {index} must have its accumulator's shape {list(a.shape)}, got {list(g.shape)}"
            )
        if not (a.is_floating_point() and g.is_floating_point()):
            raise ValueError(
                f"accumulator and gradient {index} must be floating-point, got {a.dtype} and {g.dtype}"
            )
        if a.device != device or g.device != device:
            raise ValueError(
                f"all tensors must be on {device}, "
                f"but accumulator and gradient {index} are on {a.device} and {g.device}"
            )
        if (a.requires_grad or g.requires_grad) and torch.is_grad_enabled():
            raise ValueError(
                f"multi-tensor ops are not differentiable, but a tensor at index {index} requires a gradient"
                "; call them under torch.no_grad()"
            )
    for scalar in scalars:
        if scalar.numel() != 1 or scalar.dtype != torch.float32 or scalar.device != device:
            given = f"shape {list(scalar.shape)} of {scalar.dtype} on {scalar.device}"
            raise ValueError(f"inverse_scale and found_inf must be one fp32 element on {device}, got {given}")
