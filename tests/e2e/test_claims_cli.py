"""claims: the command says what Python says, with badges and without."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from anisoscope.claims.catalogue import evaluate_claims
from anisoscope.claims.engine.claim import verdicts_to_dicts
from anisoscope.results.folder import RunFolder
from anisoscope.results.query import Table, options_of, variant_name
from support.fake_training import table
from support.pages import page_of


def test_badges_of_the_command_are_those_of_python(command: Callable[..., Any], tmp_path: Path) -> None:
    chosen = {"only": ("gradient_energy", "gradient_enrichment", "gradient_p_holm"), "fits": ("refit",)}
    plain, null = (table(**chosen, proxies=("semi_nmf",), strength=strength).records() for strength in (1.0, 0.0))
    other = [{**row, "variant": variant_name({**options_of(row["variant"]), "rank": 32})} for row in null]
    folder = RunFolder.create(tmp_path / "run", {}, resume=False)
    folder.write_table(Table.from_records([*plain, *other]))
    folder.write_about({"status": "complete"})
    words = ("claims", tmp_path / "run", "--claims", "tangent_energy", "--robust")
    ours = verdicts_to_dicts(evaluate_claims(folder.table(), ["tangent_energy"], robust=True))
    assert json.loads(command(*words, "--format", "json").out) == json.loads(json.dumps(ours))
    told = command(*words).out.replace("\u00a0", " ")
    assert "rank 32 ✕ · half 1 ✓ 2 ✓" in told and "✓ holds, ✕ fails, ? undecided" in told
    assert "it depends on the rank" in ours[0]["why"] and "same verdict in 2 of 3" in told
    without = command("claims", tmp_path / "run", "--claims", "tangent_energy").out
    assert "same verdict" not in without


def test_several_runs_have_one_page_of_their_verdicts(command: Callable[..., Any], tmp_path: Path) -> None:
    chosen = {"only": ("gradient_energy", "gradient_enrichment", "gradient_p_holm"), "fits": ("refit",)}
    for name in ("one", "two"):
        folder = RunFolder.create(tmp_path / name, {}, resume=False)
        folder.write_table(table(**chosen, proxies=("semi_nmf",)))
        folder.write_about({"status": "complete"})
    words = ("claims", tmp_path / "one", tmp_path / "two", "--claims", "tangent_energy")
    done = command(*words, "--out", tmp_path / "page")
    assert done.code == 0 and done.out.strip().endswith("report.html")
    page = page_of(tmp_path / "page" / "report.html")
    assert "(one)" in page.text and "(two)" in page.text
    badges = [a for t, a in page.elements if t == "button" and "badge" in (a.get("class") or "")]
    assert len(badges) == len(json.loads(command(*words, "--format", "json").out))
    assert not (tmp_path / "one" / "report.html").exists()
