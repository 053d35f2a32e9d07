"""A training by other people's loops on several processes, started by torchrun: HOST KIND OUT [CHECKPOINT].

HOST is trainer (of transformers), accelerate or lightning, KIND is one, ddp, fsdp1, fsdp2, zero2 or zero3. Parameters
are sharded on GPUs only by all three; that they would do the same here is told to them. Saving a model of the first
FSDP on CPUs ends torch itself.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from anisoscope.monitor.schedule import every
from anisoscope.tangent.plan import TangentPlan

METRICS = ["gradient_energy", "average_cosine", "mean_norm", "loss", "gradient_norm"]
PLAN = TangentPlan(rank=4, proxies=("pca",), draws=19, permuted=False, balanced=False, standardised=False, frozen=False)
LAYER = "LlamaDecoderLayer"


def engine_options(stage: int) -> dict[str, Any]:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed  # noqa: F401

    # its own shared-memory operations would be compiled
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    words = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    return {**words, "zero_optimization": {"stage": stage}}


def data() -> Tensor:
    return torch.randint(0, 4, (192, 16), generator=torch.Generator().manual_seed(0)).cumsum(1) % 50


def model() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, max_position_embeddings=16, pad_token_id=None, **sizes))


def options(out: str) -> dict[str, Any]:
    folder = Path(out) / "monitor"
    return {"when": every(2), "metrics": "light", "plan": PLAN, "out": folder, "every_step": True, "name": "m"}


def pretend_gpus() -> None:
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    PartialState._shared_state |= {"distributed_type": DistributedType.MULTI_GPU, "device": torch.device("cpu")}


def by_trainer(kind: str, out: str, *checkpoint: str) -> tuple[Any, Any]:
    from transformers import Trainer, TrainingArguments

    from anisoscope.integrations.hf_trainer import MonitorCallback

    more: dict[str, Any] = {}
    if kind.startswith("fsdp"):
        words: dict[str, Any] = {"transformer_layer_cls_to_wrap": [LAYER], "sync_module_states": False}
        more = {"fsdp": True, "fsdp_config": {"version": int(kind[-1]), **words}}
    if kind.startswith("zero"):
        sizes = {"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto", "gradient_clipping": "auto"}
        more = {"deepspeed": engine_options(int(kind[-1])) | sizes}
    watch = MonitorCallback(**options(out))
    arguments = TrainingArguments(
        output_dir=out, max_steps=6, per_device_train_batch_size=32 // world(), learning_rate=5e-3, logging_steps=1,
        save_strategy="no" if kind == "fsdp1" else "steps", save_steps=3, report_to="none", disable_tqdm=True,
        use_cpu=True, seed=3, **more,
    )  # fmt: skip
    if kind.startswith("fsdp"):
        pretend_gpus()
    rows = [{"input_ids": x, "labels": x} for x in data()]
    trainer = Trainer(model(), arguments, train_dataset=rows, callbacks=[watch])
    trainer.train(resume_from_checkpoint=checkpoint[0] if checkpoint else None)
    return watch, trainer.model


def by_accelerate(kind: str, out: str) -> tuple[Any, Any]:
    from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin, PartialState

    from anisoscope.integrations.accelerate import AcceleratorMonitor

    more: dict[str, Any] = {"gradient_accumulation_steps": 2}
    PartialState(cpu=True)
    if kind == "fsdp1":
        pretend_gpus()
        words: dict[str, Any] = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": [LAYER]}
        words |= {"sync_module_states": False, "cpu_ram_efficient_loading": False, "use_orig_params": True}
        more["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=1, **words)
    if kind.startswith("zero"):
        sizes = {"train_micro_batch_size_per_gpu": 16 // world(), "gradient_accumulation_steps": 2}
        sizes |= {"gradient_clipping": 0}
        more |= {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=engine_options(int(kind[-1])) | sizes)}
    accelerator, learner = Accelerator(**more), model()
    optimizer = torch.optim.AdamW(learner.parameters(), lr=5e-3, foreach=False)
    loader = torch.utils.data.DataLoader(data(), batch_size=16 // world())  # type: ignore[arg-type]
    learner, optimizer, loader = accelerator.prepare(learner, optimizer, loader)
    with AcceleratorMonitor(accelerator, learner, optimizer=optimizer, **options(out)) as watch:
        for batch in loader:
            with watch.accumulate():
                loss = learner(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            watch.log(loss=float(loss))
    return watch, learner


def by_lightning(kind: str, out: str) -> tuple[Any, Any]:
    import lightning
    from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy

    from anisoscope.integrations.lightning import MonitorCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model()

        def configure_model(self) -> None:
            if kind == "fsdp2":
                from torch.distributed.fsdp import fully_shard

                for part in (*self.model.model.layers, self.model):
                    fully_shard(part, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Tensor, _: int) -> Any:
            return self.model(input_ids=batch, labels=batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=5e-3, foreach=False)

    how: dict[str, Any] = {"strategy": "ddp"} if kind == "ddp" else {}
    if kind == "fsdp2":
        how["strategy"] = ModelParallelStrategy(data_parallel_size=world(), tensor_parallel_size=1)
    if kind == "fsdp1":
        pretend_lightning_gpus("fsdp")
        how["strategy"] = type("OnCPU", (FSDPStrategy,), {"_setup_model": lambda _, module: first_fsdp(module)})()
    if kind.startswith("zero"):
        pretend_lightning_gpus("deepspeed")
        sizes = {"train_micro_batch_size_per_gpu": 32 // world()}
        numbered = type("Numbered", (DeepSpeedStrategy,), {"root_device": torch.device("cpu", 0)})
        how["strategy"] = numbered(config=engine_options(int(kind[-1])) | sizes)
    watch, module = MonitorCallback(**options(out)), Module()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    words: dict[str, Any] = {"max_steps": 6, "enable_model_summary": False, "accelerator": "cpu", "devices": world()}
    trainer = lightning.Trainer(callbacks=[watch], use_distributed_sampler=False, **words, **quiet, **how)
    mine: Any = data().view(6, world(), -1, 16)[:, int(os.environ.get("RANK", "0"))].flatten(0, 1)
    trainer.fit(module, torch.utils.data.DataLoader(mine, batch_size=32 // world()))
    return watch, trainer.model


def first_fsdp(module: Any) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({type(module.model.model.layers[0])})
    words: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": True}
    return FullyShardedDataParallel(module, auto_wrap_policy=policy, **words)


def pretend_lightning_gpus(name: str) -> None:
    """Have a strategy of Lightning take CPUs."""
    from lightning.pytorch.accelerators import CPUAccelerator

    strategies: Any = importlib.import_module(f"lightning.pytorch.strategies.{name}")
    strategies.CUDAAccelerator = CPUAccelerator
    strategies._validate_device_index_selection = lambda _: None


def world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def main(host: str, kind: str, out: str, *checkpoint: str) -> None:
    watch, trained = globals()[f"by_{host}"](kind, out, *checkpoint)
    if int(os.environ.get("RANK", "0")) == 0:
        names = ("step", "layer", "kind", "group", "metric", "variant")
        rows = [row for row in watch.table.records() if row["metric"] in METRICS]
        found = {"|".join(str(row[name]) for name in names): row["value"] for row in rows}
        Path(out, f"found{len(checkpoint)}.json").write_text(json.dumps([type(trained).__name__, found]))
    if torch.distributed.is_initialized():  # nobody is to end while another one still writes to it
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
