"""Every form in which a kernel is compiled, for checks without a GPU."""

from gpipe_fast.kernels import activations, dropout, gated, multi_tensor, norms, rotary
from gpipe_fast.kernels.launch import Variant

FAMILIES = (activations, dropout, gated, multi_tensor, norms, rotary)


def all_variants() -> dict[str, Variant]:
    """By name: kernel, what it is specialised on, dtype, configuration."""
    return {name: variant for family in FAMILIES for name, variant in family.variants().items()}
