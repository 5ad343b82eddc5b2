"""torchvision's models, rewritten as sequences of their own blocks."""

from __future__ import annotations

import contextlib
import importlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Layers = Iterator[tuple[str, nn.Module]]

_DETECTOR = "takes lists of images and targets, and its computation depends on the boxes that it detects"
EXCLUDED = {
    "fasterrcnn_*": _DETECTOR,
    "fcos_*": _DETECTOR,
    "keypointrcnn_*": _DETECTOR,
    "maskrcnn_*": _DETECTOR,
    "raft_*": "its 12 updates share their weights, so most of it would be one layer",
    "retinanet_*": _DETECTOR,
    "ssd*": _DETECTOR,
}

# Shapes of one sample; the first matching pattern counts. The sizes are small, but large enough that no batch
# norm sees a single value.
SHAPES: dict[str, tuple[int, ...]] = {
    "*inception_v3": (3, 96, 96),
    "maxvit_t": (3, 224, 224),
    "mvit_*": (3, 8, 64, 64),
    "r3d_18": (3, 4, 32, 32),
    "mc3_18": (3, 4, 32, 32),
    "r2plus1d_18": (3, 4, 32, 32),
    "s3d": (3, 16, 224, 224),
    "swin3d_*": (3, 4, 64, 64),
    "vit_h_14": (3, 56, 56),
    "*": (3, 64, 64),
}

OPTIONS: dict[str, dict[str, Any]] = {
    "vit_h_14": {"image_size": 56},
    "vit_*": {"image_size": 64},
    "googlenet": {"aux_logits": False, "init_weights": False},
    "inception_v3": {"aux_logits": False, "init_weights": False},
    "quantized_googlenet": {"aux_logits": False, "init_weights": False, "quantize": False},
    "quantized_inception_v3": {"aux_logits": False, "init_weights": False, "quantize": False},
    "quantized_*": {"quantize": False},
    "deeplabv3_*": {"weights_backbone": None},
    "fcn_*": {"weights_backbone": None},
    "lraspp_*": {"weights_backbone": None},
    "*": {},
}


class Apply(nn.Module):
    """A layer that applies a function to its input and to the modules that the function calls."""

    def __init__(self, function: Callable[..., Any], *modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.held = nn.ModuleList(modules)

    def forward(self, x: Any) -> Any:
        return self.function(x, *self.held)


class Tokens(nn.Module):
    """Prepends a class token to the sequence and adds a positional embedding."""

    def __init__(self, token: nn.Parameter, positions: nn.Parameter) -> None:
        super().__init__()
        self.token = token
        self.positions = positions

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions


Glue = Callable[[], nn.Module]


def _apply(function: Callable[..., Any]) -> Glue:
    return partial(Apply, function)


_flatten: Glue = partial(nn.Flatten, 1)

# Glue in a model's forward besides calling its children in order: by class, and by the child it precedes.
GLUE_BY_CLASS: dict[str, dict[str, Sequence[Glue]]] = {
    "AlexNet": {"classifier": [_flatten]},
    "ConvNeXt": {},
    "DenseNet": {"classifier": [nn.ReLU, partial(nn.AdaptiveAvgPool2d, 1), _flatten]},
    "EfficientNet": {"classifier": [_flatten]},
    "GoogLeNet": {"dropout": [_flatten]},
    "Inception3": {"dropout": [_flatten]},
    "MNASNet": {"classifier": [_apply(lambda x: x.mean([2, 3]))]},
    "MaxVit": {},
    "MobileNetV2": {"classifier": [partial(nn.AdaptiveAvgPool2d, 1), _flatten]},
    "MobileNetV3": {"classifier": [_flatten]},
    "RegNet": {"fc": [_flatten]},
    "ResNet": {"fc": [_flatten]},
    "S3D": {"end": [_apply(lambda x: x.mean([2, 3, 4]))]},
    "ShuffleNetV2": {"fc": [_apply(lambda x: x.mean([2, 3]))]},
    "SqueezeNet": {"end": [_flatten]},
    "SwinTransformer": {},
    "SwinTransformer3d": {"avgpool": [_apply(lambda x: x.permute(0, 4, 1, 2, 3))], "head": [_flatten]},
    "VGG": {"classifier": [_flatten]},
    "VideoResNet": {"fc": [_flatten]},
}

# Containers that only call their children in order.
_CONTAINERS = frozenset(
    {
        "AnyStage",
        "DeepLabHead",
        "FCNHead",
        "IntermediateLayerGetter",
        "MaxVitBlock",
        "ModuleList",
        "Sequential",
    }
)


def shape_of(name: str) -> tuple[int, ...]:
    """Returns the shape of one sample."""
    found: tuple[int, ...] = _first_match(SHAPES, name)
    return found


def _first_match(table: dict[str, Any], name: str) -> Any:
    return next(value for pattern, value in table.items() if fnmatch(name, pattern))


def exclusion_reason(name: str) -> str | None:
    """Returns why a constructor's model cannot be written as a sequence of blocks, or None."""
    return next((why for pattern, why in EXCLUDED.items() if fnmatch(name, pattern)), None)


def build(name: str, seed: int = 0) -> nn.Module:
    """Returns a torchvision model with its default initialization."""
    models = importlib.import_module("torchvision.models")
    torch.manual_seed(seed)
    with _reduced(name):
        model: nn.Module = models.get_model(name, weights=None, **_first_match(OPTIONS, name))
    return model


def build_perturbed(name: str, seed: int = 0) -> nn.Module:
    """Returns a model whose weights let every block affect the gradients."""
    return perturb_constants(build(name, seed))


def perturb_constants(model: nn.Module) -> nn.Module:
    """Perturbs constant parameters: for example, a zero head would make every gradient before it zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() and bool((parameter == parameter.flatten()[0]).all()):
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model


def _shallow(build: Callable[..., nn.Module], params: Any, **options: Any) -> nn.Module:
    params.depths = [1] * len(params.depths)
    return build(params, **options)


def _with(build: Callable[..., nn.Module], given: dict[str, Any], **options: Any) -> nn.Module:
    return build(**{**options, **given})


# Reductions that no constructor argument offers: module, class, and how to call it.
_VIT = ("vision_transformer", "VisionTransformer")
_REDUCED: dict[str, tuple[str, str, Callable[[Any], Any]]] = {
    "mvit_*": (
        "video.mvit",
        "MViT",
        lambda b: partial(_with, b, {"spatial_size": (64, 64), "temporal_size": 8}),
    ),
    "regnet_y_128gf": ("regnet", "RegNet", lambda b: partial(_shallow, b)),
    "vit_h_14": (*_VIT, lambda b: partial(_with, b, {"num_layers": 4})),
    "vit_l_*": (*_VIT, lambda b: partial(_with, b, {"num_layers": 8})),
}

_REMARKS = {
    "googlenet": "aux_logits=False",
    "inception_v3": "aux_logits=False",
    "quantized_googlenet": "aux_logits=False, quantize=False",
    "quantized_inception_v3": "aux_logits=False, quantize=False",
    "quantized_*": "quantize=False",
    "regnet_y_128gf": "4 of 27 blocks, one for each width",
    "vit_h_14": "4 of 32 blocks",
    "vit_l_*": "8 of 24 blocks",
}


def reduction_note(name: str) -> str:
    """Returns how a model deviates from the constructor's defaults."""
    return next((text for pattern, text in _REMARKS.items() if fnmatch(name, pattern)), "")


@contextlib.contextmanager
def _reduced(name: str) -> Iterator[None]:
    for pattern, (module_name, class_name, change) in _REDUCED.items():
        if fnmatch(name, pattern):
            module = importlib.import_module(f"torchvision.models.{module_name}")
            with mock.patch.object(module, class_name, change(getattr(module, class_name))):
                yield
            return
    yield


def as_sequence(model: nn.Module, size: Sequence[int]) -> nn.Sequential | None:
    """Returns a `Sequential` of the model's blocks that computes the same function; None for other classes.

    Args:
        model: the model; its blocks are shared, not copied.
        size: height and width of the images, to which segmentation models resize their output.
    """
    for kind in type(model).__mro__:
        if kind.__name__ in _BY_CLASS:
            return nn.Sequential(OrderedDict(_BY_CLASS[kind.__name__](model, size)))
        if kind.__name__ in GLUE_BY_CLASS:
            return nn.Sequential(OrderedDict(_in_order(model, GLUE_BY_CLASS[kind.__name__])))
    return None


def _in_order(model: nn.Module, glue: dict[str, Sequence[Glue]]) -> Layers:
    children = dict(model.named_children())
    if "quant" in children:  # registered last, but called first
        yield "quant", children.pop("quant")
    for name, child in (*children.items(), ("end", nn.ModuleList())):
        for index, make in enumerate(glue.get(name, ())):
            yield f"before_{name}_{index}", make()
        yield from _expand(name, child)


def _expand(name: str, module: nn.Module) -> Layers:
    kind = type(module).__name__
    if kind == "_DenseBlock":
        yield from _dense_block(name, module)
    elif kind not in _CONTAINERS:
        yield name, module
    else:
        for child_name, child in module.named_children():
            yield from _expand(f"{name}_{child_name}", child)


def _dense_block(name: str, block: nn.Module) -> Layers:
    """Yields the layers of a dense block; each layer takes the outputs of all layers before it."""
    for index, (child_name, child) in enumerate(block.named_children()):
        function = _append_output if index else lambda x, layer: _append_output([x], layer)
        yield f"{name}_{child_name}", Apply(function, child)
    yield f"{name}_end", Apply(lambda xs: torch.cat(xs, 1))


def _append_output(features: list[Tensor], layer: nn.Module) -> list[Tensor]:
    return [*features, layer(features)]


def _vit(model: Any, size: Sequence[int]) -> Layers:
    yield "patches", Apply(lambda x, conv: conv(x).flatten(2).permute(0, 2, 1), model.conv_proj)
    yield "tokens", Tokens(model.class_token, model.encoder.pos_embedding)
    yield "encoder_dropout", model.encoder.dropout
    yield from _expand("encoder", model.encoder.layers)
    yield "encoder_ln", model.encoder.ln
    yield "token", Apply(lambda x: x[:, 0])
    yield from _expand("heads", model.heads)


def _mvit(model: Any, size: Sequence[int]) -> Layers:
    encoding = model.pos_encoding
    grid = (encoding.temporal_size, *encoding.spatial_size)
    yield "patches", Apply(lambda x, conv: conv(x).flatten(2).transpose(1, 2), model.conv_proj)
    yield "pos_encoding", encoding
    for index, block in enumerate(model.blocks):
        function = (lambda pair, block: block(*pair)) if index else lambda x, block: block(x, grid)
        yield f"blocks_{index}", Apply(function, block)
    yield "norm", Apply(lambda pair, norm: norm(pair[0]), model.norm)
    yield "token", Apply(lambda x: x[:, 0])
    yield from _expand("head", model.head)


def _segmentation(model: Any, size: Sequence[int]) -> Layers:
    yield from _expand("backbone", model.backbone)
    yield from _expand("classifier", model.classifier)
    yield "resize", Apply(_resize(size))


def _resize(size: Sequence[int]) -> Callable[[Tensor], dict[str, Tensor]]:
    size = tuple(size)
    return lambda x: {"out": F.interpolate(x, size=size, mode="bilinear", align_corners=False)}


def _lraspp(model: Any, size: Sequence[int]) -> Layers:
    names = {kind: name for name, kind in model.backbone.return_layers.items()}
    function: Callable[..., Any] | None = None
    for name, layer in model.backbone.items():
        yield f"backbone_{name}", layer if function is None else Apply(function, layer)
        if function is not None:
            function = _apply_to_second
        if name == names["low"]:
            function = _input_and_output
    yield ("classifier", Apply(lambda pair, head: head({"low": pair[0], "high": pair[1]}), model.classifier))
    yield "resize", Apply(_resize(size))


def _input_and_output(x: Tensor, layer: nn.Module) -> tuple[Tensor, Tensor]:
    return x, layer(x)


def _apply_to_second(pair: tuple[Any, Tensor], layer: nn.Module) -> tuple[Any, Tensor]:
    return pair[0], layer(pair[1])


_BY_CLASS: dict[str, Callable[[Any, Sequence[int]], Layers]] = {
    "LRASPP": _lraspp,
    "MViT": _mvit,
    "VisionTransformer": _vit,
    "_SimpleSegmentationModel": _segmentation,
}
