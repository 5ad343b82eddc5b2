"""GPU architectures for which the extension has machine code or PTX."""

from __future__ import annotations

import re

# A compute capability: 9.0 is (9, 0).
Capability = tuple[int, int]


def describe_code(gpu: Capability, archs: str) -> str:
    """Returns a sentence on whether an extension has code for a GPU, and if not, what to do.

    Machine code runs on GPUs of its major version with the same or a higher minor version. PTX, which the
    driver compiles, runs on the same and all newer versions (CUDA C++ Programming Guide, Compute Capabilities
    and PTX Compatibility). Code and PTX of ``9.0a`` run on 9.0 only, those of ``10.0f`` on its major version.

    Args:
        gpu: the compute capability of the GPU.
        archs: the architectures for which the extension was built, as in TORCH_CUDA_ARCH_LIST, such as
            ``8.0;9.0+PTX``; or ``none`` for a build without CUDA.
    """
    version = _version(gpu)
    if archs == "none":
        setting = _arch_list_setting(gpu)
        return f"the extension was built without CUDA; rebuild it with a CUDA toolkit for {setting}"
    machine_code: list[Capability] = []
    ptx: list[Capability] = []
    for arch in re.split(r"[;\s]+", archs.strip()):
        parsed = re.fullmatch(r"(\d+)\.(\d+)([af]?)(\+PTX)?", arch)
        if parsed is None:
            return (
                f"unknown whether the extension has code for it: it was built for {archs}, and "
                f"{arch!r} is not a version"
            )
        built = int(parsed[1]), int(parsed[2])
        if parsed[3] == "a" and built != gpu:
            continue
        if built[0] == gpu[0] and built[1] <= gpu[1]:
            machine_code.append(built)
        if parsed[4] and not parsed[3] and built <= gpu:
            ptx.append(built)
    if machine_code:
        return f"the extension has code for it, built for {_version(max(machine_code))}"
    if ptx:
        return (
            f"the extension has PTX for it, of {_version(max(ptx))}, which the driver compiles when "
            f"it is loaded; rebuild with {_arch_list_setting(gpu)} to avoid that"
        )
    setting = _arch_list_setting(gpu)
    return f"the extension has no code for {version}, only for {archs}; rebuild it with {setting}"


def _version(capability: Capability) -> str:
    return f"{capability[0]}.{capability[1]}"


def _arch_list_setting(gpu: Capability) -> str:
    return f"TORCH_CUDA_ARCH_LIST={_version(gpu)}"
