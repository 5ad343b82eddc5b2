"""Load balancing: chooses the number of layers of each stage.

The input is layers, or a cost per layer; the output is a balance, the number of layers of each partition. The
partitioning algorithm (`partition`) imports nothing from gpipe_fast. `automatic` measures layers by the
module `profile`.
"""

from gpipe_fast.balance.automatic import balance_by_size, balance_by_time
from gpipe_fast.balance.partition import balance_by_cost
from gpipe_fast.profile import LayerProfile, profile_layers, table

__all__ = ["LayerProfile", "balance_by_cost", "balance_by_size", "balance_by_time", "profile_layers", "table"]
