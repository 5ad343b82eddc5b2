"""Global hooks of modules and optimizers, and the arguments of ``Module.to``."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from gpipe_fast.torch_private.modules import (
    CALLS,
    AnyBatchNorm,
    global_hooks,
    has_global_optimizer_hooks,
    parse_to,
)


def test_hooks_of_all_modules_are_in_their_table() -> None:
    table = global_hooks("_forward_hooks")
    handle = register_module_forward_hook(lambda module, inputs, output: None)
    assert handle.id in table
    handle.remove()
    assert handle.id not in table


def test_hooks_of_all_optimizers_are_seen() -> None:
    assert not has_global_optimizer_hooks()
    handle = register_optimizer_step_post_hook(lambda *args: None)
    assert has_global_optimizer_hooks()
    handle.remove()
    assert not has_global_optimizer_hooks()


def test_arguments_of_to_are_parsed() -> None:
    device, dtype, non_blocking, memory_format = parse_to("cuda:1", torch.float16, non_blocking=True)
    assert (device, dtype, non_blocking) == (torch.device("cuda", 1), torch.float16, True)
    assert memory_format is None
    assert parse_to(torch.empty(1, dtype=torch.float64))[:2] == (torch.device("cpu"), torch.float64)


def test_every_batch_norm_has_the_class() -> None:
    assert all(issubclass(cls, AnyBatchNorm) for cls in (nn.BatchNorm1d, nn.BatchNorm3d, nn.SyncBatchNorm))
    assert not issubclass(nn.GroupNorm, AnyBatchNorm)


def test_a_call_of_a_module_runs_these_functions() -> None:
    assert nn.Module.__call__ in CALLS
    assert all(callable(function) for function in CALLS)
