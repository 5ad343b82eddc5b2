"""How many layers each stage takes.

Layers, or what each of them costs, come in; a balance, the number of layers of each partition, goes out.
`partition` imports nothing of gpipe_fast; the rest measures layers by themselves, so it may import `layers`
and `devices`, and nothing that traces or runs a pipeline.
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
