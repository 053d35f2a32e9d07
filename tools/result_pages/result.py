"""One committed result: its folder with the table, the verdicts and the record of the run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from anisoscope.claims.catalogue import claims, evaluate_claims
from anisoscope.claims.dynamics import performance_of_models
from anisoscope.claims.engine.claim import verdicts_to_dicts
from anisoscope.results.query import Query, Table
from anisoscope.view.sections.findings import leading, measured

Verdict = Mapping[str, Any]
RENAMED = {"flat_profile": "encoders_more_uniform"}  # claims of older verdicts
COMMITTED = Path(__file__).parents[2] / "docs" / "results"
COMPACT: Mapping[str, Any] = {"ensure_ascii": False, "allow_nan": False, "separators": (",", ":")}


@dataclass(frozen=True)
class Result:
    """A folder of docs/results, read when it is asked."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @cached_property
    def about(self) -> dict[str, Any]:
        return dict(json.loads(self.text("run.json")))

    @cached_property
    def verdicts(self) -> list[Verdict]:
        return list(json.loads(self.text("verdicts.json"))) if (self.folder / "verdicts.json").is_file() else []

    @cached_property
    def table(self) -> Table:
        return Table(Table.read(self.folder / "table.parquet").arrow, self.about)

    @cached_property
    def rows(self) -> Query:
        return Query(self.table)

    def rows_of(self, other: str) -> Query:
        """The rows of this result, or of another one that is shown beside it, by its name."""
        return Query(Table.read(COMMITTED / other / "table.parquet")) if other else self.rows

    def text(self, file: str) -> str:
        """A file of the folder; "" without it."""
        path = self.folder / file
        return path.read_text(encoding="utf-8") if path.is_file() else ""

    @property
    def told(self) -> list[Verdict]:
        """One verdict for each claim and subject that was measured: over all seeds where there are several."""
        return leading(measured(self.verdicts))

    def verdict(self, claim: str, subject: str) -> Verdict | None:
        return next((v for v in self.told if (v["claim"], v["subject"]) == (claim, subject)), None)


def all_results(docs: Path) -> dict[str, Result]:
    """Every result of docs/results, in the order in which the results are declared; others after them."""
    from result_pages.declared import RESULTS

    found = {path.parent.name: Result(path.parent) for path in sorted((docs / "results").glob("*/run.json"))}
    order = [*(name for name in RESULTS if name in found), *(name for name in found if name not in RESULTS)]
    return {name: found[name] for name in order}


def judged(result: Result, table: Table | None = None, *, robust: bool = False) -> list[dict[str, Any]]:
    """The verdicts of now on a table (default: that of the result), on the claims that the run was asked."""
    table = result.table if table is None else table
    if result.about.get("study") == "performance":
        return performance_judged(table)
    return judged_again(table, result.verdicts, robust=robust)


def judged_again(table: Table, verdicts: Iterable[Verdict], *, robust: bool = False) -> list[dict[str, Any]]:
    """The verdicts of now on the claims of some verdicts; on all claims where there are none."""
    asked = {RENAMED.get(verdict["claim"], verdict["claim"]) for verdict in verdicts}
    names = [name for name in claims() if name in asked] or None
    return told_once(verdicts_to_dicts(evaluate_claims(table, names, robust=robust)))


def told_once(verdicts: list[Verdict]) -> list[Verdict]:
    """The verdicts without those on single seeds that have no evidence where all seeds together have none."""
    lacking = {(v["claim"], v["subject"]) for v in verdicts if v["effect"] is None and not _of_a_seed(v)}
    return [v for v in verdicts if v["effect"] is not None or not _of_a_seed(v)
            or (v["claim"], v["subject"]) not in lacking]  # fmt: skip


def _of_a_seed(verdict: Verdict) -> bool:
    return str(verdict["scope"]).startswith("for seed")


def performance_judged(table: Table) -> list[dict[str, Any]]:
    """The verdicts of the performance study, as records."""
    return verdicts_to_dicts(performance_of_models(table))


def verdict_text(verdicts: list[dict[str, Any]]) -> str:
    """verdicts.json without needless spaces."""
    return json.dumps(verdicts, **COMPACT) + "\n"
