"""Functions that Dynamo neither traces nor enters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpipe_fast.unsupported import uncompiled

REASON = "the reason of this test"


def doubled(x: Tensor) -> Tensor:
    assert not torch.compiler.is_compiling()
    return 2 * x


def test_a_function_runs_uncompiled_in_compiled_code() -> None:
    opaque = uncompiled(doubled)
    compiled = torch.compile(lambda x: opaque(x.sin()).cos(), backend="eager")
    x = torch.linspace(0, 1, 4)
    assert torch.equal(compiled(x), (2 * x.sin()).cos())
    assert torch.equal(opaque(x), 2 * x)


def test_a_whole_graph_fails_for_the_reason() -> None:
    opaque = uncompiled(doubled, REASON)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=REASON):
        torch.compile(lambda x: opaque(x), backend="eager", fullgraph=True)(torch.ones(2))
