"""Fused kernels in stages, run by Triton's interpreter on the fake runtime: what is fused, and its errors.

`python -m tests.fake_cuda.test_fusion` writes the table of fused nodes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import HAS_TRITON
from tests.fake_cuda import process
from tests.fake_cuda.build import build

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
TABLE = Path(__file__).with_name("fused_nodes.txt")
# Stage, precision and checkpoint mode.
CASES = [
    ("GPT", "autocast", "except_last"),
    ("GPT", "autocast", "always"),
    ("GPT", "fp32", "never"),
    ("GPT", "bf16", "always"),
    ("Llama", "bf16", "always"),
    ("Llama", "autocast", "except_last"),
    ("head", "autocast", "always"),
    ("head, upcast", "bf16", "always"),
    ("BERT", "autocast", "never"),
    ("ViT", "bf16", "always"),
    ("GPT-2", "autocast", "except_last"),
    ("GPT-2, attention dropout", "fp32", "always"),
    ("ResNet", "autocast", "always"),
    ("U-Net", "fp32", "always"),
]
# Errors of gradients that are zero but for rounding differ more: the gradient of a key's bias, for example.
MAX_RATIO, MAX_RATIO_OF_NOISE = 2, 8


def fused_nodes(libraries: tuple[Path, Path], *stages: str) -> str:
    """Returns the table, or the rows of some stages."""
    return "\n".join(process.run("fused_nodes.py", libraries, *stages, limit=600)) + "\n"


@pytest.mark.parametrize("stages", [("GPT", "head"), pytest.param((), marks=pytest.mark.extended)], ids=str)
def test_the_fused_nodes_are_those_of_the_table(
    stages: tuple[str, ...], libraries: tuple[Path, Path]
) -> None:
    graphs = re.split(r"^(?! )", TABLE.read_text(), flags=re.MULTILINE)[1:-1]
    rows = [graph for graph in graphs if not stages or graph.partition("\n")[0].rsplit(", ", 2)[0] in stages]
    found = fused_nodes(libraries, *stages)
    assert found == "".join(rows), "python -m tests.fake_cuda.test_fusion writes the table"


@pytest.mark.parametrize(
    "case", [CASES[0], *(pytest.param(c, marks=pytest.mark.extended) for c in CASES[1:])], ids=" ".join
)
def test_errors_are_at_most_twice_those_of_pytorch(
    case: tuple[str, str, str], run: Callable[..., list[str]]
) -> None:
    captured = ["captured"] if case == CASES[1] else []
    (line,) = run("fusion_cases.py", *case, *captured, interpreted=True, fused=True)
    found = json.loads(line)
    assert found["kernels"]
    assert found["warnings"] == found["failures"] == []
    for index, ((error, rounding), (expected, _)) in enumerate(found["errors"]):
        # The elements are of size rounding / eps: they are noise if that is not above PyTorch's error.
        noise = rounding < 1e-3 * expected
        allowed = max((MAX_RATIO_OF_NOISE if noise else MAX_RATIO) * expected, 2 * rounding)
        assert error <= allowed, f"result {index}: {error / allowed:.3f} of the error allowed"


if __name__ == "__main__":
    TABLE.write_text(fused_nodes(build()))
