"""`anisoscope study inherent` as a user calls it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.io import wavfile

from anisoscope.data.synthetic import make_clip, make_picture
from support.small_arms import small_arms

Command = Callable[..., Any]
FEW = ("--arms", "vision,convolution", "--families", "resnet", "--steps", 2, "--contexts", 16, "--examples", 60)
HERE = ("--when", "0,2", "--jobs", 1, "--device", "cpu")


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    with small_arms(rows=256):
        yield


def test_the_study_ends_with_verdicts_and_a_page(command: Command, tmp_path: Path) -> None:
    done = command("study", "inherent", *FEW, *HERE, "--out", tmp_path / "study")
    assert done.code == 0, done.err
    assert "convolution_differs" in done.out and done.out.strip().endswith("report.html")
    assert (tmp_path / "study" / "report.html").is_file()
    verdicts = json.loads((tmp_path / "study" / "verdicts.json").read_text())
    assert "drift_explains_anisotropy" in {verdict["claim"] for verdict in verdicts}
    again = command("study", "inherent", *FEW, *HERE, "--out", tmp_path / "study", "--resume")
    assert again.code == 0, "a finished study is only shown again"


@pytest.mark.slow
def test_pictures_of_the_user_are_trained_on(command: Command, tmp_path: Path) -> None:
    images, labels = zip(*(make_picture(index, size=24) for index in range(40)), strict=True)
    np.savez(tmp_path / "mine.npz", images=np.stack(images), labels=np.array(labels))
    words = ("--arms", "vision", "--families", "none", "--images", tmp_path / "mine.npz", "--steps", 1, "--when", "0,1")
    done = command("study", "inherent", *words, "--jobs", 1, "--device", "cpu", "--out", tmp_path / "study")
    assert done.code == 0, done.err
    about = json.loads((tmp_path / "study" / "run.json").read_text())
    assert about["models"][0]["data"]["examples"] == 40 and about["models"][0]["data"]["name"].endswith("mine.npz")


def test_numbers_need_no_library_for_pages_or_sound(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine for training may lack them: all is measured, judged and drawn."""
    absent = ("plotly", "soundfile", "datasets")
    for name in [*absent, *(each for each in sys.modules if each.partition(".")[0] in absent)]:
        monkeypatch.setitem(sys.modules, name, None)
    for index in range(3):
        samples = np.rint(make_clip(index, seconds=8.0)[0] * 32767).astype(np.int16)
        wavfile.write(tmp_path / f"{index}.wav", 16_000, samples)
    words = ("--arms", "speech", "--families", "hubert", "--audio", tmp_path, "--steps", 1, "--when", "0,1")
    done = command("study", "inherent", *words, "--jobs", 1, "--device", "cpu", "--out", tmp_path / "study")
    assert done.code == 0 and (tmp_path / "study" / "report.html").is_file()
    about = json.loads((tmp_path / "study" / "run.json").read_text())
    assert about["status"] == "complete" and not about["skipped"] and not about["failed"]
    assert (tmp_path / "study" / "verdicts.json").is_file()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--preset", "huge"), "huge"),
        (("--arms", "vision,sound"), "unknown arm 'sound'"),
        (("--families", "resnt"), "unknown family 'resnt'"),
        (("--arms", "none", "--families", "none"), "there is nothing to do"),
        (("--images", "nowhere", "--arms", "vision"), "'nowhere' is no folder of pictures"),
        (("--audio", "nowhere", "--arms", "speech"), "'nowhere' is no folder of recordings"),
        (("--models", "gpt5", "--preset", "paper"), "unknown model of the paper 'gpt5'"),
        (("--resume",), "--resume needs --out"),
        (("--seeds", "0,0"), "seed 0 is named twice"),
        (("--models", "gpt2"), "--models belongs to --preset paper"),
        (("--probe-tokens", "4096", "--preset", "small"), "--probe-tokens belongs to --preset paper"),
        *(
            (("--preset", "paper", option, value), f"{option} belongs to the presets that train")
            for option, value in {
                "--arms": "vision",
                "--families": "swin",
                "--seeds": "0",
                "--steps": "9",
                "--examples": "64",
                "--when": "log",
                "--jobs": "2",
                "--limit": "1",
                "--contexts": "96",
            }.items()
        ),
    ],
)
def test_slips_are_told_in_one_sentence(
    command: Command, words: tuple[str, ...], sentence: str, tmp_path: Path
) -> None:
    place = () if "--resume" in words else ("--out", tmp_path / "study")
    done = command("study", "inherent", *words, *place)
    assert done.code == 2 and sentence in done.sentence
