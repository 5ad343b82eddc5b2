"""The time and memory of each layer: `profile_layers` measures, `table` formats."""

from gpipe_fast.balance.profile import LayerProfile, profile_layers, table

__all__ = ["LayerProfile", "profile_layers", "table"]
