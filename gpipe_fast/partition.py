"""Which layers go together: a sequence of costs cut into consecutive partitions. Plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def cut_evenly(costs: Sequence[float], num_partitions: int) -> list[int]:
    """Cuts a sequence so that the most expensive partition is as cheap as possible.

    Exact, by dynamic programming over layers and partitions in O(L^2 K) steps.

    Args:
        costs: of each layer, not negative, in any unit.
        num_partitions: at least 1, at most the number of layers.

    Returns:
        Layers per partition, each at least 1.

    Raises:
        ValueError: there are fewer layers than partitions.
    """
    num_layers = len(costs)
    if not 1 <= num_partitions <= num_layers:
        raise ValueError(
            f"cannot cut {num_layers} layers into {num_partitions} partitions of at least one layer"
        )
    before = [0.0, *accumulate(costs)]
    # best[n]: the least possible cost of the dearest of k partitions over the first n layers.
    best = [float("inf")] * (num_layers + 1)
    best[0] = 0.0
    cuts: list[list[int]] = []
    for k in range(1, num_partitions + 1):
        worst = [float("inf")] * (num_layers + 1)
        cut = [0] * (num_layers + 1)
        for n in range(k, num_layers + 1):
            for start in range(k - 1, n):
                dearest = max(best[start], before[n] - before[start])
                if dearest < worst[n]:
                    worst[n], cut[n] = dearest, start
        best = worst
        cuts.append(cut)
    sizes: list[int] = []
    end = num_layers
    for cut in reversed(cuts):
        sizes.append(end - cut[end])
        end = cut[end]
    return sizes[::-1]
