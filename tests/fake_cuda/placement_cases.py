"""Placement of stages on fake devices, and out-of-memory errors; run by test_placement.py.

`placement_cases.py OPERATORS NAME...`: runs functions of this file by name, and prints the name of each.
"""

from __future__ import annotations

import copy
import ctypes
import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_fast import GPipe, verify
from gpipe_fast.layers.quantized import parts_of
from tests import quantized
from tests.fake_cuda.fake_devices import gradients, mark, plain_loop, run_cases
from tests.fake_cuda.train_models import PopSkip, StashSkip
from tests.internals import compiler_of, programs_of

MIB = 1 << 20
# Bytes of each device, for the functions in OUT_OF_MEMORY.
MEMORY = 128 * MIB
WIDTH, CHUNKS = 64, 4


def layers(count: int = 4, width: int = 8) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


def devices_of(module: nn.Module) -> list[str]:
    return [str(p.device) for p in module.parameters()]


def first_gpus_by_default() -> None:
    """Each partition gets one GPU."""
    plain, x = layers(), torch.randn(8, 8)
    pipe = GPipe(copy.deepcopy(plain), [1, 1, 2], chunks=CHUNKS)
    assert [str(device) for device in pipe.devices] == ["cuda:0", "cuda:1", "cuda:2"]
    assert [str(layer.weight.device) for layer in pipe] == ["cuda:0", "cuda:1", "cuda:2", "cuda:2"]
    expected = gradients(plain, plain_loop(plain, x, CHUNKS))
    assert all(map(torch.equal, gradients(pipe, pipe(x.cuda())), expected))
    assert GPipe(layers(8)).balance == [2, 2, 2, 2]
    with pytest.raises(IndexError, match=r"too few devices .* \(devices: 4, partitions: 5\)"):
        GPipe(layers(8), [1, 1, 1, 1, 4])


def quantized_weights_move_with_their_scales() -> None:
    """Equal stages are traced for the first device, with stand-ins for weights of the second."""
    for kind in ("own", "torchao int8") if importlib.util.find_spec("torchao") else ("own",):
        plain = quantized.blocks(quantized.KINDS[kind])
        x = torch.randn(8, quantized.WIDTH)
        pipe = GPipe(copy.deepcopy(plain), [2, 2], chunks=CHUNKS, backend="aten")
        for index, layer in enumerate(pipe):
            parts = parts_of(layer.up.base.weight).values()
            assert {str(part.device) for part in parts} == {f"cuda:{index // 2}"}
        trained = [[p for p in each.parameters() if p.requires_grad] for each in (plain, pipe)]
        plain_loop(plain, x, CHUNKS).sum().backward()
        pipe(x.cuda()).sum().backward()
        assert all(torch.equal(a.grad, b.grad.cpu()) for a, b in zip(*trained, strict=True))


def operators_are_timed_on_their_devices() -> None:
    """The log says which devices were waited for meanwhile; they are of three kinds."""
    torch.use_deterministic_algorithms(False)  # else times are estimated
    stages = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3)]
    pipe = GPipe(nn.Sequential(*stages), [1, 1, 1], chunks=CHUNKS, checkpoint=0.5)
    x = torch.randn(8, 8, device="cuda:0")
    mark("plan")
    pipe.prepare(x)
    mark("end")


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        """Takes a tensor of shape (batch, heads, positions, width)."""
        return F.scaled_dot_product_attention(x, x, x)


def attention_suits_the_device() -> None:
    """The second GPU is too old for flash attention, the first one is current. No attention runs."""
    for enable in (torch.backends.cuda.enable_flash_sdp, torch.backends.cuda.enable_mem_efficient_sdp):
        enable(True)
    pipe = GPipe(nn.Sequential(*(Attention() for _ in range(3))), [1, 1, 1], chunks=1)
    pipe.prepare(torch.randn(2, 2, 16, 8, device="cuda:0", dtype=torch.float16, requires_grad=True))
    steps = "".join(str(program.steps) for program in programs_of(pipe))
    assert re.findall(r"scaled_dot_product_(\w+)_attention\b", steps) == ["flash", "efficient", "flash"]


class Positions(nn.Module):
    """Adds positions that it makes on its input's device, and scales by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.full((8,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        position = x.new_ones(x.shape[1]).cumsum(0)
        y: Tensor = self.linear(x).tanh() * self.scale + torch.zeros_like(x) + position
        return y


class Bias(Positions):
    """Also adds a tensor that is neither parameter nor buffer."""

    bias: Tensor = torch.tensor(3.0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.bias


class Views(Positions):
    """Has buffers in the same memory, and writes one before it reads another."""

    def __init__(self) -> None:
        super().__init__()
        both = torch.ones(2, 8)
        self.register_buffer("whole", both)
        self.register_buffer("part", both[1])

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.whole.mul_(2)
        return y * self.part.clone()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        super()._apply(fn, recurse)
        self.part = self.whole[1]
        return self


class OnDevice(Positions):
    """Makes positions on the device that its input names."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.arange(x.shape[1], device=x.device, dtype=x.dtype)


class Table(nn.Module):
    """Has tables on several GPUs, and asks where its input is."""

    ask: Callable[[Table, Tensor], Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.by_device = {torch.device("cuda", i): float(i) for i in range(4)}
        self.first = torch.device("cuda:0")
        self.table = torch.linspace(0, 1, 8, device="cuda:0")

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x).tanh() + type(self).ask(self, x)
        return y


class Scale(torch.autograd.Function):
    """Scales a gradient by the number of its device."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (1 + gradient.device.index)


def on_first_gpu(x: Tensor) -> Tensor:
    table = torch.arange(8.0, device="cuda:0")
    return table.to(x.device) * 3 if table.device != x.device else table


QUESTIONS: dict[str, Callable[[Table, Tensor], Tensor]] = {
    "index": lambda s, x: x * x.device.index,
    "number": lambda s, x: x * x.get_device(),
    "name": lambda s, x: x * len(str(x.device)) * (3.0 if str(x.device)[-1] == "2" else 1.0),
    "weight": lambda s, x: x * s.linear.weight.device.index,
    "compared": lambda s, x: x * (2.0 if x.device == torch.device("cuda:1") else 3.0),
    "other stage's table": lambda s, x: on_first_gpu(x),
    "current": lambda s, x: x * torch.cuda.current_device(),
    "by device": lambda s, x: x * s.by_device[x.device],
    "in place": lambda s, x: (h := x.detach().tanh()) + h.to("cuda:0").mul_(2).to(x.device),
    "from an attribute": lambda s, x: (h := x.detach().tanh()) + h.to(s.first).mul_(2).to(h),
    "own table": lambda s, x: s.table.to(x) * x,
    "function": lambda s, x: Scale.apply(x),
}


def devices_that_layers_ask_for() -> None:
    """The plain loop runs each layer with its own GPU as the current one, as a stage does."""
    for name, question in QUESTIONS.items():
        asking = type("Asking", (Table,), {"ask": staticmethod(question)})
        plain = nn.Sequential(*(asking().to(device) for device in ALL_GPUS))
        pipe = GPipe(copy.deepcopy(plain), [1, 1, 1, 1], devices=ALL_GPUS, chunks=1)
        for _ in range(2):
            x = torch.randn(4, 8, device="cuda:0")
            y = x
            for layer, device in zip(plain, ALL_GPUS, strict=True):
                with torch.cuda.device(device):
                    y = layer(y.to(device))
            expected = gradients(plain, y)
            found = pipe(x)
            assert torch.equal(found.cpu(), y.cpu()), name
            assert all(map(torch.equal, gradients(pipe, found), expected)), name


def other_gpus_are_left_alone() -> None:
    pipe = GPipe(nn.Sequential(Positions(), Positions()), [1, 1], devices=["cuda:2", "cuda:3"], chunks=1)
    pipe(torch.randn(4, 8, device="cuda:2")).sum().backward()
    assert torch.cuda.memory_stats(0).get("allocation.all.allocated", 0) == 0


def num_traces(make: Callable[[], nn.Module], devices: Sequence[str]) -> int:
    """Compares calls of four equal stages with the plain loop's, and returns how many graphs were traced."""
    plain = nn.Sequential(*(make() for _ in range(4)))
    pipe = GPipe(copy.deepcopy(plain), [1, 1, 1, 1], devices=devices, chunks=2)
    for layer in pipe:
        if isinstance(layer, Bias):
            layer.bias = layer.bias.to(layer.scale.device)
    for size in (4, 6, 8):
        x = torch.randn(size, 8)
        expected = gradients(plain, plain_loop(plain, x, 2))
        output = pipe(x.to(devices[0]))
        assert str(output.device) == devices[-1]
        assert all(map(torch.equal, gradients(pipe, output), expected))
        for name, buffer in plain.named_buffers():
            assert torch.equal(pipe.get_buffer(name).cpu(), buffer), name
    return compiler_of(pipe).num_traces


ONE_GPU, ALL_GPUS = ["cuda:0"] * 4, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]


def equal_stages_are_traced_once_for_equal_gpus() -> None:
    number = num_traces(Positions, ONE_GPU)
    assert num_traces(Positions, ["cuda:1"] * 4) == num_traces(Positions, ALL_GPUS) == number


def equal_stages_are_traced_for_each_kind_of_gpu() -> None:
    """The second GPU is another one."""
    of_two_kinds = num_traces(Positions, ALL_GPUS)
    assert of_two_kinds == num_traces(Positions, ["cuda:0", "cuda:0", "cuda:1", "cuda:1"])
    assert of_two_kinds > num_traces(Positions, ONE_GPU)


def tensors_that_cannot_be_moved_are_traced_where_they_are() -> None:
    assert num_traces(Bias, ALL_GPUS) >= num_traces(Bias, ONE_GPU)
    assert num_traces(Views, ALL_GPUS) >= num_traces(Views, ONE_GPU)
    assert num_traces(OnDevice, ALL_GPUS) >= num_traces(OnDevice, ONE_GPU)


def layers_move_when_the_balance_changes() -> None:
    class Slow(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(200):
                x = x.tanh()
            return super().forward(x)

    pipe = GPipe(nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)), Slow(8, 8), Slow(8, 8)), chunks=CHUNKS)
    before = pipe.balance
    pipe(torch.randn(8, 8, device="cuda")).sum().backward()
    assert pipe.balance != before
    for partition, device in zip(pipe.partitions, pipe.devices, strict=True):
        assert set(devices_of(partition)) == {str(device)}
        assert all(p.grad is not None and p.grad.device == device for p in partition.parameters())


def meta_layers_are_loaded_on_their_devices() -> None:
    """A tied weight is on the device of the last stage that has it, as if the layers had been on the CPU."""

    def tied() -> nn.Sequential:
        module = layers()
        module[3].weight = module[0].weight
        return module

    plain, x = tied(), torch.randn(8, 8)
    with torch.device("meta"):
        module = tied()
    pipe = GPipe(module, [1, 1, 2], chunks=CHUNKS)
    with pytest.raises(RuntimeError, match="has 'weight' on the meta device"):
        pipe(x.cuda())
    pipe.explain(x.cuda())
    pipe.load_weights(plain.state_dict())
    assert pipe[0].weight is pipe[3].weight
    assert devices_of(pipe) == devices_of(GPipe(copy.deepcopy(plain), [1, 1, 2], chunks=CHUNKS))
    expected = gradients(plain, plain_loop(plain, x, CHUNKS))
    for found, wanted in zip(gradients(pipe, pipe(x.cuda())), expected, strict=True):
        torch.testing.assert_close(found, wanted)

    with torch.device("meta"):
        pipe = GPipe(layers(), [2, 2], chunks=CHUNKS)
    pipe.load_state_dict(layers().state_dict(), assign=True)
    assert devices_of(pipe) == ["cuda:0"] * 4 + ["cuda:1"] * 4
    pipe(x.cuda())


def wrong_devices_raise() -> None:
    pipe = GPipe(layers(), [2, 2], chunks=CHUNKS)
    with pytest.raises(ValueError, match="input must be on the first stage's device cuda:0, got cpu"):
        pipe(torch.randn(8, 8))
    with pytest.raises(ValueError, match="input must be on the first stage's device cuda:0, got cuda:1"):
        pipe(torch.randn(8, 8, device="cuda:1"))
    x = torch.randn(8, 8, device="cuda:0")
    pipe(x)
    pipe[3].to("cuda:0")
    message = r"layer 3 \(Linear\) has 'weight' on cuda:0, but runs in stage 1 on cuda:1"
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            pipe(x)
    pipe[3].to("cuda:1")
    pipe(x).sum().backward()
    pipe[0].register_buffer("count", torch.zeros(1))
    with pytest.raises(
        ValueError, match=r"layer 0 \(Linear\) has 'count' on cpu, but runs in stage 0 on cuda:0"
    ):
        pipe(x)


def too_large_a_model_raises() -> None:
    """The error is raised before any layer is moved."""
    width = 3300  # a weight of 42 MiB, 84 MiB with its gradient
    module = layers(2, width)
    with pytest.raises(ValueError, match=r"stages 0, 1 need 0\.2 GiB .* and cuda:1 has 0\.1 GiB"):
        GPipe(module, [1, 1], devices=["cuda:1", "cuda:1"])
    assert set(devices_of(module)) == {"cpu"}
    pipe = GPipe(module, [1, 1], devices=["cuda:2", "cuda:3"])
    pipe(torch.randn(1, width, device="cuda:2"))
    del pipe
    taken = torch.empty(100 * MIB, dtype=torch.uint8, device="cuda:0")
    module = layers(1, width)
    with pytest.raises(ValueError, match=r"stages 0 move 0\.0 GiB .* to cuda:0, which has 0\.0 GiB free"):
        GPipe(module, [1], devices=["cuda:0"])
    assert set(devices_of(module)) == {"cpu"}
    del taken  # PyTorch's allocator caches the memory, and can reuse it
    GPipe(module, [1], devices=["cuda:0"])


MESSAGE = (
    r"\(in action 1{action}\d.*; stage 1 on cuda:1 holds \d+ bytes of parameters, \d+ bytes of their "
    r"gradients so far, (\d+\.\d) MiB of boundary tensors for each of 4 micro-batches "
    r"\((\d+\.\d) MiB in total\), .* of saved activations so far, and .* of scratch memory; to reduce this, "
    r"use more chunks, checkpoint='always', or a balance with fewer layers in this stage\)"
)


def check_message(error: torch.OutOfMemoryError, action: str) -> None:
    found = re.search(MESSAGE.replace("{action}", action), str(error))
    assert found, str(error)
    assert "CUDA out of memory" in str(error)
    assert float(found[2]) == pytest.approx(4 * float(found[1]), abs=0.3)


def verify_moves_boundary_tensors() -> None:
    """verify() runs the plain loop on several devices, with a skip connection and a shared weight."""
    plain = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    plain.insert(1, StashSkip()).insert(4, PopSkip())
    plain[5].weight = plain[0].weight
    pipe = GPipe(plain, [2, 2, 2], devices=["cuda:0", "cuda:1", "cuda:2"], chunks=CHUNKS)
    report = verify(pipe, torch.randn(8, 8, device="cuda:0", requires_grad=True), lambda y: y.square().mean())
    (shared,) = [row for row in report.rows if row.name == "gradient of 0.weight"]
    assert all(row.equal for row in report.rows if row is not shared), report
    assert shared.relative < 1e-5, report


def out_of_memory_in_the_forward() -> None:
    pipe = GPipe(
        nn.Sequential(nn.Identity(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.Tanh()),
        [1, 4],
        devices=["cuda:0", "cuda:1"],
        chunks=CHUNKS,
        checkpoint="never",
    )
    short = torch.randn(8, WIDTH, device="cuda:0")
    expected = gradients(pipe, pipe(short))
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError) as caught:
            pipe(torch.empty(40 * MIB // 4 // WIDTH, WIDTH, device="cuda:0"))
        check_message(caught.value, "F")
        del caught
        assert all(map(torch.equal, gradients(pipe, pipe(short)), expected))


class LargeBackward(torch.autograd.Function):
    """Allocates more memory in its backward than the device has."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient.expand(100, *gradient.shape).exp().sum(0)


class NeedsLargeBackward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return LargeBackward.apply(x)  # type: ignore[no-any-return]


def out_of_memory_in_the_backward() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), NeedsLargeBackward(), nn.Linear(WIDTH, WIDTH))
    pipe = GPipe(model, [1, 2], devices=["cuda:0", "cuda:1"], chunks=CHUNKS, checkpoint="always")
    short = torch.randn(8, WIDTH, device="cuda:0")
    expected = gradients(pipe, pipe(short))
    output = pipe(torch.randn(4 * 8192, WIDTH, device="cuda:0"))
    before = [p.grad for p in pipe.parameters()]
    with pytest.raises(torch.OutOfMemoryError) as caught:
        output.sum().backward()
    check_message(caught.value, "[RB]")
    assert all(p.grad is grad for p, grad in zip(pipe.parameters(), before, strict=True))
    del caught, output
    assert all(map(torch.equal, gradients(pipe, pipe(short)), expected))


def matrix_products_run_in_threads_with_a_context() -> None:
    """PyTorch warns if cuBLAS runs in a thread without one, such as a new thread on the first device."""
    number = ctypes.CDLL(sys.argv[1]).fake_cuda_num_without_context
    for device in (1, 0):  # the caller's thread gets a context
        torch.cuda.set_device(device)
    pipe = GPipe(layers(), [1, 1, 2], devices=["cuda:0", "cuda:0", "cuda:1"], chunks=CHUNKS)
    before = number()
    for _ in range(2):
        pipe.step(torch.randn(8, 8, device="cuda:0"), loss_fn=torch.sum, normalizer=1)
    assert number() == before


PLACEMENT = (
    first_gpus_by_default,
    layers_move_when_the_balance_changes,
    meta_layers_are_loaded_on_their_devices,
    wrong_devices_raise,
    verify_moves_boundary_tensors,
    matrix_products_run_in_threads_with_a_context,
)
OF_STAGES = (
    equal_stages_are_traced_once_for_equal_gpus,
    tensors_that_cannot_be_moved_are_traced_where_they_are,
    devices_that_layers_ask_for,
    quantized_weights_move_with_their_scales,
)
# In a process of its own.
ALONE = (other_gpus_are_left_alone,)
OF_TWO_KINDS = (attention_suits_the_device, equal_stages_are_traced_for_each_kind_of_gpu)
OUT_OF_MEMORY = (too_large_a_model_raises, out_of_memory_in_the_forward, out_of_memory_in_the_backward)

if __name__ == "__main__":
    cases = (
        *PLACEMENT,
        operators_are_timed_on_their_devices,
        *OF_STAGES,
        *ALONE,
        *OF_TWO_KINDS,
        *OUT_OF_MEMORY,
    )
    run_cases({case.__name__: case for case in cases})
