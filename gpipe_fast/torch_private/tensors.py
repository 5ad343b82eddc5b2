"""Tensors of subclasses, and the exchange of two tensors' contents.

Read in PyTorch 2.11.0 and 2.14.1.
"""

from __future__ import annotations

import torch
from torch import Tensor

make_subclass = Tensor._make_subclass
make_wrapper_subclass = Tensor._make_wrapper_subclass
swap_tensor_impl = torch._C._swap_tensor_impl

__all__ = ["make_subclass", "make_wrapper_subclass", "swap_tensor_impl"]
