"""The process and the machine: the store of the default process group, the version of the CUDA driver.

Read in PyTorch 2.11.0 and 2.14.1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist


def default_store() -> Any:
    """Returns the store of the default process group; the store of another group is known only to C++."""
    return dist.distributed_c10d._get_default_store()


def cuda_driver_version() -> int:
    """Returns the newest CUDA version that the driver supports, such as 12080; 0 if PyTorch has no CUDA."""
    get_version = getattr(torch._C, "_cuda_getDriverVersion", None)
    return 0 if get_version is None else int(get_version())
