"""The fused cases of dropout, and of LayerNorm with dropout and other parameters, against their patterns."""

from __future__ import annotations

import dataclasses

import pytest

from gpipe_fast import randomness  # noqa: F401, registers torch.ops.gpipe_fast
from gpipe_fast.fuse.families import dropout, norms
from gpipe_fast.fuse.family import Case
from tests.kernels.numerics.comparison import needs_kernels
from tests.kernels.numerics.fused_cases import cases_of, compare_with_pattern, random_inputs

pytestmark = needs_kernels


@pytest.mark.parametrize("case", cases_of(dropout, lambda case: True))
def test_dropout_equals_its_pattern(case: Case) -> None:
    compare_with_pattern(case, random_inputs(case))


# Statistics of PyTorch are in fp16 on the CPU, and in fp32 on a GPU.
def _without_statistics(case: Case) -> bool:
    norm: norms.Forward | norms.Backward = case.pattern.__self__  # type: ignore[attr-defined]
    return isinstance(norm, norms.Forward) and not norm.statistics


def _compare_larger(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares at a larger size than the pattern's, where PyTorch's error is less random."""
    columns, norm = 250, case.pattern.__self__  # type: ignore[attr-defined]
    monkeypatch.setattr(norms, "COLUMNS", columns)
    shape = (3, 19, columns) if len(norm.shape) == 3 else (57, columns)
    larger = dataclasses.replace(norm, shape=shape).case()
    compare_with_pattern(larger, random_inputs(larger))


@pytest.mark.parametrize("case", cases_of(norms, _without_statistics, every=7))
def test_norms_equal_their_patterns(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    _compare_larger(case, monkeypatch)


@pytest.mark.parametrize("case", cases_of(norms, lambda case: case.phase == 0, every=17))
def test_gradients_of_norms_equal_their_patterns(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    _compare_larger(case, monkeypatch)
