"""Steps of small versions of the papers' models, with their skip connections."""

from __future__ import annotations

from functools import partial

from bench.comparison import Outcome
from bench.gpu.subjects import LOOP, OURS, TORCHGPIPE, Subject, comparison
from bench.models.amoebanet import amoebanet_d
from bench.models.gpt import gpt
from bench.models.resnet import resnet
from bench.models.unet import unet

NAMES = OURS, TORCHGPIPE, LOOP
MODELS = {
    "AmoebaNet-D (3, 16)": Subject(partial(amoebanet_d, 3, 16, 10), (3, 64, 64), 16, 4, names=NAMES),
    "GPT, 4 blocks of width 128": Subject(
        partial(gpt, 4, 128, 4, 256, 64), (64,), 16, 4, vocab=256, names=NAMES
    ),
    "ResNet, 4 bottlenecks": Subject(partial(resnet, (1, 1, 1, 1), 10, 16), (3, 64, 64), 16, 4, names=NAMES),
    "U-Net (2, 8)": Subject(partial(unet, 2, 8, depth=3, dropout=0.0), (3, 32, 32), 16, 4, names=NAMES),
}
COMPARISONS = [comparison(name, subject, "cpu") for name, subject in MODELS.items()]


def test_models(measured: Outcome) -> None:
    """Measures a candidate of `COMPARISONS`."""
