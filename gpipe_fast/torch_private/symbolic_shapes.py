"""Sizes that are symbols.

Read in PyTorch 2.11.0 and 2.14.1.
"""

from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

__all__ = ["ConstantSource", "DimDynamic", "ShapeEnv", "StatelessSymbolicContext"]
