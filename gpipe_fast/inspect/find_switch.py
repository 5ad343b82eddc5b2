"""Finds the part of gpipe_fast that a wrong number comes from: compares steps with each part turned off."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate
from torch import Tensor

from gpipe_fast import switches
from gpipe_fast.gpipe import GPipe
from gpipe_fast.inspect.verify import Report, verify
from gpipe_fast.runtime.stage import TRACING_LOCK


@dataclass(frozen=True)
class SwitchReports:
    """The result of `find_switch`; its string is a table.

    Attributes:
        all_on: the report of `verify` with all parts on.
        by_switch: the reports with one part turned off, by its name in ``gpipe_fast.switches.SWITCHES``.
    """

    all_on: Report
    by_switch: Mapping[str, Report]

    @property
    def causes(self) -> list[str]:
        """The switches that make all differences go away."""
        return [] if self.all_on.ok else [name for name, report in self.by_switch.items() if report.ok]

    def __str__(self) -> str:
        rows = [("nothing", self.all_on), *self.by_switch.items()]
        text: str = tabulate(
            [(name, report.headline) for name, report in rows], ("turned off", "result"), tablefmt="simple"
        )
        return text


def find_switch(
    model: GPipe,
    *args: Any,
    loss_fn: Callable[[Any], Tensor] | None = None,
    also: Sequence[Any] = (),
    **kwargs: Any,
) -> SwitchReports:
    """Runs `verify` with all parts of gpipe_fast on, and then with each part turned off in turn.

    The model traces its layers anew every time. Otherwise, it is left as it was::

        print(find_switch(model, x, lambda y: F.cross_entropy(y, labels), also=[short, long]))

    Args:
        model: the pipeline.
        args: as for `verify`.
        loss_fn: as for `verify`.
        also: mini-batches of other shapes, for which the model is prepared before (see `GPipe.prepare`). A
            template is made after two shapes of one kind, so pass two if the wrong number is in a third.
        kwargs: as for `verify`.

    Raises:
        TypeError: as for `verify`.
        ValueError: as for `verify`.
        RuntimeError: as for `verify`. Under ``backend='aten'``, capture is not turned off.
    """

    def compare(*names: str) -> Report:
        with switches.disabled(*names):
            _forget_programs(model)
            for each in also:
                model.prepare(*(each if isinstance(each, tuple) else (each,)))
            return verify(model, *args, loss_fn=loss_fn, **kwargs)

    names = [name for name in switches.SWITCHES if name != "capture" or model.backend != "aten"]
    try:
        return SwitchReports(compare(), {name: compare(name) for name in names})
    finally:
        _forget_programs(model)


def _forget_programs(model: GPipe) -> None:
    with TRACING_LOCK:
        model._rebuild_stages()
