"""The kernel that the guide of fused kernels shows is the one that is generated for the layer beside it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from gpipe_fast.fuse.generated import generated_from
from gpipe_fast.fuse.launchers import launches_in
from gpipe_fast.fuse.regions.kernel import fragment_of
from tests.docs.markdown import FENCE, ROOT
from tests.fuse.graphs import regions_in

BF16 = torch.bfloat16
GUIDE = (ROOT / "docs" / "guide" / "fused_kernels.md").read_text()
SECTION = GUIDE.partition("\n## A generated kernel\n")[2].partition("\n## ")[0]


def test_the_guide_shows_the_kernel_that_is_generated_for_its_layer() -> None:
    layer, kernel = (re.sub(r"```\w*\n?", "", block).strip() for block in FENCE.findall(SECTION)[:2])
    namespace: dict[str, Callable[..., Any]] = {}
    exec(layer, {"torch": torch}, namespace)
    (region,) = regions_in(namespace["layer"], (2048, 1024), (2048, 1024), (1024,), dtypes=[BF16] * 3)
    (launch,) = launches_in(fragment_of(region))
    text = generated_from(launch.kernel.fn)
    assert text is not None
    assert text[text.index("@triton.jit") :].strip() == kernel
    assert f"`{launch.name}`" in SECTION
