"""The stages on which fusion is counted: their graphs are those of transformers and torchvision."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map_only

from gpipe_fast.trace.joint_graph import JointGraph
from gpipe_fast.trace.trace import trace
from tests.fake_cuda.build import can_build
from tools import fusion
from tools.stages import PRECISIONS, SMALL, STAGES, Precision, Stage


def _bert() -> list[nn.Module]:
    modeling = importlib.import_module("transformers.models.bert.modeling_bert")
    config = modeling.BertConfig(
        hidden_size=SMALL.width,
        num_attention_heads=SMALL.heads,
        intermediate_size=4 * SMALL.width,
        attention_probs_dropout_prob=0.0,
        attn_implementation="sdpa",
    )
    return [modeling.BertLayer(config)]


def _gpt2() -> list[nn.Module]:
    modeling = importlib.import_module("transformers.models.gpt2.modeling_gpt2")
    config = modeling.GPT2Config(
        n_embd=SMALL.width, n_head=SMALL.heads, attn_pdrop=0.0, attn_implementation="sdpa"
    )
    return [modeling.GPT2Block(config, layer_idx=0)]


class _LlamaLayer(nn.Module):
    """A layer of transformers, called as in examples/transformers_llama."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x, cos, sin = inputs
        return self.block(x, position_embeddings=(cos, sin)), cos, sin


def _llama() -> list[nn.Module]:
    modeling = importlib.import_module("transformers.models.llama.modeling_llama")
    config = modeling.LlamaConfig(
        hidden_size=SMALL.width,
        num_attention_heads=SMALL.heads,
        num_key_value_heads=SMALL.heads // 2,
        intermediate_size=SMALL.width * 11 // 4,
        attn_implementation="sdpa",
    )
    return [_LlamaLayer(modeling.LlamaDecoderLayer(config, layer_idx=0))]


def _vit() -> list[nn.Module]:
    vision = importlib.import_module("torchvision.models.vision_transformer")
    return [vision.EncoderBlock(SMALL.heads, SMALL.width, 4 * SMALL.width, 0.0, 0.0)]


LIBRARIES: dict[str, tuple[str, Callable[[], list[nn.Module]]]] = {
    "BERT": ("transformers", _bert),
    "GPT-2": ("transformers", _gpt2),
    "Llama": ("transformers", _llama),
    "ViT": ("torchvision", _vit),
}


def _trace_on_cpu(layers: list[nn.Module], stage: Stage, precision: Precision) -> JointGraph:
    layers = [layer.to(precision.parameters) for layer in layers]
    autocast = torch.autocast("cpu", precision.autocast, precision.autocast is not None, cache_enabled=False)
    with autocast:
        joint = trace(layers, stage.inputs(SMALL, precision.parameters))
    assert isinstance(joint, JointGraph), joint
    return joint


def _operators(joint: JointGraph) -> list[Any]:
    """Returns the calls of a graph with all arguments, independent of the names and order of parameters."""
    calls = [node for node in joint.module.graph.nodes if node.op == "call_function"]
    names: dict[fx.Node, Any] = {node: index for index, node in enumerate(calls)}
    for port, node in joint.inputs:
        value = node.meta["val"]
        names[node] = (port.role.value, tuple(value.shape), value.dtype)
    return [(node.target, *tree_map_only(fx.Node, names.get, (node.args, node.kwargs))) for node in calls]


@pytest.mark.extended
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", LIBRARIES)
def test_blocks_have_the_graphs_of_their_libraries(name: str, precision: str) -> None:
    library, make = LIBRARIES[name]
    pytest.importorskip(library, exc_type=ImportError)
    stage, how = STAGES[name], PRECISIONS[precision]
    ours = _operators(_trace_on_cpu(stage.layers(SMALL), stage, how))
    assert ours == _operators(_trace_on_cpu(make(), stage, how))
    assert len(ours) > 80


@pytest.mark.skipif(not can_build(), reason="needs an extension built with CUDA, and the toolkit's headers")
def test_bytes_of_stages_on_a_gpu(libraries: tuple[Path, Path]) -> None:
    found = fusion.run("small", ["head", "BERT"], libraries[0])
    assert len(found) == 2 * 2 * len(PRECISIONS)
    for row in found:
        assert row.after.moved <= row.before.moved
        assert row.after.launches <= row.before.launches
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
