"""Pretrained models beside models with seeds: one set of weights each, which is no seed, no three, and not left out."""

from __future__ import annotations

from typing import Any

import pytest

from anisoscope.claims.catalogue import evaluate_claims
from anisoscope.claims.engine.claim import Verdict
from anisoscope.results.query import Table
from anisoscope.view.headline import headline
from support.fake_modalities import Media, media_table

EVERY, DIFFERS, COUNTER, DRIFT = (
    "anisotropic_in_every_modality",
    "convolution_differs",
    "not_inherent",
    "drift_explains_anisotropy",
)
MODALITIES = ("text", "speech", "vision")
BESIDE = "modalities, pretrained models"
Planted = tuple[str, float]  # modality and average cosine


def arms(*planted: Planted, seeds: int = 3) -> list[Media]:
    """Models that were trained from several seeds, which differ a little."""
    return [
        Media(f"{modality}-arm-{i}", modality, number=n, entropy=(n, i), noise=0.002, layers=7).stream(
            lambda depth, mean=cosine + 0.01 * n: mean * (0.8 + 0.4 * depth)
        )
        for n in range(seeds)
        for i, (modality, cosine) in enumerate(planted)
    ]


def loaded(*planted: Planted, **more: Any) -> list[Media]:
    """Models of one set of weights each."""
    entry = {"fingerprint": "sha256:1", **more}
    return [
        Media(f"{modality}-pretrained-{i}", modality, entropy=i + 50, noise=0.002, layers=7, entry=entry).stream(
            lambda depth, mean=cosine: mean * (0.8 + 0.4 * depth)
        )
        for i, (modality, cosine) in enumerate(planted)
    ]


def judged(claim: str, *sheets: Media) -> dict[str, Verdict]:
    """The leading verdict of each subject."""
    found: dict[str, Verdict] = {}
    for verdict in evaluate_claims(media_table(*sheets), [claim]):
        found.setdefault(verdict.subject, verdict)
    return found


def alike(modalities: tuple[str, ...], cosine: float) -> list[Planted]:
    return [(modality, cosine) for modality in modalities]


@pytest.mark.parametrize(
    ("trained", "pretrained", "statuses"),
    [
        (0.5, [("text", 0.5), ("speech", 0.4)], ("holds", "holds")),
        (0.5, [("text", 0.5), ("speech", 0.02)], ("holds", "fails")),  # it does not spoil the arms
        (0.02, [("text", 0.5), ("speech", 0.4)], ("fails", "holds")),  # nor rescue them
        (0.5, [("text", 0.5), ("text", 0.4)], ("holds", "undecided")),  # one modality
    ],
)
def test_both_are_judged_each_by_itself(trained: float, pretrained: list[Planted], statuses: tuple[str, str]) -> None:
    found = judged(EVERY, *arms(*alike(MODALITIES, trained)), *loaded(*pretrained))
    assert tuple(found[subject].status for subject in ("modalities", BESIDE)) == statuses
    assert found["modalities"].scope == "over 3 seeds" and found[BESIDE].scope in ("for these models", "for this model")
    assert not found[BESIDE].details["pooled"] and "seed" not in found[BESIDE].why
    assert "2 pretrained models of one set of weights each are judged apart" in found["modalities"].why


def test_a_verdict_over_seeds_is_what_it_is_without_pretrained_models() -> None:
    alone = arms(*alike(MODALITIES, 0.5), ("convolution", 0.2), ("convolution", 0.25))
    extreme = loaded(("text", 0.0), ("speech", 0.9), ("convolution", 0.95))
    for claim in (EVERY, DIFFERS, COUNTER, DRIFT):
        before, after = (
            evaluate_claims(media_table(*alone), [claim]),
            evaluate_claims(media_table(*alone, *extreme), [claim]),
        )
        subjects = {verdict.subject for verdict in before}
        told = [[(v.subject, v.scope, v.status, v.effect, v.low, v.high, v.p) for v in each if v.subject in subjects]
                for each in (before, after)]  # fmt: skip
        assert repr(told[0]) == repr(told[1]), claim
        assert any(v.subject.endswith("pretrained models") for v in after), f"{claim}: they are not left out"


def test_a_pretrained_model_is_not_the_third_seed() -> None:
    """Two trainings and one set of weights are no three trainings; three trainings are."""
    sheets = arms(*alike(MODALITIES, 0.5), seeds=2)
    found = judged(EVERY, *sheets, *loaded(*alike(MODALITIES, 0.5)))
    assert found["modalities"].status == "undecided" and "needs 3" in found["modalities"].why
    assert found[BESIDE].status == "holds"
    assert judged(EVERY, *arms(*alike(MODALITIES, 0.5)))["modalities"].status == "holds", "the counter-test"


def test_a_seed_in_its_rows_makes_it_none_of_the_seeds() -> None:
    for number in (0, 2, 7):
        sheets = loaded(("text", 0.5), ("speech", 0.02))
        for sheet in sheets:
            sheet.rows = [{**row, "seed": number} for row in sheet.rows]
        found = judged(EVERY, *arms(*alike(MODALITIES, 0.5)), *sheets)
        assert (found["modalities"].status, found[BESIDE].status) == ("holds", "fails"), number
        assert found["modalities"].scope == "over 3 seeds"


def test_attention_against_convolution_is_asked_of_each_kind() -> None:
    more = [("text", 0.5), ("vision", 0.51), ("convolution", 0.5), ("convolution", 0.52)]
    less = [("text", 0.5), ("speech", 0.55), ("convolution", 0.1), ("convolution", 0.12)]
    subject = "attention and convolution"
    found = judged(DIFFERS, *arms(*more), *loaded(*less))
    assert (found[subject].status, found[f"{subject}, pretrained models"].status) == ("fails", "holds")
    found = judged(DIFFERS, *arms(*less), *loaded(*more))
    assert (found[subject].status, found[f"{subject}, pretrained models"].status) == ("holds", "fails")
    lone = judged(DIFFERS, *arms(*less), *loaded(("text", 0.5)))[f"{subject}, pretrained models"]
    assert lone.status == "undecided" and lone.details["missing"], "it is told that they have no convolution"


def test_each_pretrained_model_has_a_verdict_of_its_own_with_its_name() -> None:
    found = judged(DRIFT, *arms(*alike(MODALITIES, 0.5)), *loaded(("text", 0.5), ("speech", 0.5), ("vision", 0.4)))
    assert {"text-pretrained-0", "speech-pretrained-1", "all models", "all models, pretrained models"} <= set(found)
    assert found["text-pretrained-0"].scope == "for this model"
    assert set(found["all models, pretrained models"].details["models"]) == {
        "text-pretrained-0",
        "speech-pretrained-1",
        "vision-pretrained-2",
    }
    assert "text-pretrained-0" not in found["all models"].details["models"]


def test_an_arm_of_which_one_seed_is_left_and_random_weights_are_not_pretrained() -> None:
    lone = arms(("convolution", 0.3), seeds=1)
    found = judged(EVERY, *arms(*alike(MODALITIES, 0.5)), *lone)
    assert list(found) == ["modalities"]
    random = loaded(("speech", 0.0), notes=["random weights (seed 0)"])
    assert list(judged(EVERY, *arms(*alike(MODALITIES, 0.5)), *random)) == ["modalities"]


def test_models_of_one_set_of_weights_each_are_one_study_where_nothing_has_seeds() -> None:
    found = judged(EVERY, *loaded(*alike(MODALITIES, 0.5)), *arms(("characters", 0.4), seeds=1))
    assert list(found) == ["modalities"] and "in 4 models of 4 of 5 modalities" in found["modalities"].why.lower()


def test_the_title_says_of_which_models_it_speaks() -> None:
    table: Table = media_table(*arms(*alike(MODALITIES, 0.5)), *loaded(("text", 0.5), ("speech", 0.02)))
    verdicts = [verdict.to_dict() for verdict in evaluate_claims(table, [EVERY])]
    assert headline(verdicts, "inherent") == (
        "In models trained from several seeds tokens, characters, speech and pictures are all anisotropic; in "
        "pretrained models it is not so."
    )


def test_alternatives_are_tried_on_what_a_verdict_is_made_of() -> None:
    """Rows without the first position that only a pretrained model has change no verdict over seeds."""
    out = loaded(("text", 0.5), ("speech", 0.5))
    for sheet in out:
        sheet.stream(0.02, variant="first=out")
    found = evaluate_claims(media_table(*arms(*alike(MODALITIES, 0.5)), *out), [EVERY], robust=True)
    badges = {v.subject: v.details["robust"] for v in found if v.details["pooled"] or v.subject == BESIDE}
    assert badges[BESIDE] != badges["modalities"]


# the page


def test_the_page_tells_pretrained_models_apart_from_models_with_seeds() -> None:
    from anisoscope.commands.drawing import compare
    from anisoscope.view.report import RunView
    from anisoscope.view.sections.drift import bundles_of, modality_findings, modality_hero, size_words
    from anisoscope.view.verdict_grid import verdict_grid

    table = media_table(*arms(*alike(MODALITIES, 0.5)), *loaded(("text", 0.2), ("speech", 0.02)))
    found = compare([RunView(table, dict(table.about))])
    hero = modality_hero(found)
    assert hero is not None
    assert [panel.title for panel in hero.figure.panels] == ["Models trained from several seeds", "Pretrained models"]
    trained, pretrained = ({line.label.split(" ")[0] for line in panel.series} for panel in hero.figure.panels)
    assert trained == {"text-arm-0", "speech-arm-1", "vision-arm-2"}
    assert pretrained == {"text-pretrained-0", "speech-pretrained-1"}
    (finding,) = modality_findings(found)
    assert finding.texts[0].startswith("Average cosine over blocks: 0.5") and "0.2" not in finding.texts[0]
    assert finding.texts[1].startswith("In pretrained models, one set of weights each: 0.2")
    assert size_words(bundles_of(found.rows)) == "5 models", "a set of weights is no seed"
    grid = verdict_grid([verdict.to_dict() for verdict in evaluate_claims(table, [EVERY, DRIFT])])
    assert grid is not None and list(grid.columns)[-2:] == ["together", "pretrained models"]
    alone = media_table(*loaded(("text", 0.2), ("speech", 0.02)))
    one = modality_hero(compare([RunView(alone, dict(alone.about))]))
    assert one is not None and [panel.title for panel in one.figure.panels] == [""], "nothing has seeds: one panel"
