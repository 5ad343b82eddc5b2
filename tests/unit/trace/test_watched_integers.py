"""Which integer attributes of modules a block of code reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gpipe_fast.trace.fingerprint import fingerprint_without_integers
from gpipe_fast.trace.watched_integers import watch_integers


class Layer(nn.Module):
    """Has three integers, one of which has a default in the class."""

    default = 1

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.number = number
        self.width = 4
        self.default = 2


def watched(layer: nn.Module, read: Any) -> set[str]:
    _, integers = fingerprint_without_integers([layer])
    with watch_integers(integers) as found:
        read(layer)
    return {integers[index].name for index in found}


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (lambda layer: layer.number, {"number"}),
        (lambda layer: getattr(layer, "width"), {"width"}),  # noqa: B009
        (lambda layer: hasattr(layer, "number"), {"number"}),
        (lambda layer: layer.number + layer.width, {"number", "width"}),
        (lambda layer: layer.training, set()),
    ],
)
def test_reads_are_found(read: Any, expected: set[str]) -> None:
    # An attribute with a default in the class cannot be watched, and counts as read.
    assert watched(Layer(), read) == expected | {"default"}


def test_reads_of_another_module_of_the_class_do_not_count() -> None:
    other = Layer()
    assert watched(Layer(), lambda layer: other.number) == {"default"}


def test_values_are_those_of_the_module() -> None:
    layer = Layer(7)
    values: list[object] = []

    def change(layer: nn.Module) -> None:
        values.append(layer.number)
        layer.number = 8  # type: ignore[assignment]
        values.append(layer.number)
        del layer.number
        values.append(hasattr(layer, "number"))
        with pytest.raises(AttributeError, match="number"):
            _ = layer.number

    watched(layer, change)
    assert values == [7, 8, False]
    assert "number" not in vars(layer)


def test_the_class_is_restored_after_an_error() -> None:
    layer, before = Layer(), dict(vars(Layer))
    with pytest.raises(KeyError):
        watched(layer, lambda _: {}["missing"])
    assert dict(vars(Layer)) == before
    assert (layer.number, layer.width, layer.default) == (0, 4, 2)


def test_integers_of_all_modules_are_watched() -> None:
    layer = nn.Sequential(Layer(1), nn.Linear(4, 4), Layer(2))
    _, integers = fingerprint_without_integers([layer])
    with watch_integers(integers) as found:
        layer[1](torch.ones(4))
        _ = layer[2].number
    read = {(integers[i].name, integers[i].value) for i in found}
    assert read == {("default", 2), ("number", 2)}


def test_fingerprints_without_integers_differ_in_everything_else() -> None:
    def key(layer: nn.Module) -> object:
        return fingerprint_without_integers([layer])[0]

    def with_attribute(value: object) -> nn.Module:
        layer = Layer()
        layer.extra = value  # type: ignore[assignment]
        return layer

    assert key(Layer(1)) == key(Layer(2))
    assert key(with_attribute(1)) == key(with_attribute(2))
    different = [1, 1.0, True, "1", [1], [2]]
    assert len({key(with_attribute(value)) for value in different}) == len(different)
