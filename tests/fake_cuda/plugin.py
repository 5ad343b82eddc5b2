"""A pytest plugin that runs GPU tests on the fake CUDA runtime: `pytest -p tests.fake_cuda.plugin`.

The fake runtime must be preloaded, and the environment variable FAKE_CUDA_OPERATORS
must name the library of operators.
"""

from __future__ import annotations

import os

import torch

import gpipe_fast  # noqa: F401  registers operators that the library replaces

torch.ops.load_library(os.environ["FAKE_CUDA_OPERATORS"])
torch.backends.cudnn.enabled = False
for enable in ("enable_flash_sdp", "enable_mem_efficient_sdp", "enable_cudnn_sdp"):
    getattr(torch.backends.cuda, enable)(False)
torch.set_num_threads(1)
