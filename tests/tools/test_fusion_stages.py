"""The stages on which fusion is counted, and the bytes that fusion saves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.fake_cuda.build import can_build
from tools import fusion
from tools.stages import PRECISIONS, SMALL, STAGES


@pytest.mark.skipif(not can_build(), reason="needs an extension built with CUDA, and the toolkit's headers")
def test_bytes_of_stages_on_a_gpu(libraries: tuple[Path, Path]) -> None:
    found = fusion.run("small", ["head", "BERT"], libraries[0])
    assert len(found) == 2 * 2 * len(PRECISIONS)
    for row in found:
        assert row.after.moved <= row.before.moved
        assert row.after.launches <= row.before.launches + (row.stage == "head")  # for the mean of losses
        assert row.after.moved < row.before.moved or row.stage == "head"
    rows = {(row.precision, row.program): row for row in found if row.stage == "head"}
    tokens, hidden, logits = SMALL.batch * SMALL.length, SMALL.width, SMALL.vocab
    for precision, size in (("fp32", 4), ("bf16", 2)):
        x, y, weights, targets = size * tokens * hidden, size * tokens * logits, size * 2 * hidden, tokens * 8
        forward, backward = (rows[precision, name] for name in ("forward", "backward_recompute"))
        # No step of the forward reads the norm's statistics, nor the number of targets.
        expected = {"native_layer_norm": 2 * x + weights, "_log_softmax": 2 * y}
        expected["nll_loss_forward"] = targets + size
        assert forward.before.moved_by == expected
        assert forward.before.launches_of == {**dict.fromkeys(expected, 1), "mm": 1}
        statistics = 2 * tokens * 4
        expected["native_layer_norm"] += statistics
        expected["nll_loss_backward"] = y + targets + 2 * size
        expected["_log_softmax_backward_data"] = 3 * y
        expected["native_layer_norm_backward"] = 3 * x + 2 * weights + statistics
        expected["accumulate"] = 3 * weights
        assert backward.before.moved_by == expected
        assert backward.before.launches_of == {**dict.fromkeys(expected, 1), "mm": 2, "addmm": 1}


def test_every_stage_makes_its_layers_and_inputs() -> None:
    for stage in STAGES.values():
        with torch.device("meta"):
            layers, inputs = stage.layers(SMALL), stage.inputs(SMALL, torch.bfloat16)
            nn.Sequential(*layers).bfloat16()
        assert any(x.requires_grad for x in inputs)
