"""Texts and files that the tests of the performance study share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WORDS = "the cat sat on Mats of 12 red barns and saw a dog run over it by noon"


def write_records(path: Path, records: list[dict[str, Any]]) -> Path:
    """A `.jsonl` file."""
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n", encoding="utf-8")
    return path
