"""Steps under the balance that is found by time, against every other balance; seconds to cut many layers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn

from bench.measure import Ratio, Table, alternate, report, samples, timing
from bench.peers import Step, agrees, looped, off_by, verdict
from gpipe_fast import GPipe
from gpipe_fast.balance import balance_by_cost, balance_by_time

LAYERS, HEAVY, FACTOR = 8, 1, 8
WIDTH, BATCH, CHUNKS = 256, 512, 8
ROUNDS, CHOICES = 60, 10
MANY_LAYERS, MANY_PARTITIONS = 1000, 64


class Repeated(nn.Module):
    """One linear layer so many times; parameters do not tell how heavy it is."""

    def __init__(self, width: int, times: int) -> None:
        super().__init__()
        self.linear, self.times = nn.Linear(width, width), times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.linear(x))
        return x


class Uneven:
    """A net with one heavy layer, as a plain loop and under every balance of two stages."""

    def __init__(self, width: int = WIDTH, batch: int = BATCH) -> None:
        torch.manual_seed(0)
        layers = [Repeated(width, FACTOR if index == HEAVY else 1) for index in range(LAYERS)]
        self.model = nn.Sequential(*layers)
        self._input, self._gradient = torch.randn(batch, width), torch.randn(batch, width)
        self.balances = [[first, LAYERS - first] for first in range(1, LAYERS)]

    def chosen(self, timeout: float = 1.0) -> list[int]:
        """The balance by time."""
        microbatch = self._input.chunk(CHUNKS)[0]
        return balance_by_time(2, self.model, microbatch, timeout=timeout, device="cpu")

    def by_parameters(self) -> list[int]:
        """The balance by parameter count."""
        return balance_by_cost(2, [sum(p.numel() for p in layer.parameters()) for layer in self.model])

    def loop(self) -> Step:
        model = deepcopy(self.model)
        return Step(model.parameters(), looped(model, CHUNKS), self._input, self._gradient)

    def steps(self) -> dict[str, Step]:
        """By balance; each has a model of its own, of the same numbers."""
        found: dict[str, Step] = {}
        for balance in self.balances:
            model, devices = deepcopy(self.model), ["cpu"] * len(balance)
            pipe = GPipe(model, balance, devices=devices, chunks=CHUNKS, checkpoint="never")
            pipe.threads_per_stage = 1
            found[str(balance)] = Step(pipe.parameters(), pipe, self._input, self._gradient)
        return found


def differences(steps: Mapping[str, Step], loop: Step) -> dict[str, float]:
    """How far the gradients under each balance are off those of the plain loop."""
    loop()
    found: dict[str, float] = {}
    for balance, step in steps.items():
        step()
        found[balance] = off_by(step.gradients(), loop.gradients())
    return found


def rows(
    times: Mapping[str, Sequence[float]], off: Mapping[str, float], choices: Mapping[str, int]
) -> list[list[object]]:
    """One for each balance; what has other gradients has no timing, and gets no ratio."""
    chosen = max(choices, key=lambda balance: choices[balance])
    result: list[list[object]] = []
    for balance, difference in off.items():
        first = int(balance[1 : balance.index(",")])
        costs = [FACTOR if index == HEAVY else 1 for index in range(LAYERS)]
        timed = balance in times and chosen in times
        result.append(
            [
                balance,
                f"{sum(costs[:first])} and {sum(costs[first:])}",
                choices.get(balance, 0),
                timing(times[balance]).ms() if balance in times else "-",
                str(Ratio.of(times[chosen], times[balance])) if timed and balance != chosen else "-",
                verdict("gpipe_fast", difference),
            ]
        )
    return result


def cutting(layers: int, partitions: int, rounds: int) -> list[list[object]]:
    """Milliseconds to cut layers of random costs, for each objective."""
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
    net = Uneven()
    steps = net.steps()
    off = differences(steps, net.loop())
    right = {balance: step for balance, step in steps.items() if agrees("gpipe_fast", off[balance])}
    choices = Counter(str(net.chosen()) for _ in range(CHOICES))
    report(
        "balance",
        "Balance by time against all balances",
        ["balance", "costs of its stages", "times chosen", "ms", "chosen / this", "gradients"],
        rows(samples(right, ROUNDS), off, choices),
        f"{LAYERS} layers, the second {FACTOR} times as heavy as the others with as many parameters (by "
        f"which {net.by_parameters()} would be best), of width {WIDTH}; two stages of one intra-op thread, "
        f"{CHUNKS} micro-batches of {BATCH // CHUNKS}, no checkpointing. {CHOICES} choices by time, each of "
        f"a second. Medians [p20, p80] of forward and backward in {ROUNDS} rounds, all balances in turn. "
        "Ratios are of what was chosen most, in pairs of one round: the median, with its 95% confidence "
        "interval, bootstrapped; below 1 no other is as fast. Gradients against the plain loop's.\n",
        [
            Table(
                f"Cutting {MANY_LAYERS:,} layers into {MANY_PARTITIONS} partitions",
                ["objective", "ms"],
                cutting(MANY_LAYERS, MANY_PARTITIONS, rounds=10),
                "`balance_by_cost` of random floats, exactly; medians [p20, p80].\n",
            ),
        ],
    )


if __name__ == "__main__":
    main()
