"""A sample of the torchvision census: all layers are native, and a step equals the plain loop bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch

import pytest
import torch
from torch import nn

try:
    import torchvision  # noqa: F401
except (ImportError, RuntimeError) as error:  # RuntimeError: built for a different torch
    pytest.skip(f"torchvision does not load: {error}", allow_module_level=True)

from torchvision.models import ConvNeXt, DenseNet, SwinTransformer, VisionTransformer, list_models
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.video.mvit import MSBlockConfig, MViT

from tools import census, sequences

pytestmark = pytest.mark.usefixtures("one_thread")

# Constructors of small models, and their numbers of layers. LR-ASPP passes pairs between layers.
SAMPLE = {
    "lraspp_mobilenet_v3_large": 19,
    "mobilenet_v3_small": 19,
    "resnet18": 15,
    "shufflenet_v2_x0_5": 25,
    "squeezenet1_1": 18,
}


# A small member of each large family. A dense block passes lists between layers, MViT also passes numbers.
SMALL: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "ConvNeXt": (
        lambda: ConvNeXt([CNBlockConfig(8, 16, 2), CNBlockConfig(16, None, 1)], 0.2),
        (3, 32, 32),
        10,
    ),
    "DenseNet": (lambda: DenseNet(4, (2, 3), 8, 2, 0.1), (3, 32, 32), 17),
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
        8,
    ),
    "Swin": (
        lambda: SwinTransformer([2, 2], 8, [2, 2], [1, 2], [3, 3], dropout=0.1, attention_dropout=0.1),
        (3, 16, 16),
        13,
    ),
    "ViT": (
        lambda: VisionTransformer(16, 4, 2, 2, 8, 16, dropout=0.1, attention_dropout=0.1),
        (3, 16, 16),
        8,
    ),
}


def verdict_of(name: str) -> tuple[census.Verdict, int]:
    if name in SAMPLE:
        return census.examine(name), SAMPLE[name]
    make, shape, num_layers = SMALL[name]
    torch.manual_seed(0)
    model = sequences.perturb_constants(make())
    return census.compare(model, torch.randn(4, *shape), shape[-2:]), num_layers


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [*SAMPLE, *SMALL])
def test_a_torchvision_model_is_all_native_and_equals_the_plain_loop(name: str) -> None:
    verdict, num_layers = verdict_of(name)
    assert (verdict.refused, verdict.num_layers, verdict.num_native) == ({}, num_layers, num_layers)
    assert verdict.report, verdict.report
    assert verdict.row()[3:5] == ["100%", "equal"]


@pytest.mark.extended
def test_every_torchvision_constructor_becomes_a_sequence_or_has_a_reason() -> None:
    for name in list_models():
        if sequences.exclusion_reason(name) is not None or fnmatch(name, "regnet_*_*gf"):
            continue
        # A RegNet reads its widths from tensors, so meta does not work; only the small ones are built.
        with torch.device("cpu" if name.startswith("regnet") else "meta"):
            model = sequences.build(name)
        sequence = sequences.as_sequence(model, (64, 64))
        assert sequence is not None, name
        assert {*map(id, model.parameters())} == {*map(id, sequence.parameters())}, name
