"""Changes PyTorch settings between replays; run by test_settings.py with the fake runtime preloaded.

`settings_cases.py OPERATORS DEVICES`: after each change, a replayed step must be captured again. Prints the
settings for which it was not, and other differences, or "equal".
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from tests.fake_cuda.graph_cases import PipelineAndLoop
from tests.fake_cuda.train_models import layers_of

MATMUL, CUDNN = torch.backends.cuda.matmul, torch.backends.cudnn


def _toggle(name: str) -> Callable[[], None]:
    return lambda: setattr(MATMUL, name, not getattr(MATMUL, name))


SETTINGS: dict[str, Callable[[], None]] = {
    "sums in bf16": _toggle("allow_bf16_reduced_precision_reduction"),
    "sums in fp16": _toggle("allow_fp16_reduced_precision_reduction"),
    "accumulation in fp16": _toggle("allow_fp16_accumulation"),
    "attention": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "cuDNN": lambda: setattr(CUDNN, "enabled", not CUDNN.enabled),
    "deterministic cuDNN": lambda: setattr(CUDNN, "deterministic", not CUDNN.deterministic),
    "precision of products": lambda: setattr(MATMUL, "fp32_precision", "tf32"),
}


def main() -> None:
    operators, devices = sys.argv[1:]
    torch.ops.load_library(operators)
    torch.backends.cudnn.enabled = False
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # otherwise addmm may add unrounded products to gradients
    both = PipelineAndLoop(layers_of("mlp"), devices.split(","))
    both.warm_up()
    both.step(4)
    differences = []
    for name, change in SETTINGS.items():
        # A step under new settings uses another plan, or warms up again.
        replays = sum(report.replays for report in both.reports())
        change()
        both.step(5)
        both.step(6)
        if sum(r.replays for r in both.reports()) != replays:
            differences.append(f"{name}: replayed at once")
        both.step(7)
        if sum(r.replays for r in both.reports()) != replays + 1:
            differences.append(f"{name}: not captured again")
    print("; ".join(differences + both.differences) or "equal")


if __name__ == "__main__":
    main()
