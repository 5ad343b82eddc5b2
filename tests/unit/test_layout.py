"""A module's test has its name and its place: tests/unit mirrors gpipe_fast, csrc and kernels.

The test of ``gpipe_fast/lower/split.py`` is ``tests/unit/lower/test_split.py``; tests of an aspect are in
``test_split_ASPECT.py`` beside it. The test of ``csrc/pipeline/minibatch.cpp`` is
``tests/unit/csrc/pipeline/test_minibatch.py``, and ``minibatch_memory.cpp`` belongs to it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "tests" / "unit"
NUMERICS = "tests/unit/kernels/numerics"

# Modules that are tested through the test of another one, which imports them or their package.
TESTED_BY = {
    "gpipe_fast/fuse/accuracy.py": "tests/unit/fuse/test_check.py",
    "gpipe_fast/fuse/compile_helper.py": "tests/unit/fuse/test_cubins.py",
    "gpipe_fast/fuse/cubin.py": "tests/unit/fuse/test_cubins.py",
    "gpipe_fast/fuse/families/losses.py": f"{NUMERICS}/test_fused_losses.py",
    "gpipe_fast/fuse/families/products.py": f"{NUMERICS}/test_fused_products.py",
    "gpipe_fast/fuse/families/rotary.py": f"{NUMERICS}/test_fused_rotary.py",
    "gpipe_fast/fuse/families/stacks.py": f"{NUMERICS}/test_fused_stacks.py",
    "gpipe_fast/fuse/regions/kernel.py": "tests/unit/fuse/regions/test_source.py",
    "gpipe_fast/kernels/rotate_half.py": f"{NUMERICS}/test_stage_launchers.py",
    "gpipe_fast/kernels/stack.py": f"{NUMERICS}/test_stage_launchers.py",
    "gpipe_fast/reports/events.py": "tests/unit/reports/test_recording.py",
    "gpipe_fast/runtime/python_layers.py": "tests/contracts/contract_1_same_bits/test_python_layers.py",
    "gpipe_fast/trace/joint_export.py": "tests/unit/trace/test_trace_wrong_value_pitfalls.py",
    "gpipe_fast/trace/layer_states.py": "tests/unit/runtime/test_state.py",
    "gpipe_fast/trace/triton_calls.py": "tests/unit/fuse/test_user_kernels.py",
}
# Sources in C++ that are tested through the test of another one, by a program, or on the fake CUDA runtime.
CPP_TESTED_BY = {
    "csrc/check": "tests/unit/csrc/program/test_accumulate.py",
    "csrc/bindings/bindings": "tests/unit/csrc/program/test_program.py",
    "csrc/cuda/accumulate": "tests/unit/csrc/program/test_accumulate.py",
    "csrc/cuda/copier": "tests/fake_cuda/test_pipelines.py",
    "csrc/cuda/failure": "tests/fake_cuda/test_robustness.py",
    "csrc/cuda/graph": "tests/fake_cuda/test_graphs.py",
    "csrc/cuda/kernel": "tests/fake_cuda/test_launch.py",
    "csrc/cuda/narrow": "tests/unit/csrc/cuda/test_random.py",
    "csrc/cuda/stream": "tests/fake_cuda/test_waits.py",
    "csrc/device/copier": "tests/fake_cuda/test_pipelines.py",
    "csrc/device/failure": "tests/fake_cuda/test_robustness.py",
    "csrc/device/graph": "tests/fake_cuda/test_graphs.py",
    "csrc/device/stream": "tests/fake_cuda/test_waits.py",
    "csrc/engine/actions": "tests/cpp/test_engine.cpp",
    "csrc/engine/cores": "tests/cpp/test_cores.cpp",
    "csrc/engine/engine": "tests/cpp/test_engine.cpp",
    "csrc/engine/recorder": "tests/unit/reports/test_recording.py",
    "csrc/engine/slots": "tests/cpp/test_engine.cpp",
    "csrc/engine/waiter": "tests/cpp/test_engine.cpp",
    "csrc/pipeline/boundary": "tests/contracts/contract_1_same_bits/test_values.py",
    "csrc/pipeline/captured": "tests/fake_cuda/test_captured_reads.py",
    "csrc/pipeline/device_clock": "tests/fake_cuda/test_recording.py",
    "csrc/pipeline/graph_cache": "tests/fake_cuda/test_graphs.py",
    "csrc/pipeline/graph_report": "tests/fake_cuda/test_graphs.py",
    "csrc/pipeline/inference_stream": "tests/contracts/contract_1_same_bits/test_stream.py",
    "csrc/pipeline/layouts": "tests/fake_cuda/test_graphs.py",
    "csrc/pipeline/lowered_segment": "tests/unit/csrc/pipeline/test_minibatch.py",
    "csrc/pipeline/microbatches": "tests/unit/test_gpipe_batch_dim.py",
    "csrc/pipeline/peers": "tests/unit/distributed/test_ranks.py",
    "csrc/pipeline/pipeline": "tests/unit/csrc/pipeline/test_minibatch.py",
    "csrc/pipeline/plan": "tests/unit/runtime/test_plan.py",
    "csrc/pipeline/python_segment": "tests/contracts/contract_1_same_bits/test_python_layers.py",
    "csrc/pipeline/segment": "tests/unit/runtime/test_segments.py",
    "csrc/pipeline/skip": "tests/contracts/contract_1_same_bits/test_skip_connections.py",
    "csrc/pipeline/stage_state": "tests/unit/csrc/pipeline/test_minibatch.py",
    "csrc/pipeline/statistics": "tests/unit/layers/test_batchnorm.py",
    "csrc/program/kernel": "tests/fake_cuda/test_launch.py",
    "csrc/program/operator": "tests/unit/lower/test_operators.py",
    "csrc/program/parameter_casts": "tests/unit/fuse/test_casts.py",
    "csrc/program/port": "tests/unit/lower/test_program.py",
    "csrc/random/philox": "tests/cpp/test_random.cpp",
    "csrc/transport/channels": "tests/distributed/test_same_bits.py",
    "csrc/transport/coalesced_copy": "tests/fake_cuda/test_pipelines.py",
    "csrc/transport/pinned_ring": "tests/fake_cuda/test_pipelines.py",
    "csrc/transport/process_groups": "tests/distributed/test_same_bits.py",
    "csrc/transport/transport": "tests/fake_cuda/test_pipelines.py",
}
# Tests without a module: of the whole tree, and of contracts that all of csrc keeps.
OF_THE_TREE = {
    f"tests/unit/{name}.py"
    for name in (
        "csrc/test_no_interpreter",
        "kernels/test_cuda",
        "kernels/test_numerics",
        "test_architecture",
        "test_build",
        "test_check_includes",
        "test_contributing",
        "test_count_lines",
        "test_distribution",
        "test_installed",
        "test_interrupted_first_call",
        "test_layout",
        "test_messages",
        "test_public_api",
        "test_readme",
        "test_sampling",
        "test_smoke",
        "torch_private/test_uses",
    )
}


def modules() -> list[str]:
    """Returns the modules that define a function or a class, as paths from the root."""
    found = [*(ROOT / "gpipe_fast").rglob("*.py"), *(ROOT / "gpipe_fast" / "kernels").rglob("*.py")]
    kept = {path for path in found if not path.stem.startswith("__") and _defines(path)}
    return sorted(str(path.relative_to(ROOT)) for path in kept)


def _defines(path: Path) -> bool:
    kinds = ast.FunctionDef, ast.ClassDef
    return any(isinstance(node, kinds) for node in ast.parse(path.read_text()).body)


def sources() -> list[str]:
    """Returns the sources of csrc without extension; ``minibatch`` stands for ``minibatch_memory``, too."""
    csrc = ROOT / "csrc"
    files = (path for path in csrc.rglob("*") if path.suffix in (".cpp", ".cu", ".h"))
    found = {str(path.relative_to(ROOT).with_suffix("")) for path in files}
    return sorted(name for name in found if not any(name.startswith(f"{other}_") for other in found))


def place_of(module: str) -> list[str]:
    """Returns the paths that the test of a module, or of a source, may have."""
    inner = Path(module).relative_to("gpipe_fast") if module.endswith(".py") else Path(module)
    test = f"test_{inner.stem}.py"
    places = [Path("tests/unit") / inner.parent / test]
    if inner.parts[0] == "kernels":
        places.append(Path(NUMERICS) / test)
    return list(map(str, places))


def own_test(module: str) -> str | None:
    return next((place for place in place_of(module) if (ROOT / place).is_file()), None)


def imported(path: Path) -> Iterator[str]:
    """Yields the dotted names that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def unit_tests() -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in UNIT.rglob("test_*.py"))


@pytest.mark.parametrize("table", [TESTED_BY, CPP_TESTED_BY], ids=["modules", "sources"])
def test_every_module_has_a_test_of_its_name_or_an_entry(table: dict[str, str]) -> None:
    names = modules() if table is TESTED_BY else sources()
    assert len(names) > 50
    assert sorted(name for name in names if own_test(name) is None) == sorted(table)


@pytest.mark.parametrize("module", TESTED_BY | CPP_TESTED_BY)
def test_an_entry_names_a_test_that_imports_the_module(module: str) -> None:
    """Or its package. Tests of C++ import what they test through the extension."""
    test = ROOT / (TESTED_BY | CPP_TESTED_BY)[module]
    assert test.is_file()
    if module in TESTED_BY:
        dotted = ".".join(Path(module).with_suffix("").parts)
        assert {dotted, dotted.rpartition(".")[0]} & {*imported(test)}


def test_every_test_has_the_name_of_a_module_or_an_entry() -> None:
    packages = (
        f"{path.parent.relative_to(ROOT)}.py" for path in (ROOT / "gpipe_fast").rglob("*/__init__.py")
    )
    named = [*modules(), *packages, *sources()]
    places = {Path(place) for name in named for place in place_of(name)}
    existing = {place for place in places if (ROOT / place).is_file()}

    def is_of_a_module(test: Path) -> bool:
        aspects = (own for own in existing if own.parent == test.parent)
        return test in places or any(test.stem.startswith(f"{own.stem}_") for own in aspects)

    others = [test for test in unit_tests() if not is_of_a_module(Path(test))]
    of_numerics = [test for test in others if test.startswith(NUMERICS)]  # of regions and families
    assert sorted({*others} - {*of_numerics}) == sorted(OF_THE_TREE)
