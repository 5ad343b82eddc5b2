"""The variants of kernels that are compiled and checked without a GPU: every configuration of each kernel.

The kernels of regions are not among them; `tools/regions.py` compiles those of the stages of fusion.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpipe_fast.kernels import mean_loss, partial_sums, precomputed_gradient, rotate_half
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
    forms = {"sum of losses": (True, False), "mean of losses": (True, True), "scale": (False, True)}
    for form, (is_sum, divide) in forms.items():
        for dtype in ("fp32", "bf16"):
            x, y = ("fp32", dtype) if is_sum else (dtype, "fp32")
            tensors = {"p_x": f"*{x}", "p_target": "*i64", "p_y": f"*{y}"}
            constants = {"SUM": is_sum, "DIVIDE": divide}
            found[f"mean_loss {form}, {dtype}, {mean_loss.CONFIG}"] = Variant(
                mean_loss._mean_loss, tensors | sizes, constants, mean_loss.CONFIG, tuple(tensors)
            )
    return found


def _partial_sums() -> dict[str, Variant]:
    found = {}
    matrices, results = ("p_a", "p_b", "p_c"), ("p_y_a", "p_y_b", "p_y_c")
    mixes = {dtype: dict.fromkeys(results, f"*{dtype}") for dtype in ("fp32", "bf16")}
    mixes["autocast"] = mixes["fp32"] | {"p_y_c": "*bf16"}
    for (mix, given), count in itertools.product(mixes.items(), (1, partial_sums.MAX_MATRICES)):
        types = given | dict.fromkeys(results[count:], "*fp32")
        signature = dict.fromkeys(matrices, "*fp32") | types | {"num_partials": "i32", "num_cols": "i32"}
        aligned = (*matrices, *results, "num_cols")
        name = f"partial sums of {count}, {mix}, {partial_sums.CONFIG}"
        found[name] = Variant(
            partial_sums._add_partials, signature, {"COUNT": count}, partial_sums.CONFIG, aligned
        )
    return found


def _rotate_half() -> dict[str, Variant]:
    found = {}
    tensors = ("p_q", "p_k", "p_q_out", "p_k_out", "p_cos", "p_sin")
    names = [f"{x}_{dim}" for x in ("q", "k", "q_out", "k_out") for dim in ("batch", "head", "position")]
    strides = [*names, *(f"{table}_{dim}" for table in ("cos", "sin") for dim in ("batch", "position"))]
    counts = dict.fromkeys(("length", "half", "q_heads", "k_heads", *strides), "i32")
    for mix, dtype, other in (
        ("fp32", "fp32", "fp32"),
        ("bf16", "bf16", "bf16"),
        ("autocast", "bf16", "fp32"),
    ):
        types = dict.fromkeys(tensors, f"*{dtype}") | dict.fromkeys(tensors[2:], f"*{other}")
        for half, inverse in ((32, False), (64, False), (64, True), (128, False)):
            config = rotate_half.CONFIGS[half if half in rotate_half.CONFIGS else 1 << 62]
            constants = {"INVERSE": inverse, "HAS_K": True, "HALF": half}
            direction = "backward" if inverse else "forward"
            found[f"rotary rotate_half {direction}, {mix}, {2 * half}, {config}"] = Variant(
                rotate_half._rotate_half, types | counts, constants, config, (*tensors, "half", *strides)
            )
    return found


def all_variants() -> dict[str, Variant]:
    """Returns all variants by name. A name has the kernel, its specialization, dtype and configuration."""
    families = (_cross_entropy, _precomputed_gradient, _mean_loss, _partial_sums, _rotate_half)
    return {name: variant for family in families for name, variant in family().items()}
