"""Metrics of direction, drift and outliers.

Notation: h a row, u = h/‖h‖, n rows, d dimensions, A the average cosine.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from anisoscope.errors import AnisoscopeError, TooFewRows
from anisoscope.metrics.engine.centring import Centred, pair_cosines, too_few_directions, without_direction
from anisoscope.metrics.engine.lines import unless
from anisoscope.metrics.engine.metric import HEAD_KINDS, STREAM_KINDS, WEIGHT_KINDS, metric
from anisoscope.stats.directions import Coordinates, Directions
from anisoscope.stats.moments import Moments
from anisoscope.stats.sample import Sample

_EVERYWHERE = STREAM_KINDS | WEIGHT_KINDS | HEAD_KINDS
_directional = partial(metric, Directions, default=True, kinds=_EVERYWHERE, batched=True)
_ETHAYARAJH = "Ethayarajh 2019, arXiv:1909.00512; closed form over all pairs"


def _directed(directions: Directions) -> Tensor:
    """Rows that have a direction."""
    assert directions.zeros is not None
    return directions.n - directions.zeros


@_directional(
    title="Average cosine",
    formula="(‖Σ h/‖h‖‖² − n) / (n(n−1))",
    reference=_ETHAYARAJH,
    convention="exact over all pairs, rows not centred; zero rows have no direction and are left out",
    invariant=("rotation", "scale"),
    bounds=(-1.0, 1.0),
    left_out=without_direction,
)
def average_cosine(directions: Directions) -> Tensor:
    """Mean cosine similarity over all pairs of rows: 0 when directions are spread evenly, 1 in a narrow cone."""
    assert directions.units is not None
    return pair_cosines(directions.units, _directed(directions))


@_directional(
    title="Drift",
    formula="‖mean(h)‖",
    reference="Godey et al. 2024, arXiv:2401.12143",
    convention="not normalised",
    invariant=("rotation",),
    bounds=(0.0, None),
)
def drift(directions: Directions) -> Tensor:
    """Norm of the mean row: how far the cloud has moved from the origin."""
    assert directions.total is not None
    return directions.total.square().sum(-1).sqrt() / directions.n


@_directional(
    title="Relative drift",
    formula="‖mean(h)‖ / mean ‖h‖",
    reference="a near-identity of the average cosine (its square tracks it), shown for orientation",
    convention="between 0 and 1",
    invariant=("rotation", "scale"),
    bounds=(0.0, 1.0),
)
def relative_drift(directions: Directions) -> Tensor:
    """Norm of the mean row in units of the mean norm."""
    assert directions.total is not None and directions.norms is not None
    found = directions.total.square().sum(-1).sqrt() / directions.norms
    words = "every row is zero, so there is no relative drift; look at the model"
    return unless(directions.norms == 0.0, found, lambda: TooFewRows(words))


@_directional(title="Mean norm", formula="mean ‖h‖", reference="", invariant=("rotation",), bounds=(0.0, None))
def mean_norm(directions: Directions) -> Tensor:
    """Mean Euclidean norm of the rows."""
    assert directions.norms is not None
    return directions.norms / directions.n


@metric(
    Directions,
    title="Largest norm",
    formula="max ‖h‖ / √mean ‖h‖²",
    reference="Sun et al. 2024, arXiv:2402.17762 (massive activations)",
    convention="over all rows seen, not a sample",
    invariant=("rotation", "scale"),
    bounds=(0.0, None),
    batched=True,
)
def largest_norm(directions: Directions) -> Tensor:
    """Largest row norm in units of the root mean square norm: far above 1 when a few rows are outliers."""
    assert directions.largest_norm is not None and directions.squared_norms is not None
    typical = (directions.squared_norms / directions.n).sqrt()
    words = "every row is zero, so there is no largest norm; look at the model"
    return unless(typical == 0.0, directions.largest_norm / typical, lambda: TooFewRows(words))


def coordinate_shares(directions: Directions, coordinates: Coordinates) -> Tensor:
    """Contribution of each coordinate to the average cosine, ((Σuᵢ)² − Σuᵢ²) / (n(n−1)); they sum to it."""
    assert directions.units is not None and coordinates.unit_squares is not None
    n = _directed(directions)
    found = (directions.units.square() - coordinates.unit_squares) / (n * (n - 1)).unsqueeze(-1)
    unless(n < 2, n, lambda: too_few_directions(float(n)))
    return torch.where((n < 2).unsqueeze(-1), torch.nan, found)


@metric(
    Directions,
    Coordinates,
    title="Rogue dimensions",
    formula="Σ_{top k} |cᵢ| / Σ|cᵢ|, cᵢ = ((Σuᵢ)² − Σuᵢ²) / (n(n−1))",
    reference="Timkey & van Schijndel 2021, arXiv:2109.04404",
    convention="top = 3 coordinates; k/d when every coordinate contributes the same",
    invariant=("scale",),
    bounds=(0.0, 1.0),
    default=True,
    batched=True,
)
def rogue_share(directions: Directions, coordinates: Coordinates, *, top: int = 3) -> Tensor:
    """Share of the average cosine that the few strongest coordinates contribute."""
    if top < 1:
        raise AnisoscopeError(f"rogue_share has top {top}; expected 1 or more")
    shares = coordinate_shares(directions, coordinates).abs()
    found = shares.topk(min(top, shares.shape[-1])).values.sum(-1) / shares.sum(-1)
    words = "no coordinate contributes to the average cosine; rows are zero"
    return unless(shares.sum(-1) == 0.0, found, lambda: TooFewRows(words))


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
    assert coordinates.largest_value is not None
    middle = float(sample.rows.abs().median())
    if middle == 0.0:
        raise TooFewRows("the median coordinate is zero, so there is no scale to compare with; look at the model")
    return float(coordinates.largest_value.max()) / middle


@metric(
    Centred,
    title="Average cosine, centred",
    formula="average cosine of h − mean(h)",
    reference="Mu & Viswanath 2018, arXiv:1702.01417",
    convention="on the sample, about the sample's own mean; near 0 by construction",
    invariant=("rotation", "scale", "shift"),
    bounds=(-1.0, 1.0),
    batched=True,
)
def average_cosine_centred(rows: Centred) -> Tensor:
    """Average cosine that is left when the common mean is taken away."""
    return rows.centred


@metric(
    Centred,
    title="Explained by drift",
    formula="1 − A(centred) / A",
    reference="after Godey et al. 2024, arXiv:2401.12143",
    convention="both on the same sample; at most 1, or 1 + 1/((n − 1) A) where centred rows are opposed by chance",
    invariant=("rotation", "scale"),
    bounds=(None, 1.0),
    default=True,
    batched=True,
)
def explained_by_drift(rows: Centred) -> Tensor:
    """Share of the average cosine that vanishes when the mean is removed; unsteady where A is near 0."""
    plain = rows.plain
    words = "the average cosine is exactly 0, so nothing is there to explain"
    unless(plain == 0.0, plain, lambda: TooFewRows(words))  # said before what the centred rows lack
    return torch.where(plain == 0.0, torch.nan, 1.0 - rows.centred / plain)


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
    rows = sample.rows.double() if sample.rows.device.type != "mps" else sample.rows.cpu().double()
    if len(rows) < 2:
        raise TooFewRows(f"partition isotropy needs at least 2 rows, seen {len(rows)}; give more tokens")
    _, axes = torch.linalg.eigh(rows.T @ rows)
    projected = rows @ axes
    logs = torch.cat([torch.logsumexp(projected, 0), torch.logsumexp(-projected, 0)])
    gap = logs.min() - logs.max()
    return float(gap if log else gap.exp())


@metric(
    Moments,
    title="Mean direction",
    formula="mean(h)ᵀ C mean(h) / (‖mean(h)‖² λ₁)",
    reference="how far the drift runs along the first principal direction",
    convention="centred covariance C, largest eigenvalue λ₁",
    invariant=("rotation", "scale"),
    bounds=(0.0, 1.0),
    batched=True,
)
def drift_alignment(moments: Moments) -> Tensor:
    """Variance along the mean row in units of the largest variance: 1 when the cloud is stretched along its drift."""
    mean, top = moments.mean, moments.eigenvalues()[..., 0]
    length = mean.square().sum(-1)
    along = (mean * (moments.scatter @ mean.unsqueeze(-1)).squeeze(-1)).sum(-1)
    # rounding of the mean leaves equal rows a scatter of about 1e-32 of their energy: no direction
    none = (top <= 1e-28 * moments.n * length) | (length == 0.0)
    words = "rows are equal or have no mean, so drift has no direction to compare; give other rows"
    return unless(none, along / (length * top), lambda: TooFewRows(words))
