"""The papers' models have the published sizes; small ones in pipelines equal the plain loop bit for bit."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from bench.models.amoebanet import amoebanet_d
from bench.models.flatten import flatten
from bench.models.gpt import gpt
from bench.models.resnet import resnet, resnet101
from bench.models.unet import unet
from gpipe_fast.layers.skip import skips_of, verify_skippables

CHUNKS, BATCH = 4, 8


def num_parameters(make: Callable[[], nn.Module]) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in make().parameters())


# Table 1 of the GPipe paper: 82, 318, 542, 1050 and 1800 million. torchgpipe's benchmarks: the numbers below.
@pytest.mark.parametrize(
    ("size", "millions"),
    [
        ((18, 208), 81.5),
        ((18, 416), 319.0),
        ((18, 544), 542.7),
        ((36, 544), 1055.8),
        pytest.param((72, 512), 1844.9, marks=pytest.mark.extended),
    ],
    ids=str,
)
def test_amoebanet_d_has_the_published_number_of_parameters(size: tuple[int, int], millions: float) -> None:
    assert round(num_parameters(partial(amoebanet_d, *size)) / 1e6, 1) == millions


@pytest.mark.parametrize(
    ("size", "millions"),
    [
        ((6, 72), 362.2),
        ((11, 128), 2213.8),
        ((24, 128), 4993.9),
        ((24, 160), 7802.9),
        pytest.param((48, 160), 15822.2, marks=pytest.mark.extended),
    ],
    ids=str,
)
def test_unet_has_the_published_number_of_parameters(size: tuple[int, int], millions: float) -> None:
    assert round(num_parameters(partial(unet, *size)) / 1e6, 1) == millions


def test_resnet101_has_the_published_number_of_parameters() -> None:
    assert num_parameters(resnet101) == 44_549_160


def test_gpt_has_the_expected_number_of_parameters() -> None:
    assert num_parameters(partial(gpt, 12, 768, 12)) == 163_037_184
    assert num_parameters(partial(gpt, 12, 768, 12, tied=True)) == 124_439_808
    for layers, width, vocab, context in [(1, 8, 11, 5), (3, 16, 7, 9)]:
        expected = layers * (12 * width**2 + 13 * width) + (2 * vocab + context + 2) * width
        assert num_parameters(partial(gpt, layers, width, 2, vocab, context)) == expected


# The numbers of layers are those that torchgpipe's benchmarks partition.
@pytest.mark.parametrize(
    ("make", "shape", "output", "num_layers"),
    [
        pytest.param(
            *(partial(amoebanet_d, 18, 208), (2, 3, 224, 224), (2, 1000), 24), marks=pytest.mark.extended
        ),
        (partial(unet, 6, 72), (2, 3, 192, 192), (2, 1, 192, 192), 285),
        (partial(unet, 5, 64), (2, 3, 192, 192), (2, 1, 192, 192), 241),
        (resnet101, (2, 3, 224, 224), (2, 1000), 370),
        (partial(gpt, 12, 768, 12), (2, 1024), (2, 1024, 50257), 15),
    ],
    ids=["AmoebaNet-D (18, 208)", "U-Net (6, 72)", "U-Net (5, 64)", "ResNet-101", "GPT-2 small"],
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


def even_cuts(num_layers: int, num_stages: int) -> list[int]:
    cuts = [num_layers * i // num_stages for i in range(num_stages + 1)]
    return [end - begin for begin, end in itertools.pairwise(cuts)]


@pytest.mark.parametrize("name", SMALL)
def test_every_gradient_is_finite_and_nonzero(name: str) -> None:
    torch.manual_seed(0)
    make, batch = SMALL[name]
    model = make()
    model(batch()).square().sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()
        assert parameter.grad.any()


@pytest.mark.parametrize("name", ["U-Net", "ResNet"])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_stage_boundaries_cross_skip_connections(name: str, num_stages: int) -> None:
    model = SMALL[name][0]()
    verify_skippables(model)
    for cut in itertools.accumulate(even_cuts(len(model), num_stages)[:-1]):
        assert any(skip.source < cut <= skip.target for skip in skips_of(model))


def test_an_amoebanet_cell_takes_the_outputs_of_the_two_previous_cells() -> None:
    model, x = amoebanet_d(3, 16, 5), random_images(3, 64, 64)
    outputs = [x]
    for layer in model[:-1]:
        outputs.append(layer(outputs[-1]))
    assert [type(output) for output in outputs[:3]] == [Tensor, Tensor, tuple]
    assert outputs[2][1] is outputs[1]
    for before, after in itertools.pairwise(outputs[2:]):
        assert after[1] is before[0]
    sizes = [32, 16, 8, 8, 4, 4, 2, 2]
    channels = [4, 24, 48, 64, 96, 128, 192, 256]
    firsts = [outputs[1], *(first for first, _ in outputs[2:])]
    assert [first.shape for first in firsts] == [
        (BATCH, c, size, size) for c, size in zip(channels, sizes, strict=True)
    ]


@pytest.mark.parametrize("size", [(4, 16), (3, 20)])
def test_invalid_amoebanet_d_sizes_are_rejected(size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"got {size[0]} and {size[1]}$"):
        amoebanet_d(*size)


def test_resnet_equals_torchvisions() -> None:
    torchvision = pytest.importorskip("torchvision")
    blocks = (1, 2, 1, 1)
    torch.manual_seed(0)
    ours = resnet(blocks, 5)
    theirs = torchvision.models.ResNet(torchvision.models.resnet.Bottleneck, blocks, 5)
    state = zip(ours.state_dict(), theirs.state_dict().values(), strict=True)
    ours.load_state_dict(copy.deepcopy(dict(state)))
    for training in (True, False):
        ours.train(training)
        theirs.train(training)
        assert torch.equal(ours(random_images(3, 64, 64)), theirs(random_images(3, 64, 64)))


def test_a_tied_head_shares_the_embeddings_weight() -> None:
    model = gpt(1, 8, 2, 11, 5, tied=True)
    assert model.head.weight is model.embedding.token.weight
    torch.manual_seed(0)
    untied = gpt(1, 8, 2, 11, 5)
    untied.load_state_dict(model.state_dict())
    x = tokens()[:, :5]
    assert torch.equal(model(x), untied(x))


def test_flat_keeps_the_order_and_joins_the_names() -> None:
    a, b, c = nn.ReLU(), nn.Tanh(), nn.GELU()
    model = flatten(nn.Sequential(nn.Sequential(nn.Sequential(a), b), c))
    assert dict(model.named_children()) == {"0_0_0": a, "0_1": b, "1": c}
