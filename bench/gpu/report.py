"""Tables of the CUDA benchmark's findings, and the performance targets."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from bench.gpu import copies as cuda_copies
from bench.gpu.subjects import COMPILED, LOOP, MAX_ERROR_RATIO, OURS, PIPELINES, ROWS, STAGES, TORCHGPIPE
from bench.measure import Ratio, Table, timing
from bench.measure import write as write_tables

HEADERS = (
    "candidate", "ms: median [p20, p80]", "per second", "speedup of gpipe_fast", "host, µs per task",
    "device idle", "peak, MiB", "reserved, MiB", "error",
)  # fmt: skip
TARGET_HEADERS = ("row", "quantity", "target", "measured", "met")


NOTE = (
    "All stages share one device. Every row has its own process, in which the candidates alternate. A step "
    "is forward and backward from a given output gradient, until the device has finished. Plain loops "
    "recompute each stage as a whole with non-reentrant torch.utils.checkpoint. A task is the forward and "
    "backward of one micro-batch in one stage; host time ends when the calls return. Speedups are paired "
    "by round: the median with its 95% confidence interval. Idle is the fraction of consecutive steps in "
    "which the device runs neither a kernel nor a copy. Memory excludes parameters and input. The error is "
    "the largest gradient error against float64, relative to the largest element of its tensor, on a small "
    f"model of the same kind. If ours exceeds {MAX_ERROR_RATIO:g} times the plain loop's error, it is WRONG "
    "and gets no speedup.\n"
)


def versions() -> dict[str, str]:
    """Returns the versions of CUDA, cuDNN, the GPU and the packages involved."""
    found = {"CUDA": str(torch.version.cuda), "cuDNN": str(torch.backends.cudnn.version())}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "GPU": f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, "
            f"compute capability {properties.major}.{properties.minor}, {torch.cuda.device_count()} visible"
        }
    for package in ("triton", "torchgpipe"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def is_right(name: str, candidates: Mapping[str, Any]) -> bool:
    """Returns whether our candidate's error is within the limit; other candidates only need an error."""
    found = candidates.get(name, {})
    if "error" not in found:
        return False
    loop = candidates.get(LOOP, {}).get("error", 0.0)
    return name not in PIPELINES or found["equal"] or found["error"] <= MAX_ERROR_RATIO * loop


def ratio(name: str, candidates: Mapping[str, Any], of: str = OURS) -> Ratio | None:
    """Returns the speedup of `of` over candidate `name`, paired by round; None unless both are right."""
    pair = [candidates.get(each, {}).get("step_us") for each in (name, of)]
    if not all(pair) or not (is_right(name, candidates) and is_right(of, candidates)):
        return None
    rounds = min(len(times) for times in pair)
    return Ratio.of(pair[0][:rounds], pair[1][:rounds])


def table(name: str, row: Mapping[str, Any]) -> Table:
    """Returns the table of one row."""
    note = "".join(f"{remark}. " for remark in row.get("remarks", []))
    note += f"Skipped: {row['skipped']}. " if "skipped" in row else ""
    note += f"Failed: {row['failed']}. " if "failed" in row else ""
    candidates = row.get("candidates", {})
    if name == cuda_copies.NAME:
        headers: tuple[str, ...] = ("path", "GB/s", "plain copy, GB/s", "share", "hand-off, µs")
        cells = [[title, *_copies(found)] for title, found in candidates.items()]
        return Table(cuda_copies.TITLE, headers, cells, note + "\n")
    subject = ROWS[name].small if row.get("small") else ROWS[name].full
    dtype = str(subject.dtype).removeprefix("torch.")
    note += (
        f"Batch {subject.batch}, {subject.chunks} micro-batches, {STAGES} stages, checkpoint "
        f"'{subject.checkpoint}', {dtype}; 'per second' counts {subject.unit[0]}.\n"
    )
    cells = [[each, *_cells(each, candidates, subject)] for each in candidates]
    return Table(ROWS[name].title, HEADERS, cells, note)


def _copies(found: Mapping[str, Any]) -> list[object]:
    if "failed" in found:
        return [f"FAILED: {found['failed']}", "", "", ""]
    rate, share = found["gbps"], found["share"]
    return [
        "-" if rate is None else f"{rate:.1f}",
        f"{found['plain_gbps']:.1f}",
        "-" if share is None else f"{share:.0%}",
        f"{found['hand_over_us']:.0f}",
    ]


def _cells(name: str, candidates: Mapping[str, Any], subject: Any) -> list[object]:
    found = candidates[name]
    if "step_us" not in found:
        return [f"FAILED: {found.get('failed', 'ended before it was timed')}", *[""] * (len(HEADERS) - 2)]
    time = timing(found["step_us"])
    count = subject.batch * subject.unit[1]
    faster, idle = ratio(name, candidates), found.get("idle")
    return [
        time.ms(),
        f"{count / time.median * 1e6:,.0f}",
        "-" if faster is None else str(faster),
        f"{host_us_per_task(found, subject):.2f}",
        "-" if idle is None else f"{idle:.1%}",
        *(f"{found[key] / 2**20:.0f}" if key in found else "-" for key in ("peak_bytes", "reserved_bytes")),
        _error(name, candidates) + (f"; FAILED: {found['failed']}" if "failed" in found else ""),
    ]


def host_us_per_task(found: Mapping[str, Any], subject: Any) -> float:
    """Returns the host time (µs) of one micro-batch in one stage, forward and backward."""
    median: float = statistics.median(found["host_us"])
    return median / (STAGES * int(subject.chunks))


def _error(name: str, candidates: Mapping[str, Any]) -> str:
    found = candidates[name]
    text = f"{found['error']:.1e}" + (", equal to the loop" if found["equal"] and name != LOOP else "")
    return text if is_right(name, candidates) else f"WRONG: {text}"


def target_rows(rows: Mapping[str, Any]) -> list[list[object]]:
    """Returns one line per performance target: the limit, the measured value and whether it is met."""
    lines: list[list[object]] = []

    def line(row: str, what: str, limit: str, found: float | None, good: bool) -> None:
        verdict = "" if found is None else "yes" if good else "NO"
        lines.append([row, what, limit, "-" if found is None else f"{found:.3g}", verdict])

    def at_least(row: str, what: str, limit: float, found: float | None) -> None:
        line(row, what, f"at least {limit:g}", found, found is not None and found >= limit)

    def at_most(row: str, what: str, limit: float, found: float | None) -> None:
        line(row, what, f"at most {limit:g}", found, found is not None and found <= limit)

    for name, row in rows.items():
        candidates = row.get("candidates", {})
        ours, theirs = candidates.get(OURS, {}), candidates.get(TORCHGPIPE, {})
        if name == cuda_copies.NAME:
            for title, found in candidates.items():
                at_least(title, "share of a plain copy's bandwidth", 0.9, found.get("share"))
            continue
        speedups = {each: ratio(each, candidates) for each in (LOOP, COMPILED, TORCHGPIPE)}
        median = {each: None if r is None else r.median for each, r in speedups.items()}
        if name.startswith("tiny"):
            subject = ROWS[name].full
            both = "host_us" in ours and "host_us" in theirs
            share = host_us_per_task(ours, subject) / host_us_per_task(theirs, subject) if both else None
            at_most(name, "host time per task, relative to torchgpipe", 0.1, share)
            at_least(name, "speedup over torchgpipe", 10, median[TORCHGPIPE])
            continue
        if COMPILED in ROWS[name].full.names:
            line(name, "speedup over torch.compile", "-", median[COMPILED], True)
            continue
        at_least(name, "speedup over the plain loop", 1.05, median[LOOP])
        at_least(name, "speedup over torchgpipe", 1.2, median[TORCHGPIPE])
        at_most(name, "device idle within steps", 0.02, ours.get("idle"))
        known = "peak_bytes" in ours and "peak_bytes" in theirs
        at_most(
            name,
            "peak memory, relative to torchgpipe",
            1.0,
            ours["peak_bytes"] / theirs["peak_bytes"] if known else None,
        )
    return lines


def write(name: str, device: str, found: Mapping[str, Any]) -> None:
    """Writes the tables of a run."""
    rows, small = found["rows"], found["small"]
    words = "; ".join(f"{what}: {which}" for what, which in found["versions"].items())
    write_tables(
        name,
        f"Pipelines on {device}" + (" (small models: the figures are meaningless)" if small else ""),
        TARGET_HEADERS,
        target_rows(rows),
        f"{words}. {NOTE}",
        [table(each, row | {"small": small}) for each, row in rows.items()],
    )


def line(name: str, row: Mapping[str, Any]) -> str:
    """Returns a one-line summary of a row, for the console."""
    if "skipped" in row:
        return f"{name}: skipped, {row['skipped']}"
    parts = []
    for each, found in row.get("candidates", {}).items():
        if "failed" in found:
            parts.append(f"{each} FAILED: {found['failed'][:200]}")
        elif "step_us" in found:
            parts.append(f"{each} {timing(found['step_us']).ms()} ms")
        elif "share" in found:
            parts.append(f"{each} {' of '.join(map(str, _copies(found)[:2]))} GB/s")
    failure = f"; FAILED: {row['failed']}" if "failed" in row else ""
    return f"{name}, {row['seconds']:.0f} s: {'; '.join(parts)}{failure}"
