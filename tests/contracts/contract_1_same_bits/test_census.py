"""Every layer of torch.nn, and small models, equal the plain micro-batch loop bit for bit (contract 1)."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from gpipe_fast import GPipe
from tests.contracts.contract_1_same_bits.census import examine
from tests.contracts.contract_1_same_bits.census_layers import OUT_OF_SCOPE, RECIPES, RUN_IN_PYTHON
from tests.reference import check_step, pipeline, plain_loop

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:reduction.*:UserWarning"),
    pytest.mark.filterwarnings("error:An output with one or more elements was resized"),
]


def test_every_class_of_torch_nn_has_a_recipe_or_is_out_of_scope() -> None:
    classes = {n for n, v in vars(nn).items() if isinstance(v, type) and issubclass(v, nn.Module)}
    exercised = {name.split()[0] for name in RECIPES}
    assert exercised & OUT_OF_SCOPE.keys() == set()
    assert classes - exercised - OUT_OF_SCOPE.keys() == set()
    assert RUN_IN_PYTHON.keys() <= RECIPES.keys()


def _check_layer(name: str, thorough: bool) -> None:
    verdict = examine(name, thorough)
    if name in RUN_IN_PYTHON:
        assert verdict.reason is not None
        assert RUN_IN_PYTHON[name] in verdict.reason
    else:
        assert verdict.reason is None
        assert verdict.inexact_formats == set(), f"{verdict.max_error_ratio} times the plain loop's error"


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", RECIPES)
def test_a_layer_of_torch_nn_equals_the_plain_loop(name: str) -> None:
    _check_layer(name, thorough=False)


@pytest.mark.soak
@pytest.mark.parametrize("name", RECIPES)
def test_a_layer_of_torch_nn_equals_the_plain_loop_in_every_memory_format(name: str) -> None:
    _check_layer(name, thorough=True)


class FunctionLayer(nn.Module):
    """A layer that calls a function with the input and some modules."""

    def __init__(self, function: Callable[..., Tensor], *modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.inner = nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.inner)


class Block(nn.Module):
    """A GPT block with causal attention and dropout."""

    def __init__(self, width: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(attended))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        result = x.exp()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx, gradient):
        (result,) = ctx.saved_tensors
        return gradient * result * 0.5  # deliberately not the derivative, to show that this backward runs


def _halve_gradient(x: Tensor) -> Tensor:
    x = x * 1
    if x.requires_grad:
        x.register_hook(lambda g: g / 2)
    return x


def _in_place(x: Tensor) -> Tensor:
    x = x * 2
    x.add_(1).clamp_(min=0.1)
    x[:, 0] = 3
    return x


def _tied() -> nn.Sequential:
    embedding, head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
    head.weight = embedding.weight
    return nn.Sequential(embedding, Block(8), head)


def _frozen() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 5))
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


def _sequential(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers)


TOKENS, INDEX_INPUT, IMAGES, FEATURES = (9, 8), None, (3, 8, 8), (12,)
MODELS: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...] | None]] = {
    "GPT": (lambda: nn.Sequential(nn.Embedding(11, 8), Block(8), Block(8), nn.Linear(8, 11)), INDEX_INPUT),
    "GPT with its loss": (
        lambda: nn.Sequential(
            nn.Embedding(11, 8),
            Block(8),
            nn.Linear(8, 11),
            FunctionLayer(
                lambda x: F.cross_entropy(x.flatten(0, 1), x.detach().flatten(0, 1).argmin(1)).reshape(1)
            ),
        ),
        INDEX_INPUT,
    ),
    "convolution and batch norm": (
        lambda: _sequential(nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)),
        IMAGES,
    ),
    "group and instance norm": (
        lambda: _sequential(nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6), nn.InstanceNorm2d(6, affine=True)),
        IMAGES,
    ),
    "RMS norm": (lambda: nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 8), nn.RMSNorm(8)), TOKENS),
    "multi-head attention": (
        lambda: nn.Sequential(
            nn.Linear(8, 8),
            FunctionLayer(
                lambda x, f: f(x, x, x, need_weights=False)[0],
                nn.MultiheadAttention(8, 2, 0.1, batch_first=True),
            ),
        ),
        TOKENS,
    ),
    "transformer encoder layers": (
        lambda: nn.Sequential(
            *(nn.TransformerEncoderLayer(8, 2, 16, 0.2, batch_first=True) for _ in range(2))
        ),
        TOKENS,
    ),
    "embedding bag": (lambda: nn.Sequential(nn.EmbeddingBag(11, 8), nn.Linear(8, 4)), INDEX_INPUT),
    "pooling": (
        lambda: _sequential(
            nn.Conv2d(3, 4, 3), nn.AvgPool2d(2), nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)
        ),
        IMAGES,
    ),
    "PReLU": (lambda: nn.Sequential(nn.Linear(12, 8), nn.PReLU(8), nn.PReLU()), FEATURES),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(9, 6, 3), nn.Tanh(), nn.Conv1d(6, 4, 3)), TOKENS),
    "weight norm": (
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(12, 8)), nn.Tanh(), nn.Linear(8, 2)),
        FEATURES,
    ),
    "spectral norm": (
        lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(12, 8)), nn.Tanh(), nn.Linear(8, 2)),
        FEATURES,
    ),
    "transposed convolution": (
        lambda: _sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.ConvTranspose2d(4, 3, 3, stride=2)),
        IMAGES,
    ),
    "nearest upsampling": (
        lambda: _sequential(nn.Conv2d(3, 4, 3), nn.Upsample(scale_factor=2), nn.Conv2d(4, 2, 3)),
        IMAGES,
    ),
    "custom autograd function": (
        lambda: nn.Sequential(nn.Linear(12, 6), FunctionLayer(Exponential.apply), nn.Linear(6, 2)),
        FEATURES,
    ),
    "tensor hook": (
        lambda: nn.Sequential(nn.Linear(12, 6), FunctionLayer(_halve_gradient), nn.Linear(6, 2)),
        FEATURES,
    ),
    "nested checkpoint": (
        lambda: nn.Sequential(
            nn.Linear(12, 6),
            FunctionLayer(
                lambda x, f: checkpoint(f, x, use_reentrant=False),
                nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6)),
            ),
            nn.Linear(6, 2),
        ),
        FEATURES,
    ),
    "frozen parameters": (_frozen, FEATURES),
    "integers between layers": (
        lambda: nn.Sequential(
            FunctionLayer(lambda x: x.flip(1)), FunctionLayer(lambda x: (x + 1) % 11), nn.Embedding(11, 8)
        ),
        INDEX_INPUT,
    ),
    "integer output": (
        lambda: nn.Sequential(nn.Embedding(11, 8), FunctionLayer(lambda x: x.argmax(-1))),
        INDEX_INPUT,
    ),
    "in-place operations": (
        lambda: nn.Sequential(
            nn.Linear(12, 6), nn.ReLU(inplace=True), FunctionLayer(_in_place), nn.Linear(6, 2)
        ),
        FEATURES,
    ),
    "tied parameters": (_tied, INDEX_INPUT),
    "random numbers": (
        lambda: nn.Sequential(
            nn.Linear(12, 6),
            nn.Dropout(0.3),
            FunctionLayer(lambda x: x + torch.randn_like(x) * torch.rand(6)),
            nn.Dropout(0.3),
        ),
        FEATURES,
    ),
}


def _make_input(shape: tuple[int, ...] | None) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    if shape is None:
        return torch.randint(11, (7, 6), generator=generator)
    return torch.randn(7, *shape, generator=generator)


def make_model_and_input(name: str) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    return make(), _make_input(shape)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_in_one_stage_equals_the_plain_loop(name: str) -> None:
    model, x = make_model_and_input(name)
    check_step(model, x)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_whose_input_needs_no_gradient_equals_the_plain_loop(name: str) -> None:
    model, x = make_model_and_input(name)
    check_step(model, x, input_gradient=False, budgets=(0.0,))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [n for n in MODELS if n != "tied parameters"])
def test_a_model_with_one_stage_per_layer_equals_the_plain_loop(name: str) -> None:
    model, x = make_model_and_input(name)
    check_step(model, x, balance=[1] * len(model), budgets=(0.0, 1.0))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MODELS)
def test_inference_equals_the_plain_loop(name: str) -> None:
    model, x = make_model_and_input(name)
    model.eval()
    pipe = GPipe(model, [len(model)], chunks=4)
    with torch.no_grad():
        assert torch.equal(pipeline(pipe, x), plain_loop(model, x, 4))
    # Evaluation with gradients, as for saliency maps, is traced separately.
    assert torch.equal(pipeline(pipe, x), plain_loop(copy.deepcopy(model), x, 4))


@pytest.mark.parametrize("name", [n for n, (_, shape) in MODELS.items() if shape == IMAGES])
def test_a_channels_last_model_equals_the_plain_loop(name: str) -> None:
    model, x = make_model_and_input(name)
    model.to(memory_format=torch.channels_last)
    check_step(model, x.contiguous(memory_format=torch.channels_last)[:6], chunks=3)
