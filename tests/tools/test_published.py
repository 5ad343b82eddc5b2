"""The simulated tables: costs of layers, bytes that enter stages, and speed-ups against closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from bench.models.unet import unet
from tools.published import P40, TIMELINE, TORCHGPIPE, Cost, Published, Setting, costs, entering

WIDTH = 8


def equal_layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8)))


def rows_of_width(size: int) -> Tensor:
    return torch.empty(size, WIDTH)


def test_an_operator_takes_as_long_as_its_operations_or_its_bytes() -> None:
    with torch.device("meta"):
        (small,) = costs(nn.Sequential(nn.Linear(4, 4, bias=False)), torch.empty(2, 4), P40)
        (large,) = costs(nn.Sequential(nn.Linear(4096, 4096, bias=False)), torch.empty(4096, 4096), P40)
    assert small == Cost(4 * (2 * 4 + 4 * 4 + 2 * 4) / P40.memory, 2 * 2 * 4 * 4, 4 * 2 * 4)
    assert large.seconds == 2 * 4096**3 / P40.flops


def test_skip_tensors_enter_the_stage_that_pops_them_or_all_between() -> None:
    with torch.device("meta"):
        layers = costs(unet(1, 4, depth=2), torch.empty(1, 3, 8, 8), P40)
    pops = [i for i, layer in enumerate(layers) if layer.popped]
    assert len(pops) == 2
    balance = [pops[0] - 1, 1, pops[1] - pops[0], len(layers) - pops[1]]
    skips = [4 * 8 * 4 * 4, 4 * 4 * 8 * 8]  # of the second level, and of the first
    with_portals, without = entering(layers, balance), entering(layers, balance, portals=False)
    outputs = [layers[sum(balance[:stage]) - 1].output_bytes for stage in (1, 2, 3)]
    assert with_portals == [0, outputs[0], outputs[1] + skips[0], outputs[2] + skips[1]]
    assert without == [0, outputs[0] + sum(skips), outputs[1] + sum(skips), outputs[2] + skips[1]]


@pytest.mark.parametrize(("num_stages", "chunks"), [(1, 2), (2, 4), (4, 16), (8, 1)])
def test_equal_layers_have_the_speed_up_of_the_formula(num_stages: int, chunks: int) -> None:
    settings = [Setting(f"K = {k}", k, chunks, chunks, 1.0, checkpoint="never") for k in (1, num_stages)]
    table = Published("linear", equal_layers, rows_of_width, replace(P40, link=float("inf")), settings)
    one, pipeline = table.speeds()
    assert pipeline / one == pytest.approx(num_stages * chunks / (chunks + num_stages - 1))


@pytest.mark.parametrize("table", TORCHGPIPE[:2], ids=lambda table: table.model)
def test_one_of_two_recomputed_micro_batches_costs_a_seventh(table: Published) -> None:
    plain, one_stage = (setting.batch / table.seconds(setting) for setting in table.settings[:2])
    assert one_stage / plain == pytest.approx(3 / 3.5, rel=0.01)


def test_copy_streams_and_portals_make_the_unet_faster() -> None:
    speeds = TIMELINE[0].speeds()
    assert speeds == sorted(speeds)
