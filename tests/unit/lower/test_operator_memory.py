"""What operators allocate and free again. tests/fake_cuda/test_memory.py measures it on fake devices."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from gpipe_fast._extension import ActiveRuns
from gpipe_fast.lower import operator_memory
from gpipe_fast.lower.operator_examples import examples
from gpipe_fast.lower.operator_memory import temporary_bytes
from gpipe_fast.lower.program import StorageKind, Value
from gpipe_fast.lower.steps import Call, Ref, Release

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
VALUES = [Value(f"v{size}", StorageKind.INPUT, (size, size), (size, 1), torch.float32) for size in (2, 2, 3)]


def softmax(value: int) -> Call:
    return Call(aten._safe_softmax.default, (Ref(value), -1), (value,), ActiveRuns.ALWAYS, 0)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_memory, "_known", {})


def test_equal_calls_are_measured_once_on_each_device() -> None:
    with (
        mock.patch.object(torch.cuda, "device_count", return_value=2),
        mock.patch.object(operator_memory, "_measured", side_effect=[512, 1024, 2048]) as measured,
    ):
        assert [temporary_bytes(softmax(i), VALUES, CUDA) for i in (0, 1, 2, 0)] == [512, 512, 1024, 512]
        assert temporary_bytes(softmax(0), VALUES, torch.device("cuda", 1)) == 2048
        assert temporary_bytes(Release(0), VALUES, CUDA) == 0
    assert measured.call_count == 3


def test_nothing_is_measured_on_the_cpu_or_without_the_device() -> None:
    with mock.patch.object(operator_memory, "_measured") as measured:
        assert temporary_bytes(softmax(0), VALUES, torch.device("cpu")) == 0
        with mock.patch.object(torch.cuda, "device_count", return_value=1):
            assert temporary_bytes(softmax(0), VALUES, torch.device("cuda", 1)) == 0
    measured.assert_not_called()


def test_a_matrix_product_is_not_run_because_it_would_leave_a_workspace_of_this_thread() -> None:
    product = Call(aten.addmm.out, (Ref(0), Ref(0), Ref(1), 1, 1, Ref(0)), None, ActiveRuns.ALWAYS, 0)
    with (
        mock.patch.object(torch.cuda, "device_count", return_value=1),
        mock.patch.object(operator_memory, "_measured") as measured,
    ):
        assert temporary_bytes(product, VALUES, CUDA) == 0
    measured.assert_not_called()


def test_an_operator_that_cannot_run_alone_counts_nothing() -> None:
    call = Call(aten.cholesky_inverse.default, (Ref(2), "wrong"), (2,), ActiveRuns.ALWAYS, 0)
    with (
        mock.patch.object(torch.cuda, "device_count", return_value=2),
        mock.patch.object(torch.cuda, "device"),
        mock.patch.object(operator_memory, "examples", side_effect=lambda _, device: (torch.eye(3), "wrong")),
    ):
        assert temporary_bytes(call, VALUES, CUDA) == 0


def test_arguments_that_have_only_names_are_passed_by_name() -> None:
    call = Call(aten.sum.dim_IntList, (Ref(0), [0], False, torch.float64), (0,), ActiveRuns.ALWAYS, 0)
    freed = [{"allocated_bytes.all.freed": bytes} for bytes in (1024, 1536)]
    with (
        mock.patch.object(torch.cuda, "device_count", return_value=1),
        mock.patch.object(torch.cuda, "device"),
        mock.patch.object(torch.cuda, "memory_stats", side_effect=freed),
        mock.patch.object(operator_memory, "examples", lambda given, _: examples(given, "cpu")),
    ):
        assert temporary_bytes(call, VALUES, CUDA) == 512


def test_a_product_with_a_weight_of_4_bits_dequantizes_it_on_any_device() -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    arguments = (Ref(0), Ref(1), [128, 64], Ref(2), 64, "nf4", None, None, None, None)
    op = torch.ops.bitsandbytes.gemm_4bit.default
    product = Call(op, arguments, (2,), ActiveRuns.ALWAYS, 0)
    assert temporary_bytes(product, VALUES, torch.device("cpu")) == 128 * 64 * 4
