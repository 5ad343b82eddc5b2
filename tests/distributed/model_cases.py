"""What the ranks of the tests of `GPipe.from_model` with a mesh run."""

from __future__ import annotations

import ctypes
import itertools
import re
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from gpipe_fast import GPipe, shard
from gpipe_fast.container import runner_of
from gpipe_fast.layers.quantized import stored_bytes
from tests.distributed.cases import TIMEOUT, _check, _error_of, here
from tests.distributed.tensor_cases import mesh_of, whole
from tests.models.test_from_model import gpt2
from tests.models.test_quantized_models import settings_of
from tests.reference import SEED, Result, restored

VOCABULARY, LENGTH, BATCH = 30, 8, 7


def numbers(*shape: int) -> Tensor:
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    """A block that counts its calls in a buffer."""

    def __init__(self, tied: nn.Parameter) -> None:
        super().__init__()
        self.linear, self.drop, self.tied = nn.Linear(8, 8), nn.Dropout(0.1), tied
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.calls += 1
        x = x + torch.softmax(x @ x.transpose(1, 2) + mask, -1) @ x
        return x + self.drop(F.gelu(F.linear(self.linear(x), self.tied)))


class SmallGPT(nn.Module):
    """Its output layer has the weight of its embedding. Its positions are a parameter of its own.

    Two blocks share a weight, and the second block's layer is frozen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.positions = nn.Parameter(torch.randn(LENGTH, 8))
        shared, *others = (nn.Parameter(torch.randn(8, 8)) for _ in range(3))
        self.blocks = nn.ModuleList(map(Block, (shared, others[0], shared, others[1])))
        self.blocks[1].linear.requires_grad_(False)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.embed(ids) + self.positions[: ids.shape[1]]
        mask = torch.full((ids.shape[1], ids.shape[1]), float("-inf"), device=ids.device).triu(1)
        for block in self.blocks:
            x = block(x, mask)
        logits = F.linear(x, self.embed.weight)
        found = {"logits": logits, "mean": logits.detach().mean((1, 2))}
        if labels is not None:
            found["loss"] = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return found


def small_gpt() -> nn.Module:
    torch.manual_seed(SEED)
    return SmallGPT().train()


LABELS = torch.where(numbers(BATCH, LENGTH) > 20, -100, numbers(BATCH, LENGTH))
# Name: model, and the name of its inputs.
MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "small": (small_gpt, "ids"),
    "GPT-2": (lambda: gpt2(tie_word_embeddings=True), "input_ids"),
}


def made(name: str, balance: list[int] | None = None, **options: Any) -> tuple[Any, Any]:
    """Returns a model over all processes, and one in this process, of as many stages."""
    warnings.simplefilter("ignore")
    make, key = MODELS[name]
    kwargs = {key: numbers(BATCH, LENGTH), "labels": LABELS}
    ours = GPipe.from_model(
        make(), kwargs=kwargs, balance=balance, mesh=dist.group.WORLD, timeout=TIMEOUT, **options
    )
    alone = GPipe.from_model(
        make(), kwargs=kwargs, balance=ours.balance, devices=["cpu"] * len(ours.balance), **options
    )
    alone.threads_per_stage = 1
    return ours, alone


@contextmanager
def trained(model: Any) -> Any:
    torch.manual_seed(SEED)
    with restored(model):
        result: Result = {}
        yield result
        result |= {f"gradient of {n}": p.grad for n, p in model.named_parameters()}
        result |= {f"buffer {n}": b.clone() for n, b in model.named_buffers()}


def is_last(model: Any) -> bool:
    ranks = runner_of(model.pipeline).processes
    return ranks is None or ranks.index == ranks.size - 1


def backward(model: Any, key: str) -> Result:
    with trained(model) as result:
        output = model(**{key: numbers(BATCH, LENGTH), "labels": LABELS})
        output["loss"].backward()
        if is_last(model):
            values = {name: value for name, value in output.items() if isinstance(value, Tensor)}
            result |= {f"output {name}": value for name, value in values.items()}
    return result


def step(model: Any, key: str) -> Result:
    losses: list[Tensor] = []
    with trained(model) as result:
        inputs = {key: numbers(BATCH, LENGTH), "labels": LABELS}
        optimizer = torch.optim.SGD([p for p in model.parameters() if not p.is_meta], lr=0.1)
        update: dict[str, Any] = {"optimizer": optimizer, "max_norm": 0.1}
        loss, output = model.step(**inputs, losses=losses, return_outputs=True, **update)
        assert (output is None) != is_last(model)
        result |= {"loss": loss} | {f"loss {m}": each for m, each in enumerate(losses)}
        if output is not None:
            result["output"] = output["logits"]
    return result


def evaluate(model: Any, key: str) -> Result:
    model.eval()
    with restored(model):
        # Of another length, so that the rule of the loss is found when parameters are on the meta device.
        shorter = {key: numbers(BATCH, LENGTH)[:, :-2], "labels": LABELS[:, :-2].contiguous()}
        loss = model.evaluate(**shorter)
        with torch.no_grad():
            output = model(**{key: numbers(3, LENGTH - 2)})
    model.train()
    return {"loss": loss} | ({"output": output["logits"]} if is_last(model) else {})


def same_bits(
    names: list[str], schedules: list[str], chunks: list[int], num_stages: int = 0, backwards: bool = True
) -> int:
    """Compares models over all ranks with models in one process. By default each rank has one stage."""
    number = 0
    for name in names:
        balance = None if not num_stages else [1] * num_stages
        ours, alone = made(name, balance)
        key = MODELS[name][1]
        for schedule, count in itertools.product(schedules, chunks):
            for model in (ours, alone):
                model.schedule, model.chunks = schedule, count
            what = f"{name}, {schedule}, chunks={count}"
            if backwards:
                _check(backward(ours, key), backward(alone, key), ours, f"backward, {what}")
            _check(step(ours, key), step(alone, key), ours, f"step, {what}")
            _check(evaluate(ours, key), evaluate(alone, key), ours, f"evaluate, {what}")
            number += 1
    return number


def differing() -> list[str]:
    """The last rank passes other inputs: returns the errors; all go on afterwards."""
    ours, _ = made("small", chunks=BATCH)
    x, odd = numbers(BATCH, LENGTH), is_last(ours)
    expected = step(ours, "ids")
    few = torch.where(torch.arange(LENGTH) > 3, -100, LABELS) if odd else LABELS
    errors = [_error_of(lambda: ours.step(ids=x, labels=few))]
    errors.append(_error_of(lambda: ours(ids=x, labels=few)))
    errors.append(_error_of(lambda: ours.evaluate(ids=x, labels="none" if odd else LABELS)))
    _check(step(ours, "ids"), here(expected), ours, "step")
    return errors


def quantized(index: str, num_stages: int) -> Any:
    """Returns a Llama on the meta device, and loads it, with weights of 4 bits, by a function."""
    package = pytest.importorskip("transformers")
    package.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    config = package.AutoConfig.from_pretrained(str(Path(index).parent))
    with torch.device("meta"):
        empty = package.AutoModelForCausalLM.from_config(config)
    blocks, tokens = config.num_hidden_layers, numbers(4, LENGTH)
    where: dict[str, Any] = {"balance": [blocks // num_stages] * num_stages, "chunks": 2}
    where |= {"mesh": dist.group.WORLD} if dist.get_world_size() > 1 else {"devices": ["cpu"] * num_stages}
    model = GPipe.from_model(empty, kwargs={"input_ids": tokens, "labels": tokens}, **where)
    settings = settings_of("NF4", torch.float32)
    return model, lambda: model.load_weights(index, init=model._init_weights, quantization_config=settings)


def resident_bytes(field: str) -> int:
    return 1024 * int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1])  # type: ignore[index]


def quantized_peak(index: str, num_stages: int) -> tuple[int, int]:
    """Returns by how many bytes loading raises the peak of memory, and the bytes of the own stages.

    The C library maps allocations above 32 MiB into memory, as weights of large models, and gives them back
    when they are freed; here, smaller ones, too.
    """
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD
    settings_of("NF4", torch.float32)  # imports the library
    model, load = quantized(index, num_stages)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident_bytes("VmRSS")
    load()
    peak = resident_bytes("VmHWM") - before
    return peak, sum(stored_bytes(p) for p in model.parameters() if not p.is_meta)


def quantized_loss(index: str, num_stages: int) -> list[float]:
    """Returns the losses of three steps with LoRA."""
    peft = pytest.importorskip("peft")
    model, load = quantized(index, num_stages)
    load()
    torch.manual_seed(SEED)
    lora = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, lora).train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad and not p.is_meta], lr=1.0)
    losses = []
    for _ in range(3):
        loss = model(input_ids=numbers(4, LENGTH), labels=numbers(4, LENGTH)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, [float(x) for x in losses] if is_last(model) else None)
    return gathered[-1]


def of_plan(kind: str) -> Any:
    """Returns a small model of transformers that has a plan for tensor parallelism."""
    package = pytest.importorskip("transformers")
    package.logging.set_verbosity_error()
    name, _, tied = kind.partition(" ")
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 2 * LENGTH}
    if name != "gpt_neox":
        sizes |= {"num_key_value_heads": 2, "head_dim": 4}
    config = package.AutoConfig.for_model(name, tie_word_embeddings=tied == "tied", **sizes)
    torch.manual_seed(SEED)
    return package.AutoModelForCausalLM.from_config(config)


def divided(kind: str, stages: int, by_transformers: bool, settings: list[tuple[int, Any]]) -> list[str]:
    """Returns what differs from one process by more than rounding, by numbers of micro-batches and modes."""
    warnings.simplefilter("ignore")
    mesh = mesh_of(stages)
    inputs = {"input_ids": numbers(8, LENGTH), "labels": LABELS[:1].expand(8, -1)}
    plain, model = of_plan(kind), of_plan(kind)
    if by_transformers:
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        apply_tensor_parallelism(model, mesh["tp"])
    ours = GPipe.from_model(model, kwargs=inputs, mesh=mesh, schedule="1f1b", timeout=TIMEOUT)
    expected = plain(**inputs).loss
    expected.backward()
    wanted, found = dict(plain.named_parameters()), []
    for ours.chunks, ours.checkpoint in settings:
        ours.zero_grad()
        losses = [ours.step(**inputs), ours.evaluate(**inputs)]
        what = f"{kind}, {ours.chunks}, {ours.checkpoint}"
        found += [f"{what}: {x} is not {expected}" for x in losses if not torch.allclose(x, expected)]
        for name, parameter in ours.named_parameters():
            if parameter.is_meta:
                continue
            own, other = whole(parameter.grad), wanted[name].grad
            if not torch.allclose(own, other, rtol=1e-4, atol=1e-6):
                found.append(f"{what}: {name} differs by {(own - other).abs().max()}")
    return found


def replicated(dim: str) -> list[str]:
    """Returns what differs from one process in the mean of the losses of replicas, by more than rounding."""
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=(dim, "pp"))
    plain, model, found = of_plan("llama"), of_plan("llama"), list[str]()
    every = [
        {"input_ids": numbers(8, LENGTH).roll(r), "labels": LABELS[:1].expand(8, -1).roll(r)} for r in (0, 1)
    ]
    own = every[mesh.get_local_rank(dim)]
    model = shard(model, mesh[dim]) if dim == "fsdp" else model
    ours = GPipe.from_model(model, kwargs=own, mesh=mesh, schedule="1f1b", chunks=4, timeout=TIMEOUT)
    optimizer = torch.optim.SGD([p for p in ours.parameters() if not p.is_meta], 0.1)
    other, named = torch.optim.SGD(plain.parameters(), 0.1), dict(plain.named_parameters())
    for step in range(3):
        losses = [plain(**each).loss for each in every]
        expected = sum(losses, torch.zeros(())) / 2
        other.zero_grad(), optimizer.zero_grad()
        expected.backward()
        if step == 1:
            ours(**own).loss.backward()
            optimizer.step()
        else:
            loss = ours.step(**own, optimizer=optimizer, max_norm=0.5)
            found += [] if torch.allclose(loss, expected) else [f"{loss} is not {expected}"]
            nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        other.step()
    for name, parameter in ours.named_parameters():
        if not parameter.is_meta and not torch.allclose(whole(parameter), named[name], rtol=1e-4, atol=1e-6):
            found.append(name)
    return found
