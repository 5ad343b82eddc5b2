"""The table of compiled kernels: every variant, compiled for GPUs without one, and its register spills."""

from __future__ import annotations

import pytest
import triton

from tests.sampling import sample, seed
from tools import regions
from tools.compiled import CAPABILITIES, TRITON_VERSIONS, measure, read_table
from tools.variants import all_variants

NAMES = list(all_variants())
SAMPLED = sample(NAMES, 16, salt="compiled kernels")
REST = [name for name in NAMES if name not in SAMPLED]
# The number of variants that one test compiles sequentially; several tests run in parallel.
CHUNK = 33


@pytest.mark.skipif(
    triton.__version__ not in TRITON_VERSIONS, reason=f"the table has Triton {' and '.join(TRITON_VERSIONS)}"
)
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(SAMPLED, id="sample", marks=pytest.mark.smoke),
        *(
            pytest.param(REST[start : start + CHUNK], id=f"rest from {start}", marks=pytest.mark.extended)
            for start in range(0, len(REST), CHUNK)
        ),
    ],
)
def test_compiled_kernels_match_their_rows_in_the_table(names: list[str]) -> None:
    written = {row: found for row, found in read_table(triton.__version__).items() if row[0] in names}
    assert measure(names) == written, f"python -m tools compiled writes the table; GPIPE_FAST_SEED={seed()}"


@pytest.mark.parametrize("version", TRITON_VERSIONS)
def test_the_table_has_every_variant_and_none_spills_registers(version: str) -> None:
    found = read_table(version)
    assert set(found) == {(name, capability) for name in NAMES for capability in CAPABILITIES}
    spilling = {row: spilled for row, (_, _, spilled) in found.items() if spilled != "0"}
    assert spilling == {}


def test_no_generated_kernel_spills_registers() -> None:
    newest, oldest = (regions.read_table(version) for version in TRITON_VERSIONS)
    assert newest.keys() == oldest.keys()
    assert len(newest) > 200
    assert {spilled for _, spilled in newest.values()} == {"0"}
    spilling = {row: spilled for row, (_, spilled) in oldest.items() if spilled != "0"}
    # The oldest Triton needs 66 registers in a kernel with 1,024 threads, for which an A100 has 64.
    assert spilling == {("rsqrt_pow_div_50b14de6", 80): "8"}
