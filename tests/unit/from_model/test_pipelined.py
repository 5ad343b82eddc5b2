"""A pipelined model is the user's model, apart from its forward."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gpipe_fast import GPipe, replicate
from gpipe_fast.runtime.runner import Runner

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:.*stages idle")]
X = torch.randn(6, 4)


class Net(nn.Module):
    """Blocks, a parameter and a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 2.0))
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.power = 1

    def forward(self, x: Tensor, mask: Tensor | None = None, *, negate: bool = False) -> Tensor:
        """Documented."""
        for block in self.blocks:
            x = torch.tanh(block(x)) * self.scale**self.power
        x = x if mask is None else x @ mask
        return -x if negate else x

    def gradient_checkpointing_enable(self) -> None:
        raise AssertionError


def pipelined(model: nn.Module | None = None, *args: Any, **options: Any) -> Any:
    options = {"devices": ["cpu", "cpu"], "chunks": 2, "balance": [2, 1], **options}
    return GPipe.from_model(model or Net(), args or (X,), **options)


def test_it_has_the_class_names_parameters_and_attributes() -> None:
    plain = Net()
    model = pipelined(plain)
    assert isinstance(model, Net)
    assert str(type(model)) == str(Net)
    assert model.forward.__doc__ == "Documented."
    assert dict(model.named_parameters()) == dict(plain.named_parameters())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert model.state_dict().keys() == plain.state_dict().keys()
    model.power, model.note = 3, "x"
    assert (plain.power, plain.note) == (3, "x")
    assert plain.eval() is not model
    assert not model.training


def test_only_its_forward_runs_the_pipeline() -> None:
    plain = Net()
    model = pipelined(plain)
    assert type(plain) is Net
    assert type(model.plain()) is Net
    assert torch.equal(model.plain()(X), plain(X))
    expected = torch.cat([plain(part) for part in X.chunk(2)])
    assert torch.equal(model(X), expected)
    assert model.balance == [3, 2]


class Embedded(Net):
    """Attributes of blocks between them, a number of the model, and a loss of the whole batch."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        loss = super().forward(x * self.blocks[0].weight.mean(), *args, **kwargs).square().mean()
        return {"loss": loss, "scaled": loss * x.shape[0]}


USES: dict[str, Callable[[Any], object]] = {
    "unused": lambda model: None,
    "called": lambda model: model(X),
    "called with other lengths": lambda model: [model(X[:length]) for length in (6, 4, 2)],
    "called with a mask": lambda model: model(X, torch.eye(4)),
    "evaluated": lambda model: model.eval()(X),
    "trained": lambda model: pytree.tree_leaves(model(X))[0].sum().backward(),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("cls", [Net, Embedded])
def test_it_is_freed_when_it_is_dropped(cls: type[Net], use: str) -> None:
    plain = cls()
    model = pipelined(plain)
    USES[use](model)
    references = [weakref.ref(each) for each in (plain, plain.scale, plain.blocks[1].weight, model)]
    del plain, model
    gc.collect()
    assert [reference() for reference in references] == [None] * 4


@pytest.mark.parametrize("name", ["backend", "capture", "fuse", "grad_dtype", "memory_limit", "transport"])
def test_a_setting_without_effect_is_refused_unless_it_is_the_models_attribute(name: str) -> None:
    plain = Net()
    model = pipelined(plain)
    with pytest.raises(AttributeError, match=rf"the {name} of a pipeline .* got 'x'; make another one"):
        setattr(model, name, "x")
    assert not hasattr(plain, name)
    setattr(plain, name, "mine")
    setattr(model, name, "x")
    assert getattr(plain, name) == "x"


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_pipelines_of_their_own(again: Any) -> None:
    model = pipelined()
    copied = again(model)
    with torch.no_grad():
        copied.scale.mul_(2)
    assert not torch.equal(copied(X), model(X))
    assert torch.equal(copied(X), torch.cat([copied.plain()(part) for part in X.chunk(2)]))
    assert copied.blocks[0] is not model.blocks[0]


def test_a_changed_attribute_that_forward_reads_is_noticed() -> None:
    model = pipelined()
    before = model(X)
    model.power = 2
    assert torch.equal(model(X), torch.cat([model.plain()(part) for part in X.chunk(2)]))
    assert not torch.equal(model(X), before)
    copied = copy.deepcopy(model)
    copied.power = 3
    assert torch.equal(copied(X), torch.cat([copied.plain()(part) for part in X.chunk(2)]))
    model.blocks[1] = nn.Identity()
    assert torch.equal(model(X), torch.cat([model.plain()(part) for part in X.chunk(2)]))


class Tokens(nn.Module):
    """Has embeddings that are resized as those of transformers are."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def resize_token_embeddings(self, new_num_tokens: int | None = None) -> nn.Embedding:
        if new_num_tokens is not None:
            self.embedding = nn.Embedding(new_num_tokens, 4)
        return self.embedding


def test_embeddings_are_resized_unless_old_gradients_would_be_left() -> None:
    model = pipelined(Tokens(), torch.tensor([0, 1, 2, 3]), balance=[1, 1])
    assert model.resize_token_embeddings(7).num_embeddings == 7
    x = torch.tensor([0, 6, 5, 1])
    torch.testing.assert_close(model.step(x), model.plain()(x).detach())
    with pytest.raises(RuntimeError, match=r"resize_token_embeddings\(9\).*before GPipe\.from_model"):
        model.resize_token_embeddings(9)
    assert model.resize_token_embeddings().num_embeddings == 7
    model.zero_grad()
    assert model.resize_token_embeddings(9).num_embeddings == 9
    torch.testing.assert_close(model.step(x + 2), model.plain()(x + 2).detach())


def test_programs_may_change_between_mini_batches_of_a_stream() -> None:
    model = pipelined().eval()
    batches: list[Any] = [X, {"x": X * 2, "negate": True}, (X[:4], torch.randn(4, 4)), X]
    found = list(model.stream(batches, depth=3))
    with torch.no_grad():
        expected = [model(X), model(**batches[1]), model(*batches[2]), model(X)]
    assert all(map(torch.equal, found, expected))


SETTINGS = {"scale": 1.0}


class ReadsVariables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.change = torch.tanh

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.change(block(x)) * SETTINGS["scale"]
        return x


def test_changed_variables_and_functions_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = pipelined(ReadsVariables())
    for number in (1.0, 2.0, 3.0):
        monkeypatch.setitem(SETTINGS, "scale", number)
        assert torch.equal(model(X), model.plain_loop(X))
    for number in (1.0, 2.0, 3.0, 4.0):  # the address of a function that is gone is used again
        model.change = lambda x, by=number: torch.sigmoid(x) * by
        assert torch.equal(model(X), model.plain_loop(X))


def test_arguments_of_other_kinds_than_the_example() -> None:
    model = pipelined()
    mask = torch.randn(4, 4)
    assert torch.equal(model(X, mask), torch.cat([model.plain()(part, mask) for part in X.chunk(2)]))
    assert torch.equal(model(x=X, negate=True), -model(X))
    with pytest.raises(TypeError, match="colour"):
        model(X, colour=1)


def test_a_square_input_is_whole_unless_it_is_a_batch() -> None:
    mask, x = torch.randn(4, 4), X[:4]
    model = pipelined(None, x, mask)
    expected = torch.cat([model.plain()(part, mask) for part in x.chunk(2)])
    assert torch.equal(model(x, mask), expected)
    assert torch.equal(model(x, replicate(mask)), expected)
    assert model._calls.program.split == {0: 0}


def test_hooks_of_blocks_and_of_the_model_are_called() -> None:
    model, seen = pipelined(), []
    model.blocks[1].register_forward_hook(lambda *args: seen.append("block"))
    model.register_forward_hook(lambda *args: seen.append("model"))
    with pytest.warns(UserWarning, match="runs in Python"):
        model(X)
    assert seen == ["block", "block", "model"]


def test_settings_may_be_set_between_calls() -> None:
    model = pipelined()
    model.chunks, model.checkpoint, model.threads_per_stage = 3, "never", 1
    model(X)
    pipeline = model.pipeline
    assert (pipeline.chunks, pipeline.checkpoint, pipeline.threads_per_stage) == (3, "never", 1)
    with pytest.raises(ValueError, match="chunks"):
        model.chunks = 0
    with pytest.warns(UserWarning, match="checkpoint='always'"):
        model.gradient_checkpointing_enable()
    assert model.checkpoint == "always"
    model.gradient_checkpointing_disable()
    assert model.checkpoint == "never"
    model.checkpoint = "except_last"
    for _ in range(2):
        with pytest.warns(UserWarning, match="checkpoint='always'"):
            model.gradient_checkpointing_enable()
    for _ in range(2):
        model.gradient_checkpointing_disable()
    assert model.checkpoint == "except_last"


def test_it_is_cast_but_not_moved() -> None:
    model = pipelined()
    assert model.to(torch.float64)(X.double()).dtype == torch.float64
    for move in (lambda: model.to("cuda:1"), lambda: model.cuda(1), lambda: model.to(device="cuda:1")):
        with pytest.raises(TypeError, match=r"denied to move.*got 'cuda:1', and the stages are on cpu"):
            move()


def doubled(forward: Any) -> Any:
    return functools.wraps(forward)(lambda *args, **kwargs: 2 * forward(*args, **kwargs))


@pytest.mark.parametrize("again", [lambda model: model, copy.deepcopy])
def test_forward_may_be_wrapped(again: Any) -> None:
    model = pipelined()
    expected = model(X)
    model.forward = types.MethodType(doubled(model.forward.__func__), model)
    wrapped = again(model)
    assert torch.equal(wrapped(X), 2 * expected)
    assert torch.equal(wrapped.plain_loop(X), expected)  # the plain model has no wrapper
    del wrapped.forward
    assert torch.equal(wrapped(X), expected)


class WithLoss(Net):
    """A model that returns its loss."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.mse_loss(super().forward(x), labels)


@pytest.mark.parametrize("loss", [True, False])
def test_a_report_records_steps_and_changes_nothing(loss: bool) -> None:
    model = pipelined(WithLoss(), X, X) if loss else pipelined()
    args = (X, X) if loss else (X,)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = model.report(*args, check=True)
    assert report.num_microbatches == 2
    assert (report.between == 0) == loss
    assert any(action.kind.value in "BI" for action in report.critical_path)
    assert (model.chunks, model.checkpoint, model.schedule) == (2, "except_last", "gpipe")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    with torch.no_grad():
        report = model.report(*args)
    assert {action.kind.value for action in report.critical_path} <= {"F", "SEND_F", "RECV_F"}


def test_averages_are_accepted_knowingly() -> None:
    class Spread(Net):
        def forward(self, x: Tensor) -> Any:  # type: ignore[override]
            y = super().forward(x)
            return {"spread": y.std(), "pairs": y @ y.T, "y": y}

    plain = Spread()
    output = pipelined(plain, loss="per-microbatch")(X)
    parts = [plain(part) for part in X.chunk(2)]
    assert output["pairs"] is None
    assert torch.equal(output["spread"], parts[0]["spread"] * 0.5 + parts[1]["spread"] * 0.5)
    assert torch.equal(output["y"], torch.cat([part["y"] for part in parts]))


def test_the_device_map_of_transformers_exists_for_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    model = pipelined()
    assert not hasattr(model, "hf_device_map")
    gpus = [torch.device("cuda", index) for index in range(2)]
    placement = list(zip(model.pipeline.partitions, gpus, strict=True))
    monkeypatch.setattr(Runner, "placed", lambda runner: placement)
    assert model.hf_device_map.keys() == {"", "blocks.0", "blocks.1", "blocks.2"}
    assert not hasattr(model.plain(), "hf_device_map")


@pytest.mark.parametrize("name", ["gradient_checkpointing_disable", "disable_gradient_checkpointing"])
def test_gradient_checkpointing_becomes_a_mode(name: str) -> None:
    """As of models of transformers, and of diffusers."""

    def disable(model: Any) -> None:
        model.gradient_checkpointing = False

    model = type("Checkpointed", (Net,), {name: disable})()
    model.gradient_checkpointing = True
    with pytest.warns(UserWarning, match="gradient checkpointing becomes checkpoint='always'"):
        found = pipelined(model)
    assert found.checkpoint == "always"
    assert not model.gradient_checkpointing
