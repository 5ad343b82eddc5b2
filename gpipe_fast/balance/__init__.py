"""Balances: how many layers each stage takes.

Layers, or the cost of each layer, come in; a balance, which is the number of layers of each partition, goes
out. The cut itself (`partition`) imports nothing of gpipe_fast; the files that measure layers import `layers`
and `devices`, and nothing that traces or runs a pipeline. Only `gpipe`, `stages` and the
public `profile` import it.
"""

from gpipe_fast.balance.automatic import balance_by_size, balance_by_time
from gpipe_fast.balance.partition import balance_by_cost
from gpipe_fast.balance.profile import LayerProfile, profile_layers, table

__all__ = [
    "LayerProfile",
    "balance_by_cost",
    "balance_by_size",
    "balance_by_time",
    "profile_layers",
    "table",
]
