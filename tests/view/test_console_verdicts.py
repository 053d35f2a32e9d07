"""Verdicts on a terminal: every width, every number of models, words before colours."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from anisoscope.claims.catalogue import papers
from anisoscope.view.terminal import screen
from anisoscope.view.terminal.verdicts import MARKS, STAR, print_robustness, print_verdicts

STATUSES = ("holds", "fails", "undecided")
RESULTS = Path(__file__).parents[2] / "docs" / "results"
Said = Callable[[], list[str]]
Resize = Callable[[int], None]


@pytest.fixture
def resize(monkeypatch: pytest.MonkeyPatch) -> Resize:
    """Sets the width that commands print for."""

    def to(width: int) -> None:
        monkeypatch.setenv("COLUMNS", str(width))
        for one in (screen.console, screen.errors):
            monkeypatch.setattr(one, "_width", None)

    return to


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    return lambda: [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def verdict(claim: str, subject: str, status: str, **words: Any) -> dict[str, Any]:
    numbers = {
        "effect": -0.00194,
        "low": -0.00503,
        "high": 0.00116,
        "p": 0.006,
        "margin": 0.5,
        "p_holm": 0.01,
        "q": 0.01,
    }
    why = (
        f"Because of {claim} in {subject} there is a sentence with [brackets] and (numbers), which is long enough. " * 3
    )
    return {"claim": claim, "subject": subject, "status": status, "statement": f"{claim} grows.", "why": why} | (
        numbers | {"details": {}} | words
    )


def grid_of(claims: Sequence[str], models: Sequence[str]) -> list[dict[str, Any]]:
    statuses = itertools.cycle([*STATUSES, "fails"])
    return [verdict(claim, model, next(statuses)) for claim, model in itertools.product(claims, models)]


CLAIMS = ("tangent_energy", "local_pca_loses_curvature_all_tokens", "anisotropy_grows", "drift_explains_anisotropy")
NAMES = [f"bidirectional-masked-{size}x{width}-语言模型" for size, width in itertools.product((6, 12, 24), range(9))]


@pytest.mark.parametrize("models", [1, 2, 6, 8, 27])
@pytest.mark.parametrize("why", [False, True])
def test_no_line_is_wider_than_the_terminal(models: int, why: bool, resize: Resize, said: Said) -> None:
    found = grid_of(CLAIMS, NAMES[:models])
    found += [verdict("never_seen", model, "undecided", details={"missing": True}) for model in NAMES[:models]]
    for width in (60, 61, 79, 80, 81, 100, 109, 110, 133, 160, 200):
        resize(width)
        print_verdicts(found, why=why, papers=papers())
        lines = said()
        assert lines and max(map(cell_len, lines)) <= width, (width, max(lines, key=cell_len))


def test_a_few_verdicts_have_a_line_each_with_their_interval(resize: Resize, said: Said) -> None:
    resize(80)
    print_verdicts(grid_of(CLAIMS[:2], ("decoder", "encoder")))
    found = said()
    first = next(i for i, line in enumerate(found) if line.startswith("claim "))
    head, *lines = found[first : first + 5]
    assert head.split()[:3] == ["claim", "model", "verdict"]
    assert [line.split()[1:3] for line in lines] == [
        ["decoder", "holds"], ["encoder", "fails"], ["decoder", "undecided"], ["encoder", "fails"]]  # fmt: skip
    assert all("-0.0019 [-0.005, 0.0012]" in line for line in lines)
    assert lines[2].startswith("local_pca_loses"), "a long name loses its middle, not its end"
    assert "all_tokens" in lines[2]


@pytest.mark.parametrize("width", [80, 140])
def test_many_verdicts_are_a_grid_of_words(width: int, resize: Resize, said: Said) -> None:
    claims, models = [f"claim_{i}" for i in range(9)], ("decoder", "encoder", "decoder-flatloss")
    found = grid_of(claims, models)
    resize(width)
    print_verdicts([*found, verdict("together", "encoder and decoder", "holds")])
    lines = said()
    first = next(i for i, line in enumerate(lines) if line.startswith("claim "))
    assert lines[first].split() == ["claim", *models, "together"]
    rows = {line.split()[0]: line.split()[1:] for line in lines[first + 1 : first + 11]}
    assert rows == {
        **{c: [*(row["status"] for row in found if row["claim"] == c), "-"] for c in claims},
        "together": ["-", "-", "-", "holds"],
    }


def test_models_that_do_not_fit_are_numbered_marks_with_a_key(resize: Resize, said: Said) -> None:
    claims, models = [f"claim_{i}" for i in range(3)], [f"model-of-some-length-{i}" for i in range(30)]
    found = grid_of(claims, models)
    resize(80)
    print_verdicts(found)
    lines = said()
    seen: dict[tuple[str, str], str] = {}
    heads: list[str] = []
    for line in lines[1:]:
        first, *cells = line.split()
        if first == "claim":
            heads = cells
        elif first in claims:
            seen |= {(first, head): cell for head, cell in zip(heads, cells, strict=True)}
    text = " ".join(" ".join(lines).split())
    assert all(f"{mark} {status}" in text for status, mark in MARKS.items())
    assert all(f"{number} {model}" in text for number, model in enumerate(models, 1))
    assert seen == {(row["claim"], str(models.index(row["subject"]) + 1)): MARKS[row["status"]] for row in found}


def test_a_verdict_that_falls_with_the_grid_has_a_star_and_a_key(resize: Resize, said: Said) -> None:
    resize(100)
    print_verdicts([verdict("a", "x", "holds", p_holm=0.2), verdict("b", "x", "fails"), verdict("c", "x", "undecided")])
    lines = said()
    assert [line.split()[1] for line in lines[2:5]] == [f"holds{STAR}", "fails", "undecided"]
    text = " ".join(lines)
    assert "1 holds, 1 fails and 1 is undecided" in text and f"{STAR} not after that correction" in text
    assert lines[0] == "In x it is not so that b grows.", "what does not stand does not lead"


def test_verdicts_are_grouped_by_paper_and_our_own_come_last(resize: Resize, said: Said) -> None:
    resize(80)
    print_verdicts(
        [verdict(name, "x", "fails") for name in ("parabola", "bell_shaped", "tangent_energy")], papers=papers()
    )
    lines = said()
    first = next(i for i, line in enumerate(lines) if line.startswith("claim "))
    order = [line.split()[0] for line in lines[first + 1 : first + 7]]
    assert order == ["Razzhigaev", "bell_shaped", "arXiv:2604.08764", "tangent_energy", "not", "parabola"]


def test_what_was_not_measured_is_counted_and_named_on_request(resize: Resize, said: Said) -> None:
    absent = [verdict(name, "x", "undecided", details={"missing": True}) for name in ("seen", "lost", "gone")]
    resize(80)
    print_verdicts([verdict("seen", "y", "holds"), *absent])
    assert "Not measured here: 2 of 3 claims, and 1 in some models only." in said()
    print_verdicts([verdict("seen", "y", "holds"), *absent], why=True)
    assert "Not measured here: seen (x), lost, gone." in said()
    print_verdicts(absent)
    assert said()[0] == "no claim could be tested on what was measured"


def test_why_prints_every_sentence_whole_and_seeds_one_by_one(resize: Resize, said: Said) -> None:
    rows = [verdict("a", "x", "holds", details={"pooled": True}), *(verdict("a", "x", "fails") for _ in range(3))]
    resize(80)
    print_verdicts(rows)
    short = said()
    print_verdicts(rows, why=True)
    long = " ".join(" ".join(said()).split())
    assert "Because" not in " ".join(short) and sum(line.startswith("a ") for line in short) == 1
    assert any(line.startswith("Why, verdict by verdict") for line in short)
    assert long.count(" ".join(rows[0]["why"].split())) == 4 and long.count("p 0.006") == 4


def test_other_choices_fit_too(resize: Resize, said: Said) -> None:
    badges = [{"kind": "rank", "name": str(8 * i), "status": "holds", "phrase": f"with rank {i}"} for i in range(20)]
    robust = {"badges": badges, "words": "holds under all of 20 other choices", "missing": ["proxy"]}
    for width in (60, 80, 200):
        resize(width)
        print_robustness(
            [verdict("local_pca_loses_curvature_all_tokens", NAMES[0], "holds", details={"robust": robust})]
        )
        lines = said()
        assert max(map(cell_len, lines)) <= width
        assert "under all of 20 other choices" in " ".join(lines)
