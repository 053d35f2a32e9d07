"""Laws of every claim: it holds where its effect is planted, not where there is none, and it can fail."""

from __future__ import annotations

from typing import Any

import pytest

from anisoscope.claims.catalogue import claims
from anisoscope.results.query import Table
from support.planted import PLANTED
from support.specimen import held, leading

RATE = 0.05
NULLS = [(claim, kind) for claim, specimen in PLANTED.items() for kind in specimen.nulls]


def test_every_claim_has_planted_and_null_tables() -> None:
    assert set(PLANTED) == set(claims()), "a claim without tables, or tables without a claim"
    assert all(specimen.nulls for specimen in PLANTED.values())


@pytest.mark.parametrize("claim", PLANTED)
def test_holds_where_the_effect_is_planted(claim: str) -> None:
    found = leading(PLANTED[claim].planted(), claim)
    assert found and {verdict.status for verdict in found} == {"holds"}, [verdict.why for verdict in found]


@pytest.mark.parametrize("claim", [claim for claim, specimen in PLANTED.items() if specimen.opposite])
def test_fails_where_the_opposite_is_planted(claim: str) -> None:
    opposite: Any = PLANTED[claim].opposite
    found = leading(opposite(), claim)
    assert "fails" in {verdict.status for verdict in found}, [verdict.why for verdict in found]


@pytest.mark.parametrize("claim", PLANTED)
def test_seldom_holds_where_there_is_nothing(claim: str) -> None:
    """Ten tables, over all kinds of nothing in turn; twenty where it holds in one of them."""
    nulls = list(PLANTED[claim].nulls.values())

    def null(seed: int) -> Table:
        return nulls[seed % len(nulls)](seed)

    assert held(claim, null, range(10)) == 0 or held(claim, null, range(20)) <= RATE * 20


@pytest.mark.slow
@pytest.mark.parametrize(("claim", "kind"), NULLS)
def test_holds_in_one_of_twenty_null_tables_at_most(claim: str, kind: str) -> None:
    assert held(claim, PLANTED[claim].nulls[kind], range(200)) <= RATE * 200
