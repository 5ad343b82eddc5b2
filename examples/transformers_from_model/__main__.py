"""Fine-tunes a BERT of transformers by `GPipe.from_model`, with its own loss, beside the plain model."""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification
from transformers.utils.logging import disable_progress_bar

import gpipe_fast
from examples.shared.options import Options
from gpipe_fast import GPipe
from gpipe_fast.gpipe import CHECKPOINT_MODES

FOLDER = Path("build/transformers_from_model")
QUICK = {"steps": 20, "layers": 2, "width": 32}
HEADS, LENGTH, VOCABULARY = 4, 16, 64


def new_model(args: argparse.Namespace) -> BertForSequenceClassification:
    """Returns the library's model with random weights, in training mode: its dropout is on."""
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=args.width,
        intermediate_size=2 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=HEADS,
        max_position_embeddings=LENGTH,
        num_labels=2,
    )
    return BertForSequenceClassification(config).train()


def batch_of(args: argparse.Namespace) -> dict[str, Tensor]:
    """Returns padded texts of random tokens, and whether the first token is of the upper half of all."""
    tokens = torch.randint(1, VOCABULARY, (args.batch, LENGTH))
    lengths = torch.randint(LENGTH // 2, LENGTH, (args.batch, 1))
    mask = (torch.arange(LENGTH) < lengths).long()
    return {"input_ids": tokens * mask, "attention_mask": mask, "labels": tokens[:, 0] // (VOCABULARY // 2)}


def main(argv: Sequence[str] | None = None) -> None:
    """Compares a step with the plain model's, trains both from the same weights, saves and loads."""
    began = time.perf_counter()
    args = parse(argv)
    torch.manual_seed(args.seed)
    model = new_model(args)
    pipeline = new_pipeline(model, args)
    print(f"model: {type(pipeline).__name__}, {model.num_parameters():,} parameters")
    print(f"layers per stage: {pipeline.balance}, of which the first and the last are no blocks")
    compare_step(pipeline, batch_of(args))
    copied = copy.deepcopy(pipeline)
    print("\nlosses of the pipeline, and of the plain model over the same micro-batches:")
    ours = train(pipeline, args, pipeline)
    with threads_of_a_stage(pipeline):
        plain = train(copied, args, copied.plain_loop)
    for step in range(0, args.steps, max(1, args.steps // 5)):
        print(f"  step {step:3}: {ours[step]:.6f}  {plain[step]:.6f}")
    print(f"  equal in every step: {ours == plain}")
    pipeline.save_pretrained(args.save)
    loaded = BertForSequenceClassification.from_pretrained(args.save)
    print(f"\nsaved and loaded: accuracy {accuracy(loaded, args):.0%} on new texts")
    print(
        f"\nfinished in {time.perf_counter() - began:.0f} s\n"
        "Shown: a library's model becomes a pipeline in one call, with its own loss, and its losses are\n"
        "those of the plain model. Look next at\n"
        "- `new_pipeline` in examples/transformers_from_model/__main__.py;\n"
        "- docs/guide/not_sequential.md: what is split, and which losses are exact."
    )


def new_pipeline(model: BertForSequenceClassification, args: argparse.Namespace) -> Any:
    """Makes a pipeline of the model. It trains the parameters of ``model`` itself."""
    pipeline = GPipe.from_model(
        model,
        kwargs=batch_of(args),
        devices=["cpu"] * args.stages,
        chunks=args.chunks,
        checkpoint=args.checkpoint,
        backend="aten",  # a layer that cannot run in C++ is an error
    )
    pipeline.threads_per_stage = max(1, torch.get_num_threads() // args.stages)
    return pipeline


def compare_step(pipeline: Any, batch: dict[str, Tensor]) -> None:
    """Compares outputs, loss and gradients of a step with those of the plain model, with dropout on."""
    report = gpipe_fast.verify(pipeline, **batch, loss_fn=lambda output: output.loss)
    print(f"one step: {report}")


def train(model: Any, args: argparse.Namespace, forward: Callable[..., Any]) -> list[float]:
    """Trains a model; returns the loss of every step, before the step."""
    torch.manual_seed(args.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate)
    losses = []
    for _ in range(args.steps):
        loss = forward(**batch_of(args)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@contextmanager
def threads_of_a_stage(pipeline: Any) -> Iterator[None]:
    """Gives the plain model as many threads as a stage has, because the order of sums depends on them."""
    before = torch.get_num_threads()
    torch.set_num_threads(pipeline.threads_per_stage)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@torch.no_grad()
def accuracy(model: BertForSequenceClassification, args: argparse.Namespace) -> float:
    """Returns the share of new texts that the model classifies right."""
    batch = batch_of(args)
    labels = batch.pop("labels")
    return float((model.eval()(**batch).logits.argmax(-1) == labels).float().mean())


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses and checks the command line."""
    options = Options(
        "transformers_from_model",
        __doc__,
        QUICK,
        steps=(200, "training steps, each on one mini-batch"),
        layers=(4, "blocks of the model"),
        width=(64, "size of the hidden states"),
        batch=(64, "samples per mini-batch"),
        chunks=(8, "micro-batches per mini-batch"),
        stages=(2, "stages of the pipeline, on the CPU"),
        checkpoint=("except_last", f"which micro-batches recompute: {', '.join(CHECKPOINT_MODES)}"),
        rate=(3e-3, "learning rate"),
        seed=(0, "random seed of weights and data"),
        threads=(1, "threads of all stages together, divided evenly"),
        save=(FOLDER, "folder of the trained model"),
    )
    args = options.read(argv)
    if args.width % HEADS:
        options.error(f"--width must be a multiple of the {HEADS} heads, got {args.width}")
    if args.stages > args.layers + 2:
        options.error(f"cannot cut {args.layers + 2} layers into {args.stages} stages")
    torch.set_num_threads(args.threads)
    disable_progress_bar()
    return args


if __name__ == "__main__":
    main()
