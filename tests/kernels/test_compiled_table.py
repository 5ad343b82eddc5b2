"""The table of compiled kernels: every variant, compiled for GPUs without one, and its register spills."""

from __future__ import annotations

import re

import pytest
import triton

from bench.compiled import CAPABILITIES, TABLE, compile_variant, rows
from gpipe_fast.kernels.variants import all_variants
from tests.sampling import sample, seed

# Other versions of Triton generate other code.
TABLE_TRITON_VERSION = re.findall(r"By Triton (\S+),", TABLE.read_text())[0]
NAMES = list(all_variants())
SAMPLED = sample(NAMES, 16, salt="compiled kernels")
REST = [name for name in NAMES if name not in SAMPLED]
# The number of variants that one test compiles sequentially; several tests run in parallel.
CHUNK = 33
# The variants that draw dropout's random numbers.
WITH_DROPOUT = [name for name in NAMES if "dropout" in name]


@pytest.mark.skipif(
    triton.__version__ != TABLE_TRITON_VERSION, reason=f"Triton {TABLE_TRITON_VERSION} wrote the table"
)
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
def test_compiled_kernels_match_their_rows_in_the_table(names: list[str]) -> None:
    prefixes = tuple(f"| {name} | sm_" for name in names)
    written = [line for line in TABLE.read_text().splitlines() if line.startswith(prefixes)]
    assert rows(names) == written, f"python -m bench compiled writes the table; GPIPE_FAST_SEED={seed()}"


@pytest.mark.smoke
@pytest.mark.parametrize("name", sample(WITH_DROPOUT, 6, salt="dropout"))
def test_kernels_with_dropout_compile_with_every_supported_triton(name: str) -> None:
    assert compile_variant(all_variants()[name], 90).asm["cubin"]


def test_the_table_has_every_variant_and_no_register_spills() -> None:
    lines = [line for line in TABLE.read_text().splitlines() if re.match(r"\| \w+ .* \| sm_\d+ ", line)]
    assert len(lines) == len(all_variants()) * len(CAPABILITIES)
    assert all(line.split("|")[5].strip() == "0" for line in lines)
