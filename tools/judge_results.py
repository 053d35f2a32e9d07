"""Judge the committed tables in docs/results again by the rules as they are, and say which verdicts need a new run.

python tools/judge_results.py docs/results

For every folder with a table and verdicts it writes verdicts.json again and, where verdicts have changed since the run,
the section "Judged again" of its README: what each claim said and says, and what the table lacks for today's rules.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from anisoscope.claims.catalogue import claims, evaluate_claims
from anisoscope.claims.engine.claim import verdicts_to_dicts
from anisoscope.results.query import Table

HEADING = "## Judged again"
RENAMED = {"flat_profile": "encoders_more_uniform"}
Record = Mapping[str, Any]


def judge(folder: Path) -> None:
    """Write the verdicts of one folder again, and the section of its README."""
    about = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    table = Table(Table.read(folder / "table.parquet").to_arrow(), about)
    path = folder / "verdicts.json"
    before = json.loads(path.read_text(encoding="utf-8"))
    asked = dict.fromkeys(RENAMED.get(record["claim"], record["claim"]) for record in before)
    now = verdicts_to_dicts(evaluate_claims(table, [name for name in claims() if name in asked]))
    path.write_text(json.dumps(now, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    readme = folder / "README.md"
    text = readme.read_text(encoding="utf-8").partition(HEADING)[0].rstrip()
    first, last = _leading(_kept(folder) or before), _leading(now)
    if any(key not in first or first[key]["status"] != each["status"] for key, each in last.items()):
        text += f"\n\n{_section(table, first, last)}"
    readme.write_text(f"{text}\n", encoding="utf-8")


def _kept(folder: Path) -> list[Record]:
    """The verdicts as they were first written, from the README where this has run before."""
    lines = (folder / "README.md").read_text(encoding="utf-8").partition(HEADING)[2].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    kept = ((name.strip("`"), subject, old) for name, subject, old, *_ in cells if old != "–")
    return [{"claim": name, "subject": subject, "status": old} for name, subject, old in kept]


def _leading(records: Iterable[Record]) -> dict[tuple[str, str], Record]:
    """The first verdict on every claim and subject: over all seeds where there are several."""
    found: dict[tuple[str, str], Record] = {}
    for record in records:
        if not (record.get("details") or {}).get("missing"):
            found.setdefault((record["claim"], record["subject"]), record)
    return found


def _section(table: Table, before: Mapping[tuple[str, str], Record], now: Mapping[tuple[str, str], Record]) -> str:
    lines = [HEADING, "", "By the rules as they are now ([claims.md](../../claims.md) lists what was changed and why);"]
    lines += [
        "the text above tells the verdicts of the day it was run. *New run*: what the table lacks for the rules of"
    ]
    lines += ["today, without which a verdict rests on less than they ask for. `verdicts.json` has the verdicts now,"]
    lines += ["while `report.html` and `figures/` are of the day of the run and show those of then.", ""]
    lines += ["| claim | subject | then | now | new run |", "|---|---|---|---|---|"]
    for claim, subject in {**before, **now}:
        old, new = (found.get((claim, subject)) for found in (before, now))
        words = _lacks(table, new) if new else "the rule is gone" if claim not in claims() else "no longer asked of it"
        cells = [old["status"] if old else "–", new["status"] if new else "–", words]
        lines.append(f"| `{claim}` | {subject} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _lacks(table: Table, record: Record) -> str:
    """What a verdict would need that the table has not."""
    details, claim = record["details"], claims()[record["claim"]]
    lacks = []
    if any(each["status"] == "unknown" for each in details.get("learned", {}).values()):
        lacks.append("`constant_loss`")
    if any(metric.startswith("gradient_") for metric in claim.metrics):
        variants = {row["variant"] for row in table.where(metric="gradient_energy").records()}
        plain = not any("coordinates=standardised" in variant for variant in variants)
        lacks += ["standardised coordinates"] if plain else []
        lacks.append("frozen directions of the first checkpoints")
        lacks += [] if len(table.where(metric="proxy_stability").arrow) else ["intervals that contain the fit"]
    lacks += ["a second model without attention"] if "2 models on each side" in record["why"] else []
    lacks += ["a second model without attention"] if "one model without attention says little" in record["why"] else []
    alone = ("a general claim needs 3", "one seed decides nothing", "two trainings differ by luck")
    lacks += ["three seeds"] if any(words in record["why"] for words in alone) else []
    return ", ".join(lacks)


if __name__ == "__main__":
    for folder in sorted(path.parent for path in Path(sys.argv[1]).glob("*/verdicts.json")):
        judge(folder)
        print(folder)
