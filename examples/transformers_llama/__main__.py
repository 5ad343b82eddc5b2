"""Trains the Llama of transformers as a pipeline, and loads the result into the plain model."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.utils.logging import disable_progress_bar

from gpipe_fast import GPipe
from gpipe_fast.balance import balance_by_cost
from gpipe_fast.gpipe import CHECKPOINT_MODES

FOLDER = Path("build/transformers_llama")
QUICK = {"steps": 40, "layers": 2, "width": 64}
HEADS = 4
PROMPT = b"def "


# What passes from layer to layer: hidden states (batch, length, width), and the rotary position embedding's
# cosines and sines (1, length, width of a head).
Hidden = tuple[Tensor, Tensor, Tensor]


class Embedding(nn.Module):
    """The first lines of `LlamaModel.forward`: tokens (batch, length) to hidden states and positions."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.embed_tokens, self.rotary_emb = model.model.embed_tokens, model.model.rotary_emb

    def forward(self, tokens: Tensor) -> Hidden:
        """Embeds the tokens, and computes the positions that every block needs."""
        hidden = self.embed_tokens(tokens)
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        cosines, sines = self.rotary_emb(hidden, positions)
        return hidden, cosines, sines


class Block(nn.Module):
    """A block of the library, with its keyword argument passed along as part of a tuple."""

    def __init__(self, block: LlamaDecoderLayer) -> None:
        super().__init__()
        self.block = block

    def forward(self, inputs: Hidden) -> Hidden:
        """Changes the hidden states. With the attention ``"sdpa"``, a block without a mask is causal."""
        hidden, cosines, sines = inputs
        return self.block(hidden, position_embeddings=(cosines, sines)), cosines, sines


class Head(nn.Module):
    """The last lines of `LlamaForCausalLM.forward`: hidden states to logits (batch, length, 256)."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.norm, self.lm_head = model.model.norm, model.lm_head

    def forward(self, inputs: Hidden) -> Tensor:
        """Predicts the next byte at every position."""
        logits: Tensor = self.lm_head(self.norm(inputs[0]))
        return logits


def llama_layers(model: LlamaForCausalLM) -> nn.Sequential:
    """Returns the model as a sequence of layers, which hold the modules of ``model``, not copies."""
    return nn.Sequential(Embedding(model), *map(Block, model.model.layers), Head(model))


def new_model(args: argparse.Namespace) -> LlamaForCausalLM:
    """Returns the library's model with random weights. A token is a byte; byte 0 is the end of a text."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=args.width,
        intermediate_size=3 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,  # grouped-query attention
        max_position_embeddings=args.length,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def main(argv: Sequence[str] | None = None) -> None:
    """Compares a step with the plain model, trains, saves, loads the plain model, and compares again."""
    began = time.perf_counter()
    args = parse(argv)
    torch.manual_seed(args.seed)
    model, text = new_model(args), some_text()
    pipeline = new_pipeline(model, args)
    print(f"text: {len(text):,} bytes of Python's standard library")
    print(f"model: LlamaForCausalLM, {model.num_parameters():,} parameters")
    print(f"layers per stage: {pipeline.balance}, all run in C++; checkpoint={pipeline.checkpoint!r}")
    print(f"step: {args.batch} windows of {args.length} bytes, chunks={args.chunks}")
    compare_step(model, pipeline, windows(text, args))
    train(pipeline, text, args)
    loaded = save_and_load(model, args.save)
    compare_loaded(loaded, pipeline, windows(text, args)[0])
    write_sample(loaded, args)
    print(
        f"\nfinished in {time.perf_counter() - began:.0f} s\n"
        "Shown: the pipeline computes what the library's model computes, and trains weights that the\n"
        "library saves and loads. Look next at\n"
        "- `llama_layers` in examples/transformers_llama/__main__.py: the cut into layers;\n"
        "- examples/transformers_gpt2: shared weights;\n"
        "- docs/guide/not_sequential.md: other models, without writing layers."
    )


def new_pipeline(model: LlamaForCausalLM, args: argparse.Namespace) -> GPipe:
    """Cuts the model into stages on the CPU. The pipeline trains the parameters of ``model`` itself."""
    layers = llama_layers(model)
    # The time of a layer is roughly that of its matrices; the embedding only looks up rows.
    costs = [0, *(sum(p.numel() for p in layer.parameters()) for layer in layers[1:])]
    balance = getattr(args, "balance", None) or balance_by_cost(args.stages, costs)
    pipeline = GPipe(
        layers,
        balance,
        devices=["cpu"] * len(balance),
        chunks=args.chunks,
        checkpoint=args.checkpoint,
        backend="aten",  # a layer that cannot run in C++ is an error
    )
    pipeline.threads_per_stage = max(1, torch.get_num_threads() // len(balance))
    return pipeline


def some_text() -> Tensor:
    """Returns a few modules of Python's standard library, uint8."""
    folder = Path(argparse.__file__).parent
    names = ("argparse", "ast", "inspect", "pathlib", "shutil", "tarfile", "typing", "zipfile")
    content = b"\n".join(path.read_bytes() for n in names for path in [folder / f"{n}.py"] if path.exists())
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def windows(text: Tensor, args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Draws windows of the text; returns their bytes and the bytes that follow, (batch, length), int64."""
    starts = torch.randint(len(text) - args.length, (args.batch, 1))
    cut = text[starts + torch.arange(args.length + 1)].long()
    return cut[:, :-1], cut[:, 1:]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean cross entropy per byte, in nats."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Step(NamedTuple):
    """What one step computes; the gradients have the library's parameter names."""

    logits: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]


def run_step(
    forward: Callable[[Tensor], Tensor], model: LlamaForCausalLM, tokens: Tensor, targets: Tensor
) -> Step:
    """Runs forward and backward without changing a weight."""
    model.zero_grad()
    logits = forward(tokens)
    loss = loss_of(logits, targets)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return Step(logits.detach(), loss.detach(), gradients)


def compare_step(model: LlamaForCausalLM, pipeline: GPipe, batch: tuple[Tensor, Tensor]) -> None:
    """Compares a step of the pipeline with a step of the library's model over the same micro-batches."""
    with threads_of_a_stage(pipeline):
        plain = run_step(lambda tokens: plain_logits(model, tokens, pipeline.chunks), model, *batch)
        ours = run_step(pipeline, model, *batch)
    print("\none step, compared with the plain model over the same micro-batches:")
    print(f"  logits: {difference(ours.logits, plain.logits)}")
    print(f"  loss: {difference(ours.loss, plain.loss)}")
    pairs = {name: (ours.gradients[name], gradient) for name, gradient in plain.gradients.items()}
    unequal = {name: pair for name, pair in pairs.items() if not torch.equal(*pair)}
    print(f"  gradients: {len(pairs) - len(unequal)} of {len(pairs)} are equal bit for bit")
    for name, pair in unequal.items():
        print(f"  gradient of {name}: {difference(*pair)}")


@contextmanager
def threads_of_a_stage(pipeline: GPipe) -> Iterator[None]:
    """Gives the plain model as many threads as a stage has, because the order of sums depends on them."""
    before = torch.get_num_threads()
    torch.set_num_threads(pipeline.threads_per_stage or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def plain_logits(model: LlamaForCausalLM, tokens: Tensor, chunks: int) -> Tensor:
    """Runs the library's model on one micro-batch after the other."""
    return torch.cat([model(part, use_cache=False).logits for part in tokens.chunk(chunks)])


def difference(ours: Tensor, plain: Tensor) -> str:
    """Says whether two tensors are equal, or how much they differ."""
    if torch.equal(ours, plain):
        return "equal bit for bit"
    largest = (ours - plain).abs().max().item()
    return f"largest difference {largest:.1e}, {largest / plain.abs().max().item():.0e} of the largest value"


def train(pipeline: GPipe, text: Tensor, args: argparse.Namespace) -> None:
    """Trains as any module is trained."""
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=args.lr)
    print(f"\ntraining for {args.steps} steps:")
    for step in range(1, args.steps + 1):
        tokens, targets = windows(text, args)
        optimizer.zero_grad()
        loss = loss_of(pipeline(tokens), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(pipeline.parameters(), 1.0)
        optimizer.step()
        if step in (1, args.steps) or step % max(1, args.steps // 10) == 0:
            print(f"  step {step:4}: loss {loss.item():.3f}", flush=True)


def save_and_load(model: LlamaForCausalLM, folder: Path) -> LlamaForCausalLM:
    """Saves the trained weights as the library does, and returns a new plain model with them."""
    disable_progress_bar()
    model.save_pretrained(folder)
    loaded: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder)
    print(f"\nsaved with save_pretrained to {folder}, loaded with LlamaForCausalLM.from_pretrained")
    return loaded


@torch.no_grad()
def compare_loaded(loaded: LlamaForCausalLM, pipeline: GPipe, tokens: Tensor) -> None:
    """Compares the loaded plain model with the trained pipeline, both in eval mode."""
    with threads_of_a_stage(pipeline):
        ours = pipeline.eval()(tokens)
        by_microbatch, at_once = plain_logits(loaded, tokens, pipeline.chunks), loaded(tokens).logits
    print("the loaded plain model, compared with the trained pipeline:")
    print(f"  logits, over the same micro-batches: {difference(ours, by_microbatch)}")
    print(f"  logits, over the whole mini-batch: {difference(ours, at_once)}")


def write_sample(loaded: LlamaForCausalLM, args: argparse.Namespace) -> None:
    """Continues a prompt with the library's own `generate`."""
    prompt = torch.tensor([list(PROMPT)])
    written = loaded.generate(prompt, max_length=args.length, do_sample=True, temperature=0.7)
    print("\nthe loaded plain model writes, with the `generate` of transformers:")
    print(bytes(written[0].tolist()).decode("ascii", "backslashreplace"))


def positive(word: str) -> int:
    """Parses an integer of at least 1."""
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def command_line() -> argparse.ArgumentParser:
    """Returns the argument parser."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.transformers_llama",
        description=(__doc__ or "").strip(),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add, threads = parser.add_argument, torch.get_num_threads()
    quick = " ".join(f"--{name} {value}" for name, value in QUICK.items())
    add("--quick", action="store_true", help=f"a short run of a small model: {quick}")
    add("--steps", type=positive, default=200, metavar="N", help="training steps, each on one mini-batch")
    add("--stages", type=positive, default=2, metavar="K", help="stages; layers are balanced by their size")
    balance: dict[str, Any] = {"nargs": "+", "default": argparse.SUPPRESS, "metavar": "LAYERS"}
    add("--balance", type=positive, **balance, help="layers of each stage, instead of --stages")
    add("--chunks", type=positive, default=8, metavar="M", help="micro-batches per mini-batch")
    add("--checkpoint", choices=CHECKPOINT_MODES, default="except_last", help="which micro-batches recompute")
    add("--layers", type=positive, default=4, metavar="N", help="Transformer blocks")
    add("--width", type=positive, default=128, metavar="SIZE", help="size of a token's vector")
    add("--length", type=positive, default=64, metavar="BYTES", help="bytes per window")
    add("--batch", type=positive, default=16, metavar="N", help="windows per mini-batch")
    add("--lr", type=float, default=1e-3, metavar="RATE", help="learning rate")
    add("--seed", type=int, default=0, metavar="N", help="random seed of the weights and the windows")
    together = "threads of all stages together, divided evenly"
    add("--threads", type=positive, default=threads, metavar="T", help=together)
    add("--save", type=Path, default=FOLDER, metavar="FOLDER", help="folder for the trained model")
    return parser


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses and checks the command line."""
    parser = command_line()
    args = parser.parse_args(argv)
    if args.quick:
        parser.set_defaults(**QUICK)
        args = parser.parse_args(argv)
    if args.width % HEADS:
        parser.error(f"--width must be a multiple of the {HEADS} heads, got {args.width}")
    if args.length <= len(PROMPT):
        parser.error(f"--length must be above {len(PROMPT)}, got {args.length}")
    layers = args.layers + 2  # the embedding, the blocks, the head
    if args.stages > layers:
        parser.error(f"cannot cut {layers} layers into {args.stages} stages")
    balance = getattr(args, "balance", [layers])
    if sum(balance) != layers:
        parser.error(f"--balance must sum to {layers} layers, got {balance}")
    torch.set_num_threads(args.threads)
    return args


if __name__ == "__main__":
    main()
