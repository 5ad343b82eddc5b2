"""Wrong arguments: each error states what was received and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_fast import GPipe, doctor, keyed_rng
from gpipe_fast.balance import balance_by_cost, balance_by_size, balance_by_time, table
from gpipe_fast.picture import draw
from gpipe_fast.reports.recording import Recording
from gpipe_fast.schedule import bubble
from gpipe_fast.skip import skippable
from tests.models import features, mlp

pytestmark = pytest.mark.usefixtures("one_thread")


def make_pipe(**options: Any) -> GPipe:
    return GPipe(mlp(), **{"balance": [2, 3], "chunks": 2, **options})


def nested(layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 6), torch.ones(3, 6)], layout=layout)


CONSTRUCTOR_ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"balance": 3}, TypeError, "a list with the number of layers of each stage, such as [5] for one "),
    ({"balance": "23"}, TypeError, "got '23'; to choose only the number of stages, leave balance out and "),
    ({"balance": ["2", 3]}, TypeError, "all balance numbers must be positive integer (balance: ['2', 3])"),
    ({"balance": [2.5, 2.5]}, ValueError, "all balance numbers must be positive integer (balance: [2.5, "),
    ({"devices": "cpu"}, TypeError, "a device for each stage, got 'cpu'; for K stages on one device pass "),
    ({"devices": torch.device("cpu")}, TypeError, "pass devices=['cpu'] * K"),
    ({"devices": ["cpu"]}, IndexError, "pass a device for each stage, which has one partition of the layers"),
    ({"devices": 0}, TypeError, "a device for each stage, got 0; for K stages on one device pass devices"),
    ({"devices": ["mps", "mps"]}, ValueError, "stages run on CPU and CUDA devices, got mps; pass devices "),
    ({"devices": ["cpu", "cpux"]}, ValueError, "devices[1] must be a device such as 'cpu' or 'cuda:0', got "),
    ({"devices": ["cpu", "cuda:99"]}, ValueError, "there is no cuda:99, since "),
    ({"devices": [None, None]}, TypeError, "devices[0] must be a device such as 'cpu' or 'cuda:0', got None"),
    ({"chunks": 2.9}, ValueError, "number of chunks must be positive integer or 'auto', got 2.9"),
    ({"chunks": True}, ValueError, "number of chunks must be positive integer or 'auto', got True"),
    ({"checkpoint": None}, ValueError, "or a list with one of these for each stage, got None"),
    ({"checkpoint": float("nan")}, ValueError, "a list with one of these for each stage, got nan"),
    ({"checkpoint": []}, ValueError, "one of these for each stage, got []"),
]


@pytest.mark.parametrize(("options", "kind", "message"), CONSTRUCTOR_ERRORS)
def test_wrong_constructor_arguments_are_refused(
    options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        make_pipe(**options)


def test_only_the_module_and_the_balance_are_positional() -> None:
    with pytest.raises(
        TypeError, match=r"got 4 arguments; pass the others by name: GPipe\(module, balance, de"
    ):
        GPipe(mlp(), [2, 3], ["cpu", "cpu"], 2)  # type: ignore[arg-type]


CALL_ERRORS: list[tuple[str, Callable[[GPipe], object]]] = [
    ("got no argument; call the model with a mini-batch: model(x)", lambda model: model()),
    ("expected Tensor, but got int, str", lambda model: model(3, "x")),
    ("model(x=...) passes its arguments to layer 0 (Linear), which does not", lambda m: m(x=features())),
    ("which does not take them: too many positional arguments; it takes (input", lambda m: m(features(), 1)),
    ("got a tensor of layout torch.sparse_coo; pass x.to_dense()", lambda m: m(features().to_sparse())),
    ("got a tensor of layout torch.sparse_csr", lambda model: model((features().to_sparse_csr(), 3))),
    (
        "got a quantized tensor; pass x.dequantize()",
        lambda model: model(torch.quantize_per_tensor(features(), 0.1, 0, torch.qint8)),
    ),
    ("got a nested tensor; pass torch.nested.to_padded_tensor", lambda m: m(nested(torch.strided))),
    ("got a nested tensor", lambda model: model(nested(torch.jagged))),
]


@pytest.mark.filterwarnings("ignore:.*(CSR|quantiz|nested)")
@pytest.mark.parametrize(("message", "call"), CALL_ERRORS, ids=[message for message, _ in CALL_ERRORS])
def test_unsupported_inputs_are_refused(message: str, call: Callable[[GPipe], object]) -> None:
    model = make_pipe()
    with pytest.raises(TypeError, match=re.escape(message)):
        call(model)
    assert model(features()).shape == (8, 4)


class TakesKeyword(nn.Module):
    def forward(self, x: Tensor, *, scale: int = 1) -> Tensor:
        return x * scale


def test_keyword_arguments_reach_the_first_layer() -> None:
    model, x = GPipe(nn.Sequential(TakesKeyword(), nn.ReLU()), [1, 1], chunks=2), features()
    assert torch.equal(model(x, scale=2), (x * 2).relu())
    assert torch.equal(model(x=x), x.relu())
    hook = lambda _, args, kwargs: (args, {"scale": kwargs["s"]})  # noqa: E731
    model[0].register_forward_pre_hook(hook, with_kwargs=True)
    with pytest.warns(UserWarning, match="runs in Python"):
        assert torch.equal(model(x, s=3), (x * 3).relu())


def test_threads_per_stage_must_be_a_positive_integer() -> None:
    with pytest.raises(ValueError, match="must be a positive integer or None, got True"):
        make_pipe().threads_per_stage = True


FUNCTION_ERRORS: list[tuple[type[Exception], str, Callable[[], object]]] = [
    (TypeError, "doctor reports on a GPipe, got Linear; wrap it", lambda: doctor(nn.Linear(1, 1))),  # type: ignore[arg-type]
    (TypeError, "draw takes the Recording of a 'with model.recording", lambda: draw(make_pipe())),  # type: ignore[arg-type]
    (ValueError, "the recording holds no step: call the model inside", lambda: Recording().bubble()),
    (ValueError, "the recording holds no step: call the model inside", lambda: Recording().span()),
    (ValueError, "the recording holds no step: call", lambda: Recording().critical_path()),
    (ValueError, "expected at least one stage and one micro-batch, got 0 stages", lambda: bubble(0, 1)),
    (TypeError, "stash must be a list of names, such as stash=['skip']", lambda: skippable(stash="skip")),
    (TypeError, "pop must be a list of names", lambda: skippable(pop=3)),  # type: ignore[arg-type]
    (TypeError, "costs must be a list with a number for each layer, got 3", lambda: balance_by_cost(2, 3)),  # type: ignore[arg-type]
    (TypeError, "partitions must be a positive integer, got 2.0", lambda: balance_by_cost(2.0, [1, 2])),  # type: ignore[arg-type]
    (TypeError, "expected LayerProfile objects, got Linear", lambda: table([nn.Linear(1, 1)])),  # type: ignore[list-item]
    (
        ValueError,
        "timeout must be a number of seconds, at least 0, got None",
        lambda: balance_by_time(2, mlp(), features(), timeout=None),  # type: ignore[arg-type]
    ),
    (
        ValueError,
        "layers can be profiled only on CPU and CUDA devices, got meta",
        lambda: balance_by_time(2, mlp(), features(), device="meta"),
    ),
    (
        TypeError,
        "device must be a device such as 'cpu' or 'cuda:0', got ['cpu']",
        lambda: balance_by_time(2, mlp(), features(), device=["cpu"]),  # type: ignore[arg-type]
    ),
    (
        ValueError,
        "param_scale must be a finite number, got 'x'",
        lambda: balance_by_size(2, mlp(), features(), param_scale="x"),  # type: ignore[arg-type]
    ),
    (
        ValueError,
        "number of chunks must be positive integer, got 'auto'",
        lambda: balance_by_size(2, mlp(), features(), chunks="auto"),  # type: ignore[arg-type]
    ),
    (
        ValueError,
        "key must be a signed 64-bit integer or None, got 'a'",
        lambda: keyed_rng(mlp(), "a").__enter__(),  # type: ignore[arg-type]
    ),
]


@pytest.mark.parametrize(
    ("kind", "message", "call"), FUNCTION_ERRORS, ids=[message for _, message, _ in FUNCTION_ERRORS]
)
def test_wrong_function_arguments_are_refused(
    kind: type[Exception], message: str, call: Callable[[], object]
) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        call()


def test_a_table_of_no_profiles_has_only_headers() -> None:
    assert table([]).splitlines()[0].startswith("layer")
