"""A process that compiles kernels for a GPU that need not be there.

The parent writes a kernel's name, types and constants as one line of JSON to standard input and reads the
cubin as one line from standard output. Standard error is a file, whose last lines explain a crash.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import struct
import sys
import threading
import time
from typing import Any

from gpipe_fast.fuse.cubin import CompileFailure, Cubin, KernelSource
from gpipe_fast.fuse.kernel_name import KernelName, KernelNotFoundError, find

# Seconds between two looks whether the parent still runs.
_WATCH_INTERVAL = 0.25
_MAX_REASON = 1000
# The format of records in a cubin that have a size, and the attribute EIATTR_KPARAM_INFO.
_SIZED, _PARAMETER = 0x04, 0x17


def compile_kernel(source: KernelSource, capability: int) -> Any:
    """Compiles a kernel.

    Args:
        source: the kernel, its types and its constants.
        capability: the GPU's compute capability, 90 for 9.0.

    Returns:
        Triton's `CompiledKernel`.

    Raises:
        Exception: whatever Triton raises for a kernel that it cannot compile.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    # Attributes refer to arguments by their index in the kernel's signature.
    names = list(source.kernel.arg_names)
    types = dict(source.signature)
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in source.divisible}
    ast = ASTSource(
        source.kernel,
        {name: types.get(name, "constexpr") for name in names},
        dict(source.constants),
        attributes,
    )
    options = {
        "num_warps": source.num_warps,
        "num_stages": source.num_stages,
        "enable_fp_fusion": source.contracts,
    }
    return compile(ast, target=GPUTarget("cuda", capability, 32), options=options)


def compile_here(source: KernelSource, capability: int) -> Cubin | CompileFailure:
    """Compiles a kernel in this process.

    Args:
        source: the kernel, its types and its constants.
        capability: the GPU's compute capability, 90 for 9.0.

    Returns:
        The cubin, or the reason why there is none.
    """
    if not hasattr(source.kernel, "cache_key"):
        return CompileFailure(
            "Triton's interpreter runs the kernels of this process, which cannot compile them"
        )
    named = {*dict(source.signature), *dict(source.constants)}
    if missing := [name for name in source.kernel.arg_names if name not in named]:
        return CompileFailure(f"arguments without a type or a value: {', '.join(missing)}")
    try:
        return _cubin(source, compile_kernel(source, capability))
    except Exception as error:
        return CompileFailure(_reason(error))


def _cubin(source: KernelSource, compiled: Any) -> Cubin | CompileFailure:
    metadata = compiled.metadata
    for name in ("global_scratch_size", "profile_scratch_size", "tensordesc_meta"):
        if value := getattr(metadata, name, None):
            return CompileFailure(f"the kernel needs {name} = {value}, which launches do not provide")
    image = compiled.asm["cubin"]
    found, passed = _parameter_sizes(image, metadata.name), _argument_sizes(source)
    if found != passed:
        return CompileFailure(f"its parameters' sizes are {found} bytes, but launches pass {passed}")
    return Cubin(
        image,
        metadata.name,
        metadata.num_warps,
        metadata.num_ctas,
        metadata.shared,
        bool(metadata.launch_cooperative_grid),
        bool(metadata.launch_pdl),
    )


def _parameter_sizes(image: bytes, name: str) -> list[int]:
    """Returns the bytes of each parameter of a kernel, from the section of its cubin that describes them.

    A cubin is a 64-bit ELF file. A record of the section is one byte each for its format and its attribute,
    and two bytes that are, in one of the formats, the size of what follows.
    """
    (sections,) = struct.unpack_from("<Q", image, 0x28)
    step, count, index_of_names = struct.unpack_from("<3H", image, 0x3A)
    found = [struct.unpack_from("<2I4Q", image, sections + i * step) for i in range(count)]
    names, wanted = found[index_of_names][4], f".nv.info.{name}\0".encode()
    sizes = {}
    for place, size in ((s[4], s[5]) for s in found if image.startswith(wanted, names + s[0])):
        end = place + size
        while place < end:
            format_, attribute, length = struct.unpack_from("<2BH", image, place)
            if (format_, attribute) == (_SIZED, _PARAMETER):
                _, ordinal, _, flags = struct.unpack_from("<I2HI", image, place + 4)
                sizes[ordinal] = flags >> 18
            place += 4 + length * (format_ == _SIZED)
    return [sizes[ordinal] for ordinal in sorted(sizes)]


def _argument_sizes(source: KernelSource) -> list[int]:
    """Returns the bytes of each argument that a launch passes; the last two point to scratch memory."""
    types = [*(type_ for _, type_ in source.signature), "*i8", "*i8"]
    return [8 if type_.startswith("*") else max(8, int(type_.lstrip("iufp"))) // 8 for type_ in types]


def _reason(error: BaseException) -> str:
    """Returns the type and the last lines of an error and of its cause, as one paragraph."""
    text = str(error)
    if error.__cause__ is not None and str(error.__cause__) not in text:
        text += f"\n{error.__cause__}"
    return f"{type(error).__name__}: {last_lines(text)}"


def last_lines(text: str, count: int = 8) -> str:
    """Returns the last lines of a text as one paragraph.

    Args:
        text: an error's text or a process's output.
        count: the number of lines; the last characters of very long lines.

    Returns:
        A text without line breaks.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[-count:])[-_MAX_REASON:]


def serve(requests: Any, replies: Any) -> None:
    """Compiles kernels until there are no more requests.

    Args:
        requests: a file with a line of JSON per kernel; see `request`.
        replies: a file to which a line of JSON per kernel is written; see `parse_reply`.
    """
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in requests:
        print(json.dumps(_reply(json.loads(line))), file=replies, flush=True)


def request(name: KernelName, source: KernelSource, capability: int) -> str:
    """Returns the line that asks a worker for a cubin."""
    values = [
        source.signature,
        source.constants,
        source.divisible,
        source.num_warps,
        source.num_stages,
        source.contracts,
    ]
    return json.dumps({"name": vars(name), "source": values, "capability": capability}) + "\n"


def parse_reply(line: bytes) -> Cubin | CompileFailure | None:
    """Returns the result in a worker's line; None if the worker could not find the kernel."""
    reply = json.loads(line)
    if "cubin" in reply:
        return Cubin(base64.b64decode(reply["image"]), **reply["cubin"])
    return CompileFailure(reply["failure"]) if "failure" in reply else None


def _reply(asked: dict[str, Any]) -> dict[str, Any]:
    signature, constants, divisible, num_warps, num_stages, contracts = asked["source"]
    try:
        kernel = find(KernelName(**asked["name"]))
    except KernelNotFoundError as error:
        print(error, file=sys.stderr, flush=True)
        return {"not_found": str(error)}
    source = KernelSource(
        kernel,
        tuple(map(tuple, signature)),
        tuple(map(tuple, constants)),
        tuple(divisible),
        num_warps,
        num_stages,
        contracts,
    )
    made = compile_here(source, asked["capability"])
    if isinstance(made, CompileFailure):
        return {"failure": made.reason}
    fields = dict(vars(made))
    return {"image": base64.b64encode(fields.pop("image")).decode(), "cubin": fields}


def _end_with_parent(parent: int, folder: str) -> None:
    while os.getppid() == parent:
        time.sleep(_WATCH_INTERVAL)
    _end(folder)


def _end(folder: str) -> None:
    """Replaces this process by one that deletes a folder: no thread here can write to it any more."""
    program = "import shutil, sys; shutil.rmtree(sys.argv[1], ignore_errors=True)"
    os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", program, folder])


def main(parent: int, folder: str) -> None:
    """Runs a worker; the parent has made it the leader of a process group.

    Args:
        parent: the parent's process id.
        folder: a temporary folder, deleted if the parent ends without doing so.
    """
    threading.Thread(target=_end_with_parent, args=(parent, folder), daemon=True).start()
    # Modules that are imported here must not read requests or write between replies.
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    with contextlib.suppress(BrokenPipeError):  # the parent has ended
        serve(requests, replies)
    _end(folder)
