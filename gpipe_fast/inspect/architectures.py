"""Which GPUs the extension's code runs on."""

from __future__ import annotations

import re

# A compute capability: 9.0 is (9, 0).
Capability = tuple[int, int]


def code_for(gpu: Capability, archs: str) -> str:
    """Whether an extension has code for a GPU, in words, and if not, what to do.

    Machine code runs on GPUs of its major version and no smaller minor version; PTX, which the driver
    compiles, on all that are no older (CUDA C++ Programming Guide, Compute Capabilities and PTX
    Compatibility). Code and PTX of ``9.0a`` are for 9.0 alone,
    those of ``10.0f`` for its major version.

    Args:
        gpu: its compute capability.
        archs: for which ones the extension was built, as in TORCH_CUDA_ARCH_LIST: ``8.0;9.0+PTX``; or
            ``none``, without CUDA.
    """
    version = _version(gpu)
    if archs == "none":
        return f"the extension was built without CUDA; rebuild it with a CUDA toolkit for {_setting(gpu)}"
    machine: list[Capability] = []
    intermediate: list[Capability] = []
    for arch in re.split(r"[;\s]+", archs.strip()):
        parsed = re.fullmatch(r"(\d+)\.(\d+)([af]?)(\+PTX)?", arch)
        if parsed is None:
            return (
                f"not known whether the extension has code for it: it was built for {archs}, which names "
                f"{arch!r}"
            )
        built = int(parsed[1]), int(parsed[2])
        if parsed[3] == "a" and built != gpu:
            continue
        if built[0] == gpu[0] and built[1] <= gpu[1]:
            machine.append(built)
        if parsed[4] and not parsed[3] and built <= gpu:
            intermediate.append(built)
    if machine:
        return f"the extension has code for it, built for {_version(max(machine))}"
    if intermediate:
        return (
            f"the extension has PTX for it, of {_version(max(intermediate))}, which the driver compiles when "
            f"it is loaded; rebuilding with {_setting(gpu)} saves that"
        )
    return f"the extension has no code for {version}, only for {archs}; rebuild it with {_setting(gpu)}"


def _version(capability: Capability) -> str:
    return f"{capability[0]}.{capability[1]}"


def _setting(gpu: Capability) -> str:
    return f"TORCH_CUDA_ARCH_LIST={_version(gpu)}"
