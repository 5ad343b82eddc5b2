"""The checks that benchmarks make before they time, on tiny sizes; no test asserts speed."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from bench import comparison, measure, peers
from bench.compare import frontier, memory, overhead, step, within_memory
from bench.micro import balance, draws, engine, execution, interpreted, lengths, signature, tracing
from bench.models.gpt import blocks
from bench.models.mlp import mlp
from examples.gpt.__main__ import gpt
from tools import largest

pytestmark = [pytest.mark.extended, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize("kind", memory.KINDS)
def test_memory_is_measured_in_steps_on_several_lengths(kind: str) -> None:
    def small() -> nn.Sequential:
        return gpt(8, layers=1, heads=2, length=16)

    case = memory.Case("tiny", small, (2, 1), 256, batch=4, lengths=[3, 5], adamw=True)
    found = memory.measure(case, kind)
    assert all(value > 0 for value in found.values())
    assert found["first step, peak"] >= found["first step, after"]


def test_alternate_interleaves_the_candidates() -> None:
    order: list[str] = []
    timings = measure.alternate(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=3, calls=2
    )
    assert "".join(order) == "aabb" * 4  # the first round is a warm-up and is dropped
    assert timings.keys() == {"a", "b"}
    for timing in timings.values():
        assert 0 < timing.p20 <= timing.median <= timing.p80


def test_a_timing_prints_its_median_and_percentiles() -> None:
    assert str(measure.Timing(12.345, 11.0, 13.96)) == "12.3 [11.0, 14.0]"
    assert str(measure.Timing(1234.5, 1100.0, 1399.6)) == "1234 [1100, 1400]"
    assert measure.Timing(1234.5, 1100.0, 1399.6).ms() == "1.23 [1.10, 1.40]"
    assert measure.Timing(123456.0, 98765.0, 2e5).ms() == "123.5 [98.8, 200.0]"


def test_timing_computes_the_median_and_the_20th_and_80th_percentile() -> None:
    timing = measure.timing([float(x) for x in range(1, 10)])
    assert timing == measure.Timing(5.0, 2.0, 8.0)
    assert measure.timing([7.0]) == measure.Timing(7.0, 7.0, 7.0)


def test_a_ratio_is_the_median_of_paired_ratios() -> None:
    assert measure.Ratio.of([2.0, 4.0, 60.0], [1.0, 2.0, 30.0]) == measure.Ratio(2.0, 2.0, 2.0)
    spread = measure.Ratio.of([float(x) for x in range(1, 100)], [1.0] * 99)
    assert 35 < spread.low < spread.median == 50 < spread.high < 65
    assert str(measure.Ratio(1.0, 0.9, 1.1)) == "1.000 [0.900, 1.100]"


def test_a_report_names_the_machine_and_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    further = measure.Table("More", ["of"], [["this"]], "Another note.\n")
    module = {"__name__": "bench.name", "__doc__": "Title\nof it.\n\nA note of {COUNT} {what}.\n", "COUNT": 2}
    measure.report(module, ["what", "µs"], [["ours", 1.234]], [further], what="words")
    text = (tmp_path / "name.md").read_text()
    assert text.startswith(f"# Title of it\n\n{measure.machine()}.\nA note of 2 words.\n")
    assert "| ours   | 1.23 |" in text
    assert text.endswith("\n\n## More\n\nAnother note.\n\n| of   |\n|------|\n| this |\n")
    assert text in capsys.readouterr().out
    assert f"torch {torch.__version__}" in measure.machine()


@pytest.mark.parametrize("layers", [mlp(8), blocks(1, 8, 2)], ids=["mlp", "block"])
def test_execution_checks_and_times_forward_and_backward(layers: list[torch.nn.Module]) -> None:
    input = torch.randn(2, 3, 8)
    found = execution.candidates(layers, input)
    measure.alternate(found, rounds=1)
    assert Counter(name.split(",")[0] for name in found) == {"forward": 2, "backward": 2, "both": 3}


def test_execution_rejects_a_wrong_gradient() -> None:
    stage, forward, backward = execution.prepare(mlp(8), torch.randn(4, 8))
    runs = (stage.program(forward), stage.program(backward))
    execution.check(stage, *runs)
    stage.tangent.add_(1)  # both the programs and eager read it
    execution.check(stage, *runs)
    wrong = stage.program(backward)

    def run_twice(first: bool) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        wrong(True)
        return wrong(False)

    with pytest.raises(AssertionError):
        execution.check(stage, runs[0], run_twice)


@pytest.mark.parametrize("name", draws.DRAWS)
def test_draws_check_their_distributions(name: str) -> None:
    torch.manual_seed(0)
    baseline, ours, mean, std = draws.DRAWS[name]
    for draw in (baseline, ours):
        draws.check(name, draw, mean, std)
    with pytest.raises(AssertionError, match="standard errors"):
        draws.check(name, lambda n: ours(n) + 0.05, mean, std)


def test_tracing_counts_traces() -> None:
    name, num_traces, *seconds, steps = tracing.one_stage(1)
    assert (name, num_traces) == ("1 stage of 1", 1)
    assert steps > 0
    name, num_traces, *seconds, _ = tracing.equal_stages(2, 2)
    assert (name, num_traces) == ("2 stages of 1", 1)
    assert all(s > 0 for s in seconds)


def test_the_engine_benchmark_returns_samples_for_each_size(tmp_path: Path) -> None:
    samples = engine.run(engine.build(tmp_path), rounds=2, steps=1)
    assert list(samples) == [(2, 8), (2, 64), (4, 8), (4, 64)]
    for sample in samples.values():
        for times in (sample.steps, sample.recorded_steps, sample.waking_steps, sample.hand_offs):
            assert len(times) == 2
            assert all(time > 0 for time in times)


def test_engine_rows_report_times_per_action_and_hand_off() -> None:
    sample = engine.Samples([80.0, 160.0, 240.0], [320.0] * 3, [400.0] * 3, [2.0, 2.5, 3.0])
    (row,) = engine.rows({(2, 8): sample})
    assert row[:3] == [2, 8, 64]  # 32 F and B, 16 SEND and 16 RECV
    medians = [str(cell).split()[0] for cell in row[3:-1]]
    assert medians == ["2.500", "5.000", "5.000", "160.0", "400.0", "2.5"]
    assert row[-1] == "16 x = 40"


def test_overhead_compares_gradients_before_timing() -> None:
    found = replace(overhead.comparison(overhead.candidates()), rounds=1, calls=1).measure()
    rows = {name: cells for name, *cells in overhead.rows(found)}
    for mode in ("always", "except_last", "never"):
        for num_stages in (4, 2, 1):
            assert rows[f"gpipe_fast, K = {num_stages}, {mode}"][-1] == "equal"
        assert rows[f"torchgpipe, K = 4, {mode}"][-1] == "equal"
        assert rows[f"gpipe_fast, K = 4, {mode}"][1] == 1.0
    assert rows[overhead.LOOP][2] == 1.0


def test_candidates_with_wrong_gradients_are_not_timed() -> None:
    plain = overhead.Overhead().plain()
    name = "gpipe_fast, K = 4, never"
    steps = {**plain, name: overhead.Overhead().plain()[overhead.WHOLE]}  # sums in another order
    plain[overhead.LOOP]()
    found = comparison.compare(steps, plain[overhead.LOOP].gradients(), rounds=1)
    off = found[name].off
    assert off is not None
    assert 0 < off < peers.TOLERANCE
    assert [each for each in found if found[each].times] == [*plain]
    wrong = comparison.rows(found, name)[-1]
    assert wrong == [name, "-", "-", "-", f"WRONG, off by {off:.0e}"]


def test_rounds_end_at_the_limit_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(measure.samples({"a": lambda: None}, rounds=20, seconds=0.0)["a"]) == measure.MIN_ROUNDS
    monkeypatch.setattr(measure, "ROUND_SECONDS", 0.0)
    assert len(measure.samples({"a": lambda: None}, rounds=20)["a"]) == measure.MIN_ROUNDS
    assert "rounds of at most 0 s" in measure.machine()


def test_off_by_is_the_largest_relative_gradient_difference() -> None:
    wanted = [torch.tensor([1.0, 4.0]), torch.tensor([0.5])]
    assert peers.relative_difference([w.clone() for w in wanted], wanted) == 0
    assert peers.relative_difference([wanted[0], torch.tensor([0.625])], wanted) == 0.25
    unknown = peers.relative_difference([wanted[0] + 1, torch.tensor([float("nan")])], wanted)
    assert not peers.gradients_agree("plain loop", unknown)
    assert peers.gradients_agree("plain loop", peers.TOLERANCE)
    assert not peers.gradients_agree("gpipe_fast, K = 2, never", peers.TOLERANCE)


TINY_CASE = step.Case(chunks=2, batch=1, length=4, width=16, count=2, backend="aot_eager")


def test_processes_of_candidates_sleep_between_their_steps() -> None:
    candidate = peers.ProcessCandidate(step.make, (step.OURS, TINY_CASE, ""), threads=1)
    candidate()
    before, begin = candidate.idle_seconds(), time.perf_counter()
    time.sleep(0.5)
    assert (candidate.idle_seconds() - before) / (time.perf_counter() - begin) < 0.2
    candidate.close()


def test_steps_of_processes_are_compared() -> None:
    names = [step.OURS, step.PIPELINING]
    results = replace(step.comparison(TINY_CASE, names), rounds=2).measure()
    rows = comparison.rows(results, step.OURS)
    assert [row[0] for row in rows] == names
    assert rows[0][-1] == "equal"
    assert all(len(each.times) == 2 and (each.peak_bytes or 0) > 0 for each in results.values())


@pytest.mark.parametrize("recompute", [True, False])
def test_step_candidates_compute_the_gradients_of_the_plain_loop(recompute: bool) -> None:
    case = replace(TINY_CASE, recompute=recompute)
    wanted = case.reference_gradients()
    names = [name for name in step.names(recompute) if name != step.PIPELINING]
    assert len(names) == (3 if recompute else 4)
    for name in names:
        candidate = step.build(0, name, case)
        candidate()
        assert peers.gradients_agree(name, peers.relative_difference(candidate.gradients(), wanted)), name


def test_the_frontier_compares_shares_with_compiled_loops() -> None:
    case = replace(TINY_CASE, recompute=False)
    names = [
        frontier.name_of(0.5),
        frontier.name_of(1.0),
        frontier.ONE_STAGE + "0",
        frontier.LOOP,
        frontier.RECOMPUTING,
        frontier.BUDGET,
    ]
    results = replace(frontier.comparison(case, names), rounds=1).measure()
    assert [row[0] for row in frontier.rows(results)] == names
    assert [row[-1] for row in frontier.rows(results)][:2] == ["equal", "equal"]
    assert all(result.times for result in results.values())
    assert frontier.plot(results).count("<circle") == len(names)
    table = frontier.ladder_rows(case)
    assert [row[0] for row in table] == frontier.SHARES
    assert [row[2] for row in table][::8] == [0, 1]
    assert [row[4] for row in table][::8] == [1, 0]


def test_memory_is_compared_at_what_a_balance_by_time_needs() -> None:
    model = within_memory.Model("tiny", small_and_large, partial(torch.ones, 16, 8))
    first, second = within_memory.rows(model, rounds=1)
    assert second[3] <= first[3]
    assert second[-1] == "equal"


def small_and_large() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 64), nn.Linear(64, 8))


def test_the_needs_of_a_large_model_are_known_without_its_weights() -> None:
    with torch.device("meta"):
        layers, tokens = gpt(32, layers=3, heads=2, length=16), torch.zeros(64, 16, dtype=torch.long)
    naive = largest.need(layers, [len(layers)], tokens, tokens, naive=True)
    found = largest.need(layers, [2, len(layers) - 2], tokens, tokens, naive=False)
    assert sum(found.parameters) == sum(naive.parameters) == sum(p.numel() for p in layers.parameters())
    assert sum(found.activations) < naive.activations[0]


def test_the_largest_model_that_fits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def cells(row: largest.Row, filters: int) -> largest.Need:
        return largest.Need([900 * filters**2, 1000 * filters**2], [10**7 * filters, 10**6 * filters])

    limit = 8 * largest.GIB
    monkeypatch.setattr(largest, "amoebanet", cells)
    for row in largest.AMOEBANET:
        filters, found = largest.largest_amoebanet(row, limit)
        assert found.largest == pytest.approx(cells(row, filters).largest, rel=1e-9)
        assert found.largest <= limit < cells(row, filters + 16).largest

    def blocks(balance: tuple[int, ...], naive: bool) -> largest.Need:
        ends = [9, *[0] * (len(balance) - 2), 8] if len(balance) > 1 else [17]
        numbers = [10**7 * (n + more) for n, more in zip(balance, ends, strict=True)]
        return largest.Need(numbers, [0] * len(balance))

    monkeypatch.setattr(largest, "blocks", blocks)
    number, found = largest.largest_transformer(largest.TRANSFORMER[2], 12 * 10**7 * 30)
    assert number == 21 + 6 * 30 + 22
    assert found.parameters == [10**7 * 30] * 8
    assert largest.largest_transformer(largest.TRANSFORMER[1], 12 * 10**7 * 30)[0] == 13


def test_signature_times_the_parts_of_a_call() -> None:
    with torch.no_grad():
        timings = measure.alternate(signature.parts(10), rounds=1)
    check, python, whole = (
        timings[name].median for name in (signature.CHECK, signature.PYTHON, signature.WHOLE)
    )
    assert 0 < check < python < whole


def test_lengths_counts_traces_and_template_instances() -> None:
    name, steps, different, mean, traces, written, *times = lengths.train("few", [4, 8, 6, 4, 6], width=16)
    assert (name, steps, different, mean, traces, written) == ("few", 5, 3, 5.6, 6, 2)
    assert times.pop(2) == "-", "no further length"
    assert all(float(str(time)) > 0 for time in times)
    *_, further, _ = lengths.train("more", [4, 8, 6, 12, 14, 18, 22, 26], width=16)
    assert float(str(further)) > 0
    assert sorted(lengths.distinct_lengths(20, 20)) == list(range(1, 21))


@pytest.mark.filterwarnings("ignore:stage 1, layer")
def test_interpreted_times_all_candidates_and_rejects_wrong_gradients() -> None:
    layers = [nn.Linear(4, 4) for _ in range(4)]
    steps = interpreted.candidates(layers, [2, 2], torch.randn(8, 4), "always")
    what, *times = interpreted.row("small", steps, rounds=1, calls=1)
    assert what == "small"
    assert len(times) == len(steps) == 5
    steps["all in Python"].parameters.reverse()
    with pytest.raises(AssertionError, match="gradients of all in Python"):
        interpreted.row("small", steps, rounds=1, calls=1)


def test_the_balance_benchmark_compares_all_balances_with_the_plain_loop() -> None:
    net = balance.UnevenModel(width=4, batch=16)
    steps = net.steps()
    assert list(steps) == [f"gpipe_fast, [{first}, {8 - first}]" for first in range(1, 8)]
    assert sum(net.balance_by_time_choice(timeout=0.0)) == 8
    assert net.balance_by_parameters() == [4, 4]
    loop = net.loop()
    loop()
    measured = comparison.compare(steps, loop.gradients(), rounds=2)
    assert {each.off for each in measured.values()} == {0.0}
    measured["gpipe_fast, [2, 6]"] = comparison.Outcome(1.0)
    found = balance.rows(measured, {"[1, 7]": 3})
    assert [row[0] for row in found] == [f"[{first}, {8 - first}]" for first in range(1, 8)]
    assert found[0][1:3] == ["1 and 14", 3]
    assert found[0][4] == "-"
    assert found[1][3:] == ["-", "-", "WRONG, off by 1e+00"]
    assert "[" in str(found[2][4])
    assert [row[0] for row in balance.time_balancing(layers=20, partitions=3, rounds=1)] == [
        "max",
        "variance",
    ]
