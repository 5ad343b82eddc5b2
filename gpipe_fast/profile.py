"""What each layer costs: `profile_layers` measures it, `table` prints it."""

from gpipe_fast.balance.profile import LayerProfile, profile_layers, table

__all__ = ["LayerProfile", "profile_layers", "table"]
