"""PyTorch's pytrees: nested containers as lists of leaves.

Read in PyTorch 2.11.0 and 2.14.1.
"""

from torch.utils._pytree import (
    TreeSpec,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)
