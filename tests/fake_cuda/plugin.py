"""For `pytest -p fake_cuda.plugin` with the fake runtime preloaded: tests that need a GPU run without one.

FAKE_CUDA_OPERATORS names the library of operators.
"""

from __future__ import annotations

import os

import torch

import gpipe_fast  # noqa: F401  its operators are among those that are replaced

torch.ops.load_library(os.environ["FAKE_CUDA_OPERATORS"])
torch.backends.cudnn.enabled = False
for enable in ("enable_flash_sdp", "enable_mem_efficient_sdp", "enable_cudnn_sdp"):
    getattr(torch.backends.cuda, enable)(False)
torch.set_num_threads(1)
