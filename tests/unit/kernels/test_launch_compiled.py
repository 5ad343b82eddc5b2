"""No kernel spills registers: every variant is compiled for GPUs without one."""

from __future__ import annotations

import pytest

from tests.sampling import sample, seed
from tests.unit.kernels.compiled import kernel_source, spilling
from tools.variants import all_variants

VARIANTS = all_variants()
SAMPLED = sample(list(VARIANTS), 16, salt="compiled kernels")
REST = [name for name in VARIANTS if name not in SAMPLED]
# The number of variants that one test compiles sequentially; several tests run in parallel.
CHUNK = 33


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
def test_no_variant_spills_registers(names: list[str]) -> None:
    found = {name: spilling(kernel_source(VARIANTS[name])) for name in names}
    assert {name: where for name, where in found.items() if where} == {}, f"GPIPE_FAST_SEED={seed()}"
