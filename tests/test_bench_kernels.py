"""What benchmarks know of kernels, without a GPU: bytes, registrations, tables, tuning."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import bench.__main__
from bench import accuracy, gpu, kernels, liger, measure, traffic, tune
from bench.case import DTYPES, Case, Judge, Shape, Tuning
from bench.families import all_cases, all_tunings
from gpipe_fast.kernels import launch as launching
from gpipe_fast.kernels.launch import TUNED, Config, forced, launch, tuned
from gpipe_fast.kernels.variants import all_variants

ROWS, COLS = 4096, 4096
SIZES = {"fp32": 4, "bf16": 2}

every_case = pytest.mark.parametrize("name", all_cases())
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def doubled(rows: int = 4) -> Case:
    """A function that is no kernel's: 2 x, whose gradient is 2 g."""

    def inputs(elements: int, dtype: torch.dtype, device: str) -> list[Tensor]:
        return [torch.randn(rows, elements // rows, dtype=dtype, device=device)]

    def ours(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * x, 2 * g

    return Case("doubled", inputs, (0,), lambda x: x + x, ours, ours)


# Bytes.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["relu", "silu", "gelu", "gelu_tanh"])
def test_bytes_of_bias_and_activation(activation: str, dtype: str) -> None:
    case, size = all_cases()[f"bias_activation {activation}"], SIZES[dtype]
    matrix, row, partial_sums = ROWS * COLS * size, COLS * size, 128 * COLS * 4
    # z + bias, the activation, its gradient, and the sum of that.
    unfused = (2 * matrix + row) + 2 * matrix + 3 * matrix + (matrix + row)
    assert traffic.unfused_bytes(case, ROWS * COLS, DTYPES[dtype]) == unfused
    # The kernel, the addition of its partial sums, and the cast of the result.
    fused = (4 * matrix + row + partial_sums) + (partial_sums + COLS * 4)
    fused += COLS * 4 + row if dtype == "bf16" else 0
    assert traffic.fused_bytes(case, ROWS * COLS, DTYPES[dtype]) == fused
    shown = [f"bias_activation {activation}", dtype, unfused / ROWS / COLS, fused / ROWS / COLS]
    assert traffic.row(case, dtype)[:4] == shown


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "unfused", "fused"),
    [
        # x, y; g, x, dx.
        ("layer_norm", 2 + 3, 4),
        ("rms_norm", 2 + 3, 4),
        # The sum and the addition of its gradient from elsewhere; h, residual, g, g_sum, y, dx.
        ("rms_norm with residual", 3 + 2 + 3 + 3, 6),
        # The activation and the product; its two gradients and the activation's. 3 are read and written.
        ("gated_activation silu", 2 + 3 + 3 + 3 + 3, 6),
        # The halves of the gradient are put side by side.
        ("gated_activation silu, packed", 2 + 3 + 3 + 3 + 3 + 4, 6),
    ],
)
def test_bytes_of_what_is_as_large_as_the_input(name: str, unfused: int, fused: int, dtype: str) -> None:
    case, matrix = all_cases()[name], ROWS * COLS * SIZES[dtype]
    found = traffic.unfused_bytes(case, ROWS * COLS, DTYPES[dtype])
    assert found / matrix == pytest.approx(unfused, rel=2e-3)
    # Two programs of each multiprocessor write sums for weight and bias, which are read again.
    parameters = {"layer_norm": 2, "rms_norm": 1}.get(name.split()[0], 0)
    partial_sums = parameters * 2 * 132 * COLS * 4
    counted_bytes = traffic.fused_bytes(case, ROWS * COLS, DTYPES[dtype]) - 2 * partial_sums
    assert counted_bytes / matrix == pytest.approx(fused, rel=2e-3)


def test_bytes_of_dropout() -> None:
    case, elements = all_cases()["dropout_add"], ROWS * COLS
    # A mask of one byte is written, and read again; the key is of 24.
    assert traffic.unfused_bytes(case, elements, torch.bfloat16) == elements * (2 * (2 + 3 + 2) + 2)
    assert traffic.fused_bytes(case, elements, torch.bfloat16) == elements * 2 * (3 + 2) + 2 * 24


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "unfused", "fused", "parameters"),
    [
        # The sum with the bias, the activation, dropout; the gradients of these and of the bias.
        ("bias_activation gelu with dropout", 2 + 2 + 2 + 2 + 3 + 1, 4, 0),
        ("gated_activation silu with dropout", 2 + 3 + 2 + 2 + 3 + 3 + 3, 6, 0),
        # Dropout, the sum, the norm; its gradient, that from elsewhere added, that of dropout.
        ("layer_norm with residual and dropout", 2 + 3 + 2 + 3 + 3 + 2, 7, 2),
    ],
)
def test_bytes_with_dropout_behind(name: str, unfused: int, fused: int, parameters: int, dtype: str) -> None:
    case, elements = all_cases()[name], ROWS * COLS
    masks = 2 * elements
    found = traffic.unfused_bytes(case, elements, DTYPES[dtype]) - masks
    assert found / (elements * SIZES[dtype]) == pytest.approx(unfused, rel=2e-3)
    # Sums of programs are written, and read again: of 128, or two of each multiprocessor.
    partial_sums = (parameters * 2 * 132 or 128 * name.startswith("bias")) * COLS * 4
    counted_bytes = traffic.fused_bytes(case, elements, DTYPES[dtype]) - 2 * partial_sums
    assert counted_bytes / (elements * SIZES[dtype]) == pytest.approx(fused, rel=2e-3)


def test_bytes_of_what_is_computed_in_place() -> None:
    rotary, unscale = all_cases()["rotary halves"], all_cases()["multi_tensor unscale"]
    tables = 2 * 2048 * 64 * 4
    assert traffic.fused_bytes(rotary, 1 << 24, torch.bfloat16) == 2 * (2 * (2 << 24) + tables)
    assert traffic.fused_bytes(unscale, 1 << 24, torch.bfloat16) == 2 * (2 << 24)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_of_cross_entropy(dtype: str) -> None:
    case, (rows, classes) = all_cases()["cross_entropy mean"], (ROWS, 32000)
    matrix = rows * classes * SIZES[dtype]
    unfused = traffic.unfused_bytes(case, rows * classes, DTYPES[dtype])
    fused = traffic.fused_bytes(case, rows * classes, DTYPES[dtype])
    # x, log p; the gradient of log p, in which few are not 0; that, log p and dx. Targets are of 8 bytes.
    assert 2 * rows * 8 <= unfused - (2 + 1 + 3) * matrix < 32 * rows
    # The kernel in place; targets are counted and looked up, and losses of 4 bytes added.
    assert (3 * 8 + 2 * 4) * rows <= fused - 2 * matrix < 48 * rows


@pytest.mark.parametrize(("rows", "chunks"), [(1000, 1), (4096, 4)])
def test_bytes_of_cross_entropy_in_chunks(rows: int, chunks: int) -> None:
    case, (classes, features) = all_cases()["cross_entropy mean, with the linear layer"], (32000, 1024)
    fp32, bf16 = (traffic.fused_bytes(case, rows * classes, dtype) for dtype in DTYPES.values())
    # x, logits; the kernel in place; dlogits, dx; dlogits, x.
    each_row = 2 * features + 5 * classes + features
    # By chunk the weight twice; its gradient is written, and read by each but the first.
    weights = classes * features
    assert fp32 == 4 * (rows * each_row + weights * (4 * chunks - 1))
    # In fp32, and its cast, if there are several.
    gradient = 4 * (2 * chunks - 1) + 4 + 2 if chunks > 1 else 2
    assert bf16 == 2 * rows * each_row + weights * (2 * 2 * chunks + gradient)


def test_what_is_given_as_addresses_is_counted_by_its_case() -> None:
    case = replace(doubled(), moved=lambda inputs, gradients: sum(t.nbytes for t in (*inputs, *gradients)))
    assert traffic.fused_bytes(case, 64, torch.float32) == 512


def counted(function: Callable[[], object]) -> tuple[int, int]:
    with traffic.Traffic() as found:
        function()
    return found.read, found.written


def test_views_and_allocations_move_nothing() -> None:
    x = torch.empty(8, 16, device="meta")
    assert counted(lambda: x.t().reshape(16, 8)[1:].chunk(3)) == (0, 0)
    assert counted(lambda: (torch.empty_like(x), x.new_empty(3), torch.empty(4, device="meta"))) == (0, 0)
    assert counted(lambda: torch.zeros(4, device="meta")) == (0, 16)


def test_a_storage_is_read_once_by_an_operator_and_not_beyond_what_is_shown() -> None:
    x = torch.empty(8, 16, device="meta")
    assert counted(lambda: x + x) == (512, 512)
    assert counted(lambda: x[:2] * x[6:]) == (256, 128)
    assert counted(lambda: torch.mul(x[:, ::2], x[:, 1::2])) == (512, 256)
    assert counted(lambda: x + x[:1]) == (512, 512)
    assert counted(lambda: torch.ones(1, device="meta").expand(100).sum()) == (4, 8)


def test_what_is_computed_in_place_is_read_and_written() -> None:
    x, y = torch.empty(2, 100, device="meta")
    assert counted(lambda: x.mul_(y)) == (800, 400)
    assert counted(lambda: x.copy_(y)) == (400, 400)
    assert counted(x.zero_) == (0, 400)
    assert counted(lambda: torch._foreach_add_([x, y], 1.0)) == (800, 800)


def test_launches_read_what_was_there_and_write_what_was_not() -> None:
    x, y = (torch.empty(8, 16, device="meta") for _ in range(2))
    found = traffic.Traffic()
    with found.counting_launches([y]):
        made = torch.empty_like(x)
        launch(None, (1,), Config({}), x, x[:4], made, 7)
        assert (found.read, found.written) == (512, 512)
        launch(None, (1,), Config({}), made, 7)
        assert (found.read, found.written) == (1024, 512)
        launch(None, (1,), Config({}), y)
        assert (found.read, found.written) == (1536, 1024)
        launch(None, (0,), Config({}), y)
        assert found.moved == 2560


# Registrations.


def test_every_family_is_registered() -> None:
    assert {name.split()[0] for name in all_cases()} == {name.split()[0] for name in all_variants()}
    assert {tuning.case.name.split()[0] for tuning in all_tunings().values()} <= {
        name.split()[0] for name in all_variants()
    }


@every_case
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_case_computes_what_pytorch_does(name: str, dtype: str) -> None:
    case = all_cases()[name]
    inputs = case.inputs(1 << 14, DTYPES[dtype], "cpu")
    gradients = case.gradients(inputs)
    judge = Judge.of(case, inputs, gradients)
    assert judge.excess(gpu.ours(case, inputs, gradients).run()) <= 1
    assert traffic.fused_bytes(case, 1 << 14, DTYPES[dtype]) > 0
    if case.exact is None:
        compiled = kernels.candidates(case, inputs, gradients, backend="aot_eager")[kernels.INDUCTOR]
        assert kernels.judged(compiled, judge, peer=True) <= 1


@every_case
def test_fused_moves_less(name: str) -> None:
    case = all_cases()[name]
    if case.memory_bound:
        assert all(str(traffic.row(case, dtype)[-1])[0] != "-" for dtype in DTYPES)


class Asked(dict[str, Config]):
    """In place of what is forced: nothing is, but it is known what was asked for."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __contains__(self, name: object) -> bool:
        self.names.append(str(name))
        return False


@pytest.mark.parametrize("kernel", all_tunings())
def test_launchers_ask_for_the_shape_classes_that_are_tuned(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuning = all_tunings()[kernel]
    for name, shape in tuning.shapes.items():
        asked = Asked()
        monkeypatch.setattr(launching, "_forced", asked)
        inputs = shape.inputs(torch.float32, "meta")
        with traffic.Traffic().counting_launches():
            tuning.case.launched(*inputs, *tuning.case.gradients(inputs))
        assert f"{kernel} {name}" in asked.names
        assert len({str(config) for config in shape.candidates}) == len(shape.candidates) > 1


@pytest.mark.skipif(not TUNED.exists(), reason="nothing has been tuned")
def test_what_was_tuned_is_a_candidate() -> None:
    known = {
        f"{kernel} {name}": [str(config) for config in shape.candidates]
        for kernel, tuning in all_tunings().items()
        for name, shape in tuning.shapes.items()
    }
    for kept in json.loads(TUNED.read_text()).values():
        for name, config in kept.items():
            assert str(Config(**config)) in known[name]


# Tables.


def measured(**changed: object) -> kernels.Measured:
    case = all_cases()["bias_activation gelu"]
    excess = {kernels.OURS: 0.5, kernels.EAGER: 0.0, kernels.INDUCTOR: 0.7, kernels.LIGER: 9.0}
    times = {kernels.OURS: 100.0, kernels.EAGER: 250.0, kernels.INDUCTOR: 150.0, kernels.LIGER: 50.0}
    samples = {name: [time] * 5 for name, time in {**times, kernels.COPY: 90.0}.items()}
    return replace(kernels.Measured(case, "fp32", 16, excess, samples), **changed)


def test_a_row_of_measurements() -> None:
    row = dict(zip(kernels.HEADERS, measured().row(), strict=True))
    rate = traffic.fused_bytes(all_cases()["bias_activation gelu"], 1 << 24, torch.float32) / 100e-6 / 1e9
    assert row["ours, µs"] == "100.0 [100.0, 100.0]"
    assert row["GB/s"] == f"{rate:.0f}"
    assert row["of copy"] == "90%"
    assert row["eager / ours"] == "2.500 [2.500, 2.500]"
    assert row["Inductor / ours"] == "1.500 [1.500, 1.500]"
    assert row["Liger-Kernel / ours"] == "another function"
    assert row["error"] == "0.50"
    assert measured(times={k: [1.0, 2.0] for k in (kernels.OURS, kernels.COPY)}).row()[6:9] == ["-"] * 3


@pytest.mark.parametrize("off", [1.01, float("inf"), float("nan")])
def test_what_is_wrong_gets_no_times(off: float) -> None:
    row = measured(excess={kernels.OURS: off}).row()
    assert row[:3] == ["bias_activation gelu", "fp32", 16]
    assert set(row[3:-1]) == {"-"}
    assert str(row[-1]).startswith("WRONG")
    assert len(row) == len(kernels.HEADERS)
    assert measured(fault="out of memory").row()[-1] == "out of memory"


def test_what_was_measured_is_kept_if_time_runs_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left = iter(range(3))

    def attempt(case: Case, dtype: str, millions: int) -> kernels.Measured:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return measured(case=case, dtype=dtype, millions=millions)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU that nothing was tuned for")
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    monkeypatch.setattr(measure, "machine", lambda: "A machine")
    monkeypatch.setattr(kernels, "attempt", attempt)
    with pytest.raises(KeyboardInterrupt):
        kernels.main(["rms_norm"])
    lines = (tmp_path / "kernels_rms_norm.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:4]] for line in lines if line.startswith("| rms")]
    # The largest first, in the order of functions.
    expected = [["rms_norm", dtype] for dtype in DTYPES] + [["rms_norm with residual", "fp32"]]
    assert cells == [[*row, "256"] for row in expected]
    assert "rms_norm | fp32 | 256" in capsys.readouterr().out


def a_microsecond_each(candidates: Mapping[str, gpu.Candidate], rounds: int) -> dict[str, list[float]]:
    for candidate in candidates.values():
        candidate.reset()
        candidate.run()
    return {name: [1.0] * rounds for name in candidates}


def test_what_is_right_is_timed_beside_its_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    case = all_cases()["bias_activation relu"]
    inputs = case.inputs
    case = replace(
        case,
        inputs=lambda elements, dtype, device: inputs(1 << 14, dtype, device),
        liger=lambda z, bias: torch.relu(z + bias).mul(1.01),
    )
    monkeypatch.setattr(liger, "available", lambda: True)
    arguments = {"device": "cpu", "backend": "aot_eager", "sample": a_microsecond_each}
    found = kernels.measure(case, "bf16", 1, **arguments)
    assert found.excess[kernels.OURS] <= 1
    assert set(found.times) == {kernels.OURS, *kernels.PEERS, kernels.COPY}
    assert [str(cell)[:5] for cell in found.row()[5:9]] == ["100%", "1.000", "1.000", "1.000"]
    wrong = replace(case, ours=lambda z, bias, g: case.ours(z, bias * 1.1, g))
    assert kernels.measure(wrong, "bf16", 1, **arguments).times == {}

    def raises(*tensors: Tensor) -> Tensor:
        raise RuntimeError("too many columns")

    without = kernels.measure(replace(case, liger=raises), "bf16", 1, **arguments)
    assert kernels.LIGER not in without.times


def test_a_wrong_candidate_is_noticed() -> None:
    case = doubled()
    inputs = case.inputs(64, torch.float32, "cpu")
    gradients = case.gradients(inputs)
    judge = Judge.of(case, inputs, gradients)
    assert judge.excess(case.fused(inputs, gradients)) == 0
    for wrong in (
        lambda x, g: (2 * x, 2 * g * (1 + 1e-6)),
        lambda x, g: (2 * x,),
        lambda x, g: (2 * x, (2 * g)[0]),
        lambda x, g: (2 * x, 2 * g.half()),
        lambda x, g: (2 * x, torch.full_like(g, float("nan"))),
    ):
        assert judge.excess(replace(case, ours=wrong).fused(inputs, gradients)) > 1


def test_candidates_in_place_start_anew() -> None:
    case = replace(doubled(), ours=lambda x, g: (x.mul_(2), g.mul_(2)), overwritten=(0, 1))
    inputs = case.inputs(64, torch.float32, "cpu")
    gradients = case.gradients(inputs)
    judge, candidate = Judge.of(case, inputs, gradients), gpu.ours(case, inputs, gradients)
    for _ in range(2):
        assert kernels.judged(candidate, judge, peer=False) == 0
    assert judge.excess(candidate.run()) > 1
    assert torch.equal(case.unfused(inputs, gradients)[0], judge.eager[0])


def test_errors_are_shares_of_those_allowed() -> None:
    truth = [torch.tensor([1.0, 2.0], dtype=torch.float64)]
    exact, off = [truth[0].float()], [torch.tensor([1.0, 2.5])]
    assert accuracy.excess(exact, exact, truth) == [0.0]
    assert accuracy.excess(off, off, truth) == [0.5]
    assert accuracy.excess([truth[0].float() + 2.0], off, truth) == [2.0]
    zeros = [torch.zeros(2, dtype=torch.float64)]
    assert accuracy.excess([torch.ones(2)], [torch.zeros(2)], zeros) == [float("inf")]
    accuracy.check(off, off, truth)
    with pytest.raises(AssertionError, match="2"):
        accuracy.check([truth[0].float() + 2.0], off, truth)


@without_gpu
def test_without_a_gpu_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    kernels.main()
    assert "needs a GPU" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    with pytest.raises(SystemExit, match=r"no family is called nobody; there are .*bias_activation"):
        kernels.main(["nobody"])
    assert {"kernels", "traffic"} < set(bench.__main__.BENCHMARKS)


def test_wheels_are_pinned() -> None:
    root = Path(__file__).parents[1]
    pinned = {line.partition("==")[0] for line in (root / "requirements.txt").read_text().splitlines()}
    for line in (root / "bench" / "wheelhouse.txt").read_text().splitlines():
        assert line.startswith("#") or "==" in line or line in pinned, line


# Tuning.


def tuning_of(takes: Mapping[str, float], wrong: str = "", fails: str = "") -> tuple[Tuning, gpu.Sample]:
    """A kernel without a GPU whose configurations take so long; and a clock that knows it."""
    launched: list[str] = []
    default = Config({"BLOCK": 1})

    def ours(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        config = str(tuned("doubled", "all", default))
        launched.append(config)
        if config == fails:
            raise RuntimeError("out of resource: registers")
        return (3 if config == wrong else 2) * x, 2 * g

    def sample(candidates: Mapping[str, gpu.Candidate], rounds: int) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for name, candidate in candidates.items():
            candidate.run()
            found[name] = [takes[launched[-1]]] * rounds
        return found

    configs = [Config({"BLOCK": size}) for size in (1, 2, 4)]
    case = replace(doubled(), ours=ours, launched=ours)
    shape = Shape(lambda dtype, device: case.inputs(64, dtype, device), configs)
    return Tuning("doubled", case, {"all": shape}), sample


def test_the_fastest_right_configuration_is_found() -> None:
    one, two, four = (str(Config({"BLOCK": size})) for size in (1, 2, 4))
    takes = {one: 9.0, two: 6.0, four: 3.0}
    tuning, sample = tuning_of(takes)
    assert tune.search(tuning, "all", "cpu", sample) == tune.Outcome(Config({"BLOCK": 4}), 3.0, 0)
    for broken in ({"wrong": four}, {"fails": four}):
        tuning, sample = tuning_of(takes, **broken)
        assert tune.search(tuning, "all", "cpu", sample) == tune.Outcome(Config({"BLOCK": 2}), 1.5, 1)
    tuning, sample = tuning_of({one: 9.0, two: 8.9, four: 8.9})  # within the margin
    assert tune.search(tuning, "all", "cpu", sample).config is None
    tuning, sample = tuning_of(takes, wrong=one)
    with pytest.raises(AssertionError, match="wrong"):
        tune.search(tuning, "all", "cpu", sample)


def test_a_forced_configuration_is_launched_until_it_is_not() -> None:
    default, other = Config({"ROWS": 1}), Config({"ROWS": 2})
    with forced("kernel", "class", other):
        assert tuned("kernel", "class", default) is other
        assert tuned("kernel", "another", default) is default
    assert tuned("kernel", "class", default) is default


@without_gpu
def test_tuning_refuses_to_run_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (([], "needs a GPU"), (["nobody"], "no kernel is called nobody")):
        with pytest.raises(SystemExit):
            tune.main(arguments)
        assert message in capsys.readouterr().err
