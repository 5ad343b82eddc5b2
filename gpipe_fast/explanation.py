"""Explanations of what fused kernels compute in a model: the objects that ``model.explain(x)`` returns."""

from gpipe_fast.reports.explanation import (
    Explanation,
    FusedGroup,
    LeftGroup,
    ProgramExplanation,
    StageExplanation,
)

__all__ = ["Explanation", "FusedGroup", "LeftGroup", "ProgramExplanation", "StageExplanation"]
