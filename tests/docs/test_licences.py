"""Everything that is depended on or shipped has a licence that is known and fits Apache-2.0."""

from __future__ import annotations

from pathlib import Path

import pytest

from licences import everything, judge, shipped


def test_all_licences_are_known_and_compatible() -> None:
    found = everything()
    assert {"torch", "transformers", "plotly"} <= {each.name for each in found}
    assert not [each for each in found if each.problem]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("MIT", ""),
        ("Apache-2.0 WITH LLVM-exception AND BSD-2-Clause", ""),
        ("MPL-2.0", ""),
        ("", "unknown"),
        ("MIT AND Example-1.0", "unknown"),
        ("UNKNOWN", "unknown"),
        ("GNU General Public License v3 (GPLv3)", "incompatible"),
        ("AGPL-3.0-or-later", "incompatible"),
        ("CC-BY-NC-4.0", "incompatible"),
    ],
)
def test_a_licence_is_judged_by_its_words(words: str, problem: str) -> None:
    assert judge("package", words).problem == problem


def test_a_shipped_file_of_others_without_its_licence_is_found(tmp_path: Path) -> None:
    (tmp_path / "view").mkdir()
    (tmp_path / "view" / "library.min.js").write_text("x", encoding="utf-8")
    (tmp_path / "view" / "page.js").write_text("x", encoding="utf-8")
    assert [each.problem for each in shipped(tmp_path)] == ["no known LICENSE beside it"]
    (tmp_path / "view" / "LICENSE").write_text("Permission is hereby granted, free of charge, …", encoding="utf-8")
    assert [(each.words, each.problem) for each in shipped(tmp_path)] == [("MIT", "")]
