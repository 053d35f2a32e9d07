"""Changes of rules name claims that exist, and stand in docs/claims.md."""

from __future__ import annotations

from pathlib import Path

from anisoscope.claims.catalogue import claims
from anisoscope.claims.changes import RULE_CHANGES

PAGE = Path(__file__).parents[2] / "docs" / "claims.md"


def test_every_change_names_its_claims_its_date_and_its_reason() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for change in RULE_CHANGES:
        assert set(change.claims) <= {*claims(), "all claims about training"}, change.claims
        assert all(change) and change.date.startswith("2026-")
        assert change.reason in text, "run `make docs`"
