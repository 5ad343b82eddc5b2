"""For which GPUs an extension has code, given the architectures it was built for."""

from __future__ import annotations

import pytest

from gpipe_fast.reports.doctor import Capability, describe_code

WHEEL = "7.5;8.0;9.0;12.0+PTX"


@pytest.mark.parametrize(
    ("gpu", "archs", "expected"),
    [
        ((9, 0), WHEEL, "the extension has code for it, built for 9.0"),
        ((8, 9), WHEEL, "the extension has code for it, built for 8.0"),
        ((8, 9), "8.0 8.6+PTX", "the extension has code for it, built for 8.6"),
        ((12, 1), WHEEL, "the extension has code for it, built for 12.0"),
        ((10, 3), "10.0f", "the extension has code for it, built for 10.0"),
        ((9, 0), "9.0a", "the extension has code for it, built for 9.0"),
        (
            (13, 0),
            WHEEL,
            "the extension has PTX for it, of 12.0, which the driver compiles when it is loaded; rebuild "
            "with TORCH_CUDA_ARCH_LIST=13.0 to avoid that",
        ),
        (
            (8, 0),
            "7.0+PTX;8.6",
            "the extension has PTX for it, of 7.0, which the driver compiles when it is loaded; rebuild "
            "with TORCH_CUDA_ARCH_LIST=8.0 to avoid that",
        ),
    ],
)
def test_code_for_names_the_binary_or_ptx_that_a_gpu_runs(gpu: Capability, archs: str, expected: str) -> None:
    assert describe_code(gpu, archs) == expected


@pytest.mark.parametrize(
    ("gpu", "archs"),
    [
        ((8, 0), "8.6"),
        ((8, 0), "8.6+PTX"),
        ((11, 0), WHEEL),
        ((7, 0), WHEEL),
        ((10, 0), "8.0;9.0"),
        ((10, 0), "9.0a+PTX"),
        ((9, 1), "9.0a"),
        ((12, 0), "10.0f+PTX"),
    ],
)
def test_code_for_says_how_to_rebuild_for_an_unsupported_gpu(gpu: Capability, archs: str) -> None:
    version = f"{gpu[0]}.{gpu[1]}"
    assert describe_code(gpu, archs) == (
        f"the extension has no code for {version}, only for {archs}; rebuild it with "
        f"TORCH_CUDA_ARCH_LIST={version}"
    )


def test_an_extension_built_without_cuda_has_no_code_for_any_gpu() -> None:
    assert describe_code((9, 0), "none") == (
        "the extension was built without CUDA; rebuild it with a CUDA toolkit for TORCH_CUDA_ARCH_LIST=9.0"
    )


def test_an_architecture_given_by_name_is_reported_as_unknown() -> None:
    assert describe_code((9, 0), "8.0;Hopper") == (
        "unknown whether the extension has code for it: it was built for 8.0;Hopper, and "
        "'Hopper' is not a version"
    )
