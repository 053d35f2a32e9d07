"""`anisoscope sweep` as it would be typed: a real training with planted faults, real weights, other trainers."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from anisoscope.results.folder import RunFolder
from support.tiny_series import ARCHITECTURE, TEXT, flags, gpt, make_series, swap

Command = Callable[..., Any]
LOOK = ("--data", TEXT, "--tokens", 320, "--context", 16, "--device", "cpu")
GEOMETRY = (*LOOK, "--metrics", "average_cosine")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of a real training: 0, 1, 2, 4, … 64."""
    from anisoscope.training.config import TrainConfig
    from anisoscope.training.loop import train

    out = tmp_path_factory.mktemp("trained") / "run"
    sizes: dict[str, Any] = {"layers": 2, "width": 16, "heads": 2, "context": 16, "batch_size": 4, "limit": 0.1}
    return train(TrainConfig(steps=64, checkpoints="log", device="cpu", **sizes), out)


@pytest.mark.slow
def test_faults_planted_in_a_real_series_are_found_and_the_rest_is_measured(
    trained: Path, command: Command, tmp_path: Path
) -> None:
    series, out = tmp_path / "series", tmp_path / "out"
    shutil.copytree(trained / "checkpoints", series)
    shutil.rmtree(series / "checkpoint-64" / "training")  # without any record of a step
    swap(series, "checkpoint-4", "checkpoint-8")
    shutil.copytree(series / "checkpoint-16", series / "checkpoint-24")
    file = series / "checkpoint-1" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-500])
    file = series / "checkpoint-32" / "model.safetensors"
    weights = load_file(file)
    next(iter(weights.values())).view(-1)[7] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})
    done = command("sweep", series, *GEOMETRY, "--out", out)
    assert done.code == 0, done.err
    found = flags(out)
    words = {4: "looks out of order", 8: "looks out of order", 24: "repeated", 1: "unreadable", 32: "non-finite"}
    assert {step: flag[0] for step, flag in found.items() if flag}.keys() == words.keys()
    assert all(len(found[step]) == 1 and found[step][0].startswith(start) for step, start in words.items())
    measured = RunFolder.open(out).table().where(metric="average_cosine")
    assert set(measured.arrow["step"].to_pylist()) == {0, 2, 4, 8, 16, 24, 64}
    for step in words:
        assert f"checkpoint-{step}" in done.notes, "and they are said"


@pytest.mark.slow
def test_an_honest_training_is_swept_without_a_flag(trained: Path, command: Command, tmp_path: Path) -> None:
    done = command("sweep", trained, *GEOMETRY, "--out", tmp_path / "out")
    assert done.code == 0, done.err
    assert "loss_type" not in done.err + done.out
    assert flags(tmp_path / "out") == {step: [] for step in (0, 1, 2, 4, 8, 16, 32, 64)}
    assert set(RunFolder.open(tmp_path / "out").table().arrow["model"].to_pylist()) == {"run"}


@pytest.mark.slow
def test_three_real_stages_sweep_in_one_command(command: Command, tmp_path: Path) -> None:
    package = importlib.util.find_spec("rxnfp")
    if package is None or not package.submodule_search_locations:
        pytest.skip("the weights of the package 'rxnfp' are not installed")
    place = Path(next(iter(package.submodule_search_locations))) / "models" / "transformers"
    stages = ["bert_pretrained", "bert_ft", "bert_ft_10k_25s"]
    data = tmp_path / "reactions.txt"
    lines = (f"CC(=O)O{'C' * (i % 7)}.OC{'N' * (i % 5)}C>>CC(=O)OC{'O' * (i % 3)}C{'F' * (i % 11)}" for i in range(400))
    data.write_text("\n".join(lines))
    words = [place / stage for stage in stages]
    look = ("--data", data, "--tokens", 1500, "--context", 64, "--device", "cpu")
    metrics = ("--metrics", "two_nn,svd_ratio,attention_sharpness")
    done = command("sweep", *words, *look, *metrics, "--out", tmp_path / "out")
    assert done.code == 0, done.err
    table = RunFolder.open(tmp_path / "out").table()
    assert flags(tmp_path / "out") == {0: [], 1: [], 2: []}
    for metric in ("two_nn", "svd_ratio"):
        found = table.where(metric=metric, kind="resid", variant="", group="").records()
        assert {(row["step"], row["layer"]) for row in found} == set(product(range(3), range(1, 13)))
    assert [row["step"] for row in table.where(metric="probe_loss").records()] == [0], "the others have no head"
    gradients = ("--layers", "0,6", "--preset", "light", "--draws", 19)
    done = command("sweep", *words, *look, *gradients, "--why", "--out", tmp_path / "g")
    assert done.code == 0, done.err
    assert "no language-model head" in done.notes
    assert set(RunFolder.open(tmp_path / "g").table().where(metric="gradient_energy").arrow["step"].to_pylist()) == {0}


@pytest.mark.slow
def test_a_folder_of_the_trainer_itself(command: Command, tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(tmp_path / "run"), max_steps=4, save_steps=2, per_device_train_batch_size=2, report_to=[],
        use_cpu=True, logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    data = [{"input_ids": torch.arange(i, i + 8), "labels": torch.arange(i, i + 8)} for i in range(16)]
    Trainer(gpt().train(), arguments, train_dataset=data).train()
    words = ("sweep", tmp_path / "run", *GEOMETRY, "--tokenizer", "bytes")  # the trainer was given none
    done = command(*words, "--out", tmp_path / "out")
    assert done.code == 0, done.err
    assert flags(tmp_path / "out") == {2: [], 4: []}
    swap(tmp_path / "run", "checkpoint-2", "checkpoint-4")
    assert command(*words, "--out", tmp_path / "swapped").code == 0
    assert [flag[0] for flag in flags(tmp_path / "swapped").values()] == [
        "out of order: it says inside that it is of step 4",
        "out of order: it says inside that it is of step 2",
    ]


@pytest.mark.slow
def test_a_folder_of_lightning_itself(command: Command, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self, rate: float = 1e-3) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = gpt()

        def training_step(self, batch: Any, _: int) -> Any:
            return self.net(input_ids=batch, labels=batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=self.hparams.rate)

    keep = lightning.callbacks.ModelCheckpoint(tmp_path / "run", every_n_train_steps=2, save_top_k=-1, save_last=True)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(max_steps=6, callbacks=[keep], default_root_dir=tmp_path, **quiet)
    trainer.fit(Module(), torch.utils.data.DataLoader([torch.arange(i, i + 8) for i in range(16)], batch_size=2))
    words = ("--architecture", ARCHITECTURE, "--tokenizer", "bytes")
    done = command("sweep", tmp_path / "run", *GEOMETRY, *words, "--out", tmp_path / "out")
    assert done.code == 0, done.err
    assert flags(tmp_path / "out") == {2: [], 4: [], 6: []} and "last.ckpt was left out" in done.notes


BAD = {
    "sweep no-such-folder": "no-such-folder",
    "sweep {series} --metrics two_n": "did you mean 'two_nn'",
    "sweep {series} --sites resit": "resid",
    "sweep {series} --preset heavy": "heavy",
    "sweep {series} --revisions step0": "no revisions",
    "sweep {series} --remove-downloads": "--remove-downloads",
    "sweep {series} --layers 9 --metrics two_nn --tokenizer bytes": "9",
    "sweep {series} --dtype float12": "float12",
    "sweep {files}": "--architecture",
    "sweep {files} --architecture brt:hidden_size=3": "brt",
    "sweep {files} --architecture gpt2:n_layer=2,n_embd=32,n_head=2,vocab_size=258": "has the shape",
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("places")
    (folder / "files").mkdir()
    for step in (1, 2):
        torch.save({"state_dict": gpt(step).state_dict(), "global_step": step}, folder / "files" / f"step={step}.ckpt")
    return {"series": make_series(folder / "series", (0, 10)), "files": folder / "files"}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_gets_one_sentence(words: str, command: Command, places: dict[str, Path], tmp_path: Path) -> None:
    done = command(*words.format(**places).split(), *LOOK, "--out", tmp_path / "out")
    assert done.code != 0 and "Traceback" not in done.err
    assert BAD[words] in done.sentence


@pytest.mark.parametrize("words", [words for words in BAD if "--layers" not in words and "n_embd" not in words])
def test_a_slip_leaves_no_folder_behind(words: str, command: Command, places: dict[str, Path], tmp_path: Path) -> None:
    command(*words.format(**places).split(), *LOOK, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_claims_say_the_same_as_the_sweep_and_which_checkpoints_are_flagged(
    trained: Path, command: Command, tmp_path: Path
) -> None:
    honest = command("sweep", trained, *GEOMETRY, "--out", tmp_path / "honest")
    told = command("claims", tmp_path / "honest")
    assert told.code == 0, told.err
    lists = [
        [line for line in done.out.splitlines() if line.startswith("Not measured here")] for done in (honest, told)
    ]
    assert lists[0] == lists[1] and len(lists[0]) == 1
    assert "flagged" not in told.out
    shutil.copytree(trained / "checkpoints", tmp_path / "series")
    shutil.copytree(tmp_path / "series" / "checkpoint-16", tmp_path / "series" / "checkpoint-24")
    assert command("sweep", tmp_path / "series", *GEOMETRY, "--out", tmp_path / "out").code == 0
    line = "checkpoints flagged: checkpoint-24 (repeated); verdicts over steps rest on them"
    assert line in command("claims", tmp_path / "out").out.splitlines()
    both = command("claims", tmp_path / "out", "--format", "json")
    assert line in both.err and json.loads(both.out)


def test_what_was_asked_is_in_the_record(command: Command, places: dict[str, Path], tmp_path: Path) -> None:
    words = ("--architecture", ARCHITECTURE, "--halves", "--name", "mine", "--dtype", "float64", "--tokenizer", "bytes")
    done = command("sweep", places["files"], *LOOK, *words, "--metrics", "two_nn", "--out", tmp_path / "out")
    assert done.code == 0, done.err
    about = json.loads((tmp_path / "out" / "run.json").read_text())
    assert about["kind"] == "sweep" and about["config"]["halves"] and about["config"]["architecture"] == ARCHITECTURE
    table = RunFolder.open(tmp_path / "out").table()
    assert set(table.arrow["model"].to_pylist()) == {"mine"} and "half:2" in table.arrow["group"].to_pylist()
