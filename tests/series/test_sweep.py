"""A series of checkpoints is measured once, whatever is wrong with some of them and whatever interrupts it."""

from __future__ import annotations

import json
import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import anisoscope
from anisoscope.errors import AnisoscopeError
from anisoscope.models.checkpoint import HEADLESS
from anisoscope.results.folder import RunFolder
from anisoscope.results.query import Table
from anisoscope.series import SweepConfig
from anisoscope.series.measurer import CheckpointMeasurer
from anisoscope.series.sweep import Sweeper
from support.tiny_series import ARCHITECTURE, FORKS, LOOK, Hub, flags, gpt, killed, make_series, moved, put, same, swap

sweep = partial(anisoscope.sweep, report=False)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_series(tmp_path_factory.mktemp("shelf"), range(0, 90, 10))


@pytest.fixture
def series(shelf: Path, tmp_path: Path) -> Path:
    """Four checkpoints to spoil."""
    for step in (0, 10, 20, 30):
        shutil.copytree(shelf / f"checkpoint-{step}", tmp_path / "series" / f"checkpoint-{step}")
    return tmp_path / "series"


def spoil(path: Path, how: str) -> None:
    file = path / "model.safetensors"
    if how == "truncated":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    elif how == "missing":
        file.unlink()
    else:
        weights = load_file(file)
        weights["transformer.h.1.mlp.c_fc.weight"][0, 0] = math.nan
        save_file(weights, file, metadata={"format": "pt"})


# faults


def test_all_planted_faults_are_found_at_once_and_the_rest_is_measured(shelf: Path, tmp_path: Path) -> None:
    faulty, out = tmp_path / "series", tmp_path / "out"
    shutil.copytree(shelf, faulty)
    swap(faulty, "checkpoint-20", "checkpoint-30")
    shutil.rmtree(faulty / "checkpoint-50")
    shutil.copytree(faulty / "checkpoint-40", faulty / "checkpoint-50")
    spoil(faulty / "checkpoint-60", "truncated")
    spoil(faulty / "checkpoint-70", "nan")
    table = sweep(str(faulty), out=out, **LOOK)
    found = flags(out)
    starts = {
        0: None,
        10: None,
        20: "looks out of order: by its weights it is in the place of checkpoint-30",
        30: "looks out of order: by its weights it is in the place of checkpoint-20",
        40: None,
        50: "repeated: the same weights as checkpoint-40",
        60: "unreadable: ",
        70: "non-finite weights",
        80: None,
    }
    assert list(found) == list(starts)
    for step, words in starts.items():
        assert len(found[step]) == (words is not None), found[step]
        assert words is None or found[step][0].startswith(words)
    measured = set(table.where(metric="average_cosine").arrow["step"].to_pylist())
    assert measured == {0, 10, 20, 30, 40, 50, 80}
    rows = table.where(metric="checkpoint", kind="training").records()
    assert [(row["step"], row["value"]) for row in rows] == [(s, float(w is None)) for s, w in starts.items()]
    assert all(row["note"] == "; ".join(found[row["step"]]) for row in rows)
    about = json.loads((out / "run.json").read_text())
    assert (
        about["status"] == "complete"
        and sum("checkpoint-" in text and "WRONG" not in text for text in about["warnings"]) == 5
    )


def test_an_honest_series_has_no_flags(series: Path, tmp_path: Path) -> None:
    sweep(str(series), out=tmp_path / "out", report=True, **LOOK)
    assert flags(tmp_path / "out") == {0: [], 10: [], 20: [], 30: []}
    assert json.loads((tmp_path / "out" / "verdicts.json").read_text()), "Python's sweep is judged as the command's is"
    assert (tmp_path / "out" / "report.html").is_file(), "and drawn"


def test_a_step_recorded_inside_tells_a_swapped_pair(series: Path, tmp_path: Path) -> None:
    for step in (10, 20):
        path = series / f"checkpoint-{step}" / "trainer_state.json"
        path.write_text(json.dumps({"global_step": step}))
    sweep(str(series), out=tmp_path / "honest", **LOOK)
    assert not any(flags(tmp_path / "honest").values())
    swap(series, "checkpoint-10", "checkpoint-20")
    sweep(str(series), out=tmp_path / "out", **LOOK)
    assert flags(tmp_path / "out") == {
        0: [],
        10: ["out of order: it says inside that it is of step 20"],
        20: ["out of order: it says inside that it is of step 10"],
        30: [],
    }


def test_what_could_not_be_loaded_is_tried_again_also_after_the_end(
    shelf: Path, series: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(series / "checkpoint-10", "truncated")
    spoil(series / "checkpoint-20", "missing")
    out = tmp_path / "out"
    sweep(str(series), out=out, **LOOK)
    assert [flags(out)[step][0].partition(":")[0] for step in (10, 20)] == ["unreadable", "missing"]
    for step in (10, 20):
        shutil.rmtree(series / f"checkpoint-{step}")
        shutil.copytree(shelf / f"checkpoint-{step}", series / f"checkpoint-{step}")
    measured: list[int | None] = []
    alone = CheckpointMeasurer.alone

    def noted(self: CheckpointMeasurer, loaded: Any, step: int | None, **words: Any) -> Any:
        measured.append(step)
        return alone(self, loaded, step, **words)

    monkeypatch.setattr(CheckpointMeasurer, "alone", noted)
    table = sweep(str(series), out=out, resume=True, **LOOK)
    assert measured == [10, 20], "nothing is measured twice"
    assert flags(out) == {0: [], 10: [], 20: [], 30: []}
    whole = sweep(str(series), out=tmp_path / "again" / "out", **LOOK)
    same(table, whole)
    assert json.loads((out / "run.json").read_text())["warnings"] == whole.about["warnings"]
    measured.clear()
    sweep(str(series), out=out, resume=True, **LOOK)
    assert measured == []


@pytest.mark.parametrize("junk", [b"hello", b"", b"\x80\x02}."])
def test_one_damaged_file_is_flagged_and_the_rest_is_measured(tmp_path: Path, junk: bytes) -> None:
    for step in (1, 2, 3):
        torch.save({"state_dict": gpt(step).state_dict(), "global_step": step}, tmp_path / f"step={step}.ckpt")
    (tmp_path / "step=2.ckpt").write_bytes(junk)
    table = sweep(str(tmp_path), out=tmp_path / "out", architecture=ARCHITECTURE, **LOOK)
    found = flags(tmp_path / "out")
    assert found[1] == found[3] == [] and found[2][0].startswith("unreadable: ")
    assert junk == b"\x80\x02}." or found[2][0].endswith("copy it again, and the same command with --resume goes on.")
    assert set(table.where(metric="average_cosine").arrow["step"].to_pylist()) == {1, 3}


def test_a_single_damaged_checkpoint_says_what_to_do(series: Path, tmp_path: Path) -> None:
    for step in (10, 20, 30):
        shutil.rmtree(series / f"checkpoint-{step}")
    spoil(series / "checkpoint-0", "truncated")
    words = "cut off or damaged .*; copy it again, and the same command with --resume goes on"
    with pytest.raises(AnisoscopeError, match=words):
        sweep(str(series), out=tmp_path / "out", **LOOK)


def test_a_mended_checkpoint_is_measured_and_one_that_is_not_stays_flagged(
    shelf: Path, series: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    for step in (10, 20):
        spoil(series / f"checkpoint-{step}", "nan")
    sweep(str(series), out=out, **LOOK)
    shutil.rmtree(series / "checkpoint-20")
    shutil.copytree(shelf / "checkpoint-20", series / "checkpoint-20")
    loaded: list[int | None] = []
    check = Sweeper._checkpoint
    monkeypatch.setattr(Sweeper, "_checkpoint", lambda self, c, d: loaded.append(c.step) or check(self, c, d))
    table = sweep(str(series), out=out, resume=True, **LOOK)
    assert loaded == [20] and flags(out) == {0: [], 10: ["non-finite weights"], 20: [], 30: []}
    same(table, sweep(str(series), out=tmp_path / "again" / "out", **LOOK))
    loaded.clear()
    sweep(str(series), out=out, resume=True, **LOOK)
    assert loaded == []


def test_a_checkpoint_without_its_head_is_said_in_its_row(tmp_path: Path) -> None:
    for step in (1, 2):
        state = dict(gpt(step).state_dict())
        torch.save({k: v for k, v in state.items() if step == 1 or k != "lm_head.weight"}, tmp_path / f"step={step}.pt")
    given = f"{ARCHITECTURE},tie_word_embeddings=false"
    table = sweep(str(tmp_path), out=tmp_path / "out", architecture=given, **LOOK)
    rows = table.where(metric="checkpoint").records()
    assert [(row["value"], row["note"]) for row in rows] == [(1.0, ""), (1.0, HEADLESS)]
    assert f"step=2: {HEADLESS}" in table.about["warnings"]


def test_a_series_that_grew_goes_on(shelf: Path, series: Path, tmp_path: Path) -> None:
    sweep(str(series), out=tmp_path / "out", **LOOK)
    shutil.copytree(shelf / "checkpoint-40", series / "checkpoint-40")
    table = sweep(str(series), out=tmp_path / "out", resume=True, **LOOK)
    assert set(table.where(metric="average_cosine").arrow["step"].to_pylist()) == {0, 10, 20, 30, 40}


# what is measured


def test_metrics_are_exactly_those_named_and_the_numbers_are_profiles(series: Path, tmp_path: Path) -> None:
    from anisoscope import profile

    metrics = ("two_nn", "svd_ratio", "attention_sharpness")
    look = LOOK | {"metrics": metrics}
    table = sweep(str(series), out=tmp_path / "out", **look)
    assert set(table.metrics) == {*metrics, "probe_loss", "checkpoint"}
    alone = profile(str(series / "checkpoint-20"), out=tmp_path / "alone", **look)
    mine = table.where(step=20, metric=list(metrics)).records()
    other = {(r["layer"], r["kind"], r["head"], r["metric"], r["variant"]): r for r in alone.records()}
    assert len(mine) == len(other)
    for row in mine:
        twin = other[row["layer"], row["kind"], row["head"], row["metric"], row["variant"]]
        assert all(str(row[name]) == str(twin[name]) for name in ("value", "low", "high", "sd", "n", "depth"))


def test_sites_layers_and_halves_are_as_asked(series: Path, tmp_path: Path) -> None:
    look = LOOK | {"sites": ("attn_out", "mlp_out"), "layers": (2,)}
    table = sweep(str(series), out=tmp_path / "places", **look).where(metric="average_cosine")
    assert set(table.arrow["kind"].to_pylist()) == {"attn_out", "mlp_out"}
    assert set(table.arrow["layer"].to_pylist()) == {2}
    look = LOOK | {"metrics": ("two_nn",)}
    halved = sweep(str(series), out=tmp_path / "halves", **look, halves=True).where(metric="two_nn")
    assert set(halved.arrow["group"].to_pylist()) == {"", "half:1", "half:2"}
    assert set(sweep(str(series), out=tmp_path / "whole", **look).arrow["group"].to_pylist()) == {""}


def test_the_word_tangent_adds_the_study_and_without_it_nothing_is_differentiated(
    series: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = sweep(str(series), out=tmp_path / "both", **LOOK | {"metrics": ("tangent", "drift"), "draws": 19})
    assert {"gradient_energy", "drift", "probe_loss"} <= set(both.metrics)

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("no gradient was asked for")

    monkeypatch.setattr(torch.autograd, "grad", refuse)
    assert "gradient_energy" not in sweep(str(series), out=tmp_path / "plain", **LOOK).metrics
    with pytest.raises(AssertionError):
        sweep(str(series), out=tmp_path / "again", **LOOK | {"metrics": ("tangent",), "draws": 19})


def test_the_loss_is_that_of_the_model_itself(series: Path, tmp_path: Path) -> None:
    from anisoscope.measurement.feed import make_feed
    from anisoscope.models.load import load_model
    from anisoscope.series.measurer import feed_config

    table = sweep(str(series), out=tmp_path / "out", **LOOK)
    loaded, config = (
        load_model(str(series / "checkpoint-10"), device="cpu", tokenizer="bytes"),
        feed_config(SweepConfig("x", **LOOK)),
    )
    total = tokens = 0.0
    seen: set[tuple[int, ...]] = set()  # a context that occurs twice counts once
    for batch in make_feed(loaded, config).batches():
        for ids, mask in zip(batch.inputs["input_ids"], batch.inputs["attention_mask"], strict=True):
            kept = ids[mask.bool()]
            if tuple(kept.tolist()) in seen:
                continue
            seen.add(tuple(kept.tolist()))
            logits = loaded.model(input_ids=kept[None]).logits[0, :-1].double()
            total += float(torch.nn.functional.cross_entropy(logits, kept[1:], reduction="sum").detach())
            tokens += len(kept) - 1
    assert table.value(metric="probe_loss", step=10) == pytest.approx(total / tokens, rel=1e-5)


def test_models_without_a_head_are_measured_without_gradients(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification, BertModel

    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(**sizes, vocab_size=258)
    kinds = {"pretrained": BertForMaskedLM, "tuned": BertModel, "judged": BertForSequenceClassification}
    for name, kind in kinds.items():
        kind(config).save_pretrained(tmp_path / name)
    table = sweep([str(tmp_path / name) for name in kinds], out=tmp_path / "out", **LOOK)
    assert set(table.where(metric="average_cosine").arrow["step"].to_pylist()) == {0, 1, 2}
    assert set(table.arrow["revision"].to_pylist()) == set(kinds)
    tangent = LOOK | {"metrics": ("tangent", "drift"), "draws": 19}
    both = sweep([str(tmp_path / name) for name in ("tuned", "judged")], out=tmp_path / "both", **tangent)
    assert "drift" in both.metrics and any("no language-model head" in text for text in both.about["warnings"])


# kinds of series


def test_files_of_weights_and_folders_give_the_same_numbers(shelf: Path, tmp_path: Path) -> None:
    for step in (10, 20):
        weights = load_file(shelf / f"checkpoint-{step}" / "model.safetensors")
        inside = {f"model._orig_mod.{name}": value for name, value in weights.items()}
        state = {"state_dict": inside, "global_step": step, "hyper_parameters": {"lr": 1e-3}}
        (tmp_path / "lightning").mkdir(exist_ok=True)
        torch.save(state, tmp_path / "lightning" / f"epoch={step // 10}-step={step}.ckpt")
        shutil.copytree(shelf / f"checkpoint-{step}", tmp_path / "folders" / f"checkpoint-{step}")
        (tmp_path / "accelerate" / f"step_{step}").mkdir(parents=True)
        shutil.copy(shelf / f"checkpoint-{step}" / "model.safetensors", tmp_path / "accelerate" / f"step_{step}")
    tables = {
        name: sweep(str(tmp_path / name), out=tmp_path / "out" / name, architecture=given, name="x", **LOOK)
        for name, given in (
            ("folders", None),
            ("lightning", ARCHITECTURE),
            ("accelerate", str(shelf / "checkpoint-0")),
        )
    }
    values = {name: table.where(metric="average_cosine").arrow["value"] for name, table in tables.items()}
    assert values["folders"].equals(values["lightning"]) and values["folders"].equals(values["accelerate"])
    (tmp_path / "lightning" / "epoch=1-step=10.ckpt").rename(tmp_path / "lightning" / "epoch=3-step=30.ckpt")
    sweep(str(tmp_path / "lightning"), out=tmp_path / "out" / "moved", architecture=ARCHITECTURE, **LOOK)
    assert flags(tmp_path / "out" / "moved")[30] == ["out of order: it says inside that it is of step 10"]


def test_a_trainers_folder_with_its_tokenizer_above(shelf: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    for step in (10, 20):
        folder = tmp_path / "run" / f"checkpoint-{step}"
        shutil.copytree(shelf / f"checkpoint-{step}", folder)
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        torch.save({}, folder / "optimizer.pt")
    letters = {chr(97 + i): i + 1 for i in range(26)} | {"[UNK]": 0}
    words = Tokenizer(models.WordLevel(letters, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(tmp_path / "run")
    shutil.copy(shelf / "checkpoint-20" / "config.json", tmp_path / "run")
    table = sweep(str(tmp_path / "run"), out=tmp_path / "out", **LOOK | {"tokenizer": None})
    assert flags(tmp_path / "out") == {10: [], 20: []}
    assert not any("bytes" in text for text in table.about["warnings"])
    assert any("folder itself was left out" in text for text in table.about["warnings"])


def test_revisions_are_fetched_measured_and_removed_and_a_failed_one_comes_later(
    shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (0, 10, 20):
        shutil.copytree(shelf / f"checkpoint-{step}", tmp_path / "repo" / f"step{step}")
    hub = Hub(tmp_path / "repo", tmp_path / "cache").install(monkeypatch)
    hub.broken = {"step10"}
    look = LOOK | {"revisions": ("all",), "remove_downloads": True}
    sweep("org/tiny", out=tmp_path / "out", **look)
    assert flags(tmp_path / "out")[10][0].startswith("missing: org/tiny@step10 could not be downloaded")
    assert hub.fetched == ["step0", "step20"] == hub.deleted
    hub.broken = set()
    shutil.copytree(shelf / "checkpoint-30", tmp_path / "repo" / "step30")  # not there when the sweep began
    table = sweep("org/tiny", out=tmp_path / "out", resume=True, **look)
    assert hub.fetched == ["step0", "step20", "step10"] == hub.deleted, "only what was left out"
    assert flags(tmp_path / "out") == {0: [], 10: [], 20: []}
    local = sweep(str(tmp_path / "repo"), out=tmp_path / "local", **LOOK).where(step=10, metric="average_cosine")
    assert table.where(step=10, metric="average_cosine").arrow["value"].equals(local.arrow["value"])


def test_options_that_make_no_sense_are_refused(series: Path) -> None:
    for options, words in (
        ({"metrics": ("two_n",)}, "two_n"),
        ({"sites": ("resit",)}, "resit"),
        ({"preset": "heavy"}, "heavy"),
        ({"metrics": ("tangent",), "sites": ("resid",)}, "--sites"),
        ({"remove_downloads": True}, "--remove-downloads"),
    ):
        with pytest.raises(AnisoscopeError, match=words):
            SweepConfig(str(series), **options)  # type: ignore[arg-type]


# interruptions


@pytest.mark.slow
@pytest.mark.skipif(not FORKS, reason="a process that uses torch cannot be forked here")
@pytest.mark.parametrize("metrics", [("average_cosine", "two_nn"), ("tangent", "drift")])
def test_a_killed_sweep_ends_with_the_table_of_an_undisturbed_one(
    series: Path, tmp_path: Path, metrics: tuple[str, ...]
) -> None:
    look = LOOK | {"metrics": metrics} | ({"draws": 19} if "tangent" in metrics else {})
    whole = sweep(str(series), out=tmp_path / "whole" / "out", **look)
    out = tmp_path / "killed" / "out"
    for after in (4, 7):  # at different files of different checkpoints: each attempt goes a little further
        assert killed(lambda: sweep(str(series), out=out, resume=True, **look), after)
    same(sweep(str(series), out=out, resume=True, **look), whole)
    same(RunFolder.open(out).table(), RunFolder.open(tmp_path / "whole" / "out").table())
    mine, theirs = (json.loads((path / "run.json").read_text()) for path in (out, tmp_path / "whole" / "out"))
    assert [mine[name] == theirs[name] for name in ("checkpoints", "warnings", "models", "data")] == [True] * 4


def test_sameness_is_of_every_value() -> None:
    rows = [{"metric": "a", "value": 1.0, "step": 0}]
    same(Table.from_records(rows), Table.from_records(rows))
    with pytest.raises(AssertionError):
        same(Table.from_records(rows), Table.from_records([{**rows[0], "value": 1.0 + 1e-15}]))


def test_moved_weights_are_those_of_the_series(shelf: Path) -> None:
    expected = put(gpt(), moved(gpt(), range(0, 90, 10))[3]).state_dict()
    found = load_file(shelf / "checkpoint-30" / "model.safetensors")
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_a_series_without_a_tokenizer_is_refused_at_its_first_checkpoint(series: Path, tmp_path: Path) -> None:
    with pytest.raises(AnisoscopeError, match="comes without a tokenizer"):
        sweep(str(series), out=tmp_path / "out", **LOOK | {"tokenizer": None})
    assert not (tmp_path / "out" / "table.parquet").exists()


def test_a_loss_above_that_of_guessing_is_the_first_warning_of_run_page_and_model(tmp_path: Path) -> None:
    model = gpt()
    with torch.no_grad():
        model.lm_head.weight.mul_(50)
    model.save_pretrained(tmp_path / "m" / "checkpoint-10")
    sweep(str(tmp_path / "m"), out=tmp_path / "out", report=True, **LOOK)
    about = json.loads((tmp_path / "out" / "run.json").read_text())
    assert "WRONG TEXT: its loss is" in about["warnings"][0] and "WRONG TEXT" in about["models"][0]["notes"][0]
    assert "Read this first" in (tmp_path / "out" / "report.html").read_text()


def test_paths_words_and_numbers_of_numpy_are_taken(series: Path) -> None:
    words: dict[str, Any] = {**LOOK, "layers": "0-1", "seed": np.int64(1)}
    found, wanted = sweep(series, **words), sweep(str(series), **{**words, "layers": (0, 1), "seed": 1})
    assert found.arrow["value"].equals(wanted.arrow["value"])
    both = [series / "checkpoint-0", series / "checkpoint-10"]
    assert len(sweep(both, **LOOK))
