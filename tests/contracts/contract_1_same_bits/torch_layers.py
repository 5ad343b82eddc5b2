"""Recipes for every layer of torch.nn: constructor, input and call; or why the layer is out of scope."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Recipe:
    """How to construct and call one layer.

    Attributes:
        make: constructs the layer.
        shape: the shape of one sample.
        call: calls the layer with arguments derived from one tensor; None passes the tensor itself.
        integers: if not 0, the input holds integers from 0 to integers - 1.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    call: Callable[[Any, Tensor], Tensor] | None = None
    integers: int = 0


class SingleTensorLayer(nn.Module):
    """Adapts a layer with several arguments or results to a single input and output tensor."""

    def __init__(self, layer: nn.Module, call: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = layer
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.layer, x)


SEQUENCE, IMAGE, VOLUME, FEATURES = (6, 9), (6, 9, 7), (4, 6, 5, 7), (12,)
RECIPES: dict[str, Recipe] = {}


def _add(
    name: str,
    *args: Any,
    shape: tuple[int, ...],
    call: Callable[[Any, Tensor], Tensor] | None = None,
    integers: int = 0,
    **kwargs: Any,
) -> None:
    """Adds a recipe named by its class, optionally followed by words that distinguish configurations."""
    layer_class = getattr(nn, name.split()[0], None)  # None: the class is missing from this release of torch
    if layer_class is not None:
        RECIPES[name] = Recipe(lambda: layer_class(*args, **kwargs), shape, call, integers)


_POINTWISE = (
    "CELU ELU GELU Hardshrink Hardsigmoid Hardswish Hardtanh Identity LeakyReLU LogSigmoid Mish PReLU "
    "RReLU ReLU ReLU6 SELU SiLU Sigmoid Softplus Softshrink Softsign Tanh Tanhshrink Dropout AlphaDropout"
)


for name in _POINTWISE.split():
    _add(name, shape=IMAGE)
for name in ("ReLU", "Dropout", "ELU", "RReLU"):
    _add(f"{name} in place", inplace=True, shape=IMAGE)
_add("GELU tanh", approximate="tanh", shape=FEATURES)
_add("PReLU per channel", 6, shape=IMAGE)
_add("Threshold", 0.1, 20.0, shape=IMAGE)
_add("GLU", shape=FEATURES)
_add("GLU over channels", 1, shape=IMAGE)
for name in ("Softmax", "LogSoftmax", "Softmin"):
    _add(name, -1, shape=FEATURES)
    _add(f"{name} over channels", 1, shape=IMAGE)
_add("Softmax2d", shape=IMAGE)
_add("FeatureAlphaDropout", shape=IMAGE)
for name, shape in (("Dropout1d", SEQUENCE), ("Dropout2d", IMAGE), ("Dropout3d", VOLUME)):
    _add(name, shape=shape)


_add("Linear", 12, 10, shape=FEATURES)
_add("Linear on sequences", 9, 10, shape=SEQUENCE)
_add("Linear without bias", 9, 10, bias=False, shape=SEQUENCE)
_add("LazyLinear", 10, shape=FEATURES)
_add("Bilinear", 6, 6, 5, shape=FEATURES, call=lambda f, x: f(*x.chunk(2, -1)))
for d, shape in ((1, SEQUENCE), (2, IMAGE), (3, VOLUME)):
    c = shape[0]
    _add(f"Conv{d}d", c, 8, 3, padding=1, shape=shape)
    _add(f"Conv{d}d strided in groups", c, 8, 3, stride=2, dilation=2, padding=3, groups=2, shape=shape)
    _add(f"Conv{d}d reflected", c, 8, 3, padding=1, padding_mode="reflect", bias=False, shape=shape)
    _add(f"Conv{d}d depthwise", c, c, 3, groups=c, padding="same", shape=shape)
    _add(f"Conv{d}d pointwise", c, 8, 1, shape=shape)
    _add(f"ConvTranspose{d}d", c, 8, 3, stride=2, output_padding=1, shape=shape)
    _add(f"ConvTranspose{d}d in groups", c, 8, 3, groups=2, shape=shape)
    _add(f"LazyConv{d}d", 8, 3, shape=shape)
    _add(f"LazyConvTranspose{d}d", 8, 3, shape=shape)
_add("Unfold", 3, shape=IMAGE)
_add("Fold", (5, 4), 2, shape=(8, 12))
_add("Embedding", 11, 8, shape=(5,), integers=11)
_add("Embedding padded", 11, 8, padding_idx=2, shape=(5,), integers=11)
_add("Embedding scaled", 11, 8, scale_grad_by_freq=True, shape=(5,), integers=11)
_add("Embedding max_norm", 11, 8, max_norm=1.0, shape=(5,), integers=11)
_add("Embedding sparse", 11, 8, sparse=True, shape=(5,), integers=11)
for mode in ("sum", "mean", "max"):
    _add(f"EmbeddingBag {mode}", 11, 8, mode=mode, shape=(5,), integers=11)


for d, shape in ((1, SEQUENCE), (2, IMAGE), (3, VOLUME)):
    c = shape[0]
    _add(f"BatchNorm{d}d", c, shape=shape)
    _add(f"BatchNorm{d}d cumulative", c, momentum=None, shape=shape)
    _add(f"BatchNorm{d}d untracked", c, affine=False, track_running_stats=False, shape=shape)
    _add(f"InstanceNorm{d}d", c, shape=shape)
    _add(f"InstanceNorm{d}d tracked", c, affine=True, track_running_stats=True, shape=shape)
    _add(f"LazyBatchNorm{d}d", shape=shape)
    _add(f"LazyInstanceNorm{d}d", shape=shape)
_add(
    "BatchNorm1d of features",
    12,
    shape=FEATURES,
    call=lambda f, x: f(x.unflatten(1, (4, 3)).flatten(0, 1).repeat(1, 4)),
)
_add("SyncBatchNorm", 6, shape=IMAGE)
_add("GroupNorm", 3, 6, shape=IMAGE)
_add("LayerNorm", 12, shape=FEATURES)
_add("LayerNorm over images", list(IMAGE), shape=IMAGE)
_add("RMSNorm", 9, shape=SEQUENCE)
_add("LocalResponseNorm", 3, shape=IMAGE)
_add("CrossMapLRN2d", 3, shape=IMAGE)


for d, shape in ((1, SEQUENCE), (2, IMAGE), (3, VOLUME)):
    _add(f"MaxPool{d}d", 2, shape=shape)
    _add(f"MaxPool{d}d overlapping", 3, stride=2, padding=1, ceil_mode=True, shape=shape)
    _add(f"MaxPool{d}d indices", 2, return_indices=True, shape=shape, call=lambda f, x: f(x)[0])
    _add(f"AvgPool{d}d", 2, shape=shape)
    _add(f"AvgPool{d}d padded", 3, stride=2, padding=1, count_include_pad=False, shape=shape)
    _add(f"AdaptiveAvgPool{d}d", 3, shape=shape)
    _add(f"AdaptiveAvgPool{d}d to one", 1, shape=shape)
    _add(f"AdaptiveMaxPool{d}d", 3, shape=shape)
    _add(f"LPPool{d}d", 2, 2, shape=shape, call=lambda f, x: f(x.abs() + 0.1))
    _add(f"MaxUnpool{d}d", 2, shape=shape, call=lambda f, x, d=d: _unpool(f, x, d))
_add("FractionalMaxPool2d", 2, output_size=(4, 3), shape=IMAGE)
_add("FractionalMaxPool3d", 2, output_size=(4, 3, 4), shape=VOLUME)


def _unpool(layer: nn.Module, x: Tensor, d: int) -> Tensor:
    pool = (nn.functional.max_pool1d, nn.functional.max_pool2d, nn.functional.max_pool3d)[d - 1]
    pooled, indices = pool(x, 2, return_indices=True)
    return layer(pooled, indices, output_size=x.shape[2:])


for d, shape in ((1, SEQUENCE), (2, IMAGE), (3, VOLUME)):
    for kind in ("Circular", "Reflection", "Replication", "Zero"):
        _add(f"{kind}Pad{d}d", 2, shape=shape)
    _add(f"ConstantPad{d}d", 2, 0.5, shape=shape)
_add("ChannelShuffle", 3, shape=IMAGE)
_add("PixelShuffle", 2, shape=(8, 5, 3))
_add("PixelUnshuffle", 2, shape=(3, 6, 4))
_add("Flatten", shape=IMAGE)
_add("Unflatten", 1, (3, 4), shape=FEATURES)
_add("UpsamplingNearest2d", scale_factor=2, shape=IMAGE)
_add("UpsamplingBilinear2d", scale_factor=2, shape=IMAGE)
for mode, shape in (
    *(("nearest", s) for s in (SEQUENCE, IMAGE, VOLUME)),
    *(("nearest-exact", s) for s in (SEQUENCE, IMAGE, VOLUME)),
    ("linear", SEQUENCE),
    ("bilinear", IMAGE),
    ("bicubic", IMAGE),
    ("trilinear", VOLUME),
):
    _add(f"Upsample {mode} {len(shape) - 1}d", scale_factor=1.7, mode=mode, shape=shape)
_add("Upsample aligned", size=(13, 5), mode="bilinear", align_corners=True, shape=IMAGE)


sizes = {"d_model": 8, "nhead": 2, "dim_feedforward": 16, "batch_first": True}
tokens = (5, 8)
self_attention = {"shape": tokens, "call": lambda f, x: f(x, x, x)[0]}
_add("MultiheadAttention", 8, 2, batch_first=True, **self_attention)
_add("MultiheadAttention dropout", 8, 2, dropout=0.2, batch_first=True, **self_attention)
_add(
    "MultiheadAttention unweighted",
    8,
    2,
    dropout=0.2,
    batch_first=True,
    shape=tokens,
    call=lambda f, x: f(x, x, x, need_weights=False)[0],
)
_add("TransformerEncoderLayer", **sizes, shape=tokens)
_add("TransformerEncoderLayer norm first", **sizes, norm_first=True, activation="gelu", shape=tokens)
source_and_target = {"shape": tokens, "call": lambda f, x: f(x, x.flip(1))}
_add("TransformerDecoderLayer", **sizes, **source_and_target)
RECIPES["TransformerEncoder"] = Recipe(
    lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(**sizes), 2), tokens
)
RECIPES["TransformerDecoder"] = Recipe(
    lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(**sizes), 2), **source_and_target
)
layers = {"num_encoder_layers": 1, "num_decoder_layers": 1}
_add("Transformer", **sizes, **layers, **source_and_target)
for name in ("RNN", "GRU", "LSTM"):
    _add(name, 8, 6, batch_first=True, shape=tokens, call=lambda f, x: f(x)[0])
_add("RNNCell", 12, 6, shape=FEATURES)
_add("GRUCell", 12, 6, shape=FEATURES)
_add("LSTMCell", 12, 6, shape=FEATURES, call=lambda f, x: torch.cat(f(x), -1))
for name in ("RNNCell", "GRUCell"):
    _add(f"{name} with a state", 12, 12, shape=FEATURES, call=lambda f, x: f(x, f(x.tanh())))
_add(
    *("LSTMCell with a state", 12, 12),
    **{"shape": FEATURES, "call": lambda f, x: torch.cat(f(x, f(x.tanh())), -1)},
)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    a, b = x.chunk(2, -1)
    return a, b


def _sign_targets(x: Tensor) -> Tensor:
    return torch.where(x.detach() > 0, 1.0, -1.0)


def _class_targets(x: Tensor) -> Tensor:
    return x.detach().argmax(1)


def _add_losses() -> None:
    """Adds losses, whose targets are computed from their input; each returns one number per micro-batch."""

    def add(name: str, call: Callable[[Any, Tensor], Tensor], shape: tuple[int, ...] = FEATURES, **kw: Any):
        _add(name, shape=shape, call=lambda f, x: call(f, x).reshape(1), **kw)

    for name in ("L1Loss", "MSELoss", "SmoothL1Loss", "HuberLoss"):
        add(name, lambda f, x: f(*_halves(x)))
    for name in ("SoftMarginLoss", "HingeEmbeddingLoss"):
        add(name, lambda f, x: f(x, _sign_targets(x.flip(-1))))
    for name in ("CrossEntropyLoss", "MultiMarginLoss"):
        add(name, lambda f, x: f(x, _class_targets(x.flip(-1))))
    add("CrossEntropyLoss smoothed", lambda f, x: f(x, _class_targets(x.flip(1))), IMAGE, label_smoothing=0.1)
    add("NLLLoss", lambda f, x: f(x.log_softmax(1), _class_targets(x)))
    add("NLLLoss2d", lambda f, x: f(x.log_softmax(1), _class_targets(x)), IMAGE)
    add("BCELoss", lambda f, x: f(*(h.sigmoid() for h in _halves(x))))
    add("BCEWithLogitsLoss", lambda f, x: f(x, (x.detach() > 0.3).to(x.dtype)))
    add("KLDivLoss", lambda f, x: f(x.log_softmax(1), x.flip(1).softmax(1)))
    add("PoissonNLLLoss", lambda f, x: f(*(h.abs() for h in _halves(x))))
    add("GaussianNLLLoss", lambda f, x: f(*_halves(x), _halves(x)[0].exp()))
    add("MultiLabelSoftMarginLoss", lambda f, x: f(x, (x.detach() > 0.3).to(x.dtype)))
    add("MultiLabelMarginLoss", lambda f, x: f(x, x.detach().argsort(1)))
    for name in ("CosineSimilarity", "PairwiseDistance"):
        _add(name, shape=FEATURES, call=lambda f, x: f(*_halves(x)))
    add("CosineEmbeddingLoss", lambda f, x: f(*_halves(x), _sign_targets(x[:, 0])))
    add("MarginRankingLoss", lambda f, x: f(*_halves(x), _sign_targets(x[:, :6])))
    for name in ("TripletMarginLoss", "TripletMarginWithDistanceLoss"):
        add(name, lambda f, x: f(*x.chunk(3, -1)))
    add("CTCLoss", _ctc, (7, 5))
    sizes, classes = (
        (12, 10),
        {"shape": FEATURES, "call": lambda f, x: f(x, _class_targets(x[:, :10])).output},
    )
    _add("AdaptiveLogSoftmaxWithLoss", *sizes, [4, 7], **classes)
    _add(
        *("LinearCrossEntropyLoss", *sizes),
        **classes | {"call": lambda f, x: f(x, _class_targets(x[:, :10])).reshape(1)},
    )


def _ctc(f: nn.Module, x: Tensor) -> Tensor:
    n = len(x)
    y: Tensor = f(x.transpose(0, 1).log_softmax(-1), torch.tensor([[1, 2, 4]] * n), (7,) * n, (3,) * n)
    return y


_add_losses()

_CONTAINER = "a container: it has no forward of its own"
OUT_OF_SCOPE = {
    "Container": _CONTAINER,
    "DataParallel": "needs several GPUs",
    "Module": "abstract",
    "ModuleDict": _CONTAINER,
    "ModuleList": _CONTAINER,
    "ParameterDict": _CONTAINER,
    "ParameterList": _CONTAINER,
    "RNNBase": "abstract",
    "RNNCellBase": "abstract",
    "Sequential": "the container that a pipeline is made from; every recipe runs inside one",
}

_DATA_DEPENDENT = "Could not guard on data-dependent expression"
RUN_IN_PYTHON: dict[str, str] = {
    "RNN": "recurrent layers",
    "GRU": "recurrent layers",
    "LSTM": "recurrent layers",
    "Embedding max_norm": "changes a parameter",
    "Embedding sparse": "sparse gradients",
    **{
        f"BatchNorm{d}d cumulative": _DATA_DEPENDENT for d in (1, 2, 3)
    },  # momentum is 1 / num_batches_tracked, read as a Python number
    "GaussianNLLLoss": _DATA_DEPENDENT,  # checks that the variance is positive
    "CTCLoss": "Dynamic shape operator",
    "AdaptiveLogSoftmaxWithLoss": _DATA_DEPENDENT,
    "CrossMapLRN2d": "PyTorch cannot trace it",  # its autograd.Function resizes tensors
}


class TrainableScale(nn.Module):
    """A trainable factor; placed around the tested layer, so that its input is not a boundary activation."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def model_of(recipe: Recipe) -> nn.Sequential:
    """Returns the layers of one stage, among them the recipe's layer."""
    torch.manual_seed(1)
    layer = recipe.make()
    if recipe.call is not None:
        layer = SingleTensorLayer(layer, recipe.call)
    model = nn.Sequential(layer, TrainableScale(0.75))
    if not recipe.integers:
        model.insert(0, TrainableScale(1.25))
    if any(isinstance(p, nn.parameter.UninitializedTensorMixin) for p in model.parameters()):
        with torch.no_grad():
            model(inputs_of(recipe.shape, recipe.integers, 2))  # initializes the parameters of a lazy layer
    return model


def inputs_of(shape: tuple[int, ...], integers: int, samples: int, seed: int = 3) -> Tensor:
    """Returns a mini-batch: of integers below a number, or of noise if it is 0."""
    generator = torch.Generator().manual_seed(seed)
    size = (samples, *shape)
    if integers:
        return torch.randint(integers, size, generator=generator)
    return torch.randn(size, generator=generator)
