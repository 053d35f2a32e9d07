"""The fixed parts of runs, in a new process as a command has it: start, page, claims, preparing text.

    python -m anisoscope.planning.ends start|ends clock|processor SECONDS

SECONDS is the time of day at which the process was begun. Prints the stages as JSON, with the seconds spent until then.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

CLI, DRAWING = "anisoscope.cli", "anisoscope.commands.drawing"  # above this room
MINI = {"model": "gpt2:n_layer=1,n_embd=32,n_head=2,n_positions=64", "tokens": 1024}
_LATER = 7  # how many times as many measured steps the longer table has


class EndClock:
    """Seconds since the process was begun: of its processor, or of the clock."""

    def __init__(self, kind: str, begun: float) -> None:
        self.processor, self.begun = kind == "processor", begun

    def now(self) -> float:
        return time.process_time() if self.processor else time.time() - self.begun

    def timed(self, act: Callable[[], Any]) -> float:
        start = self.now()
        act()
        return max(1e-6, self.now() - start)


def start(clock: EndClock, root: Path) -> dict[str, dict[str, float]]:
    """A whole command that profiles a small model, from its first import to what it prints; its page apart."""
    from anisoscope.measurement.inspection import MIB, WORKSPACE

    words = ["profile", MINI["model"], "--random-init", "--tokens", MINI["tokens"], "--device", "cpu"]
    sys.argv = ["anisoscope", *map(str, words), "--out", str(root / "profile")]
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere), suppress(SystemExit):
        importlib.import_module(CLI).main()
    whole = clock.now()
    # what the process held before it measured: its own estimate without the workspace, all that is large in it
    about = json.loads((root / "profile" / "run.json").read_text(encoding="utf-8"))
    held = float(about["memory_estimate_mb"] * MIB - WORKSPACE)
    page = clock.timed(lambda: importlib.import_module(DRAWING).report_runs([root / "profile"]))
    return {"start": {"runs": max(0.0, whole - page), "bytes_held": held}, "page:profile": {"runs": page}}


def ends(clock: EndClock, root: Path) -> dict[str, dict[str, float]]:
    """Text, and claims and pages of trainings by the rows of their tables; the first ones contain what is slow once."""
    from anisoscope.results.folder import RunFolder
    from anisoscope.results.query import Table
    from anisoscope.training.config import TrainConfig
    from anisoscope.training.corpus import prepare_corpus

    drawing = importlib.import_module(DRAWING)
    evaluate = importlib.import_module("anisoscope.claims.catalogue").evaluate_claims
    text = clock.timed(lambda: prepare_corpus("embedded", root / "corpus", tokens="char"))
    pieces = clock.timed(lambda: prepare_corpus("embedded", root / "bpe", tokens="bpe:512"))
    config = TrainConfig(steps=2, layers=2, width=32, heads=4, context=32, checkpoints="none", device="cpu")
    watch = {"monitor": "light", "contexts": 16, "when": "0,2"}
    loop = importlib.import_module("anisoscope.training.loop")
    attach = importlib.import_module("anisoscope.studies.arms").training_monitor
    words: dict[str, Any] = {"watch": watch, "corpus": root / "corpus"}
    loop.train(config, root / "run", monitor=lambda *made: attach(*made, **watch), **words)
    folder = RunFolder(root / "run")
    short = folder.table()
    rows = short.records()
    later = [{**row, "step": (row["step"] or 0) + 10 * n} for n in range(_LATER) for row in rows]
    long = Table.from_records(({k: v for k, v in row.items() if k != "schema"} for row in later), short.about)
    first, again, most = (clock.timed(lambda t=t: evaluate(t, robust=True)) for t in (short, short, long))  # type: ignore[misc]
    draw = lambda: drawing.report_runs([root / "run"])  # noqa: E731
    pages = [clock.timed(draw), clock.timed(draw)]
    folder.write_table(long)
    pages.append(clock.timed(draw))
    more, records = float(len(later) - len(rows)), float(len(rows))
    found = {"corpus:char": {"runs": text}, "corpus:bpe": {"runs": pieces}}
    for name, (cold, warm, large) in (("claims", (first, again, most)), ("page", tuple(pages))):
        slope = max(0.0, large - warm) / more
        found[name] = {"runs": max(0.0, cold - slope * records), "records": slope}
    return found


def main(words: list[str]) -> None:
    what, kind, begun = words
    clock = EndClock(kind, float(begun))
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = (start if what == "start" else ends)(clock, Path(place))
    print(json.dumps({**found, "spent": {"seconds": clock.now()}}))


if __name__ == "__main__":
    main(sys.argv[1:])
