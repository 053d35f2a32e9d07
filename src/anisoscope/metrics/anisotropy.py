"""Metrics of direction, drift and outliers.

Notation: h a row, u = h/‖h‖, n rows, d dimensions, A the average cosine, m the mean of all sampled rows, m + δ their
mean without one fold of contexts. Over pairs of different contexts c of k_c rows, A is
(‖Σu‖² − Σ_c ‖Σ_{i∈c} u‖²) / (n² − Σ_c k_c²): all ordered pairs, minus those inside contexts, the pairs of a row with
itself among them. Its mean over draws of contexts is ‖E u‖² for any dependence inside contexts (of equal length, and
nearly so otherwise), where A over all pairs leans towards the similarity inside them by about 1 / (number of contexts).
"""

from __future__ import annotations

from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from anisoscope.errors import AnisoscopeError, TooFewRows, unknown_name
from anisoscope.metrics.engine.folds import SampleLines, once, unless
from anisoscope.metrics.engine.metric import HEAD_KINDS, STREAM_KINDS, WEIGHT_KINDS, metric
from anisoscope.numerics.linalg import as_float64, has_float64, lengths, widened
from anisoscope.stats.directions import ContextPairs, Coordinates, Directions
from anisoscope.stats.moments import Moments
from anisoscope.stats.sample import Sample

_NOISE = 1e-13  # centred rows below this share of the largest norm are rounding errors and have no direction
_EVERYWHERE = STREAM_KINDS | WEIGHT_KINDS | HEAD_KINDS
_RIGID = ("rotation", "scale")
_rigid = partial(metric, invariant=_RIGID, batched=True)
_everywhere = partial(_rigid, Directions, default=True, kinds=_EVERYWHERE)
_length = partial(_everywhere, invariant=("rotation",), bounds=(0.0, None))


def pair_cosines(units: Tensor, n: Tensor) -> Tensor:
    """(‖Σu‖² − n) / (n(n−1)): the mean cosine over all pairs of n [...] unit rows, from their sums [..., d]."""
    return unless(n < 2, (units.square().sum(-1) - n) / (n * (n - 1)), lambda: _too_few_directions(float(n)))


def without_direction(directions: Directions, _: dict[str, Any]) -> Tensor:
    """The number of zero rows, which metrics of cosines leave out because they have no direction."""
    return directions.zeros


def _too_few_directions(n: float) -> str:
    if n == 0:
        return "every row is exactly zero, so none has a direction; look at the model"
    return f"an average over pairs needs at least 2 rows that are not zero, seen {int(n)}; give more"


def _directed(directions: Directions) -> Tensor:
    return directions.n - directions.zeros


@_everywhere(
    title="Average cosine",
    formula="(‖Σ h/‖h‖‖² − n) / (n(n−1))",
    reference="Ethayarajh 2019, arXiv:1909.00512; closed form over all pairs",
    convention="exact over all pairs, rows not centred; zero rows have no direction and are left out; pairs=between "
    "takes pairs of rows of different contexts alone, which few contexts do not bias",
    bounds=(-1.0, 1.0),
    left_out=without_direction,
    sums=frozenset({"units"}),
    instead={("pairs", "between"): (Directions, ContextPairs)},
    beside={"pairs": "between"},
    leans=True,
)
def average_cosine(directions: Directions, same: ContextPairs | None = None, *, pairs: str = "all") -> Tensor:
    """Mean cosine similarity over all pairs of rows: 0 when directions are spread evenly, 1 in a narrow cone."""
    if pairs not in ("all", "between"):
        raise unknown_name("choice of pairs", pairs, ("all", "between"))
    n = _directed(directions)
    if pairs == "all" or same is None:
        return pair_cosines(directions.units, n)
    apart = n * n - same.pairs
    words = "pairs of different contexts need rows of at least 2 contexts that are not zero, seen fewer; give more"
    return unless(apart <= 0, (directions.units.square().sum(-1) - same.inside) / apart, words)


@_length(
    title="Drift",
    formula="‖mean(h)‖",
    reference="Godey et al. 2024, arXiv:2401.12143",
    convention="not normalised",
    sums=frozenset({"total"}),
)
def drift(directions: Directions) -> Tensor:
    """Norm of the mean row: how far the cloud has moved from the origin."""
    return directions.total.square().sum(-1).sqrt() / directions.n


@_everywhere(
    title="Relative drift",
    formula="‖mean(h)‖ / mean ‖h‖",
    reference="ours: a near-identity of the average cosine (its square tracks it), shown for orientation",
    convention="between 0 and 1",
    bounds=(0.0, 1.0),
    sums=frozenset({"total"}),
    leans=True,
)
def relative_drift(directions: Directions) -> Tensor:
    """Norm of the mean row in units of the mean norm."""
    found = directions.total.square().sum(-1).sqrt() / directions.norms
    return unless(directions.norms == 0.0, found, "every row is zero, so there is no relative drift; look at the model")


@_length(title="Mean norm", formula="mean ‖h‖", reference="ours: the scale of the other lengths", sums=frozenset())
def mean_norm(directions: Directions) -> Tensor:
    """Mean Euclidean norm of the rows."""
    return directions.norms / directions.n


@_rigid(
    Directions,
    title="Largest norm",
    formula="max ‖h‖ / √mean ‖h‖²",
    reference="Sun et al. 2024, arXiv:2402.17762 (massive activations)",
    convention="over all rows seen, not a sample",
    bounds=(0.0, None),
    sums=frozenset(),
)
def largest_norm(directions: Directions) -> Tensor:
    """Largest row norm in units of the root mean square norm: far above 1 when a few rows are outliers."""
    typical = (directions.squared_norms / directions.n).sqrt()
    words = "every row is zero, so there is no largest norm; look at the model"
    return unless(typical == 0.0, directions.largest_norm / typical, words)


@_rigid(
    Directions,
    Coordinates,
    title="Rogue dimensions",
    formula="Σ_{top k} |cᵢ| / Σ|cᵢ|, cᵢ = ((Σuᵢ)² − Σuᵢ²) / (n(n−1))",
    reference="Timkey & van Schijndel 2021, arXiv:2109.04404",
    convention="top = 3 coordinates; k/d when every coordinate contributes the same",
    invariant=("scale",),
    bounds=(0.0, 1.0),
    default=True,
)
def rogue_share(directions: Directions, coordinates: Coordinates, *, top: int = 3) -> Tensor:
    """Share of the average cosine that the few strongest coordinates contribute."""
    if top < 1:
        raise AnisoscopeError(f"rogue_share has top {top}; expected 1 or more")
    n = _directed(directions)
    unless(n < 2, n, lambda: _too_few_directions(float(n)))
    shares = (directions.units.square() - coordinates.unit_squares) / (n * (n - 1)).unsqueeze(-1)  # they sum to A
    shares = torch.where((n < 2).unsqueeze(-1), torch.nan, shares.abs())
    found = shares.topk(min(top, shares.shape[-1])).values.sum(-1) / shares.sum(-1)
    return unless(shares.sum(-1) == 0.0, found, "no coordinate contributes to the average cosine; rows are zero")


@metric(
    Coordinates,
    Sample,
    title="Massive activations",
    formula="max |hᵢ| / median |hᵢ|",
    reference="Sun et al. 2024, arXiv:2402.17762 (massive above 1000)",
    convention="maximum over all rows, median over the sample",
    invariant=("scale",),
    bounds=(1.0, None),
)
def massive_activation(coordinates: Coordinates, sample: Sample) -> float:
    """Largest coordinate of any row in units of the median one."""
    middle = float(sample.rows.abs().median())
    if middle == 0.0:
        raise TooFewRows("the median coordinate is zero, so there is no scale to compare with; look at the model")
    return float(coordinates.largest_value.max()) / middle


class Centred(SampleLines):
    """Average cosines of sampled rows, raw and centred, for all rows and with each fold left out.

    One pass over the rows serves all folds: Σ (h − m − δ) / ‖h − m − δ‖ needs only products of h − m with the few δ.
    """

    @classmethod
    def of(cls, sample: Sample) -> Self:
        """The rows as they are: some are converted at a time, since float64 would double float32 rows."""
        rows = sample.rows.flatten(1)
        return cls(rows if has_float64(rows.device) else rows.cpu(), sample.fold)

    def average_cosine(self, *, centred: bool) -> Tensor:
        """The average cosine by line of the raw rows h, or of h − m − δ, the rows minus the mean of the line."""

        def cosines() -> Tensor:
            there = self.staying(self.left_out or (-1,)).to(self.rows.device, torch.float64)
            units, counts = (_centred_units if centred else _raw_units)(self.rows, there)
            return pair_cosines(*(x.cpu() if self.left_out else x[0].cpu() for x in (units, counts)))

        return once(self.known, (centred, self.left_out), cosines)


def _raw_units(rows: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
    """Σ h/‖h‖ and the number of rows that are not zero, by line; `there` [n, lines] of zeros and ones."""
    units, counts = rows.new_zeros(there.shape[1], rows.shape[1], dtype=torch.float64), there.new_zeros(there.shape[1])
    for part, block in widened(rows):
        norms = lengths(block).unsqueeze(1)
        has = there[part] * (norms > 0)
        units += (has / torch.where(norms > 0, norms, 1.0)).T @ block
        counts += has.sum(0)
    return units, counts


def _centred_units(rows: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
    """As `_raw_units`, of the rows minus the mean of each line, m + δ."""
    mean, largest = rows.new_zeros(rows.shape[1], dtype=torch.float64), there.new_zeros(())
    for _, block in widened(rows):
        mean += block.sum(0) / len(rows)
        largest = torch.maximum(largest, lengths(block).max())
    shift, share = torch.zeros_like(mean).expand(there.shape[1], -1).clone(), there / there.sum(0).clamp_min(1.0)
    for part, block in widened(rows):
        shift += share[part].T @ block.sub_(mean)
    noise, far = (_NOISE * largest).square(), shift.square().sum(1)
    units, total, counts = torch.zeros_like(shift), torch.zeros_like(far), torch.zeros_like(far)
    for part, block in widened(rows):
        squares = lengths(block.sub_(mean)).square().unsqueeze(1) - block @ (2.0 * shift.T) + far
        has = there[part] * (squares > noise)
        weights = torch.where(has > 0, squares.clamp_min(noise).rsqrt(), 0.0)
        units += weights.T @ block
        total, counts = total + weights.sum(0), counts + has.sum(0)
    return units - total.unsqueeze(1) * shift, counts


@_rigid(
    Centred,
    title="Average cosine, centred",
    formula="average cosine of h − mean(h)",
    reference="Mu & Viswanath 2018, arXiv:1702.01417",
    convention="on the sample, about the sample's own mean; near 0 by construction",
    invariant=("rotation", "scale", "shift"),
    bounds=(-1.0, 1.0),
)
def average_cosine_centred(rows: Centred) -> Tensor:
    """Average cosine that is left when the common mean is taken away."""
    return rows.average_cosine(centred=True)


@_rigid(
    Centred,
    title="Explained by drift",
    formula="1 − A(centred) / A",
    reference="after Godey et al. 2024, arXiv:2401.12143",
    convention="both on the same sample; about 1 + 1/((n − 1) A) where the mean explains all, because rows about their "
    "own mean are opposed by chance",
    default=True,
)
def explained_by_drift(rows: Centred) -> Tensor:
    """Share of the average cosine that vanishes when the mean is removed; unsteady where A is near 0."""
    plain = rows.average_cosine(centred=False)
    # this error takes precedence over those of the centred rows
    plain = unless(plain == 0.0, plain, "the average cosine is exactly 0, so nothing is there to explain")
    return 1.0 - rows.average_cosine(centred=True) / plain


@metric(
    Sample,
    title="Partition isotropy",
    formula="min_c Z(c) / max_c Z(c), Z(c) = Σ exp(c·h), c = ± unit eigenvectors of HᵀH",
    reference="Mu & Viswanath 2018, arXiv:1702.01417; Arora et al. 2016",
    convention="on the sample, rows not centred; log=1 gives the logarithm, for large norms",
    invariant=("rotation",),
)
def partition_isotropy(sample: Sample, *, log: bool = False) -> float:
    """1 when the partition function is the same in all directions, near 0 in a cone; falls with the rows' norm."""
    rows = as_float64(sample.rows)
    if len(rows) < 2:
        raise TooFewRows(f"partition isotropy needs at least 2 rows, seen {len(rows)}; give more tokens")
    _, axes = torch.linalg.eigh(rows.T @ rows)
    projected = rows @ axes
    logs = torch.cat([torch.logsumexp(projected, 0), torch.logsumexp(-projected, 0)])
    gap = logs.min() - logs.max()
    return float(gap if log else gap.exp())


@_rigid(
    Moments,
    title="Mean direction",
    formula="mean(h)ᵀ C mean(h) / (‖mean(h)‖² λ₁)",
    reference="ours: how far the drift runs along the first principal direction",
    convention="centred covariance C, largest eigenvalue λ₁",
    bounds=(0.0, 1.0),
)
def drift_alignment(moments: Moments) -> Tensor:
    """Variance along the mean row in units of the largest variance: 1 when the cloud is stretched along its drift."""
    mean, top = moments.mean, moments.spectrum().top
    length = mean.square().sum(-1)
    along = moments.along_mean
    # equal rows have a scatter of about 1e-32 of their energy by rounding of the mean; it has no direction
    none = (top <= 1e-28 * moments.n * length) | (length == 0.0)
    words = "rows are equal or have no mean, so drift has no direction to compare; give other rows"
    return unless(none, along / (length * top), words)
