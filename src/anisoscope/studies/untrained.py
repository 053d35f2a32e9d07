"""`anisoscope study untrained`: is a transformer block anisotropic before it has learned anything?

One block at initialisation is given rows x + N·b/‖b‖: embeddings of random tokens that share a bias of size N in a
random direction. Against N: average cosine, norms and drift of input and output, queries and keys, scores and softmax
(arXiv 2401.12143, section on untrained transformers). Seeds are the independent samples: each draws its own tokens,
direction and weights. docs/untrained.md has the definitions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anisoscope.capture.families import list_families
from anisoscope.claims.claim import evaluate_claims, verdicts_to_dicts
from anisoscope.runs.opening import opening
from anisoscope.runs.store import RunFolder, slug
from anisoscope.runs.table import Table
from anisoscope.studies.untrained_block import Block, biased, build_block, direction, known_family
from anisoscope.studies.untrained_config import Arm, UntrainedConfig
from anisoscope.studies.untrained_measure import EDGES, Point, measure_point
from anisoscope.studies.untrained_weights import initialise

__all__ = ["CLAIMS", "HISTOGRAMS", "Untrained", "UntrainedConfig"]

Progress = Callable[[str, int, int], None]
CLAIMS = ("anisotropic_at_initialisation", "anisotropy_grows_with_bias", "sharpness_grows_with_bias")
HISTOGRAMS = "histograms"  # the file of arrays
DATA = "random tokens"


@dataclass
class Untrained:
    """One run of the study."""

    config: UntrainedConfig
    folder: RunFolder
    command: Sequence[str] = ()
    progress: Progress | None = None
    about: dict[str, Any] = field(default_factory=dict)
    done: int = 0
    _block: tuple[tuple[Any, ...], Block] | None = None

    def run(self) -> Path:
        """Every block, then the verdicts; a finished block is never measured again."""
        old = self.folder.about()
        if old.get("status") == "complete":
            return self.folder.path
        words = {"kind": "study", "study": "untrained"}
        seed = self.config.size.seeds[0]
        self.about = opening(asdict(self.config), command=self.command, seed=seed, old=old, **words)
        self.about |= {"device": str(self._device()), "size": asdict(self.config.size)}
        self.folder.write_about(self.about)
        started = time.monotonic()
        try:
            for family in self.config.families:  # a slip in the last name is told before the first is measured
                known_family(family)
            self._conclude([self._arm(arm) for arm in self.config.arms()])
        except BaseException as error:
            self._end("interrupted" if isinstance(error, KeyboardInterrupt) else "failed", started, error)
            raise
        self._end("complete", started)
        self.folder.tidy()
        return self.folder.path

    def _end(self, status: str, started: float, error: BaseException | None = None) -> None:
        self.about["status"] = status
        if error is not None and str(error):
            self.about["error"] = str(error).splitlines()[0]
        self.about["wall_seconds"] = round(self.about["wall_seconds"] + time.monotonic() - started, 1)
        self.folder.write_about(self.about)

    def _device(self) -> torch.device:
        from anisoscope.capture.placement import choose_device

        return choose_device(self.config.device)

    # one block

    def _arm(self, arm: Arm) -> Table:
        part = slug(arm.name)
        table = self.folder.part(part)
        if table is None:
            table = self._measured(arm)
            self.folder.write_part(part, table)
        else:
            self.done += self.config.points
        if not any(entry["name"] == arm.family for entry in self.about["models"]):
            self.about["models"].append(table.about["model"])
        return table

    def _measured(self, arm: Arm) -> Table:
        c, size = self.config, self.config.size
        block = self._block_of(arm)
        initialise(block, arm.init, seed=arm.seed)
        x = block.rows(size.sequences, size.length, seed=arm.seed).to(self._device())
        b = direction(arm.width, seed=arm.seed)
        records: list[dict[str, Any]] = []
        counts: dict[str, list[int]] = {}
        for norm in c.norms:
            for bias in c.biases:
                point = Point(bias, arm.init, arm.width, norm)
                rows, histogram = measure_point(block, biased(x, b, bias=bias, input_norm=norm), point, rows=size.rows)
                records += [self._columns(arm, row) for row in rows]
                counts[point.key] = histogram.tolist()
                self._tell(arm)
        told = {"model": _described(block), "histograms": {arm.name: counts}}
        return Table.from_records(records, told)

    def _block_of(self, arm: Arm) -> Block:
        """The block of a family, width and seed; built once for all initialisations that replace its weights."""
        key = (arm.family, arm.width, arm.seed)
        if self._block is None or self._block[0] != key or arm.init == "own":
            size, heads = self.config.size, self.config.heads_of(arm.width)
            shape = {"width": arm.width, "heads": heads, "length": size.length, "sequences": size.sequences}
            self._block = None  # the old one goes before the new one comes
            self._block = key, build_block(arm.family, **shape, seed=arm.seed, device=str(self._device()))
        return self._block[1]

    def _columns(self, arm: Arm, row: dict[str, Any]) -> dict[str, Any]:
        own = {"run": self.folder.path.name, "model": arm.family, "revision": "", "data": DATA, "seed": arm.seed}
        return {**own, "step": None, **row}

    def _tell(self, arm: Arm) -> None:
        self.done += 1
        if self.progress is not None:
            total = self.config.points * sum(1 for _ in self.config.arms())
            self.progress("blocks at every bias", self.done, total)

    # what it comes to

    def _conclude(self, parts: Sequence[Table]) -> None:
        table = Table.concat(parts)
        self.folder.write_table(table)
        self.folder.write_arrays(HISTOGRAMS, dict(_arrays(parts)))
        verdicts = evaluate_claims(Table(table.arrow, {"models": self.about["models"]}), CLAIMS)
        self.folder.write_json("verdicts.json", verdicts_to_dicts(verdicts))


def _arrays(parts: Iterable[Table]) -> Iterable[tuple[str, torch.Tensor]]:
    """Counts of scores by block and point, [points of the same name], and the edges of their bins."""
    yield "edges", torch.from_numpy(EDGES)
    for part in parts:
        for arm, counts in part.about["histograms"].items():
            for point, values in counts.items():
                yield f"{arm}/{point}", torch.from_numpy(np.asarray(values, dtype=np.int32))


def _described(block: Block) -> dict[str, Any]:
    """What run.json says about a family."""
    words = {row["name"]: row["about"] for row in list_families()}
    own = "GPT-NeoX blocks, norm before each sublayer, rotary, sees both sides" if block.family == "prenorm" else ""
    rows = "token embeddings of the family" if block.table is not None else "N(0, 0.02²), as it reads no tokens"
    return {"name": block.family, "about": own or words.get(block.family, ""), "block": type(block.module).__name__,
            "rows": rows}  # fmt: skip
