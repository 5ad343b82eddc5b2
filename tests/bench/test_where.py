"""Where the time of a step on a GPU is: the arithmetic on made profiles, programs and samples."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._C._autograd import DeviceType

from bench import measure
from bench.gpu import bare, levers, shares, where
from bench.gpu.shares import ATTENTION, COPY, GENERATED, IDLE, OTHER, PRODUCT, Interval
from bench.gpu.subjects import ROWS
from bench.peers import Step
from gpipe_fast import GPipe
from gpipe_fast.container import runner_of
from gpipe_fast.lower import accumulation
from gpipe_fast.lower.operator_examples import Spec
from gpipe_fast.lower.work import Work

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def products_that_accumulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """On some processors, a product that adds to a gradient has other bits, and is none of a step."""
    monkeypatch.setattr(accumulation, "addmm_is_bitwise_equal", lambda a, b: True)


GEMM, FLASH = "nvjet_hsh_128x256_64x4_TNT", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma"
KINDS_OF = {
    GEMM: PRODUCT,
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n": PRODUCT,
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm>": PRODUCT,
    "void cublasLt::splitKreduce_kernel<32, 16>": PRODUCT,
    "sm80_xmma_wgrad_implicit_gemm_indexed_tf32f32": PRODUCT,
    FLASH: ATTENTION,
    "void pytorch_flash::flash_fwd_kernel<...cutlass::bfloat16_t>": ATTENTION,
    "fmha_cutlassB_bf16_aligned_64x64_k64_sm80": ATTENTION,
    "triton_poi_fused_gelu_0": GENERATED,
    "layer_norm_36540e5a": GENERATED,
    "layer_norm_other": OTHER,
    "Memcpy DtoD (Device -> Device)": COPY,
    "Memset (Device)": COPY,
    "void at::native::vectorized_elementwise_kernel<4>": OTHER,
}


def test_kernels_are_told_apart_by_their_names() -> None:
    found = {name: shares.kind_of(name, {"layer_norm_36540e5a"}) for name in KINDS_OF}
    assert found == KINDS_OF


def test_shares_are_unions_that_add_up_to_the_step() -> None:
    intervals = [
        Interval(GEMM, 0, 4),
        Interval(GEMM, 3, 6),  # beside the first, on another stream
        Interval("mine", 5, 8),  # one microsecond beside a product
        Interval("Memset (Device)", 2, 3),  # wholly beside a product
        Interval(FLASH, 10, 12),
        Interval("void copy", 19, 30),  # ends behind the step
        Interval(GEMM, -5, -1),  # before the step
    ]
    found = shares.shares(intervals, -0.5, 20, {"mine"})
    assert found == {PRODUCT: 6, ATTENTION: 2, GENERATED: 2, COPY: 0, OTHER: 1, IDLE: 9.5}
    assert sum(found.values()) == 20.5
    assert shares.shares([], 3, 5)[IDLE] == 2
    assert shares.time_by_name(intervals[:3]) == {GEMM: (2, 7), "mine": (1, 3)}


def test_a_profile_has_the_kernels_of_the_annotated_step() -> None:
    def event(name: str, begin: float, end: float, on_gpu: bool = True, annotated: bool = False) -> object:
        kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
        range_ = SimpleNamespace(start=begin, end=end)
        return SimpleNamespace(name=name, device_type=kind, time_range=range_, is_user_annotation=annotated)

    events = [
        event(shares.STEP, 10, 20, on_gpu=False, annotated=True),
        event(shares.STEP, 11, 19, annotated=True),
        event("PP:2F0", 11, 18, annotated=True),
        event("early", 1, 2),
        event("mine", 12, 13),
        event("aten::mm", 11, 12, on_gpu=False),
    ]
    assert shares.profile_of(events) == ([Interval("mine", 12, 13)], 10, 20)


def stages_of_two_layers(checkpoint: str) -> tuple[GPipe, torch.Tensor]:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    pipe = GPipe(model, [2, 1], devices=["cpu"] * 2, chunks=4, checkpoint=checkpoint)
    x = torch.randn(12, 8)
    pipe(x).sum().backward()
    return pipe, x


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_products_of_a_step_are_counted_with_their_shapes(checkpoint: str) -> None:
    pipe, _ = stages_of_two_layers(checkpoint)
    calls = bare.bare_calls(bare.programs_of(runner_of(pipe).planner, checkpoint, 4))
    forwards = 8 if checkpoint == "always" else 4  # the last layer is not needed again
    found = {(call.shapes().partition(" ")[2], call.operations()): number for call, number in calls.items()}
    assert found["16, 3x8, 8x16T, 3x16", 2 * 3 * 8 * 16] == forwards
    assert found["4, 3x16, 16x4T, 3x4", 2 * 3 * 16 * 4] == 4
    of_weights = {shape: number for (shape, _), number in found.items() if shape.startswith(("16x8", "4x16"))}
    # The first micro-batch writes the gradient of a weight; the others add to it.
    assert of_weights == {"16x8, 16x3T, 3x8": 3, "4x16, 4x3T, 3x16": 3}


def test_the_bare_call_computes_what_the_operator_computes() -> None:
    pipe, _ = stages_of_two_layers("never")
    for call in bare.bare_calls(bare.programs_of(runner_of(pipe).planner, "never", 4)):
        args, kwargs = call.examples("cpu")
        accumulates = call.shapes().startswith("float32 16x8")
        if accumulates:
            assert args[0] is kwargs["out"]
        assert isinstance(call.op(*args, **kwargs), torch.Tensor)


def test_attention_that_is_causal_counts_half_of_its_square() -> None:
    op = torch.ops.aten._scaled_dot_product_flash_attention.default
    operand = bare.Operand(0, Spec((2, 3, 64, 8), (1536, 512, 8, 1), torch.bfloat16))
    for causal, operations in ((False, 2 * 2 * 3 * 2 * 64 * 64 * 8), (True, 2 * 3 * 2 * 64 * 64 * 8)):
        arguments = (operand, operand, operand, 0.0, causal, False, None)
        assert bare.BareCall(op, arguments, ()).operations() == operations
    assert bare.BareCall(op, arguments, ()).operands() == [operand]


def test_bare_rows_add_up_and_begin_with_the_longest() -> None:
    pipe, _ = stages_of_two_layers("never")
    calls = bare.bare_calls(bare.programs_of(runner_of(pipe).planner, "never", 4))

    def microseconds_of(call: bare.BareCall) -> float:
        if call.shapes().startswith("float32 16,"):
            raise RuntimeError("cannot run alone")
        return 1000.0 if call.shapes().startswith("float32 4,") else 10.0

    rows, total = bare.bare_rows(calls, microseconds_of)
    others = sum(number for call, number in calls.items() if not call.name.startswith("addmm"))
    others += 6  # of weights
    assert total == pytest.approx(4 * 1.0 + others * 0.01)
    assert rows[0][2:] == [4, "1000.0", "4.00", f"{2 * 3 * 16 * 4 / 1e9:.3g}"]
    assert "FAILED: cannot run alone" in str(rows[-1])


def test_rates_and_ratios_follow_from_times_and_bytes() -> None:
    found = {"short": (4, 20.0, 40_000_000), "long": (2, 100.0, 100_000_000), "absent": (0, 0.0, 5)}
    rows = where.generated_rows(found, copied=4e6)
    assert rows[0] == ["long", 2, "0.10", "100", "1000", "25%"]
    assert rows[1] == ["short", 4, "0.02", "40", "2000", "50%"]
    assert rows[2][-2:] == ["-", "-"]
    text = where.sums_text({"captured": 30.0, "not captured": 24.0}, 20.0, Work(3 * 10**9, 10**9), 4e6)
    assert "captured 1.50, not captured 1.20" in text
    assert "4.00 GB" in text
    assert "1.00 ms at the 4000 GB/s" in text
    x = torch.zeros(1000)
    text = where.inputs_text(Step([], nn.Identity(), x, x), Work(50_000, 10_000, by_libraries=24_000))
    assert "0.02 of 0.10 MB that a captured step moves, 16.0%" in text
    lines = ["345, 1980, 90.5, 700.0, 30"] * 3 + ["1755, 1980, 650.0, 700.0, 61"] * 4
    assert where.clock_text(lines) == "SM clock 1755 of 1980 MHz, 650 of 700 W, 61 °C. "
    assert where.clock_text(["[N/A]"]) == where.clock_text([]) == "The clock is unknown. "


def test_the_order_of_candidates_is_rotated() -> None:
    ran: list[str] = []
    found = measure.samples({name: lambda name=name: ran.append(name) for name in "abc"}, rounds=3)
    assert "".join(ran) == "abcbcacababc"
    assert [len(times) for times in found.values()] == [3, 3, 3]


def test_every_row_and_lever_has_its_place() -> None:
    assert set(where.ORDER) <= ROWS.keys()
    for row in ROWS.values():
        assert row.full.names == row.small.names or row.title.startswith("ResNet"), row.title
        assert set(row.untimed) <= set(row.full.names)
    # Programs and kernels are those of uncaptured steps.
    assert all("gpipe_fast, not captured" in ROWS[r].full.names for r in where.ORDER)
    assert all(each.off != each.on for each in levers.LEVERS.values())


@pytest.mark.extended
def test_all_tables_are_written_for_a_small_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    assert where.main(["tiny-never", "--device=cpu", "--seconds=300"])
    (path,) = tmp_path.glob("cpu-*-where.md")
    text = path.read_text()
    assert "step / bare sum: gpipe_fast, captured " in text
    assert text.count("| addmm ") == 2
    for title in ("the time of a step", "bare products and attention", "the halves of a step"):
        assert f": {title}\n" in text


@pytest.mark.extended
def test_levers_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    assert levers.main(["fuse", "--device=cpu", "--seconds=300"])
    (path,) = tmp_path.glob("cpu-*-levers.md")
    assert path.read_text().count("fused kernels, captured") == 1
