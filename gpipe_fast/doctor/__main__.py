"""``python -m gpipe_fast.doctor``: the command ``gpipe-fast doctor``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gpipe_fast import command


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a report. Returns the exit status: 1 if a model differs from the plain loop, else 0."""
    return command.main(["doctor", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    sys.exit(main())
