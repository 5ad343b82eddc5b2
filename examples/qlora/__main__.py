"""Fine-tunes a Llama with weights of 4 bits by LoRA and TRL's SFTTrainer, over several stages."""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import gpipe_fast
from examples.shared.options import Options
from gpipe_fast import GPipe

try:
    import bitsandbytes  # noqa: F401
    from datasets import Dataset, disable_progress_bars
    from peft import LoraConfig, PeftModel, get_peft_model
    from tokenizers import Tokenizer, models
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        BitsAndBytesConfig,
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
        PrinterCallback,
    )
    from transformers.utils import logging
    from trl import SFTConfig, SFTTrainer
except ImportError as error:
    raise SystemExit(f"this example needs bitsandbytes, datasets, peft and trl ({error})") from None

FOLDER = Path("build/qlora")
QUICK = {"steps": 20, "layers": 2, "width": 64}
LENGTH, VOCABULARY = 32, 64
INDEX = "model.safetensors.index.json"
QUANTIZATION = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.bfloat16,
)


def main(argv: Sequence[str] | None = None) -> None:
    """Loads block by block, compares a step with the plain model's, trains, and saves and loads adapters."""
    began = time.perf_counter()
    args = parse(argv)
    torch.manual_seed(args.seed)
    folder = args.model if args.model.name else new_checkpoint(args)
    data = rows(args)
    model = new_pipeline(folder, data[: args.batch], args)
    print(f"layers per stage: {model.base_model.model.balance}, on {', '.join(args.devices)}")
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f"parameters: {model.num_parameters():,}, of which {trained:,} are trained")
    batch = {"input_ids": data[: args.batch], "labels": data[: args.batch]}
    report = gpipe_fast.verify(model.base_model.model, **batch, loss_fn=lambda output: output.loss)
    print(f"one step: {report}")
    losses = train(model, data, args)
    print(f"losses of SFTTrainer: the first {losses[0]:.4f}, the last {losses[-1]:.4f}")
    model.save_pretrained(args.save / "adapters")
    if set(args.devices) == {"cpu"}:
        compare_loaded(model, folder, data[:4], args)
    print(
        f"\nfinished in {time.perf_counter() - began:.0f} s\n"
        "Shown: a model with frozen weights of 4 bits is loaded block by block, each on the device of its\n"
        "stage, and its adapters are trained by SFTTrainer with all stages at work. Look next at\n"
        "- `new_pipeline` in examples/qlora/__main__.py;\n"
        "- docs/coming_from/device_map.md: what changes, and what to expect of 2, 4 and 8 cards."
    )


def new_checkpoint(args: argparse.Namespace) -> Path:
    """Saves a small Llama with random weights, in shards, and returns its folder."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=args.width,
        intermediate_size=2 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=False,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0),
    )
    LlamaForCausalLM(config).save_pretrained(args.save / "model", max_shard_size="100KB")
    return Path(args.save, "model")


def rows(args: argparse.Namespace) -> torch.Tensor:
    """Returns texts (64, LENGTH), int64: numbers that grow by the same step, from random ones."""
    starts, steps = torch.randint(VOCABULARY, (64, 1)), torch.randint(1, 4, (64, 1))
    return 1 + (starts + steps * torch.arange(LENGTH)) % (VOCABULARY - 1)


def new_pipeline(folder: Path, ids: torch.Tensor, args: argparse.Namespace) -> Any:
    """Cuts the empty model, loads and quantizes each weight on the device of its stage, and adds adapters."""
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    blocks, stages = config.num_hidden_layers, len(args.devices)
    model = GPipe.from_model(
        empty,
        kwargs={"input_ids": ids, "labels": ids},
        balance=[(blocks + i) // stages for i in range(stages)],
        devices=args.devices,
        chunks=args.chunks,
        checkpoint="always",
        backend="aten",  # a block that cannot run in C++ is an error
    )
    model.load_weights(folder / INDEX, init=model._init_weights, quantization_config=QUANTIZATION)
    lora = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, lora).train()


def train(model: Any, data: torch.Tensor, args: argparse.Namespace) -> list[float]:
    """Trains the adapters, and returns the loss of each step."""
    settings = SFTConfig(
        output_dir=str(args.save),
        per_device_train_batch_size=args.batch,  # of which the pipeline makes micro-batches
        max_steps=args.steps,
        learning_rate=args.rate,
        loss_type="nll",  # the model's own
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        use_cpu=args.devices[0] == "cpu",
    )
    words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0"))
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "0")
    trainer = SFTTrainer(
        model,
        settings,
        train_dataset=Dataset.from_dict({"input_ids": data.tolist()}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, **special),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@torch.no_grad()
def compare_loaded(model: Any, folder: Path, ids: torch.Tensor, args: argparse.Namespace) -> None:
    """Compares the trained model with the plain one that PEFT loads, over the same micro-batches."""
    plain = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=QUANTIZATION, dtype=torch.bfloat16, device_map={"": "cpu"}
    )
    loaded = PeftModel.from_pretrained(plain, args.save / "adapters").train()
    for ours, theirs in zip(model.parameters(), loaded.parameters(), strict=True):
        theirs.data = theirs.data.to(ours.dtype)  # of adapters, which SFTTrainer has cast to bfloat16
    logits = model(input_ids=ids).logits
    expected = torch.cat([loaded(input_ids=part).logits for part in ids.chunk(min(4, args.chunks))])
    same = "equal bit for bit" if torch.equal(logits, expected) else "DIFFERENT"
    print(f"saved, and loaded into the plain model by PEFT: its logits: {same}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses and checks the command line."""
    options = Options(
        "qlora",
        __doc__,
        QUICK,
        devices=(["cpu", "cpu"], "one for each stage, such as cuda:0 cuda:1"),
        model=(Path(), "folder of a sharded model of your own, of the same vocabulary"),
        steps=(100, "steps of SFTTrainer, each on one mini-batch"),
        layers=(4, "blocks of the model"),
        width=(128, "size of the hidden states"),
        batch=(16, "samples per mini-batch"),
        chunks=(8, "micro-batches per mini-batch"),
        rate=(1e-2, "learning rate"),
        seed=(0, "random seed of weights and data"),
        save=(FOLDER, "folder of the model and of the adapters"),
    )
    args = options.read(argv)
    if args.width % 64:
        options.error(f"--width must be a multiple of the 64 weights that share a scale, got {args.width}")
    if len(args.devices) > args.layers:
        options.error(f"cannot cut {args.layers} blocks into {len(args.devices)} stages")
    warnings.simplefilter("ignore")  # those of libraries
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    disable_progress_bars()
    torch.set_num_threads(1)
    return args


if __name__ == "__main__":
    main()
