"""Trainers of other libraries compute the same losses with a pipelined model as with the plain one."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from gpipe_fast import GPipe

_TRL = find_spec("trl")
pytestmark = pytest.mark.usefixtures("one_thread")
VOCABULARY = 50
STEPS = 20
# Since 1.16, TRL's trainers compute the loss by a head of their own.
_UTILS = Path(_TRL.origin).parent / "trainer" / "utils.py" if _TRL is not None and _TRL.origin else None
HAS_FUSED_HEAD = _UTILS is not None and _UTILS.exists() and "def add_fused_lm_head" in _UTILS.read_text()


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    special_tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, **special_tokens)).train()


def pipelined(model: Any) -> Any:
    ids = samples()[:8]
    example = {"input_ids": ids, "labels": ids}
    return GPipe.from_model(model, kwargs=example, balance=[1, 1], devices=["cpu"] * 2, chunks=2)


def with_lora(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


def samples() -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (80, 12), generator=torch.Generator().manual_seed(2))


def settings(folder: Path, num_microbatches: int, **more: Any) -> dict[str, Any]:
    """Returns arguments of trainers, for mini-batches of 8 samples."""
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8 // num_microbatches,
        "gradient_accumulation_steps": num_microbatches,
        "max_steps": STEPS,
        "learning_rate": 0.01,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "use_cpu": True,
        **more,
    }


def losses(trainer: Any, resume: str | None = None) -> list[float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train(resume_from_checkpoint=resume)
    found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(found) == STEPS
    return found


def losses_of_transformers(model: Any, folder: Path, num_microbatches: int, **more: Any) -> list[float]:
    from transformers import Trainer, TrainingArguments

    data = [{"input_ids": row, "labels": row} for row in samples()]
    arguments = TrainingArguments(**settings(folder, num_microbatches, **more))
    return losses(Trainer(model, arguments, train_dataset=data))


def tokenizer() -> Any:
    """Returns a tokenizer whose words are numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "0")
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def losses_of_trl(
    model: Any, folder: Path, num_microbatches: int, resume: str | None = None, **more: Any
) -> list[float]:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    return losses(
        trl.SFTTrainer(
            model,
            trl.SFTConfig(**settings(folder, num_microbatches, **{"loss_type": "nll", **more})),
            train_dataset=datasets.Dataset.from_dict({"input_ids": samples().tolist()}),
            processing_class=tokenizer(),
        ),
        resume,
    )


def test_transformers_trainer(tmp_path: Path) -> None:
    """The pipeline's two micro-batches are two steps of gradient accumulation."""
    expected = losses_of_transformers(llama(), tmp_path, 2)
    assert losses_of_transformers(pipelined(llama()), tmp_path, 1) == expected


def test_trl_and_peft_with_their_defaults(tmp_path: Path) -> None:
    """These are autocast to bfloat16 and gradient checkpointing."""
    expected = losses_of_trl(with_lora(llama()), tmp_path, 2)
    found = losses_of_trl(with_lora(pipelined(llama())), tmp_path, 1)
    # In autocast, and since TRL 1.16 the plain model's head computes in tiles.
    assert found == (pytest.approx(expected, rel=1e-4) if HAS_FUSED_HEAD else expected)


def losses_of_preferences(model: Any, folder: Path, num_microbatches: int) -> list[float]:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    texts = [" ".join(map(str, row.tolist())) for row in samples()]
    columns = {"prompt": texts, "chosen": texts[1:] + texts[:1], "rejected": texts[2:] + texts[:2]}
    more = {"bf16": False, "gradient_checkpointing": False}
    return losses(
        trl.DPOTrainer(
            model,
            args=trl.DPOConfig(**settings(folder, num_microbatches, **more)),
            train_dataset=datasets.Dataset.from_dict(columns),
            processing_class=tokenizer(),
        )
    )


def test_preferences_with_trl_and_peft(tmp_path: Path) -> None:
    """The reference model is the pipeline without its adapters; chosen and rejected texts are one batch."""
    expected = losses_of_preferences(with_lora(llama()), tmp_path, 2)
    found = losses_of_preferences(with_lora(pipelined(llama())), tmp_path, 1)
    assert found == pytest.approx(expected, rel=1e-5)


def test_trl_and_peft_with_weights_of_4_bits(tmp_path: Path) -> None:
    """QLoRA: a run is resumed; adapters are saved, loaded beside weights quantized again, and merged."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    from transformers import BitsAndBytesConfig, LlamaForCausalLM

    llama().save_pretrained(tmp_path / "base")
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,  # that of autocast, which trainers turn on
    )

    def quantized() -> Any:
        return LlamaForCausalLM.from_pretrained(
            tmp_path / "base", quantization_config=config, dtype=torch.float32, device_map={"": "cpu"}
        ).train()

    peft = pytest.importorskip("peft")
    expected = losses_of_trl(with_lora(quantized()), tmp_path, 2)
    ours = with_lora(pipelined(quantized()))
    half = {"save_strategy": "steps", "save_steps": STEPS // 2}
    found = losses_of_trl(ours, tmp_path, 1, **half)
    assert found == (pytest.approx(expected, rel=1e-4) if HAS_FUSED_HEAD else expected)
    checkpoint = str(tmp_path / f"checkpoint-{STEPS // 2}")
    resumed = losses_of_trl(with_lora(pipelined(quantized())), tmp_path, 1, checkpoint, **half)
    assert resumed[STEPS // 2] == found[STEPS // 2]  # with the saved adapters
    assert resumed == pytest.approx(found, abs=1e-4)  # a resumed run of the plain model is as near
    ours.save_pretrained(tmp_path / "adapters")
    loaded = peft.PeftModel.from_pretrained(quantized(), tmp_path / "adapters")
    ids = samples()[:4]

    def logits_of(model: Any) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = model.train()(input_ids=ids).logits
        return found

    trained = {name: p for name, p in ours.named_parameters() if "lora_" in name}
    assert trained
    for name, parameter in loaded.named_parameters():
        if "lora_" in name:
            assert torch.equal(parameter.float(), trained[name].float())
    both = [model.float().merge_and_unload() for model in (loaded, ours)]
    assert torch.equal(logits_of(both[0]), logits_of(both[1].plain()))


@pytest.mark.skipif(HAS_FUSED_HEAD, reason="TRL has no other loss, or none at all")
def test_trl_without_a_pipeline_in_its_loss_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"denied to replace forward.*loss_type='nll'"):
        losses_of_trl(pipelined(llama()), tmp_path, 1, loss_type="chunked_nll")
