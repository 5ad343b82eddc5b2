"""Memory on one stage: what is predicted, and what PyTorch's MemTracker counts in the plain loop."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from bench.models.gpt import blocks
from gpipe_fast import GPipe

SHAPE = 8, 32, 64


def layers() -> nn.Sequential:
    return nn.Sequential(*blocks(1, 64))


def bytes_by_kind(tracker: MemTracker, when: str = "current") -> dict[str, int]:
    (found,) = tracker.get_tracker_snapshot(when).values()
    return {getattr(kind, "value", kind): size for kind, size in found.items()}


def counted(num_microbatches: int) -> tuple[int, int, dict[str, int]]:
    """Returns the most activations between forward and backward, the peak, and what an optimizer leaves.

    The mini-batch itself does not count.
    """
    tracker, activations = MemTracker(), 0
    with FakeTensorMode():
        model, x = layers(), torch.randn(SHAPE)
        optimizer = torch.optim.AdamW(model.parameters())
        tracker.track_external(model, optimizer, x)
        with tracker:
            for part in x.chunk(num_microbatches):
                loss = F.mse_loss(model(part), part, reduction="sum")
                activations = max(activations, bytes_by_kind(tracker)["Activation"] - loss.nbytes)
                loss.backward()  # type: ignore[no-untyped-call]
                tracker.reset_mod_stats()  # else it refuses the next micro-batch
            peak = bytes_by_kind(tracker, "peak")
            optimizer.step()
            return activations, peak["Total"] - peak["Other"], bytes_by_kind(tracker)


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_predicted_memory_is_that_of_the_plain_loop(num_microbatches: int) -> None:
    activations, peak, after = counted(num_microbatches)
    pipe = GPipe(
        layers(), devices=["cpu"], chunks=num_microbatches, checkpoint="never", schedule="1f1b", fuse=False
    )
    x = torch.empty(SHAPE, device="meta")
    report = pipe.memory(x, target=x, loss_fn=F.mse_loss, normalizer=1, optimizer=torch.optim.AdamW)
    (own,) = report.stages
    assert own is not None
    assert own.parameters == after["Parameter"]
    assert report.optimizer == (after["Optstate"],)
    assert own.saved == activations
    # The first backward makes the gradients: those of the only micro-batch count as its intermediates.
    assert own.gradients == (after["Gradient"] if num_microbatches > 1 else 0)
    # Autograd frees saved tensors one by one; a program frees them at its end, and keeps its scratch memory.
    assert own.total - own.intermediates <= peak <= own.total
