"""Values that no option has, options without use, names that nobody knows: told before anything is done."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anisoscope
from anisoscope import AnisoscopeError, cli
from anisoscope.errors import near_miss, unknown_name
from anisoscope.measurement.config import ProfileConfig
from anisoscope.option import check_values, python_options, refuse_idle, typed_options
from anisoscope.series import SweepConfig
from anisoscope.studies.config import check_watch
from anisoscope.studies.inherent import InherentConfig
from anisoscope.training.config import TrainConfig


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tokens": "many"}, "tokens is 'many'; expected a whole number"),
        ({"tokens": 1.5}, "tokens is '1.5'; expected a whole number"),
        ({"tokens": True}, "tokens is 'True'; expected a whole number"),
        ({"tokens": 10**30}, "expected at most 1,000,000,000,000"),
        ({"seed": 1 << 63}, r"expected less than 2\*\*63"),
        ({"seconds": float("nan")}, "seconds is 'nan'; expected a number or None"),
        ({"seconds": 1e9}, "expected at most 86,400"),
        ({"data": None}, "data is 'None'; expected a text"),
        ({"layers": "x"}, "layers is 'x'; expected a list \\(each a whole number\\)"),
        ({"device": "meta"}, "unknown device 'meta'"),
        ({"metrics": ("drift",), "halves": True}, "--halves does nothing"),
        ({"metrics": ("drift",), "sample_size": 64}, "--sample-size does nothing"),
        ({"metrics": ("drift",), "attention_rows": 4}, "--attention-rows does nothing"),
        ({"modules": ("a",), "sites": ("resid",)}, "--sites does nothing beside --modules"),
        ({"sites": ("unembed",), "tokens": 64}, "--tokens does nothing for tables of weights"),
    ],
)
def test_what_no_profile_can_use_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(AnisoscopeError, match=words):
        ProfileConfig(("gpt2",), **options)


def test_lists_and_numbers_of_arrays_are_taken() -> None:
    config = ProfileConfig(("gpt2",), metrics="drift,two_nn", layers=[0, 1], tokens=np.int64(64))  # type: ignore[arg-type]
    assert config.metrics == ("drift", "two_nn") and config.layers == (0, 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"preset": "shape", "metrics": ("drift",)}, "--preset does nothing beside --metrics"),
        ({"preset": "light", "frozen_window": "steps:0.5"}, "--frozen-window does nothing without a frozen proxy"),
        ({"standardised": True}, "--standardised does nothing here"),
        ({"halves": True}, "--halves does nothing without an intrinsic dimension"),
        ({"preset": "light", "sites": ("resid",)}, "--sites does nothing without --metrics"),
    ],
)
def test_what_no_sweep_can_use_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(AnisoscopeError, match=words):
        SweepConfig("somewhere", **options)


def test_an_option_typed_with_its_default_value_is_refused_as_well() -> None:
    with typed_options(SweepConfig, ["draws"]), pytest.raises(AnisoscopeError, match="--draws does nothing"):
        SweepConfig("somewhere", metrics=("drift",))
    with typed_options(ProfileConfig, ["draws"]):
        SweepConfig("somewhere", metrics=("drift",))  # another command's option of that name


def test_what_was_typed_is_known_of_the_configuration_that_was_made_and_of_no_other() -> None:
    typed, other = ProfileConfig(("a",)), ProfileConfig(("a",))
    with typed_options(typed, ["tokens"]):
        refuse_idle(other, ("tokens",), "here")
        with pytest.raises(AnisoscopeError, match="--tokens does nothing here"):
            refuse_idle(typed, ("tokens",), "here")


@pytest.mark.parametrize(
    ("watch", "words"),
    [
        ({"monitor": "drift", "rank": 4}, "--rank does nothing with --monitor drift"),
        ({"monitor": "drift", "split": (1,)}, "--split does nothing with --monitor drift"),
        ({"monitor": "light", "frozen_window": "steps:0.3"}, "which has no frozen proxy"),
        ({"monitor": "standard", "standardised": True}, "which has such energies anyway"),
        ({"monitor": "light", "weighted_gradients": True}, "does nothing without --target-weights"),
        ({"monitor": "light", "contexts": 0}, "contexts is 0; expected at least 2"),
    ],
)
def test_what_no_monitor_of_a_training_can_use_is_refused(watch: dict[str, Any], words: str) -> None:
    with pytest.raises(AnisoscopeError, match=words):
        check_watch({"when": "log", "contexts": 96, "rank": None, **watch}, TrainConfig())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"arms": ("vision",), "families": (), "text": "x"}, "--text does nothing here"),
        ({"arms": ("vision",), "families": (), "limit": 1.0}, "--limit does nothing without an arm that reads text"),
        ({"arms": (), "families": ("swin",), "steps": 5}, "--steps does nothing with --arms none"),
    ],
)
def test_what_no_chosen_model_can_use_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(AnisoscopeError, match=words):
        InherentConfig(**options)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("profile x --tokens nan", "--tokens is 'nan'; expected a whole number. See `anisoscope profile --help`."),
        ("study shape --steps 0", "--steps is '0'; expected at least 1."),
        ("profile x --tokens 3 --tokens=9", "--tokens is given twice, and only the last would count"),
        ("train --monitor none --when log", "--when does nothing with --monitor none"),
        ("train --steps 10 --checkpoints 0,5000", "--checkpoints names step 5000, after the last of 10 updates"),
        ("selftest --seed -1", "seed is -1; expected at least 0"),
    ],
)
def test_a_command_says_what_it_saw(
    words: str, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["anisoscope", *words.split()])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_an_option_after_two_dashes_is_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    cli._refuse_repeated(["profile", "--tokens", "3", "--", "--tokens"])
    with pytest.raises(AnisoscopeError, match="--tokens is given twice"):
        cli._refuse_repeated(["profile", "--tokens", "3", "--tokens"])


def test_long_lists_of_names_are_cut_to_the_nearest() -> None:
    told = str(unknown_name("claim", "name70", [f"name{i}" for i in range(70)]))
    assert "and 58 more" in told and "did you mean 'name7'" in told


def test_unknown_options_and_wrong_arguments_of_functions_are_named() -> None:
    with pytest.raises(AnisoscopeError, match="unknown option 'tokns'; did you mean 'tokens'"):
        python_options(ProfileConfig, {"tokns": 3})
    for wrong, words in (((None, []), "model is 'None'"), ((3, []), "model is '3'")):
        with pytest.raises(AnisoscopeError, match=words):
            anisoscope.measure(*wrong)  # type: ignore[arg-type]
    with pytest.raises(AnisoscopeError, match="out is '3'"):
        anisoscope.profile("gpt2", out=3)  # type: ignore[arg-type]
    with pytest.raises(AnisoscopeError, match="no model was given"):
        anisoscope.sweep([])
    with pytest.raises(AnisoscopeError, match="table is 'x'; expected Table"):
        anisoscope.evaluate_claims("x")
    with pytest.raises(AnisoscopeError, match="these runs hold none"):
        anisoscope.evaluate_claims(anisoscope.Table.from_records([]), fit="frozen")


def test_types_of_calls_are_told_in_words() -> None:
    def call(steps: int, names: tuple[str, ...], share: float = 0.5) -> None: ...

    call.__annotations__ = {"steps": int, "names": tuple[str, ...], "share": float}
    check_values(call, {"steps": 3, "names": ("a",), "share": 1})
    for values, words in (
        ({"steps": None}, "a whole number"),
        ({"share": "x"}, "a number"),
        ({"names": "x"}, "a list"),
    ):
        with pytest.raises(AnisoscopeError, match=words):
            check_values(call, values)


def test_a_tangent_study_has_presets_with_gradients_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["tangent", str(tmp_path), "--preset", "shape", "--out", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", ["anisoscope", *words])
    with pytest.raises(SystemExit):
        cli.main()
    assert "unknown preset 'shape'" in capsys.readouterr().err


def test_a_link_to_nowhere_is_not_what_was_meant(tmp_path: Path) -> None:
    (tmp_path / "corpus").symlink_to(tmp_path / "gone")
    (tmp_path / "corpus2").touch()
    assert near_miss(tmp_path / "corpus") == f"did you mean {str(tmp_path / 'corpus2')!r}?"
