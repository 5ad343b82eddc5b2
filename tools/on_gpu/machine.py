"""Prints hardware and software versions of a GPU machine: `python -m tools.on_gpu.machine`.

The script imports neither the extension nor a package other than torch, so it works even if the build fails.
"""

from __future__ import annotations

import faulthandler
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PACKAGES = ("torch", "triton", "pytest", "tabulate", "torchgpipe", "liger-kernel", "ninja", "numpy")

# Time limit in seconds.
SECONDS = 45


def command_output(*command: str) -> str:
    """Returns the last lines of a command's output as one line."""
    if not shutil.which(command[0]):
        return "not installed"
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=Path(__file__).parent)
    return " / ".join((done.stdout.strip() or done.stderr.strip()).splitlines()[-4:])


def packages() -> str:
    """Returns the versions of the packages."""
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


def processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
    return f"{names[0].partition(':')[2].strip() if names else platform.machine()}, {os.cpu_count()} cores"


def commit() -> str:
    from bench import measure

    return measure.commit()


def torch_devices() -> str:
    import torch

    cudnn = torch.backends.cudnn.version()
    found = [f"CUDA {torch.version.cuda}, cuDNN {cudnn}, for {' '.join(torch.cuda.get_arch_list())}"]
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        found.append(
            f"{device.name}, {device.total_memory / 2**30:.0f} GiB, {device.major}.{device.minor}, "
            f"{device.multi_processor_count} multiprocessors"
        )
    return "; ".join(found) + ("" if len(found) > 1 else "; NO GPU IS VISIBLE")


FACTS: dict[str, Callable[[], str]] = {
    "date": lambda: time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    "commit": commit,
    "Python": lambda: f"{sys.version.split()[0]}, {sys.executable}",
    "packages": packages,
    "processor": processor,
    "driver": lambda: command_output(
        "nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"
    ),
    "nvcc": lambda: command_output("nvcc", "--version"),
    "compiler": lambda: command_output(os.environ.get("CXX", "g++"), "--version"),
    "compute-sanitizer": lambda: command_output("compute-sanitizer", "--version"),
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
