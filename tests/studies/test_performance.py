"""Pieces of the performance study: tasks with known labels, patches with known losses, correlations and verdicts."""

from __future__ import annotations

import contextlib
import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anisoscope.capture.gradient_pass import LabelConvention
from anisoscope.capture.sites.layout import find_layout
from anisoscope.capture.sites.site import Site
from anisoscope.claims.dynamics import (
    PerformanceResults,
    ScoreSeries,
    correlate,
    over_contexts,
    over_points,
    performance_verdicts,
)
from anisoscope.claims.engine.claim import Verdict
from anisoscope.data.tasks import (
    NONE,
    PieceTexts,
    embedded_units,
    key_of,
    labelled_units,
    spread_contexts,
    token_labels,
)
from anisoscope.data.text import Document
from anisoscope.errors import AnisoscopeError
from anisoscope.metrics.catalogue import registry
from anisoscope.models.tokenizer import ByteTokenizer
from anisoscope.numerics.hashing import FOLDS, fold_of
from anisoscope.results.quantity import as_equal_folds, jackknife
from anisoscope.results.query import Table
from anisoscope.studies.performance.row_set import (
    FREE,
    SHARE,
    ProbeScores,
    RowSet,
    TextPiece,
    collect_rows,
    correlations,
    known_rows,
    metric_estimate,
    patching,
    pooled,
    refuse_few,
    token_losses,
)
from anisoscope.studies.performance.shortcut import can_skip
from support.performances import WORDS, write_records
from support.tiny_models import tiny

# -- tasks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["models/small", "models/small/", "models/small.gguf"])
def test_a_model_has_the_name_of_its_folder_or_file(spec: str) -> None:
    from anisoscope.studies.performance.protocol import _subject

    assert _subject(spec, ()).name == "small"


def test_token_labels_follow_the_words() -> None:
    texts = [" The", " cat", "s", ",", " 12", "\n", "a"]
    found = token_labels(texts, np.zeros(7, dtype=bool))
    assert found["place_in_word"].tolist() == [0, 0, 1, 2, 0, NONE, 0]
    assert found["token_class"].tolist() == [2, 1, 1, 5, 3, 4, 0]
    assert found["space_next"].tolist() == [1, 0, 0, 1, 1, 0, NONE]
    special = np.array([False] * 6 + [True])
    assert token_labels(texts, special)["token_class"].tolist()[-1] == NONE


@pytest.mark.parametrize(
    ("vocabulary", "texts"),
    [({"the": 0, "##re": 1}, [" the", "re"]), ({"Ġthe": 0, "re": 1, "###": 2}, [" the", "re", "###"])],
)
def test_signs_of_headings_make_no_word_pieces(vocabulary: dict[str, int], texts: list[str]) -> None:
    class Words:
        all_special_ids: tuple[int, ...] = ()

        def get_vocab(self) -> dict[str, int]:
            return vocabulary

        def convert_ids_to_tokens(self, token: int) -> str:
            return list(vocabulary)[token]

    pieces = PieceTexts(Words())
    assert [pieces.text(token) for token in range(len(texts))] == texts


def test_the_shuffled_twin_has_the_same_words_in_another_order_and_the_same_key() -> None:
    pieces = spread_contexts([Document(f"{WORDS} {i}" * 4) for i in range(3)], ByteTokenizer(), length=64, tokens=600,
                             articles=3)  # fmt: skip
    units, tasks = embedded_units(pieces, ByteTokenizer(), names=("order",))
    natural, twins = [u for u in units if u.natural], [u for u in units if not u.natural]
    assert list(tasks) == ["order"]
    assert [u.key for u in natural] == [u.key for u in twins]
    for one, two in zip(natural, twins, strict=True):
        a, b = (ByteTokenizer().decode(u.context.ids.tolist()) for u in (one, two))
        assert sorted(a.split(" ")) == sorted(b.split(" "))
        assert a.split(" ")[0] == b.split(" ")[0]
        assert (one.labels["order"], two.labels["order"]) == (0, 1)
    assert any((u.context.ids != v.context.ids).any() for u, v in zip(natural, twins, strict=True))


def test_contexts_are_spread_over_documents_and_none_comes_twice() -> None:
    documents = [Document(f"{i}: {WORDS * 30}") for i in range(6)] + [Document(f"0: {WORDS * 30}")]
    pieces = spread_contexts(documents, ByteTokenizer(), length=32, tokens=32 * 24, articles=4)
    groups = [piece.group for piece in pieces]
    assert len(pieces) == 24 == len({key_of(piece) for piece in pieces})
    assert max(groups.count(g) for g in set(groups)) <= 6
    assert len(set(groups)) >= 4


def test_labels_of_texts_and_of_words_are_read(tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.jsonl", [{"text": f"{WORDS} {i}", "label": "ab"[i % 2]} for i in range(6)])
    units, tasks = labelled_units(path, ByteTokenizer(), length=16)
    assert tasks["labels"].classes == ("a", "b") and tasks["labels"].level == "context"
    assert [u.labels["labels"] for u in units] == [0], "cut to 16 tokens they are one text, which counts once"
    units, _ = labelled_units(path, ByteTokenizer(), length=100)
    assert [u.labels["labels"] for u in units] == [0, 1, 0, 1, 0, 1]
    records = [{"text": "a bc", "label": ["x", "y"]}, {"text": "abxy", "label": ["y", "x", "y", "x"]}]
    path = write_records(tmp_path / "b.jsonl", records)
    units, tasks = labelled_units(path, ByteTokenizer(), length=16)
    assert tasks["labels"].level == "token" and tasks["labels"].classes == ("x", "y")
    assert units[0].labels["labels"].tolist() == [0, 1, 1, 1]  # type: ignore[union-attr]
    assert units[1].labels["labels"].tolist() == [1, 0, 1, 0], "one for each token"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([{"text": "some text", "label": "a"}] * 3, "expected at least two classes"),
        ([{"text": "some text", "label": 0.5}, {"text": "more text", "label": 1.5}], "labels with fractions"),
        ([{"text": "some text", "kind": "a"}], "has no field 'label'"),
        ([{"text": "a b c", "label": ["x", "y"]}, {"text": "a b", "label": ["x", "y"]}], "one for each word"),
        ([{"text": "a b c", "label": "x"}, {"text": "a b", "label": ["x", "y"]}], "expected one kind"),
        ([{"text": f"text {i}", "label": f"id{i}"} for i in range(9)], "expected classes that repeat"),
    ],
)
def test_labels_that_cannot_be_used_are_refused(tmp_path: Path, records: list[Any], message: str) -> None:
    with pytest.raises(AnisoscopeError, match=message):
        labelled_units(write_records(tmp_path / "a.jsonl", records), ByteTokenizer(), length=32)
    (tmp_path / "b.txt").write_text("text")
    with pytest.raises(AnisoscopeError, match="no fields"):
        labelled_units(tmp_path / "b.txt", ByteTokenizer(), length=32)


# -- patches -----------------------------------------------------------------------------------------------------------


def _piece(model: Any, *, masked: bool = False) -> TextPiece:
    ids = torch.randint(6, 60, (3, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    ids = ids.masked_fill(mask == 0, 1)
    labels = ids.masked_fill((mask == 0) | (masked and (torch.arange(12) % 3 > 0)), -100)
    return TextPiece({"input_ids": ids, "attention_mask": mask, "labels": labels}, torch.arange(3), torch.arange(3))


@pytest.mark.parametrize(("name", "masked"), [("gpt2", False), ("gpt_neox", False), ("bert-masked", True)])
def test_token_losses_are_the_models_own_loss(name: str, masked: bool) -> None:
    model, piece = tiny(name).eval(), _piece(None, masked=masked)
    losses, keys = token_losses(model, [piece], reading=LabelConvention(shifted=not masked))
    with torch.no_grad():
        own = model(**piece.inputs).loss
    assert float(losses.mean()) == pytest.approx(float(own), rel=1e-5)
    if not masked:
        assert keys.bincount().tolist() == [11, 6, 11], "padding is never a target"


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "bert-masked", "albert-groups"])
def test_a_patch_that_changes_nothing_changes_no_loss_and_sees_every_real_row_once(name: str) -> None:
    model, masked = tiny(name).eval(), "gpt" not in name
    piece, layout, reading = _piece(None, masked=masked), find_layout(model), LabelConvention(shifted=not masked)
    base, _ = token_losses(model, [piece], reading=reading)
    for site in layout.sites(["embed", "resid"] + (["final"] if "final" in layout.kinds else [])):
        seen: list[int] = []

        def same(x: torch.Tensor, seen: list[int] = seen) -> torch.Tensor:
            seen.append(len(x))
            return x

        def patch(real: torch.Tensor, site: Site = site) -> contextlib.AbstractContextManager[None]:
            return patching(model, layout, site, same, real=real)

        again, _ = token_losses(model, [piece], reading=reading, patch=patch)
        assert seen == [31], site
        assert torch.equal(base, again), site

        def other(real: torch.Tensor, site: Site = site) -> contextlib.AbstractContextManager[None]:
            return patching(model, layout, site, lambda x: x.flip(1), real=real)

        changed, _ = token_losses(model, [piece], reading=reading, patch=other)
        assert not torch.allclose(base, changed), f"a real change at {site} is seen"
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "bert-masked", "albert-groups", "llama"])
def test_known_rows_give_the_losses_of_the_whole_run_without_the_blocks_before(name: str) -> None:
    model, masked = tiny(name).eval(), "bert" in name
    piece, layout, reading = _piece(None, masked=masked), find_layout(model), LabelConvention(shifted=not masked)
    stack, sites = layout.stacks[0], layout.sites(["embed", "resid"])
    assert can_skip(model, stack, piece.inputs)
    found = collect_rows(model, [piece], sites, layout=layout, special=torch.tensor([0]))
    for site in sites:
        runs: list[Any] = []
        parts = [m for n, m in model.named_modules() if any(n.startswith(f"{path}.") for path in stack.blocks)]
        handles = [m.register_forward_hook(lambda *seen, runs=runs: runs.append(seen[0])) for m in parts]  # type: ignore[misc]
        change = functools.partial(patching, model, layout, site, lambda x: 2 * x.flip(1))
        whole, _ = token_losses(model, [piece], reading=reading, patch=change)
        usual = len(runs)
        known = known_rows(found[site], [piece])
        short, _ = token_losses(model, [piece], reading=reading, patch=change, known=known)
        assert torch.allclose(whole, short, rtol=1e-5, atol=1e-6), site
        left = 1 - site.layer / stack.depth
        assert len(runs) - usual == pytest.approx(left * usual), "parts of blocks before the patch do not run"
        for handle in handles:
            handle.remove()
    assert not any("forward" in vars(module) for module in model.modules())
    again = found[sites[0]].keep(torch.arange(len(found[sites[0]]) - 1))
    assert known_rows(again, [piece]) == [], "a row that is missing: the whole run is made"


def test_a_model_without_final_rows_predicts_every_token_alike() -> None:
    model, piece = tiny("gpt2").eval(), _piece(None)
    layout = find_layout(model)
    site = layout.sites(["final"])[0]

    def patch(real: torch.Tensor) -> contextlib.AbstractContextManager[None]:
        return patching(model, layout, site, torch.zeros_like, real=real)

    losses, _ = token_losses(model, [piece], reading=LabelConvention(shifted=True), patch=patch)
    assert torch.allclose(losses, torch.full_like(losses, math.log(60)), atol=1e-5)


# -- scores, rows ------------------------------------------------------------------------------------------------------


def test_the_interval_of_a_score_is_the_jackknife_over_folds_of_contexts() -> None:
    key = torch.arange(300).repeat_interleave(3)
    value = torch.randn(900, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = ProbeScores(value, key).estimate(FREE)
    fold = fold_of(key)
    left = [float(value[fold != j].mean()) for j in range(FOLDS)]
    slow = as_equal_folds(float(value.mean()), left, fold_of(key.unique()).bincount(minlength=FOLDS).tolist())
    assert found.replicates == pytest.approx(slow)
    assert (found.low, found.high) == pytest.approx(jackknife(float(value.mean()), slow, bounds=FREE))
    assert (found.n, found.contexts) == (900, 300)


def test_folds_without_contexts_are_left_open_in_scores_and_in_geometry() -> None:
    key = torch.arange(1000)
    key = key[fold_of(key) != 2]
    found = ProbeScores(torch.ones(len(key)), key).estimate(SHARE)
    assert [i for i, v in enumerate(found.replicates) if math.isnan(v)] == [2]
    x = torch.randn(len(key), 5, generator=torch.Generator().manual_seed(0))
    shape = metric_estimate(registry()["svd_ratio"], x, key)
    assert [i for i, v in enumerate(shape.replicates) if math.isnan(v)] == [2]
    same = metric_estimate(registry()["two_nn"], torch.zeros(50, 3), torch.arange(50))
    assert math.isnan(same.value) and same.note, "rows that are all one have no neighbours, and it says so"


def test_pooling_leaves_special_tokens_out_of_the_mean() -> None:
    x = torch.tensor([[9.0], [1.0], [3.0], [5.0], [7.0]])
    unit, position = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 1, 2, 0, 1])
    special = torch.tensor([True, False, False, False, False])
    rows = RowSet(x, unit, unit, position, unit, special)
    for how, wanted in (("mean", [2.0, 6.0]), ("cls", [9.0, 5.0]), ("last", [3.0, 7.0])):
        found = pooled(rows, how)
        assert found.x.squeeze(1).tolist() == wanted and found.unit.tolist() == [0, 1]


def test_too_few_contexts_are_refused() -> None:
    with pytest.raises(AnisoscopeError, match="12 different contexts"):
        refuse_few(torch.arange(12), "contexts")
    refuse_few(torch.arange(64), "contexts")


# -- correlations and verdicts -----------------------------------------------------------------------------------------


def test_correlations_are_those_of_scipy() -> None:
    from scipy import stats

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=9), rng.integers(0, 4, size=9).astype(float)
    assert correlate(x, y, "pearson") == pytest.approx(stats.pearsonr(x, y).statistic)
    assert correlate(x, y, "spearman") == pytest.approx(stats.spearmanr(x, y).statistic)
    assert math.isnan(correlate(x, np.full(9, 0.3), "pearson"))


def test_one_interval_leaves_out_contexts_and_the_other_points() -> None:
    rng = np.random.default_rng(0)
    x = np.arange(7.0)
    noisy = ScoreSeries(x, x[:, None] + rng.normal(size=(7, 8)))
    sure = ScoreSeries(x**2, np.repeat((x**2)[:, None], 8, axis=1))
    noise, points = over_contexts(noisy, sure, "pearson"), over_points(noisy, sure, "pearson")
    assert len(noise.left) == 8 and len(points.left) == 7
    assert points.left[0] == pytest.approx(correlate(x[1:], x[1:] ** 2, "pearson"))
    assert noise.value == points.value == pytest.approx(correlate(x, x**2, "pearson"))


def test_the_rows_of_correlations_say_what_their_points_are() -> None:
    rows = list(correlations(PerformanceResults(Table.from_records(_study(gain=0.0)), "m")))
    assert rows and all("not independent" in row["note"] for row in rows)
    assert {row["n"] for row in rows} == {5, 7, 8}, "layers, changes between checkpoints, checkpoints"


def _row(metric: str, variant: str, value: float, *, step: int, layer: int, spread: float = 0.001) -> dict[str, Any]:
    place = {"model": "m", "step": step, "stack": "single", "layer": layer, "kind": "resid" if layer else "embed"}
    folds = [value + spread * (j - 3.5) for j in range(8)]
    return {**place, "metric": metric, "variant": variant, "value": value, "replicates": folds}


def _study(*, gain: float, sign: float = 1.0, steps: int = 8) -> list[dict[str, Any]]:
    """A run in which whitening gains so much, and anisotropy rises with the loss (or falls)."""
    rows = []
    for step in range(steps):
        for layer in range(5):
            where: dict[str, Any] = {"step": step, "layer": layer}
            rows += [
                _row("svd_ratio", "repair=raw", 0.5 + 0.01 * sign * step + 0.1 * layer, **where),
                _row("lm_loss", "reading=patched;repair=raw", 3 + 0.1 * step, **where),
                _row("lm_loss", "reading=readout;repair=raw", 3 + 0.1 * step + 0.02 * layer, **where),
                _row("probe_accuracy", "repair=raw;task=t", 0.7 - 0.01 * step, **where),
                _row("probe_accuracy", "against=raw;repair=whitened;task=t", gain, **where),
                _row("probe_selectivity", "repair=raw;task=t", 0.2, **where),
            ]
    return rows


def _judged(rows: list[dict[str, Any]]) -> dict[str, Verdict]:
    return {v.claim: v for v in performance_verdicts(PerformanceResults(Table.from_records(rows), "m"))}


@pytest.mark.parametrize(("gain", "status"), [(0.1, "holds"), (0.01, "undecided"), (-0.1, "fails")])
def test_a_repair_improves_probes_when_the_interval_lies_beyond_the_margin(gain: float, status: str) -> None:
    verdicts = _judged(_study(gain=gain))
    assert verdicts["whitened_improves_probe"].status == status
    assert verdicts["whitened_improves_probe"].effect == pytest.approx(gain)
    assert "highest" not in verdicts["whitened_improves_probe"].why, "no site stands out where all are alike"
    rows = _study(gain=gain)
    rows[-2]["value"] += 0.5  # of the last site
    assert "; highest after block 4 (" in _judged(rows)["whitened_improves_probe"].why


@pytest.mark.parametrize(("sign", "status"), [(1.0, "holds"), (-1.0, "fails")])
def test_anisotropy_goes_with_a_higher_loss_or_it_does_not(sign: float, status: str) -> None:
    verdicts = _judged(_study(gain=0.0, sign=sign))
    for what in ("loss", "probe"):
        assert verdicts[f"anisotropy_worse_{what}_checkpoints"].status == status
        assert verdicts[f"anisotropy_worse_{what}_checkpoints"].effect == pytest.approx(sign)


def test_a_handful_of_checkpoints_decides_nothing() -> None:
    verdicts = _judged(_study(gain=0.0, steps=4))
    assert verdicts["anisotropy_worse_loss_checkpoints"].status == "undecided"
    assert "too few" in verdicts["anisotropy_worse_loss_checkpoints"].why
    verdicts = _judged(_study(gain=0.0, steps=2))
    assert math.isnan(verdicts["anisotropy_worse_loss_checkpoints"].effect)


def test_verdicts_of_a_table_with_its_correlations_are_those_without_them() -> None:
    rows = _study(gain=0.1)
    columns = {"model": "m", "seed": 0}
    more = [{**columns, **row} for row in correlations(PerformanceResults(Table.from_records(rows), "m"))]
    one, two = _judged(rows), _judged([*rows, *more])
    assert {name: (v.status, v.effect) for name, v in one.items()} == {n: (v.status, v.effect) for n, v in two.items()}
    assert any(row["layer"] is not None for row in more), "correlations at one site have no step"


def test_a_correlation_with_what_stays_the_same_says_so() -> None:
    rows = [{**row, "value": 0.5} if row["metric"] == "probe_accuracy" else row for row in _study(gain=0.0)]
    found = correlations(PerformanceResults(Table.from_records(rows), "m"))
    notes = {row["note"] for row in found if math.isnan(row["value"])}
    assert all(note.endswith("; one of the two is the same at all points") for note in notes) and notes


def test_only_intervals_that_there_are_stand_in_the_sentence() -> None:
    rows = _study(gain=0.0)
    for row in rows:  # a correlation with a constant is none
        if row["metric"] == "svd_ratio":
            row |= {"value": 0.5, "replicates": [0.5] * 8}
    for study, there in ((_study(gain=0.0), True), (rows, False)):
        why = _judged(study)["anisotropy_worse_loss_checkpoints"].why
        assert ("leaving out contexts [" in why) is there and "not independent" in why
        assert "[unknown" not in why
