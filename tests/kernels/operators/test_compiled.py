"""Every kernel and configuration compiled for GPUs, without one: nothing spills; the table is true."""

from __future__ import annotations

import re

import pytest
import triton

from bench.compiled import CAPABILITIES, TABLE, rows
from gpipe_fast.kernels.variants import all_variants

FAMILIES = sorted({name.split()[0] for name in all_variants()})
# Another Triton makes other code.
WRITTEN_BY = re.findall(r"By Triton (\S+),", TABLE.read_text())[0]


@pytest.mark.skipif(triton.__version__ != WRITTEN_BY, reason=f"the table is by Triton {WRITTEN_BY}")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_is_as_compiled(family: str) -> None:
    names = [name for name in all_variants() if name.split()[0] == family]
    written = [line for line in TABLE.read_text().splitlines() if line.startswith(f"| {family} ")]
    assert rows(names) == written, "python -m bench compiled writes the table"


def test_nothing_spills_and_all_is_there() -> None:
    lines = [line for line in TABLE.read_text().splitlines() if re.match(r"\| \w+ .* \| sm_\d+ ", line)]
    assert len(lines) == len(all_variants()) * len(CAPABILITIES)
    assert all(line.split("|")[5].strip() == "0" for line in lines)
