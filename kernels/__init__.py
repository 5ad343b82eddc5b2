"""Triton kernels that stages launch, and the public losses.

They depend only on torch, triton and `gpipe_fast.torch_private`.
"""

from gpipe_fast.kernels.cross_entropy import cross_entropy
from gpipe_fast.kernels.linear_cross_entropy import linear_cross_entropy

__all__ = ["cross_entropy", "linear_cross_entropy"]
