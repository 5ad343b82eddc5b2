"""Every form in which a kernel is compiled, for checks without a GPU."""

from gpipe_fast.kernels import activations, dropout, gated
from gpipe_fast.kernels.launch import Variant


def all_variants() -> dict[str, Variant]:
    """By name: kernel, what it is specialised on, dtype, configuration."""
    return {**activations.variants(), **dropout.variants(), **gated.variants()}
