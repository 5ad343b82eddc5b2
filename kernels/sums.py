"""The sum of two to four tensors, as the gradients of a tensor with several uses are added.

The sum is computed in fp32 and rounded once. Each tensor may have its own dtype: under autocast the gradients
of linear layers are bf16, and their sum is fp32. Memory traffic per element of itemsize i: n tensors read n i
bytes, and i are written. PyTorch reads 2 i and writes i for every addition, and casts in passes of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpipe_fast.kernels.launch import Config, Variant, cdiv, launch, tuned

MAX_TENSORS = 4
# Configurations by the maximum number of elements; the first entry that is large enough applies.
CONFIGS = {1 << 20: Config({"SIZE": 1024}), 1 << 62: Config({"SIZE": 2048})}


def choose(num_elements: int) -> Config:
    """Returns the configuration for ``num_elements`` elements."""
    max_elements = next(size for size in CONFIGS if num_elements <= size)
    return tuned("sum", f"elements<={max_elements}", CONFIGS[max_elements])


@triton.jit
def _sum(p_a, p_b, p_c, p_d, p_y, num_elements, COUNT: tl.constexpr, SIZE: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    mask = offsets < num_elements
    y = tl.load(p_a + offsets, mask=mask).to(tl.float32) + tl.load(p_b + offsets, mask=mask).to(tl.float32)
    if COUNT > 2:
        y += tl.load(p_c + offsets, mask=mask).to(tl.float32)
    if COUNT > 3:
        y += tl.load(p_d + offsets, mask=mask).to(tl.float32)
    tl.store(p_y + offsets, y.to(p_y.dtype.element_ty), mask=mask)


def launch_sum(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Returns the sum of two to four tensors of one shape: contiguous, in ``dtype``."""
    given = [tensor.contiguous() for tensor in tensors]
    y = torch.empty_like(given[0], dtype=dtype)
    config = choose(y.numel())
    # The kernel does not access absent tensors.
    absent = [given[0]] * (MAX_TENSORS - len(given))
    grid = (cdiv(y.numel(), config.blocks["SIZE"]),)
    launch(_sum, grid, config, *given, *absent, y, y.numel(), COUNT=len(given))
    return y


def variants() -> dict[str, Variant]:
    """Returns every configuration in the variants that are checked without a GPU."""
    found = {}
    small, large = CONFIGS.values()
    names = ("p_a", "p_b", "p_c", "p_d", "p_y")
    mixes = {dtype: dict.fromkeys(names, f"*{dtype}") for dtype in ("fp32", "bf16")}
    mixes["autocast"] = {name: "*bf16" if name in ("p_b", "p_c", "p_d") else "*fp32" for name in names}
    for mix, types in mixes.items():
        for config, elements in ((small, "i32"), (large, "i32"), (large, "i64")):
            signature = types | {"num_elements": elements}
            found[f"sum of four, {mix}, {elements} elements, {config}"] = Variant(
                _sum, signature, {"COUNT": MAX_TENSORS}, config, (*names, "num_elements")
            )
    return found
