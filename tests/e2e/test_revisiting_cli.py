"""`anisoscope study revisiting`: its options, and three seeds on byte-pair tokens from end to end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anisoscope.results.folder import RunFolder

Command = Callable[..., Any]
SMALL = ("--arms", "decoder,decoder-flatloss,encoder-flatloss", "--layers", 1, "--width", 32, "--context", 32)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--tokens", "32768"), ("--probe-tokens 32768", "char, enwik8 or bpe:N")),
        (("--tokens", "bpe:12"), ("12 is too small",)),
        (("--probe-tokens", "4096"), ("--probe-tokens belongs to --preset paper",)),
        (("--preset", "paper", "--tokens", "char"), ("--tokens belongs to the presets that train",)),
        (("--contexts", "2"), ("--contexts",)),
        (("--models", "pythia-1b"), ("--models belongs to --preset paper",)),
        (("--remove-downloads",), ("--remove-downloads belongs to --preset paper",)),
        (
            ("--preset", "paper", "--models", "pythia-1b,pythia-2b"),
            ("unknown model of the paper 'pythia-2b'; did you mean 'pythia-1b' or", "Known: EuroBERT-210m,"),
        ),
        *(
            (("--preset", "paper", option, value), (f"{option} belongs to the presets that train",))
            for option, value in (("--arms", "decoder"), ("--layers", "2"), ("--width", "8"), ("--context", "8"))
        ),
        (("--preset", "paper", "--metrics", "light"), ("--metrics belongs to the presets that train",)),
    ],
)
def test_options_that_cannot_be_are_told_before_anything_is_written(
    options: tuple[str, ...], words: tuple[str, ...], command: Command, tmp_path: Path
) -> None:
    done = command("study", "revisiting", *options, "--out", tmp_path / "run")
    assert done.code == 2 and all(word in done.err for word in words), done.err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_three_seeds_on_pieces_from_end_to_end(command: Command, tmp_path: Path) -> None:
    options: tuple[Any, ...] = (*SMALL, "--seeds", "0,1,2", "--steps", 6, "--when", "0,3,6", "--limit", 0.3)
    done = command("study", "revisiting", *options, "--device", "cpu", "--out", tmp_path / "study")
    assert done.code == 0, done.err
    folder = RunFolder.open(tmp_path / "study")
    table, arms = folder.table(), {"decoder", "decoder-flatloss", "encoder-flatloss"}
    assert set(table.arrow["model"].to_pylist()) == arms and set(table.arrow["seed"].to_pylist()) == {0, 1, 2}
    assert {path.name for path in (folder.path / "arms").iterdir()} == {f"{a}-seed{s}" for a in arms for s in range(3)}
    for arm in arms:
        rows = {
            m: table.where(model=arm, seed=1, step=6, metric=m).records() for m in ("unigram_entropy", "target_entropy")
        }
        bits = {metric: found[0]["value"] for metric, found in rows.items()}
        assert (bits["target_entropy"] > bits["unigram_entropy"] + 0.3) == arm.endswith("flatloss")
        assert bool(len(table.where(model=arm, metric="weighted_probe_loss"))) == arm.endswith("flatloss")
    groups = set(table.where(model="encoder-flatloss").arrow["group"].to_pylist())
    assert {"masked", "unmasked", "frequency:1", "target:5"} <= groups
    spread = table.where(model="decoder", metric="frequency_beta", step=6).records()
    assert min(row["n"] for row in spread) > 50 and all(f"{row['n']} types" in row["note"] for row in spread)
    verdicts = json.loads((folder.path / "verdicts.json").read_text())
    found = [v for v in verdicts if v["claim"] == "frequency_intervention"]
    assert found[0]["subject"] == "decoder over decoder-flatloss" and found[0]["scope"] == "over 3 seeds"
    assert "weighs targets by their frequency" in (folder.path / "report.html").read_text(encoding="utf-8")
    assert command("report", folder.path).code == 0
    # the pieces are in the run folder, so a sweep over the checkpoints reads text as the training did
    checkpoints = folder.path / "arms" / "decoder-seed1" / "checkpoints"
    swept = command("sweep", checkpoints, "--tokens", 2048, "--context", 32, "--out", tmp_path / "swept")
    assert swept.code == 0, swept.err
    assert RunFolder.open(tmp_path / "swept").about()["models"][0]["name"]
