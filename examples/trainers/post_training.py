"""From a base model through fine-tuning (TRL's SFTTrainer) to preferences (DPOTrainer), watched and then swept.

python examples/trainers/post_training.py
"""

from __future__ import annotations

import contextlib
import io
import string
import tempfile
from pathlib import Path

import torch
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import anisoscope
from anisoscope.integrations.hf_trainer import MonitorCallback

logging.set_verbosity_error()
logging.disable_progress_bar()
disable_progress_bars()
torch.manual_seed(0)
numbers = torch.randint(1, 50, (128, 2)).tolist()
sums = [(f"{a}+{b}=", f"{a + b}", f"{a - b}") for a, b in numbers]  # what to answer, and what not to
tuning = Dataset.from_list([{"prompt": prompt, "completion": right} for prompt, right, _ in sums])
pairs = Dataset.from_list([{"prompt": prompt, "chosen": right, "rejected": wrong} for prompt, right, wrong in sums])

letters = ["<pad>", "<end>", "<unknown>", *string.printable]
spelling = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="<unknown>"))
spelling.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")  # one token for each letter
special = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<unknown>"}
tokenizer = PreTrainedTokenizerFast(tokenizer_object=spelling, **special)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=128, tie_word_embeddings=False, **sizes, **ids)
usual = {
    "max_steps": 17, "per_device_train_batch_size": 32, "learning_rate": 3e-3, "logging_steps": 1, "save_steps": 8,
    "report_to": "none", "disable_tqdm": True, "use_cpu": True, "bf16": False, "seed": 0,
}  # fmt: skip

with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()):
    folder = Path(name)
    stages = [folder / stage for stage in ("base", "sft", "dpo")]
    LlamaForCausalLM(config).save_pretrained(stages[0])
    tokenizer.save_pretrained(stages[0])

    fine_tuned = MonitorCallback(when=anisoscope.every(8), metrics="light", rank=8)
    trainer = SFTTrainer(
        str(stages[0]), SFTConfig(str(stages[1]), **usual), train_dataset=tuning, callbacks=[fine_tuned]
    )
    trainer.train()
    trainer.save_model()

    # an adapter: the reference is the same model without it, and its passes are not measured
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    preferred = MonitorCallback(when=anisoscope.every(8), metrics="light", rank=8)
    options = {"train_dataset": pairs, "callbacks": [preferred], "peft_config": adapter}
    trainer = DPOTrainer(str(stages[1]), args=DPOConfig(str(stages[2]), **usual), **options)
    trainer.train()
    trainer.save_model()

    few = {"metrics": ("average_cosine", "participation_ratio"), "tokens": 2048, "context": 64, "device": "cpu"}
    swept = anisoscope.sweep(stages, stage_checkpoints=True, out=folder / "swept", **few)

for stage, watch in (("sft", fine_tuned), ("dpo", preferred)):
    energy = watch.table.where(layer=1, kind="resid", metric="gradient_energy", group="")
    for row in energy.where(variant="batch=live;fit=refit;proxy=pca;rank=8").records():
        print(f"{stage} step {row['step']:2d}: tangent energy {row['value']:.2f}, chance {8 / 64:.2f}")
for row in swept.where(metric="participation_ratio", layer=2, kind="resid", group="", variant="").records():
    print(f"{row['revision']:18s} after {row['step']:2d} updates: participation ratio {row['value']:.1f}")
