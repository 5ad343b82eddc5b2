"""Global hooks of modules and optimizers, and the arguments of ``Module.to``."""

from __future__ import annotations

from torch.optim.optimizer import register_optimizer_step_post_hook

from gpipe_fast.torch_private.modules import (
    has_global_optimizer_hooks,
)


def test_hooks_of_all_optimizers_are_seen() -> None:
    assert not has_global_optimizer_hooks()
    handle = register_optimizer_step_post_hook(lambda *args: None)
    assert has_global_optimizer_hooks()
    handle.remove()
    assert not has_global_optimizer_hooks()
