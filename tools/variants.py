"""The variants of kernels that are compiled and checked without a GPU: every configuration of each kernel.

The kernels of regions are not among them: those of the stages of fusion.md are compiled by
tests/fake_cuda/test_fusion.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpipe_fast.kernels import mean_loss, partial_sums, precomputed_gradient
from gpipe_fast.kernels.cross_entropy import CONFIGS as LOSS_CONFIGS
from gpipe_fast.kernels.cross_entropy import _long_rows, _whole_rows
from gpipe_fast.kernels.launch import Config


@dataclass(frozen=True)
class Variant:
    """A specialization of a kernel, compiled and checked without a GPU.

    Variants cover every configuration in fp32 and bf16. They do not cover fp16, which allocates registers
    differently.

    Attributes:
        kernel: a `triton.jit` function.
        signature: the type of each non-constant argument, in Triton's notation (``*fp32``, ``i32``).
        constants: the constant arguments except block sizes.
        config: the launch configuration.
        aligned: the arguments that are divisible by 16. The address of every tensor that PyTorch allocates
            is.
    """

    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    config: Config
    aligned: Sequence[str] = field(default=())


def _cross_entropy() -> dict[str, Variant]:
    found = {}
    # The losses and the gradient together, and as a stage computes them: separately, under autocast with a
    # cast of the logits to fp32 that has been fused.
    forms = {
        "forward, fp32": ("fp32", "fp32", True, True),
        "forward, bf16": ("bf16", "bf16", True, True),
        "losses alone, bf16": ("bf16", "bf16", True, False),
        "gradient alone, bf16": ("bf16", "bf16", False, True),
        "gradient alone, bf16 logits, fp32 gradient": ("bf16", "fp32", False, True),
    }
    for form, (logits, gradient, with_losses, with_gradient) in forms.items():
        tensors = {"p_logits": f"*{logits}", "p_gradient": f"*{gradient}", "p_target": "*i64"}
        tensors |= dict.fromkeys(("p_scale", "p_losses"), "*fp32")
        strides = dict.fromkeys(("num_cols", "stride", "gradient_stride"), "i32")
        others = {"num_rows": "i32", "scale_stride": "i32", "ignore_index": "i32", "smoothing": "fp32"}
        constants = {"WITH_LOSSES": with_losses, "WITH_GRADIENT": with_gradient}
        for config in LOSS_CONFIGS.values():
            kernel = _whole_rows if "ROWS" in config.blocks else _long_rows
            aligned = (*tensors, *strides)
            found[f"cross_entropy {form}, {config}"] = Variant(
                kernel, tensors | strides | others, constants, config, aligned
            )
    return found


def _precomputed_gradient() -> dict[str, Variant]:
    tensors = {dtype: {"p_gradient": f"*{dtype}", "p_g": "*fp32"} for dtype in ("fp32", "bf16")}
    sizes = dict.fromkeys(("num_rows", "num_cols", "stride", "g_stride"), "i32")
    aligned = ("p_gradient", "p_g", "num_cols", "stride")
    return {
        f"cross_entropy scale, {dtype}, {config}": Variant(
            precomputed_gradient._scale, own | sizes, {}, config, aligned
        )
        for dtype, own in tensors.items()
        for config in precomputed_gradient.CONFIGS.values()
    }


def _mean_loss() -> dict[str, Variant]:
    found = {}
    sizes = {"num_rows": "i32", "ignore_index": "i32"}
    for form, divide in {"sum of losses": False, "mean of losses": True}.items():
        for dtype in ("fp32", "bf16"):
            tensors = {"p_x": "*fp32", "p_target": "*i64", "p_y": f"*{dtype}"}
            found[f"mean_loss {form}, {dtype}, {mean_loss.CONFIG}"] = Variant(
                mean_loss._mean_loss, tensors | sizes, {"DIVIDE": divide}, mean_loss.CONFIG, tuple(tensors)
            )
    return found


def _partial_sums() -> dict[str, Variant]:
    found = {}
    for dtype in ("fp32", "bf16"):
        tensors = {"p_partials": "*fp32", "p_y": f"*{dtype}"}
        signature = tensors | {"num_partials": "i32", "num_cols": "i32"}
        found[f"partial sums, {dtype}, {partial_sums.CONFIG}"] = Variant(
            partial_sums._add_partials, signature, {}, partial_sums.CONFIG, (*tensors, "num_cols")
        )
    return found


def all_variants() -> dict[str, Variant]:
    """Returns all variants by name. A name has the kernel, its specialization, dtype and configuration."""
    families = (_cross_entropy, _precomputed_gradient, _mean_loss, _partial_sums)
    return {name: variant for family in families for name, variant in family().items()}
