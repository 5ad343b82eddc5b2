"""Captured steps on the fake CUDA runtime: bits, races, memory, and changes between replays.

The fake runtime executes a captured graph's operations again at every launch, and destroys the results of the
capture itself; the log contains the accesses of every launch, on new streams.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fake_cuda.fake_devices import FOUR_DEVICES, ONE_DEVICE
from tests.fake_cuda.race_detector import Line, check

MODELS = "mlp/skips/several/batch norm/dropout/tied/convolutions"
CASES = (
    "replaced_parameter",
    "two_forwards_in_flight",
    "backward_twice",
    "other_gradient_layouts",
    "inference",
    "kept_gradients",
    "capture_turned_off",
    "more_shapes_than_places",
    "several_threads",
    "eight_stages_on_one_device",
    "a_second_thread_on_pool_streams",
)
SEVERAL_PLANS = (
    "inference_before_a_backward",
    "two_shapes_in_flight_the_longer_first",
    "two_shapes_in_flight_the_shorter_first",
    "captures_of_other_plans_in_flight",
    "kept_output_blocks_replays",
    "replicated_gradient",
)

Run = Callable[..., list[str]]
Logged = Callable[..., list[Line]]


@pytest.mark.parametrize(
    ("models", "devices", "words"),
    [
        ("skips/batch norm", FOUR_DEVICES, ("except_last",)),
        *(
            pytest.param(models, devices, words, marks=pytest.mark.extended)
            for models, devices, words in (
                *((MODELS, each, ("never", "except_last", "always")) for each in (FOUR_DEVICES, ONE_DEVICE)),
                *(("skips", FOUR_DEVICES, (each, "never")) for each in ("own_streams", "pinned")),
                ("skips", ONE_DEVICE, ("own_streams", "peer", "never")),
            )
        ),
    ],
    ids=str,
)
def test_captured_models_equal_the_plain_loop_without_races(
    models: str, devices: str, words: tuple[str, ...], logged: Logged
) -> None:
    lines = logged("train_models.py", models, devices, "captured", *words, expected=["equal"], late=1)
    assert check(lines) == []


@pytest.mark.parametrize(
    ("cases", "devices", "checkpoint"),
    [
        (("streams_of_one_device_warn_of_nothing", "changed_settings"), FOUR_DEVICES, "always"),
        pytest.param(CASES, FOUR_DEVICES, "always", marks=pytest.mark.extended),
        (SEVERAL_PLANS, ONE_DEVICE, "except_last"),
        pytest.param(SEVERAL_PLANS, ONE_DEVICE, "never", marks=pytest.mark.extended),
        pytest.param(SEVERAL_PLANS, FOUR_DEVICES, "always", marks=pytest.mark.extended),
    ],
    ids=["settings", "cases", "one, except_last", "one, never", "four, always"],
)
def test_changes_and_several_plans_keep_the_bits_without_races(
    cases: tuple[str, ...], devices: str, checkpoint: str, logged: Logged
) -> None:
    """No plan overwrites what another plan keeps for its backward in the graphs' shared memory."""
    expected = [f"{case}: equal" for case in cases]
    words = ("/".join(cases), devices, checkpoint)
    assert check(logged("graph_cases.py", *words, expected=expected, late=1), may_wait=True) == []


@pytest.mark.extended
@pytest.mark.parametrize(
    ("case", "variables", "environment"),
    [
        ("forward_cannot_be_captured", {"synchronizes": "aten::gelu"}, {}),
        ("backward_cannot_be_captured", {"synchronizes": "aten::gelu_backward"}, {}),
        ("allocator_cannot_capture", {}, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}),
        ("allocator_cannot_capture", {}, {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}),
    ],
)
def test_what_cannot_be_captured_runs_uncaptured(
    case: str,
    variables: dict[str, str],
    environment: dict[str, str],
    logged: Logged,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    lines = logged("graph_cases.py", case, FOUR_DEVICES, expected=[f"{case}: equal"], **variables)
    # The log does not have the accesses of devices to the memory pools of others.
    assert environment or check(lines, may_wait=True) == []


@pytest.mark.parametrize("milliseconds", [0, 1000000])
def test_graphs_are_captured_only_if_launches_do_not_hide(logged: Logged, milliseconds: int) -> None:
    case = "captured_only_where_it_pays"
    lines = logged("graph_cases.py", case, FOUR_DEVICES, expected=[f"{case}: equal"], elapsed=milliseconds)
    assert check(lines, may_wait=True) == []


@pytest.mark.extended
def test_a_capture_needs_little_more_memory_than_an_uncaptured_step(run: Run) -> None:
    """The uncaptured steps have already filled the allocator's cache."""
    (needed,) = run("graph_memory.py", "needed_never")
    assert run("graph_memory.py", "captured_never", memory=int(int(needed) * 1.3)) == ["3 replays"]


def test_workspaces_of_other_streams_are_kept(run: Run) -> None:
    """The capture has memory for workspaces in the graphs' pool, because it frees those of its streams."""
    workspace = 64 << 20
    (needed,) = run("graph_memory.py", "needed_always", workspace=workspace)
    # A replay copies the output, which has 40 MiB, and an uncaptured step does not.
    memory = int(int(needed) * 1.3) + (40 << 20)
    found = run("graph_memory.py", "workspaces", workspace=workspace, memory=memory)
    assert found == ["1, 3 replays, 1"]


@pytest.mark.extended
def test_graphs_of_several_lengths_share_memory(run: Run) -> None:
    assert run("graph_memory.py", "several_lengths") == ["several_lengths"]


@pytest.mark.extended
def test_graphs_are_freed_when_memory_runs_out(run: Run) -> None:
    cases = ["short_of_memory_in_a_forward", "short_of_memory_in_a_backward"]
    assert run("graph_memory.py", *cases, memory=720 << 20) == cases
