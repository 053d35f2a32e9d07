"""How often 95 % intervals contain what they should: every default metric on clustered rows, by simulation.

python tools/interval_coverage.py docs/intervals.md [SEEDS [PROCESSES]]   400 seeds (the default): 15 minutes of a core
writes the tables of that page again, below its mark.

Notation: a row of context c is μ + σ ∘ (√ρ a_c + √(1−ρ) e), a and e of 12 independent coordinates of variance 1, normal
or (tails) of a t distribution with 6 degrees of freedom that the coordinates share; 8 rows of each context. ρ is the
intraclass correlation. The *population* value is that of infinitely many contexts, the *expected* value the mean of the
estimates over all seeds: a metric with a bias has an interval about its expected value.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anisoscope.metrics.catalogue import measure_rows, parse_requests, registry
from anisoscope.metrics.engine.estimation import View, evaluate_heads
from anisoscope.metrics.engine.metric import is_of_rows
from anisoscope.numerics.hashing import FOLDS, fold_of
from anisoscope.stats.directions import Attention, Directions, Keys

WIDTH, ROWS, FREEDOM = 12, 8, 6
SIGMA = torch.linspace(1.6, 0.4, WIDTH, dtype=torch.float64)
MEAN = 1.5 / torch.arange(1, WIDTH + 1, dtype=torch.float64)
KEY_MEAN = MEAN.flip(0) + 0.3
NEIGHBOURS = ("two_nn", "two_nn:method=ml", "gride", "levina_bickel", "gride:scale=8", "hubness")
CONTEXTS, CORRELATIONS, TAILS = (16, 32, 64, 256), (0.0, 0.2, 0.6), (False, True)
_SPECTRA = ("svd_ratio", "svd_ratio_squared", "participation_ratio", "iso_score", "effective_rank", "stable_rank")
_FINITE = ("few rows and few contexts bias spectra: the interval is about the expected value at this sample size; "
           "`participation_ratio:clusters=1` is without that bias")  # fmt: skip
_BOUNDARY = "its bias of 1/((n − 1) A) is larger than its spread where the mean explains everything, as it does here"
_SCALE = ("it reads more neighbours than a context has rows, so that whole contexts, not single rows, depend on each "
          "other; too narrow where contexts are apart (ρ = .6), too wide for independent rows with tails")  # fmt: skip
_HUBS = "a few hubs make the skewness, and an interval from eight folds does not know how few"
LISTED: dict[str, dict[str, str]] = {  # exceptions, with their reasons
    "expected": {"levina_bickel": _SCALE, "gride:scale=8": _SCALE, "hubness": _HUBS},
    "population": {**dict.fromkeys(_SPECTRA, _FINITE), "explained_by_drift": _BOUNDARY,
                   "relative_drift": "the norm of a mean of few contexts is too long on average"},
}  # fmt: skip
MARK = "<!-- what follows is written by tools/interval_coverage.py -->"
_DRAWN = 1 << 19  # rows for a population value
Interval = tuple[float, float, float]  # value, low, high


@dataclass(frozen=True)
class Cell:
    """One population and number of contexts."""

    contexts: int
    correlation: float
    tails: bool

    def __str__(self) -> str:
        return f"{self.contexts} contexts, ρ = {self.correlation:g}, {'t₆' if self.tails else 'normal'}"


CELLS = tuple(Cell(*one) for one in product(CONTEXTS, CORRELATIONS, TAILS))


@dataclass(frozen=True)
class Coverage:
    """Shares of the intervals that contain the population's value (NaN: not known) and the expected value.

    `width` is the root mean square of the stated standard error in units of the true one.
    """

    population: float
    expected: float
    width: float


def _noise(shape: Sequence[int], generator: torch.Generator, *, tails: bool) -> Tensor:
    z = torch.randn(*shape, generator=generator, dtype=torch.float64)
    if not tails:
        return z
    half = torch.full((*shape[:-1], 1), FREEDOM / 2, dtype=torch.float64)
    return z * ((FREEDOM / 2 - 1) / torch._standard_gamma(half, generator=generator)).sqrt()


def draw(cell: Cell, seed: int, *, mean: Tensor = MEAN) -> tuple[Tensor, Tensor]:
    """Rows and the contexts that they belong to; contexts of other seeds have other keys, and so other folds."""
    generator = torch.Generator().manual_seed(seed)
    common = _noise((cell.contexts, 1, WIDTH), generator, tails=cell.tails)
    own = _noise((cell.contexts, ROWS, WIDTH), generator, tails=cell.tails)
    rows = mean + SIGMA * (math.sqrt(cell.correlation) * common + math.sqrt(1 - cell.correlation) * own)
    return rows.flatten(0, 1), torch.arange(cell.contexts).repeat_interleave(ROWS) + seed * 10_000


def default_names() -> list[str]:
    """The metrics of rows that a profile measures by default, with the variants beside them."""
    requests = [request for request in parse_requests("default") if is_of_rows(request.metric)]
    return [":".join([r.metric.name, *(f"{k}={int(v) if v is True else v}" for k, v in r.options.items())])
            for r in requests]  # fmt: skip


def attention_names() -> list[str]:
    return [name for name, m in registry().items() if m.default and not m.measured_by and not is_of_rows(m)]


def _scores(rows: Tensor) -> Tensor:
    """Eight quantities of attention rows, by columns of the rows, between 0 and 1: [n, 1, 8]."""
    return torch.sigmoid(rows[:, :8]).unsqueeze(1)


def measured(cell: Cell, seed: int, names: Sequence[str]) -> dict[str, Interval]:
    """Value and interval of each metric on one draw."""
    rows, contexts = draw(cell, seed)
    of_rows = [name for name in names if name not in attention_names()]
    found: dict[str, Any] = measure_rows(rows, of_rows, contexts=contexts) if of_rows else {}
    if set(names) - set(of_rows):
        keys, fold = draw(cell, seed + 1_000_000, mean=KEY_MEAN)[0], fold_of(contexts)
        parts: list[dict[type, Any]] = [{} for _ in range(FOLDS)]
        for j in set(fold.tolist()):
            mine = fold == j
            parts[j] = {Attention: Attention().update(_scores(rows[mine])),
                        Directions: Directions().update(rows[mine].unsqueeze(1)),
                        Keys: Directions().update(keys[mine].unsqueeze(1))}  # fmt: skip
        sizes = dict(enumerate(torch.bincount(fold_of(contexts.unique()), minlength=FOLDS).tolist()))
        view = View(parts, contexts=cell.contexts, sizes=sizes)
        for name in set(names) - set(of_rows):
            found[name] = evaluate_heads(registry()[name], view, {}, heads=1)[0]
    return {name: (found[name].value, found[name].low, found[name].high) for name in names}


@cache
def population(tails: bool, correlation: float) -> Mapping[str, float]:
    """The values of infinitely many contexts; spectra from σ, means from many rows, one per context."""
    cell = Cell(_DRAWN // ROWS, 0.0, tails)
    if correlation and tails:  # √ρ a + √(1−ρ) e is not t: the rows' own distribution
        cell = Cell(_DRAWN, correlation, tails)
    rows = draw(cell, 77)[0][:: ROWS if correlation and tails else 1]
    units = (rows / rows.norm(dim=1, keepdim=True)).mean(0)
    cosine, norm, variance = float(units.square().sum()), float(rows.norm(dim=1).mean()), SIGMA.square()
    share = SIGMA / SIGMA.sum()
    ratio = float(variance.sum() ** 2 / variance.square().sum())
    drift = float(MEAN.norm())
    found = {
        "average_cosine": cosine,
        "average_cosine:pairs=between": cosine,
        "drift": drift,
        "relative_drift": drift / norm,
        "mean_norm": norm,
        "rogue_share": float(units.square().topk(3).values.sum() / units.square().sum()),
        "explained_by_drift": 1.0,
        "svd_ratio": float(SIGMA[0] / SIGMA.sum()),
        "svd_ratio_squared": float(variance[0] / variance.sum()),
        "participation_ratio": ratio,
        "participation_ratio:clusters=1": ratio,
        "iso_score": (ratio - 1) / (WIDTH - 1),
        "effective_rank": math.exp(-float((share * share.log()).sum())),
        "stable_rank": float(variance.sum() / variance[0]),
        "qk_cosine": float(torch.cosine_similarity(MEAN, KEY_MEAN, dim=0)),
    }
    means = Attention().update(_scores(rows))
    scored = [name for name in attention_names() if name != "qk_cosine"]
    return found | {name: registry()[name].function(means.head(0)) for name in scored}


def coverage(cell: Cell, names: Sequence[str], seeds: Iterable[int]) -> dict[str, Coverage]:
    """The coverage of each metric in one cell."""
    draws = [measured(cell, seed, names) for seed in seeds]
    truth, found = population(cell.tails, cell.correlation), {}
    for name in names:
        value, low, high = torch.tensor([one[name] for one in draws], dtype=torch.float64).T
        centre = float(value.mean())

        def share(of: float, low: Tensor = low, high: Tensor = high) -> float:
            return float(((low <= of) & (of <= high)).double().mean())

        error = float(((high - low) / 2 / 2.365).square().mean().sqrt() / value.std())
        found[name] = Coverage(share(truth[name]) if name in truth else math.nan, share(centre), error)
    return found


def _one(task: tuple[Cell, tuple[str, ...], int]) -> dict[str, Coverage]:
    torch.set_num_threads(1)
    cell, names, seeds = task
    return coverage(cell, names, range(seeds))


def run(names: Sequence[str], seeds: int, *, processes: int = 1) -> dict[Cell, dict[str, Coverage]]:
    """All cells."""
    tasks = [(cell, tuple(names), seeds) for cell in CELLS]
    with ProcessPoolExecutor(processes) as pool:
        return dict(zip(CELLS, pool.map(_one, tasks), strict=True))


def within(found: Mapping[Cell, Mapping[str, Coverage]], name: str, contexts: int, *, of: str) -> str:
    """The smallest and the largest share over correlations and tails, for a cell of the table."""
    shares = [getattr(by_name[name], of) for cell, by_name in found.items() if cell.contexts == contexts]
    if not all(map(math.isfinite, shares)):
        return "–"
    low, high = (f"{share:.2f}".removeprefix("0") for share in (min(shares), max(shares)))
    return low if low == high else f"{low} – {high}"


def pooled(found: Mapping[Cell, Mapping[str, Coverage]], name: str, *, of: str = "expected") -> float:
    """The share of all cells together."""
    shares = [getattr(by_name[name], of) for by_name in found.values()]
    return sum(shares) / len(shares)


def tables(found: Mapping[Cell, Mapping[str, Coverage]], *, seeds: int) -> str:
    """The tables of docs/intervals.md."""
    default = [*default_names(), *attention_names()]
    known = [name for name in default if name in population(False, 0.0)]
    error = f"{math.sqrt(0.95 * 0.05 / seeds):.3f}".removeprefix("0")
    lines = [f"{seeds} draws of each population; a share has a standard error of {error}.", ""]
    lines += _table("The expected value: default metrics", found, default, of="expected")
    lines += _table("The expected value: neighbour metrics", found, NEIGHBOURS, of="expected")
    lines += _table("The population's value: default metrics", found, known, of="population")
    return "\n".join(lines)


def _table(title: str, found: Mapping[Cell, Mapping[str, Coverage]], names: Sequence[str], *, of: str) -> list[str]:
    lines = [f"## {title}", "", f"| share of the intervals | {' | '.join(f'{k} contexts' for k in CONTEXTS)} | all |"]
    lines += ["|---" * (len(CONTEXTS) + 2) + "|"]
    for name in names:
        together, mark = f"{pooled(found, name, of=of):.3f}".removeprefix("0"), " ¹" if name in LISTED[of] else ""
        cells = [*(within(found, name, k, of=of) for k in CONTEXTS), together]
        lines.append(f"| `{name}`{mark} | {' | '.join(cells)} |")
    reasons: dict[str, list[str]] = {}
    for name in (name for name in names if name in LISTED[of]):
        reasons.setdefault(LISTED[of][name], []).append(f"`{name}`")
    return [*lines, "", *(f"¹ {', '.join(who)}: {why}.\n" for why, who in reasons.items())]


if __name__ == "__main__":
    path, (seeds, processes) = Path(sys.argv[1]), map(int, [*sys.argv[2:], *("400", "2")[len(sys.argv) - 2 :]])
    every = list(dict.fromkeys([*default_names(), *attention_names(), *NEIGHBOURS]))
    made = tables(run(every, seeds, processes=processes), seeds=seeds)
    path.write_text(path.read_text(encoding="utf-8").partition(MARK)[0] + f"{MARK}\n\n{made}", encoding="utf-8")
