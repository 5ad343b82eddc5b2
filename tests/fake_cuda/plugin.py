"""A pytest plugin that runs GPU tests on the fake CUDA runtime: `pytest -p tests.fake_cuda.plugin`.

The fake runtime must be preloaded, and the environment variable FAKE_CUDA_OPERATORS
must name the library of operators.
"""

import os

from tests.fake_cuda.fake_devices import load

load(os.environ["FAKE_CUDA_OPERATORS"], deterministic=False)
