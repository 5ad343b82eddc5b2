"""The command ``gpipe-fast``, also ``python -m gpipe_fast``: `doctor`, `report`, `compare` and `simulate`.

The exit status is 0; 1 if ``doctor --check`` finds a difference, or ``doctor`` under torchrun a problem; and
2 if an argument or the user's function is wrong.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from gpipe_fast.devices import checked_devices, parse_devices
from gpipe_fast.distributed.mesh import checked_timeout
from gpipe_fast.distributed.torchrun import Network, examine, is_launched
from gpipe_fast.from_model.pipelined import Pipelined
from gpipe_fast.gpipe import GPipe
from gpipe_fast.reports.checkup import NUM_STAGES, check
from gpipe_fast.reports.compare import Comparison, compare
from gpipe_fast.reports.doctor import format_sections, sections
from gpipe_fast.reports.report import Report, format_of
from gpipe_fast.schedule import SCHEDULES, Schedule, simulate

_PROGRAM = "gpipe-fast"
_Found = TypeVar("_Found", Report, Comparison)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command, with the arguments of the process by default; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except _UsageError as error:
        options.parser.error(str(error))
    return status


class _UsageError(Exception):
    """An argument is wrong; the message says which and what to do."""


def _parser() -> argparse.ArgumentParser:
    about = "GPipe for PyTorch: what a pipeline does, and how fast."
    parser = argparse.ArgumentParser(_PROGRAM, description=about)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, add, run, text in (
        ("doctor", _add_doctor, _doctor, "report on this machine, or check that it computes right"),
        ("report", _add_report, _report, "record steps of a model, and say where their time goes"),
        ("compare", _add_model, _compare, "time a step beside the plain and the compiled layers"),
        ("simulate", _add_simulate, _simulate, "predict the time of a step from those of its stages"),
    ):
        own = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        own.add_argument("--json", action="store_true", help="print JSON instead of text")
        own.set_defaults(run=run, parser=own)
        add(own)
    return parser


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare small models with the plain loop, in every checkpoint mode and over every transport, "
        "in about a minute; the exit status is 1 if a result differs",
    )
    parser.add_argument(
        "--devices", nargs="+", metavar="DEVICE", help="with --check: one device per stage of these models"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="under torchrun: the maximum time to wait for another rank (default: 60)",
    )


def _doctor(options: argparse.Namespace) -> int:
    if options.devices:
        _check_devices(options.devices, options.check)
    if not options.check:
        if is_launched():
            return _examine(options)
        found = sections()
        print(json.dumps(dict(found), indent=2) if options.json else format_sections(found))
        return 0
    checkup = check(GPipe, options.devices, None if options.json else functools.partial(print, flush=True))
    if options.json:
        print(json.dumps(asdict(checkup) | {"ok": checkup.ok}, indent=2, default=str))
    return 0 if checkup else 1


def _check_devices(names: list[str], is_for_check: bool) -> None:
    """Checks that the machine has the devices, and that they are enough for ``doctor --check``."""
    try:
        checked_devices(parse_devices(names), len(names))
    except ValueError as error:
        raise _UsageError(f"--devices {' '.join(names)}: {error}") from error
    if not is_for_check:
        raise _UsageError("--devices chooses the devices of --check; add --check")
    if len(names) < NUM_STAGES:
        raise _UsageError(
            f"--check needs one device for each of {NUM_STAGES} stages, got --devices {' '.join(names)}; one "
            f"device may have several: --devices {' '.join(names * NUM_STAGES)}"
        )


def _examine(options: argparse.Namespace) -> int:
    """Reports on the ranks of torchrun; rank 0 prints."""

    def show(network: Network) -> None:
        if options.json:
            print(json.dumps(dict(sections()) | network.to_dict(), indent=2), flush=True)
        else:
            print(format_sections([*sections(), *network.sections()]), flush=True)

    try:
        return 0 if examine(checked_timeout(options.timeout), show) else 1
    except ValueError as error:
        raise _UsageError(f"--timeout, RANK, WORLD_SIZE and MASTER_PORT must be numbers: {error}") from error
    except RuntimeError as error:
        print(f"{_PROGRAM} doctor: {error}", file=sys.stderr, flush=True)
        return 1


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "make",
        metavar="FILE.py:FUNCTION",
        help="a function without arguments that returns (model, x) or (model, x, target, loss_fn); x may be "
        "a dict of arguments of a model made by GPipe.from_model; also MODULE:FUNCTION",
    )


def _add_report(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument("--check", action="store_true", help="also measure the first piece of advice")
    parser.add_argument(
        "--save",
        nargs="+",
        default=[],
        metavar="PATH",
        help="files for the step: a page (.html) or a trace for Perfetto (.json)",
    )


def _report(options: argparse.Namespace) -> int:
    for path in options.save:
        try:
            format_of(path)
        except ValueError as error:
            raise _UsageError(f"--save {path}: {error}") from error
    report = _of_model(options, functools.partial(_reported, options.check))
    for path in options.save:
        try:
            report.save(path)
        except OSError as error:
            raise _UsageError(f"--save {path}: {error}") from error
        print(f"saved {path}", file=sys.stderr)
    return 0


def _compare(options: argparse.Namespace) -> int:
    _of_model(options, compare)
    return 0


def _of_model(options: argparse.Namespace, run: Callable[..., _Found]) -> _Found:
    """Returns and prints what a function finds for what the user's function returns."""
    try:
        found = run(*_made(options.make))
    except _UsageError:
        raise
    except Exception as error:  # of the user's function or model
        traceback.print_exc()
        raise _UsageError(f"{options.make} failed: {type(error).__name__}: {error}") from error
    print(json.dumps(found.to_dict(), indent=2) if options.json else found)
    return found


def _reported(check: bool, model: Any, x: Any, target: Any, loss_fn: Any) -> Report:
    if isinstance(model, GPipe):
        found: Report = model.report(x, target=target, loss_fn=loss_fn, check=check)
        return found
    arguments = x if isinstance(x, dict) else {}
    found = model.report(*([] if isinstance(x, dict) else [x]), check=check, **arguments)
    return found


def _made(name: str) -> tuple[Any, Any, Any, Any]:
    """Returns the model, its input, the target and the loss that the user's function returns."""
    place, colon, function = name.rpartition(":")
    if not colon or not place or not function:
        raise _UsageError(f"expected FILE.py:FUNCTION or MODULE:FUNCTION, got {name!r}")
    make = getattr(_imported(place), function, None)
    if not callable(make):
        raise _UsageError(f"{place} has no function {function!r}")
    found = make()
    if isinstance(found, tuple) and found and isinstance(found[0], (GPipe, Pipelined)):
        if len(found) == 2:
            return (*found, None, None)
        if len(found) == 4 and isinstance(found[0], GPipe):
            return found
    kind = type(found).__name__
    what = f"a tuple of {', '.join(type(x).__name__ for x in found)}" if kind == "tuple" else kind
    raise _UsageError(
        f"{name} must return (model, x) or (model, x, target, loss_fn), where the model is a GPipe, or "
        f"(model, x) with a model made by GPipe.from_model; it returned {what}"
    )


def _imported(place: str) -> ModuleType:
    if not place.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise _UsageError(f"{error}; pass the path of a file, or the name of a module") from error
    path = Path(place)
    if not path.is_file():
        raise _UsageError(f"there is no file {place}")
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


# The arguments of `simulate` that are one number, or one for each stage.
_PER_STAGE = {
    "forward": "time of a stage's forward of one micro-batch, in any unit",
    "backward": "time of its backward",
    "weights": "part of the backward that weight gradients take",
    "recompute": "time of its recompute",
    "transfer": "time that a send takes its stage",
    "boundary_bytes": "bytes that enter a stage for one micro-batch",
    "activation_bytes": "bytes that a forward keeps if it is not recomputed",
}


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--stages", type=int, default=4, metavar="K", help="number of stages (default: 4)")
    add("--micro-batches", type=int, default=8, metavar="M", help="number of micro-batches (default: 8)")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--schedule", choices=SCHEDULES, default="gpipe", help="default: gpipe")
    choice.add_argument("--csv", type=Path, help="a schedule as a CSV of torch.distributed.pipelining")
    add("--checkpoint", choices=("always", "except_last", "never"), default="except_last")
    for name, text in _PER_STAGE.items():
        option = f"--{name.replace('_', '-')}"
        add(option, type=_numbers, metavar="X[,X...]", help=f"{text}; one number, or one for each stage")
    add("--latency", type=float, help="time from a send until the tensor begins to arrive")
    add("--bandwidth", type=float, help="bytes per unit of time of a connection")
    add("--num-devices", type=int, help="number of ranks of the interleaved schedule")
    add("--draw", action="store_true", help="also draw the schedule, on a time axis of ticks")


def _numbers(text: str) -> float | list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers, such as 2 or 1,2.5, got {text!r}") from None
    return found[0] if len(found) == 1 else found


def _simulate(options: argparse.Namespace) -> int:
    schedule: Any = options.schedule
    names = [*_PER_STAGE, "latency", "bandwidth", "num_devices"]
    costs = {name: value for name in names if (value := getattr(options, name)) is not None}
    stages, microbatches = options.stages, options.micro_batches
    try:
        if options.csv is not None:
            schedule = Schedule.from_csv(options.csv.read_text(encoding="utf-8"))
            stages, microbatches = schedule.num_stages, schedule.num_microbatches
        found = simulate(schedule, stages, microbatches, checkpoint=options.checkpoint, **costs)
    except (ValueError, OSError) as error:
        raise _UsageError(str(error)) from error
    try:
        print(json.dumps(found.to_dict(), indent=2, allow_nan=False) if options.json else found)
    except ValueError as error:  # the sum of finite times is not
        raise _UsageError(f"the times are too large: {error}") from error
    if options.draw and not options.json:
        print(f"\n{found.schedule}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
