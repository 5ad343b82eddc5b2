"""Explanations of what fused kernels compute in a model: the objects that ``model.explain(x)`` returns."""

from gpipe_fast.explanation.explanation import Explanation
from gpipe_fast.explanation.stages import FusedGroup, LeftGroup, ProgramExplanation, StageExplanation

__all__ = ["Explanation", "FusedGroup", "LeftGroup", "ProgramExplanation", "StageExplanation"]
