"""Step times under the balance that `balance_by_time` finds and under every other balance.

The model has {LAYERS} layers of width {WIDTH}. The second layer costs {HEAVY_FACTOR} times as much as each
other layer and has equally many parameters, so parameter counts alone suggest {suggested}. Two stages with
one intra-op thread each, {CHUNKS} micro-batches of {size} samples, no checkpointing. balance_by_time ran
{NUM_CHOICES} times for one second. Times are medians [p20, p80] of forward and backward over {ROUNDS} rounds;
the balances alternate. A ratio divides the time of the balance chosen most often by the time of this balance,
paired by round: the median with a bootstrapped 95% confidence interval; below 1, the chosen balance is
faster. The last column compares gradients with the plain loop's.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from copy import deepcopy

import torch
from torch import Tensor, nn

from bench.comparison import Outcome, compare, gradients
from bench.measure import Ratio, Table, alternate, report
from bench.peers import Step, looped
from gpipe_fast import GPipe
from gpipe_fast.balance import balance_by_cost, balance_by_time

LAYERS, HEAVY_INDEX, HEAVY_FACTOR = 8, 1, 8
WIDTH, BATCH, CHUNKS = 256, 512, 8
ROUNDS, NUM_CHOICES = 60, 10
OURS = "gpipe_fast, "  # begins the names of the candidates
MANY_LAYERS, MANY_PARTITIONS = 1000, 64


class RepeatedLinear(nn.Module):
    """One linear layer applied `times` times, so that its parameter count does not reveal its cost."""

    def __init__(self, width: int, times: int) -> None:
        super().__init__()
        self.linear, self.times = nn.Linear(width, width), times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.linear(x))
        return x


class UnevenModel:
    """A model with one heavy layer, as a plain loop and as a pipeline under every balance of two stages."""

    def __init__(self, width: int = WIDTH, batch: int = BATCH) -> None:
        torch.manual_seed(0)
        layers = [
            RepeatedLinear(width, HEAVY_FACTOR if index == HEAVY_INDEX else 1) for index in range(LAYERS)
        ]
        self.model = nn.Sequential(*layers)
        self._input, self._gradient = torch.randn(batch, width), torch.randn(batch, width)
        self.balances = [[first, LAYERS - first] for first in range(1, LAYERS)]

    def balance_by_time_choice(self, timeout: float = 1.0) -> list[int]:
        """Returns the balance that `balance_by_time` chooses."""
        microbatch = self._input.chunk(CHUNKS)[0]
        return balance_by_time(2, self.model, microbatch, timeout=timeout, device="cpu")

    def balance_by_parameters(self) -> list[int]:
        """Returns the balance that equalizes parameter counts."""
        return balance_by_cost(2, [sum(p.numel() for p in layer.parameters()) for layer in self.model])

    def loop(self) -> Step:
        model = deepcopy(self.model)
        return Step(model.parameters(), looped(model, CHUNKS), self._input, self._gradient)

    def steps(self) -> dict[str, Step]:
        """Returns a step for each balance; each step has its own copy of the model."""
        found: dict[str, Step] = {}
        for balance in self.balances:
            model, devices = deepcopy(self.model), ["cpu"] * len(balance)
            pipe = GPipe(model, balance, devices=devices, chunks=CHUNKS, checkpoint="never")
            pipe.threads_per_stage = 1
            found[f"{OURS}{balance}"] = Step(pipe.parameters(), pipe, self._input, self._gradient)
        return found


def rows(found: Mapping[str, Outcome], choices: Mapping[str, int]) -> list[list[object]]:
    """Returns one row per balance; a balance whose gradients are wrong gets neither a time nor a ratio."""
    most_chosen = found[OURS + max(choices, key=lambda balance: choices[balance])]
    result: list[list[object]] = []
    for name, each in found.items():
        balance = name.removeprefix(OURS)
        first = int(balance[1 : balance.index(",")])
        costs = [HEAVY_FACTOR if index == HEAVY_INDEX else 1 for index in range(LAYERS)]
        timed = each.times and most_chosen.times and each is not most_chosen
        result.append(
            [
                balance,
                f"{sum(costs[:first])} and {sum(costs[first:])}",
                choices.get(balance, 0),
                each.ms(),
                str(Ratio.of(most_chosen.times, each.times)) if timed else "-",
                gradients(name, each),
            ]
        )
    return result


def time_balancing(layers: int, partitions: int, rounds: int) -> list[list[object]]:
    """Times, for each objective, how long it takes to balance layers of random costs."""
    generator = random.Random(0)
    costs = [generator.lognormvariate(0, 1) for _ in range(layers)]
    timings = alternate(
        {
            "max": lambda: balance_by_cost(partitions, costs, "max"),
            "variance": lambda: balance_by_cost(partitions, costs, "variance"),
        },
        rounds,
    )
    return [[objective, time.ms()] for objective, time in timings.items()]


def main() -> None:
    torch.set_num_threads(1)
    net = UnevenModel()
    steps = net.steps()
    loop = net.loop()
    loop()
    found = compare(steps, loop.gradients(), ROUNDS)
    choices = Counter(str(net.balance_by_time_choice()) for _ in range(NUM_CHOICES))
    report(
        globals(),
        ["balance", "costs of the stages", "times chosen", "ms", "chosen / this", "gradients"],
        rows(found, choices),
        [
            Table(
                f"Balancing {MANY_LAYERS:,} layers over {MANY_PARTITIONS} partitions",
                ["objective", "ms"],
                time_balancing(MANY_LAYERS, MANY_PARTITIONS, rounds=10),
                "Exact solutions of `balance_by_cost` for random float costs; medians [p20, p80].\n",
            )
        ],
        suggested=net.balance_by_parameters(),
        size=BATCH // CHUNKS,
    )
