"""State dicts: the keys are the plain Sequential's, and torchgpipe's state dicts can be loaded."""

from __future__ import annotations

import io
import itertools
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from tests.torchgpipe.libraries import OURS, TORCHGPIPE

BALANCES = [[5], [2, 2, 1], [1, 1, 1, 1, 1]]


def layers(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    inner = nn.Sequential(OrderedDict(partitions=nn.Linear(6, 6), norm=nn.BatchNorm1d(6)))
    first = [("stem", nn.Linear(6, 6)), ("norm", nn.BatchNorm1d(6)), ("act", nn.ReLU())]
    return nn.Sequential(OrderedDict([*first, ("block", inner), ("0", nn.Linear(6, 2))]))


def torchgpipe_state_dict(balance: list[int], **options: Any) -> tuple[nn.Sequential, dict[str, Tensor]]:
    """Returns the layers of a torchgpipe model, and its state dict as loaded from a file."""
    module = layers(1)
    plain = list(module.state_dict())
    pipe = TORCHGPIPE.make(module, balance, chunks=2, **options)
    file = io.BytesIO()
    torch.save(pipe.state_dict(), file)
    file.seek(0)
    assert not set(plain) & set(pipe.state_dict())
    return module, torch.load(file)


def state_equals(a: nn.Module, b: dict[str, Tensor]) -> bool:
    state = a.state_dict()
    return all(torch.equal(value, b[name]) for name, value in state.items())


def test_state_dict_keys_are_the_sequentials() -> None:
    module = layers(0)
    names = list(module.state_dict())
    for balance in BALANCES:
        pipe = GPipe(module, balance)
        assert list(pipe.state_dict()) == names
        assert [name for name, _ in pipe.named_parameters()] == [n for n, _ in module.named_parameters()]
    pipe.load_state_dict(layers(1).state_dict())
    assert state_equals(pipe, layers(1).state_dict())
    module.load_state_dict(pipe.state_dict())


def test_torchgpipes_state_dicts_are_loaded() -> None:
    """The two balances may differ, and loading does not change the dictionary."""
    for theirs, balance in itertools.product(BALANCES, BALANCES):
        module, checkpoint = torchgpipe_state_dict(theirs)
        before = list(checkpoint)
        assert all(name.startswith("partitions.") for name in before)
        pipe = GPipe(layers(0), balance)
        assert str(pipe.load_state_dict(checkpoint)) == "<All keys matched successfully>"
        assert state_equals(pipe, module.state_dict())
        assert list(checkpoint) == before
    pipe.load_state_dict(checkpoint, assign=True)
    assert pipe[0].weight.data_ptr() == checkpoint["partitions.0.stem.weight"].data_ptr()
    assert pipe(torch.randn(8, 6)).shape == (8, 2)


def test_sums_of_torchgpipes_deferred_batch_norm_are_dropped() -> None:
    """This includes state dicts of the module itself, in which torchgpipe replaces layers."""
    module, checkpoint = torchgpipe_state_dict([2, 3], deferred_batch_norm=True)
    for state in (checkpoint, module.state_dict()):
        assert sum(name.endswith(("norm.sum", "norm.sum_squares")) for name in state) == 4
        pipe = GPipe(layers(0), [3, 2])
        pipe.load_state_dict(state)
        assert state_equals(pipe, module.state_dict())


class Sums(nn.Module):
    """Has a buffer called `sum`, but is no batch norm."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.register_buffer("sum", torch.tensor(value))


def test_sum_buffers_of_other_modules_are_loaded() -> None:
    pipe = GPipe(nn.Sequential(Sums(0.0)), [1])
    pipe.load_state_dict(TORCHGPIPE.make(nn.Sequential(Sums(3.0)), [1]).state_dict())
    assert pipe[0].sum == 3.0


def test_unknown_and_double_names_are_unexpected_keys() -> None:
    state = layers(1).state_dict()
    for name, message in (("sum", "stem.sum"), ("weight", "partitions.0.stem.weight")):
        with pytest.raises(RuntimeError, match=rf'Unexpected key\(s\) in state_dict: "{message}"'):
            GPipe(layers(0), [2, 3]).load_state_dict(state | {f"partitions.0.stem.{name}": torch.ones(6)})


class ContainsPipeline(nn.Module):
    """A module with a pipeline, and another submodule with an entry called `partitions`."""

    def __init__(self, pipe: nn.Module) -> None:
        super().__init__()
        self.pipe, self.head = pipe, nn.Linear(2, 2)
        self.other = nn.ModuleDict({"partitions": nn.ModuleList([nn.Linear(1, 1)])})


@pytest.mark.parametrize("deferred", [False, True])
def test_a_pipeline_within_another_module_is_loaded(deferred: bool) -> None:
    module = layers(1)
    theirs = ContainsPipeline(TORCHGPIPE.make(module, [2, 3], deferred_batch_norm=deferred))
    ours = ContainsPipeline(OURS.make(layers(0), [4, 1]))
    state = theirs.state_dict()
    before = list(state)
    ours.load_state_dict(state)
    assert state_equals(ours.pipe, module.state_dict())
    assert torch.equal(ours.head.weight, theirs.head.weight)
    assert torch.equal(ours.other["partitions"][0].weight, theirs.other["partitions"][0].weight)
    assert list(state) == before


@pytest.mark.parametrize("prefix", ["", "partitions.0."])
def test_load_errors_list_the_users_own_names(prefix: str) -> None:
    state = {f"{prefix}{name}": value for name, value in layers(1).state_dict().items()}
    del state[f"{prefix}stem.weight"]
    state[f"{prefix}tail.weight"] = torch.ones(1)
    state[f"{prefix}stem.bias"] = torch.ones(7)
    pipe = GPipe(layers(0), [2, 3])
    with pytest.raises(RuntimeError) as raised:
        pipe.load_state_dict(state)
    message = str(raised.value)
    assert 'Missing key(s) in state_dict: "stem.weight". ' in message
    assert 'Unexpected key(s) in state_dict: "tail.weight". ' in message
    assert "size mismatch for stem.bias" in message
    assert "partitions.0" not in message
    del state[f"{prefix}stem.bias"]
    assert str(pipe.load_state_dict(state, strict=False)).count("stem.") == 2
