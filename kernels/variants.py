"""The kernel variants that are compiled and checked without a GPU."""

from gpipe_fast.kernels.cross_entropy import variants as cross_entropy
from gpipe_fast.kernels.launch import Variant
from gpipe_fast.kernels.mean_loss import variants as mean_loss
from gpipe_fast.kernels.partial_sums import variants as partial_sums
from gpipe_fast.kernels.precomputed_gradient import variants as precomputed_gradient
from gpipe_fast.kernels.rotate_half import variants as rotate_half
from gpipe_fast.kernels.stack import variants as stack

FAMILIES = (cross_entropy, precomputed_gradient, mean_loss, partial_sums, rotate_half, stack)


def all_variants() -> dict[str, Variant]:
    """Returns all variants by name. A name has the kernel, its specialization, dtype and configuration."""
    return {name: variant for family in FAMILIES for name, variant in family().items()}
