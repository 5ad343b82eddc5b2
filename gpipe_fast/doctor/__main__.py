"""Prints the report on this machine; with ``--check``, also compares small models with the plain loop."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence

from gpipe_fast.inspect.case_processes import connect_to_parent
from gpipe_fast.inspect.check import check, run_here
from gpipe_fast.inspect.doctor import doctor


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a report. Returns the exit status: 1 if a model differs from the plain loop, else 0."""
    parser = argparse.ArgumentParser("python -m gpipe_fast.doctor", description="Reports on this machine.")
    parser.add_argument(
        "--check",
        action="store_true",
        help="also compare small models with the plain loop, in every checkpoint mode and over every "
        "transport, in about a minute; the exit status is 1 if a result differs",
    )
    parser.add_argument("--devices", nargs="+", metavar="DEVICE", help="one device per stage of these models")
    parser.add_argument("--here", nargs="+", help=argparse.SUPPRESS)  # cases for a child process of check()
    options = parser.parse_args(arguments)
    if not options.check:
        print(doctor())
        return 0
    if options.here:
        send = connect_to_parent()
        for message in run_here(options.devices, options.here):
            send(message)
        return 0
    return 0 if check(options.devices, functools.partial(print, flush=True)) else 1


if __name__ == "__main__":
    sys.exit(main())
