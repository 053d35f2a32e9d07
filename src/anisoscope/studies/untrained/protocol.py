"""`anisoscope study untrained`: is a transformer block anisotropic before it has learned anything?

One block at initialisation is given rows x + N·b/‖b‖: embeddings of random tokens that share a bias of size N in a
random direction. Against N: average cosine, norms and drift of input and output, queries and keys, scores and softmax
(Anisotropy Is Inherent to Self-Attention, arXiv 2401.12143, section on untrained transformers). Seeds are the
independent samples: each draws its own tokens, direction and weights. docs/untrained.md has the definitions.

Notation: s the scores of one query as fed to softmax, p = softmax(s), m the keys that the mask allows; rows with fewer
than 8 keys are left out. All numbers of queries, keys and scores are means over heads: at initialisation heads are
exchangeable.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from anisoscope.capture.attention_call import Call
from anisoscope.capture.row import Index, Rows, Scores
from anisoscope.capture.sites.family import list_families
from anisoscope.capture.sites.site import Site
from anisoscope.claims.catalogue import evaluate_claims
from anisoscope.claims.engine.claim import verdicts_to_dicts
from anisoscope.measurement.bank import Bank, Setup, make_plan
from anisoscope.measurement.cells import chosen_rows
from anisoscope.measurement.evaluation import evaluate_bank
from anisoscope.metrics.attention import SMALLEST_ROW, attention_median, attention_min, score_magnitude
from anisoscope.metrics.catalogue import parse_requests
from anisoscope.metrics.engine.estimation import Estimate
from anisoscope.metrics.engine.metric import Request
from anisoscope.models.placement import choose_device
from anisoscope.numerics.hashing import FOLDS, fold_of
from anisoscope.results.folder import slug
from anisoscope.results.quantity import jackknife
from anisoscope.results.query import Table, with_options
from anisoscope.studies.study_run import Study
from anisoscope.studies.untrained import BlockArm, UntrainedConfig, fresh_block
from anisoscope.studies.untrained.fresh_block import UntrainedBlock, biased

CLAIMS = ("anisotropic_at_initialisation", "anisotropy_grows_with_bias", "sharpness_grows_with_bias")
HISTOGRAMS = "histograms"  # name of the file of arrays
DATA = "random tokens"
KINDS = ("embed", "resid", "query", "key", "scores")
METRICS: tuple[str, ...] = ("average_cosine", "drift", "mean_norm", "qk_cosine")
METRICS += ("attention_entropy", "attention_sharpness", "attention_max", "score_spread")
JUDGED = ("average_cosine", "attention_sharpness")  # claims use their folds; others are not stored
_REACH, _FINE, _BINS = 1e4, 0.05, 160
EDGES = _FINE * np.sinh(np.linspace(-1, 1, _BINS + 1) * math.asinh(_REACH / _FINE))  # fine near 0, wide far from it


@dataclass(frozen=True)
class BiasPoint:
    """The grid point of a measurement, from which its variant is made."""

    bias: float
    init: str
    width: int
    input_norm: bool

    def variant(self, options: str = "") -> str:
        """The variant of a row of the table, with the options `own` of the metric.

        >>> BiasPoint(50.0, "normal", 768, True).variant()
        'bias=50;init=normal;input_norm=1;width=768'
        """
        where = {"bias": f"{self.bias:g}", "init": self.init, "width": self.width, "input_norm": self.input_norm}
        return with_options(options, **where)

    @property
    def key(self) -> str:
        """A key for arrays, unique within one (family, initialisation, width, seed)."""
        return f"input_norm={int(self.input_norm)}/bias={self.bias:g}"


@cache
def requests() -> tuple[Request, ...]:
    """Requests for the metrics of the registry, each at its declared kinds of sites."""
    return tuple(replace(request, named=False) for request in parse_requests(METRICS))


@cache
def sequence_numbers(count: int) -> tuple[int, ...]:
    """Context numbers that are evenly distributed over the folds of the jackknife.

    >>> fold_of(torch.tensor(sequence_numbers(10))).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7, 0, 1]
    """
    folds = fold_of(torch.arange(64 * (count + FOLDS))).tolist()
    members = [[number for number, fold in enumerate(folds) if fold == f] for f in range(FOLDS)]
    return tuple(members[i % FOLDS][i // FOLDS] for i in range(count))


def row_index(sequences: int, length: int) -> Index:
    """The row index of all positions of all sequences."""
    context = torch.tensor(sequence_numbers(sequences)).repeat_interleave(length)
    position = torch.arange(length).repeat(sequences)
    nothing = torch.full_like(context, -1)
    return Index(sequences, length, torch.arange(len(context)), context, position, nothing, first=position == 0)


def measure_point(
    block: UntrainedBlock, x: Tensor, point: BiasPoint, *, rows: int
) -> tuple[list[dict[str, Any]], np.ndarray]:
    """Records of the table for biased inputs [S, T, d], and the histogram of the scores over `EDGES`."""
    out, call = block.run(x)
    index = row_index(*x.shape[:2])
    bank = Bank(make_plan(requests(), KINDS, seed=0, sample_size=1, attention_rows=rows))
    for site, values in ((Site(0, "embed"), x), (Site(1, "resid"), out)):
        bank.rows(Rows(site, values.flatten(0, 1), index))
    for kind, heads in (("query", call.query), ("key", call.key)):
        bank.rows(Rows(Site(1, kind), heads.transpose(1, 2).flatten(0, 1).float(), index))
    allowed, bias = call.parted()
    scores = Scores(Site(1, "scores"), call.query, call.key, allowed, bias, call.scaling, index)
    bank.scores(scores)
    setup = Setup(None, [], [], list(KINDS), {"single": 1})
    records = [row for row in evaluate_bank(bank, requests(), setup) if row.get("head") is None]
    looked = score_rows(call, index, rows)
    records += [{**row, "stack": "single", "layer": 1, "depth": 1.0, "kind": "scores"} for row in looked.records()]
    for row in records:
        judged = row["metric"] in JUDGED and row["kind"] in ("embed", "resid", "scores")
        row |= {"variant": point.variant(row["variant"]), "replicates": row["replicates"] if judged else []}
    return records, looked.histogram()


# -- rows of scores ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScoreRows:
    """Scores of some query rows, s [S, H, R, T], and the mask of allowed keys."""

    scores: Tensor
    allowed: Tensor

    def records(self) -> Iterator[dict[str, Any]]:
        """Records of the row metrics: means over rows and heads, with a jackknife over sequences."""
        counted = self.allowed.sum(-1).expand(self.scores.shape[:-1])
        enough = counted >= SMALLEST_ROW
        few = int((~enough).sum()) // max(1, self.scores.shape[1])
        p = self.scores.masked_fill(~self.allowed, -torch.inf).softmax(-1)
        found = {  # for every row, [S, H, R]
            "score_magnitude": score_magnitude(self.scores, self.allowed),
            "attention_median": attention_median(p, self.allowed),
            "attention_min": attention_min(p, self.allowed),
        }
        for metric, values in found.items():
            sums = torch.where(enough, values, 0.0).double().sum((1, 2))
            mean = _mean(sums, enough.sum((1, 2)).double(), few)
            yield {"metric": metric, "group": "", "variant": "", **vars(mean)}

    def histogram(self) -> np.ndarray:
        """Counts of all scores between `EDGES`; the outermost bins include what lies beyond."""
        seen = self.scores[self.allowed.expand_as(self.scores)].double().cpu().numpy()
        return np.histogram(np.clip(seen, EDGES[0], EDGES[-1]), bins=EDGES)[0]


def _mean(sums: Tensor, counts: Tensor, dropped: int) -> Estimate:
    """A mean over rows, with a leave-one-sequence-out jackknife."""
    total, count = float(sums.sum()), float(counts.sum())
    value = total / count if count else math.nan
    without = [(total - a) / (count - b) for a, b in zip(sums.tolist(), counts.tolist(), strict=True) if 0 < b < count]
    ends, note = jackknife(value, without, bounds=(0.0, None)), "mean over heads and sampled rows"
    return Estimate(value, *ends, n=int(count), contexts=len(without), dropped=dropped, note=note)


def score_rows(call: Call, index: Index, rows: int) -> ScoreRows:
    """The same query rows as the metric bank uses, with all their scores."""
    allowed, bias = call.parted()
    chosen = [positions for _, positions, _ in chosen_rows(index, rows, seed=0)]
    picked = torch.stack(chosen).to(call.query.device)  # [S, R]; there is no padding
    query = torch.stack([q[:, at] for q, at in zip(call.query, picked, strict=True)])
    key = call.key.repeat_interleave(call.query.shape[1] // call.key.shape[1], dim=1)
    scores = call.scaling * query.float() @ key.float().mT
    if bias is not None:
        scores = scores + _of_rows(bias.float(), picked)
    return ScoreRows(scores, _of_rows(allowed, picked))


def _of_rows(matrix: Tensor, picked: Tensor) -> Tensor:
    """The chosen query rows of [S or 1, H or 1, T or 1, T]."""
    whole = matrix.expand(len(picked), *matrix.shape[1:])
    if matrix.shape[2] == 1:
        return whole
    return torch.stack([one[:, at] for one, at in zip(whole, picked, strict=True)])


# -- the study ---------------------------------------------------------------------------------------------------------


@dataclass
class Untrained(Study):
    """One run of the study."""

    config: UntrainedConfig
    done: int = 0
    name: ClassVar[str] = "untrained"

    def measure(self) -> None:
        """Measure every block except finished ones, then write the verdicts."""
        self.about |= {"device": str(choose_device(self.config.device)), "size": asdict(self.config.size)}
        for family in self.config.families:  # check all names before the first is measured
            fresh_block.known_family(family)
        arms, parts = self.config.arms(), []
        for number, arm in enumerate(arms, start=1):
            parts.append(self.part(slug(arm.name), partial(self._measured, arm, total=len(arms))))
            self.done = number * self.config.points  # also those of a finished block
            self.add_model(parts[-1].about["model"])
        table = Table.concat(parts)
        self.folder.write_table(table)
        arrays = {"edges": EDGES}  # bin edges; score counts by block and point
        for arm, counts in (item for part in parts for item in part.about["histograms"].items()):
            arrays |= {f"{arm}/{point}": np.asarray(values, dtype=np.int32) for point, values in counts.items()}
        self.folder.write_arrays(HISTOGRAMS, arrays)
        verdicts = evaluate_claims(replace(table, about={"models": self.about["models"]}), CLAIMS)
        self.folder.write_json("verdicts.json", verdicts_to_dicts(verdicts))

    def run(self) -> Path:
        """As in the base class; then removes the intermediate files of a complete run."""
        path = super().run()
        self.folder.tidy()
        return path

    def _measured(self, arm: BlockArm, *, total: int) -> Table:
        c, size, device = self.config, self.config.size, choose_device(self.config.device)
        shape = {"width": arm.width, "heads": c.heads_of(arm.width), "length": size.length, "sequences": size.sequences}
        block = fresh_block.build_block(arm.family, **shape, seed=arm.seed, device=str(device))
        fresh_block.initialise(block, arm.init, seed=arm.seed)
        x = block.rows(size.sequences, size.length, seed=arm.seed).to(device)
        b = fresh_block.direction(arm.width, seed=arm.seed)
        columns = {"run": self.folder.path.name, "model": arm.family, "revision": "", "data": DATA, "seed": arm.seed}
        records: list[dict[str, Any]] = []
        counts: dict[str, list[int]] = {}
        for number, (norm, bias) in enumerate(product(c.norms, c.biases), start=1):
            point = BiasPoint(bias, arm.init, arm.width, norm)
            rows, histogram = measure_point(block, biased(x, b, bias=bias, input_norm=norm), point, rows=size.rows)
            records += [{**columns, "step": None, **row} for row in rows]
            counts[point.key] = histogram.tolist()
            self.tell("blocks at every bias", self.done + number, c.points * total)
        return Table.from_records(records, {"model": _described(block), "histograms": {arm.name: counts}})


def _described(block: UntrainedBlock) -> dict[str, str]:
    """The model entry of a family in run.json."""
    about = {row["name"]: row["about"] for row in list_families()}
    about |= {"prenorm": "GPT-NeoX blocks, norm before each sublayer, rotary, sees both sides"}
    rows = "token embeddings of the family" if block.table is not None else "N(0, 0.02²), as it reads no tokens"
    name = type(block.module).__name__
    return {"name": block.family, "about": about.get(block.family, ""), "block": name, "rows": rows}
