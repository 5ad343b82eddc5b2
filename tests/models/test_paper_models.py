"""The papers' models have the published sizes; small ones in pipelines equal the plain loop bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from bench.models.amoebanet import amoebanet_d
from bench.models.gpt import gpt
from bench.models.resnet import resnet, resnet101
from bench.models.unet import unet
from tests.reference import check_step

BATCH = 8

# Table 1 of the GPipe paper: 82, 318, 542, 1050 and 1800 million. torchgpipe's benchmarks: the others.
NUM_PARAMETERS: dict[Callable[[], nn.Module], float] = {
    partial(amoebanet_d, 18, 208): 81.5,
    partial(amoebanet_d, 18, 416): 319.0,
    partial(amoebanet_d, 18, 544): 542.7,
    partial(amoebanet_d, 36, 544): 1055.8,
    partial(amoebanet_d, 72, 512): 1844.9,
    partial(unet, 6, 72): 362.2,
    partial(unet, 11, 128): 2213.8,
    partial(unet, 24, 128): 4993.9,
    partial(unet, 24, 160): 7802.9,
    partial(unet, 48, 160): 15822.2,
    resnet101: 44.5,
    partial(gpt, 12, 768, 12): 163.0,
    partial(gpt, 12, 768, 12, tied=True): 124.4,
}


@pytest.mark.extended
def test_models_have_the_published_numbers_of_parameters() -> None:
    with torch.device("meta"):
        for make, millions in NUM_PARAMETERS.items():
            assert round(sum(p.numel() for p in make().parameters()) / 1e6, 1) == millions, make


# The numbers of layers are those that torchgpipe's benchmarks partition.
@pytest.mark.parametrize(
    ("make", "shape", "output", "num_layers"),
    [
        pytest.param(
            *(partial(amoebanet_d, 18, 208), (2, 3, 224, 224), (2, 1000), 24), marks=pytest.mark.extended
        ),
        (partial(unet, 6, 72), (2, 3, 192, 192), (2, 1, 192, 192), 285),
        (resnet101, (2, 3, 224, 224), (2, 1000), 370),
        (partial(gpt, 12, 768, 12), (2, 1024), (2, 1024, 50257), 15),
    ],
    ids=["AmoebaNet-D (18, 208)", "U-Net (6, 72)", "ResNet-101", "GPT-2 small"],
)
def test_full_size_models_have_the_expected_shapes_and_layers(
    make: Callable[[], nn.Sequential], shape: tuple[int, ...], output: tuple[int, ...], num_layers: int
) -> None:
    with torch.device("meta"):
        model = make()
        x = torch.zeros(shape, dtype=torch.long if len(shape) == 2 else torch.float)
        assert (model(x).shape, len(model)) == (output, num_layers)


def random_images(*shape: int) -> Tensor:
    return torch.randn(BATCH, *shape, generator=torch.Generator().manual_seed(1))


def tokens() -> Tensor:
    return torch.randint(0, 11, (BATCH, 6), generator=torch.Generator().manual_seed(1))


SMALL: dict[str, tuple[Callable[[], nn.Sequential], Callable[[], Tensor]]] = {
    "AmoebaNet-D": (partial(amoebanet_d, 3, 16, 5), partial(random_images, 3, 64, 64)),
    "U-Net": (partial(unet, 2, 4, depth=2), partial(random_images, 3, 16, 16)),
    "ResNet": (partial(resnet, (1, 2), 5, 4), partial(random_images, 3, 32, 32)),
    "GPT": (partial(gpt, 2, 16, 2, 11, 8), tokens),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.usefixtures("one_thread")
def test_a_step_of_a_small_model_equals_the_plain_loop(name: str) -> None:
    make, batch = SMALL[name]
    torch.manual_seed(0)
    model, half = make(), len(make()) // 2
    check_step(model, batch(), balance=[half, len(model) - half], budgets=(0.0, 1.0))


def test_a_tied_head_shares_the_embeddings_weight() -> None:
    model = gpt(1, 8, 2, 11, 5, tied=True)
    assert model.head.weight is model.embedding.token.weight
