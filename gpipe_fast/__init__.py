"""GPipe for PyTorch: pipeline parallelism with the micro-batch loop in C++."""

from gpipe_fast._extension import build_info, built_with_cuda
from gpipe_fast.diagnosis import doctor
from gpipe_fast.gpipe import GPipe
from gpipe_fast.phase import is_checkpointing, is_recomputing
from gpipe_fast.random import keyed_rng
from gpipe_fast.structure import replicate
from gpipe_fast.verify import verify

__version__ = "0.1.0"

__all__ = [
    "GPipe",
    "build_info",
    "built_with_cuda",
    "doctor",
    "is_checkpointing",
    "is_recomputing",
    "keyed_rng",
    "replicate",
    "verify",
]
