"""A sample of the torchvision census: all is native, and a step equals the plain loop bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

try:
    import torchvision  # noqa: F401
except (ImportError, RuntimeError) as error:  # RuntimeError: built for a different torch
    pytest.skip(f"torchvision does not load: {error}", allow_module_level=True)

from torchvision.models import ConvNeXt, DenseNet, SwinTransformer, VisionTransformer
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.video.mvit import MSBlockConfig, MViT

from tools import census

pytestmark = pytest.mark.usefixtures("one_thread")

# Constructors of small models. The last one adds by modules that could be quantized.
SAMPLE = (
    "lraspp_mobilenet_v3_large",
    "mobilenet_v3_small",
    "resnet18",
    "shufflenet_v2_x0_5",
    "squeezenet1_1",
    "quantized_mobilenet_v2",
)

# A small member of each large family, and the shape of a sample. MViT passes numbers between its blocks.
SMALL: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "ConvNeXt": (
        lambda: ConvNeXt([CNBlockConfig(8, 16, 2), CNBlockConfig(16, None, 1)], 0.2),
        (3, 32, 32),
    ),
    "DenseNet": (lambda: DenseNet(4, (2, 3), 8, 2, 0.1), (3, 32, 32)),
    "MViT": (
        lambda: MViT(
            (16, 16),
            4,
            [
                MSBlockConfig(1, 8, 16, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 2, 2]),
                MSBlockConfig(2, 16, 16, [3, 3, 3], [3, 3, 3], [1, 2, 2], [1, 1, 1]),
            ],
            residual_pool=True,
            residual_with_cls_embed=False,
            rel_pos_embed=False,
            proj_after_attn=True,
            stochastic_depth_prob=0.2,
        ),
        (3, 4, 16, 16),
    ),
    "Swin": (
        lambda: SwinTransformer([2, 2], 8, [2, 2], [1, 2], [3, 3], dropout=0.1, attention_dropout=0.1),
        (3, 16, 16),
    ),
    "ViT": (
        lambda: VisionTransformer(16, 4, 2, 2, 8, 16, dropout=0.1, attention_dropout=0.1),
        (3, 16, 16),
    ),
}


def verdict_of(name: str) -> census.Verdict:
    if name in SAMPLE:
        return census.examine(name)
    make, shape = SMALL[name]
    torch.manual_seed(0)
    return census.compare(make(), torch.randn(4, *shape))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [*SAMPLE, *SMALL])
def test_a_torchvision_model_is_all_native_and_equals_the_plain_loop(name: str) -> None:
    verdict = verdict_of(name)
    assert verdict.report, (verdict.note, verdict.report)
    assert verdict.result == "equal"
    # A cut between blocks, not before or after all of them.
    assert verdict.num_layers >= census.NUM_STAGES
