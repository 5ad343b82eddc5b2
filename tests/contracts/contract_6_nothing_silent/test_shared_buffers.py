"""A buffer that one stage writes is refused in every other stage, also where a layer merely refers to it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe
from tests.reference import loop_step, pipeline_step, unequal

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 8


class Reader(nn.Module):
    """Adds what a function returns."""

    def __init__(self, read: Callable[[], Tensor]) -> None:
        super().__init__()
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return x + self.read()


def by_list(norm: nn.BatchNorm1d) -> nn.Module:
    reader = Reader(lambda: reader.norms[0].running_mean)
    reader.norms = [norm]
    return reader


def by_closure(norm: nn.BatchNorm1d) -> nn.Module:
    return Reader(lambda: norm.running_mean)


def by_view(norm: nn.BatchNorm1d) -> nn.Module:
    mean = norm.running_mean[2:3]
    return Reader(lambda: mean)


REFERENCES = [by_list, by_closure, by_view]


def layers(refer: Callable[[nn.BatchNorm1d], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(WIDTH)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, WIDTH), refer(norm))


@pytest.mark.parametrize("refer", REFERENCES)
def test_no_layer_may_refer_to_a_buffer_that_another_stage_writes(refer: Callable[..., nn.Module]) -> None:
    pipe = GPipe(layers(refer), [2, 2], chunks=4)
    for size in (8, 12, 16):  # the third is derived from a template
        with pytest.raises(ValueError, match=r"stage 0 writes a buffer of shape \[8\] that stage 1 uses"):
            pipe(torch.randn(size, WIDTH))


@pytest.mark.filterwarnings("ignore:.*it refers to the memory of a buffer that the stage writes")
@pytest.mark.parametrize("refer", REFERENCES)
def test_the_writing_stage_and_evaluation_may_refer_to_it(refer: Callable[..., nn.Module]) -> None:
    model, x = layers(refer), torch.randn(8, WIDTH)
    pipe = GPipe(model, [1, 3], chunks=4)
    assert unequal(pipeline_step(pipe, x), loop_step(model, x, 4)) == []
    pipe = GPipe(model.eval(), [2, 2], chunks=4, backend="aten")
    assert unequal(pipeline_step(pipe, x), loop_step(model, x, 4)) == []


def test_stages_may_write_separate_parts_of_one_tensor() -> None:
    model = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH))
    both = torch.zeros(2 * WIDTH)
    model[0].running_mean, model[1].running_mean = both[:WIDTH], both[WIDTH:]
    x = torch.randn(8, WIDTH)
    assert unequal(pipeline_step(GPipe(model, [1, 1], chunks=4), x), loop_step(model, x, 4)) == []
