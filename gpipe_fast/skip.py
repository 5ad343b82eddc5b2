"""Skip connections: `stash` a tensor in one layer, `pop` it in a later one."""

from gpipe_fast.layers.skip import Namespace, pop, skippable, stash, verify_skippables

__all__ = ["Namespace", "pop", "skippable", "stash", "verify_skippables"]
