"""A tiny language model, its tokenizer, and made data for the trainers of TRL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

V = 60


def tokenizer() -> Any:
    """Words w0, w1, … are tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(V - 3))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **names)


def tiny_llama(seed: int = 0) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=V, max_position_embeddings=64, **sizes, **ids))


def answers(n: int = 64, *, seed: int = 0) -> list[dict[str, str]]:
    """Prompts of different lengths, each with a chosen and a rejected answer."""
    generator = torch.Generator().manual_seed(seed)

    def words(low: int, high: int) -> str:
        length = int(torch.randint(low, high, (1,), generator=generator))
        return " ".join(f"w{int(i)}" for i in torch.randint(0, V - 3, (length,), generator=generator))

    return [{"prompt": words(3, 8), "chosen": f" {words(3, 10)}", "rejected": f" {words(3, 10)}"} for _ in range(n)]


def trl_trainer(kind: str, out: Path, *callbacks: Any, model: nn.Module | None = None, **options: Any) -> Any:
    """An SFTTrainer, or a DPOTrainer of full weights (`dpo`) or of an adapter (`lora`)."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    words: dict[str, Any] = {
        "output_dir": str(out), "max_steps": 2, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 2,
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True,
        "bf16": False, "learning_rate": 1e-3, "max_grad_norm": 0.01, "seed": 1, **options,
    }  # fmt: skip
    more: dict[str, Any] = {"processing_class": tokenizer(), "callbacks": list(callbacks)}
    rows, model = answers(), tiny_llama() if model is None else model
    if kind == "sft":
        rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows]
        return SFTTrainer(model, SFTConfig(**words), train_dataset=Dataset.from_list(rows), **more)
    if kind == "lora":
        from peft import LoraConfig

        more["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    else:
        more["ref_model"] = tiny_llama(seed=7)
    return DPOTrainer(model, args=DPOConfig(**words), train_dataset=Dataset.from_list(rows), **more)
