"""Two runs side by side: what differs, with paired intervals."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from anisoscope.errors import AnisoscopeError
from anisoscope.measurement.compare import compare
from support.tiny_profiles import BERT, GPT2, WORDS, config, keyed, run

DEEP = "gpt2:n_layer=4,n_embd=32,n_head=2,vocab_size=300,n_positions=64"


def test_a_model_does_not_differ_from_itself(prose: Path, tmp_path: Path, whole_profile: Path) -> None:
    run(config(prose), tmp_path / "again")
    seen = compare(str(whole_profile), str(tmp_path / "again"))
    assert seen.paired and seen.first.removesuffix(f" ({whole_profile.name})") == seen.second.removesuffix(" (again)")
    assert len({seen.first, seen.second, compare(str(whole_profile), str(whole_profile)).first}) == 3
    assert len(seen.rows) > 100
    for row in seen.rows:
        assert (row["difference"], row["low"], row["high"]) == pytest.approx((0.0, 0.0, 0.0), abs=1e-12)
        assert not row["differs"]
    one, two, matrix = seen.cka
    assert one == two
    assert np.diag(matrix) == pytest.approx(1.0, abs=1e-6)
    assert matrix == pytest.approx(matrix.T, abs=1e-6)


def test_another_model_differs_and_layers_are_matched_by_depth(
    prose: Path, tmp_path: Path, whole_profile: Path
) -> None:
    run(config(prose, DEEP, seed=1), tmp_path / "deep")
    seen = compare(str(whole_profile), str(tmp_path / "deep"))
    assert seen.paired, "the same tokens"
    assert any("depth" in note for note in seen.notes)
    assert any(row["differs"] for row in seen.rows)
    pairs = {(row["layer"], row["other_layer"]) for row in seen.rows if row["kind"] == "resid"}
    assert pairs == {(1, 2), (2, 4)}
    assert {(r["layer"], r["other_layer"]) for r in seen.rows if r["kind"] == "final"} == {(2, 4)}
    assert seen.cka[2].shape == (len(seen.cka[0]), len(seen.cka[1])) == (4, 6)
    for row in seen.rows:
        assert row["low"] <= row["difference"] <= row["high"]
        assert row["difference"] == pytest.approx(row["second"] - row["first"])


def test_paired_intervals_are_narrower_than_unpaired_ones(prose: Path, tmp_path: Path, whole_profile: Path) -> None:
    other = prose.with_name("other.txt")
    rng = random.Random(7)
    other.write_text("\n\n".join(" ".join(rng.choices(WORDS, k=30)) for _ in range(40)), encoding="utf-8")
    run(config(prose, seed=1), tmp_path / "same")
    run(config(other, seed=1), tmp_path / "other")
    paired, apart = (
        compare(str(whole_profile), str(tmp_path / "same")),
        compare(str(whole_profile), str(tmp_path / "other")),
    )
    assert paired.paired
    assert not apart.paired
    assert any("not paired" in note for note in apart.notes)
    wide = {(r["layer"], r["kind"], r["metric"]): r["high"] - r["low"] for r in apart.rows if r["head"] is None}
    narrow = {(r["layer"], r["kind"], r["metric"]): r["high"] - r["low"] for r in paired.rows if r["head"] is None}
    ratios = [narrow[key] / wide[key] for key in narrow if wide.get(key)]
    assert np.median(ratios) < 1.1


def test_two_models_of_one_run_are_compared_and_others_must_be_named(prose: Path, tmp_path: Path) -> None:
    run(config(prose, GPT2, BERT), tmp_path / "both")
    seen = compare(str(tmp_path / "both"))
    assert (seen.first, seen.second) != ("", "")
    assert seen.paired
    with pytest.raises(AnisoscopeError, match="#"):
        compare(str(tmp_path / "both"), str(tmp_path / "both"))
    with pytest.raises(AnisoscopeError, match="does not exist"):
        compare(str(tmp_path / "none"), str(tmp_path / "both"))


def test_the_same_model_twice_in_one_run_stays_two(prose: Path, tmp_path: Path) -> None:
    table = run(config(prose, GPT2, GPT2), tmp_path / "twice")
    keyed(table)
    seen = compare(str(tmp_path / "twice"))
    assert max(abs(row["difference"]) for row in seen.rows) == 0.0
