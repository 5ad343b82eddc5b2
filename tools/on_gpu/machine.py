"""Prints hardware and software versions of a GPU machine: `python -m tools.on_gpu.machine`.

The script imports neither the extension nor a package other than torch, so it works even if the build fails.
"""

from __future__ import annotations

import faulthandler
import importlib.metadata
import os
import subprocess
import time
from collections.abc import Callable

PACKAGES = ("torch", "triton", "pytest", "tabulate", "torchgpipe", "ninja", "numpy")
SECONDS = 45


def output(*command: str) -> str:
    """Returns the last lines of a command's output as one line."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    return " / ".join((done.stdout.strip() or done.stderr.strip()).splitlines()[-4:])


def packages() -> str:
    """Returns the versions of the packages."""
    installed = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
    return ", ".join(f"{name} {installed.get(name, 'not installed')}" for name in PACKAGES)


def machine() -> str:
    """Returns processor, first GPU, versions and commit."""
    from bench import measure

    return measure.machine()


def torch_devices() -> str:
    """Returns the versions that torch is built with, and all GPUs."""
    import torch

    found = [f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"]
    found += [str(torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count())]
    return "; ".join(found) + ("" if len(found) > 1 else "; NO GPU IS VISIBLE")


FACTS: dict[str, Callable[[], str]] = {
    "date": lambda: time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    "packages": packages,
    "driver": lambda: output("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv"),
    "clocks": lambda: output(
        "nvidia-smi", "--query-gpu=clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit", "--format=csv"
    ),
    "nvcc": lambda: output("nvcc", "--version"),
    "compiler": lambda: output(os.environ.get("CXX", "g++"), "--version"),
    "compute-sanitizer": lambda: output("compute-sanitizer", "--version"),
    "machine": machine,
    "torch": torch_devices,
}


def main() -> None:
    for name, get_fact in FACTS.items():
        try:
            found = get_fact()
        except Exception as error:
            found = f"FAILED: {type(error).__name__}: {error}"
        print(f"{name}: {found}", flush=True)


if __name__ == "__main__":
    # If the driver hangs, says where, and does not use up the time of the build.
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    main()
