"""Every kernel and configuration compiled for GPUs, without one: nothing spills; the table is true."""

from __future__ import annotations

import re

import pytest
import triton

from bench.compiled import CAPABILITIES, TABLE, rows
from gpipe_fast.kernels.variants import all_variants
from tests.sampling import sample, seed

# Another Triton makes other code.
WRITTEN_BY = re.findall(r"By Triton (\S+),", TABLE.read_text())[0]
NAMES = list(all_variants())
SAMPLED = sample(NAMES, 16, salt="compiled kernels")
REST = [name for name in NAMES if name not in SAMPLED]
# Variants that are compiled one after another by one test; several tests run at once.
CHUNK = 33


@pytest.mark.skipif(triton.__version__ != WRITTEN_BY, reason=f"the table is by Triton {WRITTEN_BY}")
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(SAMPLED, id="sample"),
        *(
            pytest.param(REST[start : start + CHUNK], id=f"rest from {start}", marks=pytest.mark.extended)
            for start in range(0, len(REST), CHUNK)
        ),
    ],
)
def test_the_table_is_as_compiled(names: list[str]) -> None:
    prefixes = tuple(f"| {name} | sm_" for name in names)
    written = [line for line in TABLE.read_text().splitlines() if line.startswith(prefixes)]
    assert rows(names) == written, f"python -m bench compiled writes the table; GPIPE_FAST_SEED={seed()}"


def test_nothing_spills_and_all_is_there() -> None:
    lines = [line for line in TABLE.read_text().splitlines() if re.match(r"\| \w+ .* \| sm_\d+ ", line)]
    assert len(lines) == len(all_variants()) * len(CAPABILITIES)
    assert all(line.split("|")[5].strip() == "0" for line in lines)
