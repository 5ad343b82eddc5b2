"""The command lines of examples."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any


class Options(argparse.ArgumentParser):
    """Options that have a default and a help text each, beside ``--quick``, which sets other defaults.

    Args:
        name: the example.
        text: what it does.
        quick: the defaults of ``--quick``.
        options: for each option, its default, whose type it has, and its help; a list takes several values.
    """

    def __init__(
        self, name: str, text: str | None, quick: Mapping[str, Any], **options: tuple[Any, str]
    ) -> None:
        super().__init__(
            prog=f"python -m examples.{name}",
            description=text,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        for option, (default, words) in options.items():
            several: dict[str, Any] = {"nargs": "+"} if isinstance(default, list) else {}
            kind = type(default[0] if several else default)
            self.add_argument(f"--{option}", type=kind, default=default, help=words, **several)
        self.add_argument("--quick", action="store_true", help=f"other defaults: {quick}")
        self.quick = quick

    def read(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """Parses the command line."""
        if self.parse_args(argv).quick:
            self.set_defaults(**self.quick)
        return self.parse_args(argv)
