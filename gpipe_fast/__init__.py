"""GPipe for PyTorch: pipeline parallelism with the micro-batch loop in C++."""

# A function with the name of a public module is imported from that module: a later first import of the module
# would replace the function.
from gpipe_fast import explanation as explanation
from gpipe_fast import profile as profile
from gpipe_fast import recording as recording
from gpipe_fast import skip as skip
from gpipe_fast._extension import build_info, built_with_cuda
from gpipe_fast.doctor import doctor
from gpipe_fast.gpipe import GPipe
from gpipe_fast.layers.phase import is_checkpointing, is_recomputing
from gpipe_fast.layers.sharded import shard
from gpipe_fast.layers.structure import replicate
from gpipe_fast.randomness.random import keyed_rng
from gpipe_fast.schedule import simulate
from gpipe_fast.tuning import tune
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
    "shard",
    "simulate",
    "tune",
    "verify",
]
