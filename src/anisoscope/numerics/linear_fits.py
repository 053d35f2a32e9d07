"""Linear maps fitted on rows: repairs of anisotropy, and probes that predict classes.

Repairs are affine maps that remove the mean of rows, their top directions or their unequal variances.
Notation: X n×d rows to fit on, μ their mean, C = (X−μ)ᵀ(X−μ)/n their covariance, U its eigenvectors by falling
eigenvalues λ. A repair is an affine map r(x) = (x − m) M, fitted on some rows and applied to others.

    raw          m = 0, M = I
    mean         m = μ, M = I
    all_but_top  m = μ, M = I − U_D U_Dᵀ                    (Mu and Viswanath 2018)
    whitened     m = μ, M = U Λ^(−½) Uᵀ, Λ = (1−s) λ + s·median λ   (ZCA; Bell and Sejnowski 1997)

The shrinkage is s = d/(n + d) unless it is given, about the relative sampling error of an eigenvalue. It is towards the
median and not, as in Ledoit and Wolf (2004), the mean of the eigenvalues, which one direction with nearly all the
variance would determine. Directions without variance hold only rounding errors: they are mapped to 0.

Linear probes are multinomial logistic regression, and the nearest class mean by cosine.
Notation: X n×d rows, y their classes 0 … K−1, W d×K weights, b K intercepts, λ penalty.

    minimise  (1/n) Σᵢ −log softmax(xᵢ W + b)[yᵢ]  +  (λ v/2) ‖W‖²,   v = tr C/d the mean variance of the fit rows

The intercept is not penalised and λ is relative to the variance, so a shift or a scaling of all rows changes nothing.
Without a penalty no invertible affine map does: differences between repairs come from the penalty alone.

The minimum is found by L-BFGS in float64, in the coordinates W = U (S ∘ V): U the principal axes of the rows, and
S_jk = (λ_j π_k (1 − π_k) + λ v)^(−½) with λ_j the variance along axis j and π_k the share of class k. There the problem
is well conditioned for every penalty and cloud, so that no repair is favoured because it is easier to optimise on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from anisoscope.errors import AnisoscopeError, unknown_name

_ULPS = 8  # bound on the rounding error of a row's norm or sum, in units of the precision of the rows
REPAIRS = ("raw", "mean", "all_but_top", "whitened")
STEPS = 100  # L-BFGS iterations at most
TOLERANCE = 1e-4  # nats above the minimum, estimated by ½‖g‖² in the coordinates V, where the curvature is about 1
ROUGH = 10.0  # factor on the tolerance while penalties are compared
GRID = (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0)


@dataclass(frozen=True)
class Repair:
    """A fitted affine map of rows; `removed` is the number of directions that it maps to 0."""

    name: str
    shift: Tensor | None = None  # [d]
    matrix: Tensor | None = None  # [d, d], symmetric
    scale: float = 1.0  # mean norm of the fit rows before the repair / after it; restores their usual size
    removed: int = 0
    shrinkage: float = 0.0

    def __call__(self, x: Tensor, *, rescaled: bool = False) -> Tensor:
        """Repaired rows in float64 [n, d]; `rescaled` to the mean norm that the fit rows had."""
        rows = x.double()
        if self.shift is not None:
            rows = rows - self.shift.to(rows.device)
        if self.matrix is not None:
            rows = rows @ self.matrix.to(rows.device)
        return rows * self.scale if rescaled and self.scale != 1.0 else rows


def fit_repair(name: str, x: Tensor, *, directions: int | None = None, shrinkage: float | None = None) -> Repair:
    """Fit one of REPAIRS on rows; `directions` D of all_but_top is max(1, d // 100) by default.

    >>> rows = torch.tensor([[3.0, 1.0], [3.0, -1.0]])
    >>> fit_repair("mean", rows)(rows).tolist()
    [[0.0, 1.0], [0.0, -1.0]]
    """
    if name not in REPAIRS:
        raise unknown_name("repair", name, REPAIRS)
    if x.ndim != 2 or len(x) < 2:
        raise AnisoscopeError(
            f"a repair was to be fitted on an array of shape {tuple(x.shape)}; expected at least two rows × width."
        )
    rows = x.double()
    if not bool(rows.isfinite().all()):
        raise AnisoscopeError("a repair was to be fitted on rows that are not all finite; leave those out first.")
    if name == "raw":
        return Repair(name)
    (n, d), mean = rows.shape, rows.mean(0)
    if name == "mean":
        return _scaled(Repair(name, mean), rows)
    centred = rows - mean
    values, vectors = torch.linalg.eigh(centred.T @ centred / n)
    values, vectors = values.flip(0).clamp_min(0.0), vectors.flip(1)
    if name == "all_but_top":
        count = directions_of(d, directions)
        top = vectors[:, :count]
        matrix = torch.eye(d, dtype=torch.float64, device=rows.device) - top @ top.T
        return _scaled(Repair(name, mean, matrix, removed=count), rows)
    if shrinkage is not None and not 0 <= shrinkage <= 1:
        raise AnisoscopeError(f"the shrinkage is {shrinkage}; expected a share from 0 to 1.")
    share = d / (n + d) if shrinkage is None else float(shrinkage)
    # variances below these are rounding noise: of the float64 sums, or of the precision the rows were stored in
    sums = d * torch.finfo(torch.float64).eps * float(values[0])
    stored = (_ULPS * torch.finfo(x.dtype).eps) ** 2 * float(rows.square().mean()) if x.is_floating_point() else 0.0
    alive = values > max(sums, stored)
    middle = values[alive].median() if bool(alive.any()) else values.sum()
    shrunk = (1 - share) * values + share * middle
    inverse = torch.where(alive, shrunk, torch.ones_like(shrunk)).rsqrt() * alive
    matrix = (vectors * inverse) @ vectors.T
    return _scaled(Repair(name, mean, matrix, removed=int((~alive).sum()), shrinkage=share), rows)


def fit_repairs(x: Tensor, *, directions: int | None = None, shrinkage: float | None = None) -> dict[str, Repair]:
    """Every repair, fitted on the same rows."""
    return {name: fit_repair(name, x, directions=directions, shrinkage=shrinkage) for name in REPAIRS}


def directions_of(width: int, directions: int | None) -> int:
    """The number of top directions that all_but_top removes.

    >>> directions_of(768, None), directions_of(64, None), directions_of(64, 3)
    (7, 1, 3)
    """
    count = max(1, width // 100) if directions is None else directions
    if not 1 <= count < width:
        raise AnisoscopeError(
            f"all-but-the-top is to take {count} directions of {width}; expected at least 1 and fewer than the width."
        )
    return count


def _scaled(repair: Repair, rows: Tensor) -> Repair:
    before, after = (float(torch.linalg.vector_norm(r, dim=1).mean()) for r in (rows, repair(rows)))
    return replace(repair, scale=before / after if after > 0 else 1.0)


@dataclass(frozen=True)
class LinearProbe:
    """Fitted weights; `excess` estimates how far the loss is above its minimum, in nats."""

    weight: Tensor  # [d, K]
    bias: Tensor  # [K]
    penalty: float
    excess: float = 0.0

    def logits(self, x: Tensor) -> Tensor:
        return x.double() @ self.weight + self.bias

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        """Cross-entropy of every row in nats [n]."""
        return torch.nn.functional.cross_entropy(self.logits(x), y.to(x.device), reduction="none")

    def hits(self, x: Tensor, y: Tensor) -> Tensor:
        """1.0 where the most likely class is the true one, else 0.0 [n]."""
        return (self.logits(x).argmax(1) == y.to(x.device)).double()


def fit_probe(
    x: Tensor,
    y: Tensor,
    *,
    classes: int,
    penalty: float = 1e-2,
    start: LinearProbe | None = None,
    steps: int = STEPS,
    tolerance: float = TOLERANCE,
) -> LinearProbe:
    """Multinomial logistic regression with penalty λ; a `start` near the solution saves time and changes nothing else.

    >>> x = torch.tensor([[-1.0], [-2.0], [1.0], [2.0]])
    >>> fit_probe(x, torch.tensor([0, 0, 1, 1]), classes=2).hits(x, torch.tensor([0, 0, 1, 1])).tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    _check_rows(x, y)
    return _fit(_Cloud.of(x), y, classes=classes, penalty=penalty, start=start, steps=steps, tolerance=tolerance)


def _fit(
    cloud: _Cloud,
    y: Tensor,
    *,
    classes: int,
    penalty: float,
    start: LinearProbe | None = None,
    steps: int = STEPS,
    tolerance: float = TOLERANCE,
) -> LinearProbe:
    problem = _Problem.of(cloud, y, classes=classes, penalty=penalty)
    at = problem.start(start)
    excess = _search(problem, at, steps=steps, tolerance=tolerance)
    plain = problem.scale * at
    weight = problem.axes @ plain[:-1]
    return LinearProbe(weight, plain[-1] - problem.mean @ weight, penalty, excess)


@dataclass(frozen=True)
class _Cloud:
    """The rows of a fit in their principal axes, which all penalties share."""

    rows: Tensor  # [n, d] centred, in the principal axes
    mean: Tensor
    axes: Tensor  # U
    values: Tensor  # [d] variances along the axes, rising

    @classmethod
    def of(cls, x: Tensor) -> _Cloud:
        mean = x.double().mean(0)
        centred = x.double() - mean
        values, axes = torch.linalg.eigh(centred.T @ centred / len(centred))
        return cls(centred @ axes, mean, axes, values.clamp_min(0.0))


@dataclass(frozen=True)
class _Problem:
    """The loss in the well-conditioned coordinates V: weights along the principal axes, divided by S."""

    rows: Tensor  # [n, d] centred, in the principal axes
    target: Tensor
    mean: Tensor
    axes: Tensor  # U
    scale: Tensor  # [d + 1, K]: S, and the scale of the intercepts last
    cost: float  # λ v
    shares: Tensor  # [K] π

    @classmethod
    def of(cls, cloud: _Cloud, y: Tensor, *, classes: int, penalty: float) -> _Problem:
        values = cloud.values
        target = _checked_labels(cloud.rows, y, classes=classes, penalty=penalty)
        alive = values > len(values) * torch.finfo(torch.float64).eps * values[-1]
        cost = penalty * max(float(values.mean()), torch.finfo(torch.float64).tiny)
        shares = torch.bincount(target, minlength=classes).double().clamp_min(0.5) / len(target)
        curvature = shares * (1 - shares).clamp_min(1e-3)  # of the loss in the logit of each class
        scale = (values[:, None] * curvature + cost).clamp_min(1e-300).rsqrt()
        scale = torch.cat([scale * alive[:, None], curvature.rsqrt()[None]])  # axes without variance get no weight
        return cls(cloud.rows, target, cloud.mean, cloud.axes, scale, cost, shares)

    def start(self, probe: LinearProbe | None) -> Tensor:
        """The coordinates [d + 1, K] of a probe, or of zero weights: V, and the intercepts in the last row."""
        if probe is None:
            plain = torch.cat([torch.zeros_like(self.scale[:-1]), self.shares.log()[None]])
        else:
            plain = torch.cat([self.axes.T @ probe.weight, (probe.bias + self.mean @ probe.weight)[None]])
        return torch.where(self.scale > 0, plain / self.scale.clamp_min(1e-300), 0.0)

    def loss(self, at: Tensor) -> tuple[float, Tensor]:
        """The loss and its gradient at coordinates [d + 1, K]."""
        plain = self.scale * at
        logits = torch.addmm(plain[-1], self.rows, plain[:-1])
        normal = logits.logsumexp(1)
        chosen = logits.gather(1, self.target[:, None]).squeeze(1)
        error = logits.sub_(normal[:, None]).exp_()
        error[torch.arange(len(error), device=error.device), self.target] -= 1.0
        error /= len(error)
        gradient = torch.cat([self.rows.T @ error + self.cost * plain[:-1], error.sum(0, keepdim=True)])
        value = float((normal - chosen).mean() + 0.5 * self.cost * plain[:-1].square().sum())
        return value, gradient * self.scale


def _check_rows(x: Tensor, y: Tensor) -> None:
    if x.ndim != 2 or len(x) < 2 or y.shape != (len(x),):
        raise AnisoscopeError(
            f"a probe was given rows of shape {tuple(x.shape)} and {tuple(y.shape)} labels; expected n×d and n, n > 1."
        )
    if not bool(x.isfinite().all()):
        raise AnisoscopeError("a probe was given rows that are not all finite; leave those out first.")


def _checked_labels(x: Tensor, y: Tensor, *, classes: int, penalty: float) -> Tensor:
    target = y.to(x.device).long()
    if not 0 <= int(target.min()) <= int(target.max()) < classes:
        raise AnisoscopeError(f"labels run from {int(y.min())} to {int(y.max())}; expected 0 to {classes - 1}.")
    if not (penalty >= 0 and math.isfinite(penalty)):
        raise AnisoscopeError(f"the penalty is {penalty}; expected a number from 0 on.")
    return target


def _search(problem: _Problem, at: Tensor, *, steps: int, tolerance: float, memory: int = 10) -> float:
    """Minimise by L-BFGS with backtracking, in place at `at`; returns ½‖g‖² (Nocedal and Wright, section 7.2)."""
    value, gradient = problem.loss(at)
    pairs: list[tuple[Tensor, Tensor, float]] = []
    for _ in range(steps):
        if 0.5 * float(gradient.square().sum()) <= tolerance:
            break
        direction = _direction(gradient, pairs)
        slope = float((direction * gradient).sum())
        if slope >= 0:  # no descent direction because of rounding: restart with the gradient
            direction, pairs = -gradient, []
            slope = -float(gradient.square().sum())
        found = _line(problem, at, direction, value=value, slope=slope)
        if found is None:
            break
        step, lower, fresh = found
        moved, change = direction * step, fresh - gradient
        at += moved
        curve = float((moved * change).sum())
        if curve > 1e-12 * float(moved.square().sum()):
            pairs = [*pairs, (moved, change, curve)][-memory:]
        value, gradient = lower, fresh
    return 0.5 * float(gradient.square().sum())


def _direction(gradient: Tensor, pairs: Sequence[tuple[Tensor, Tensor, float]]) -> Tensor:
    """The quasi-Newton direction −H g by the two-loop recursion."""
    q, kept = gradient.clone(), []
    for moved, change, curve in reversed(pairs):
        share = float((moved * q).sum()) / curve
        q -= share * change
        kept.append(share)
    if pairs:
        _, change, curve = pairs[-1]
        q *= curve / float(change.square().sum())
    for (moved, change, curve), share in zip(pairs, reversed(kept), strict=True):
        q += moved * (share - float((change * q).sum()) / curve)
    return -q


def _line(
    problem: _Problem, at: Tensor, direction: Tensor, *, value: float, slope: float
) -> tuple[float, float, Tensor] | None:
    """A step length that meets the Armijo condition, with loss and gradient there; None if rounding prevents any."""
    step = 1.0
    for _ in range(30):
        lower, gradient = problem.loss(at + step * direction)
        if lower <= value + 1e-4 * step * slope:
            return step, lower, gradient
        curve = 2 * (lower - value - step * slope)
        step = max(0.1 * step, -slope * step * step / curve) if curve > 0 and math.isfinite(curve) else 0.5 * step
    return None


def choose_probe(x: Tensor, y: Tensor, held: Tensor, *, classes: int, grid: Sequence[float] = GRID) -> LinearProbe:
    """The probe with the penalty of `grid` that has the lowest loss on the rows in `held` (bool), refitted on all rows.

    From strong to weak penalties, each fit starting at the previous one, until two in a row are worse than the best.
    Without held-out rows the middle of the grid is used.
    """
    _check_rows(x, y)
    ordered = sorted(grid, reverse=True)
    rest, rough = ~held, ROUGH * TOLERANCE
    probe = chosen = None
    best, least, worse = ordered[len(ordered) // 2], math.inf, 0
    if bool(held.any()) and int(rest.sum()) > 1 and len(ordered) > 1:
        cloud, labels = _Cloud.of(x[rest.to(x.device)]), y[rest]
        asked, answers = x[held.to(x.device)], y[held]
        for penalty in ordered:
            probe = _fit(cloud, labels, classes=classes, penalty=penalty, start=probe, tolerance=rough)
            loss = float(probe.losses(asked, answers).mean())
            worse = worse + 1 if loss >= least else 0
            if worse == 2:
                break
            if not worse:
                best, least, chosen = penalty, loss, probe
    return fit_probe(x, y, penalty=best, start=chosen, classes=classes)


@dataclass(frozen=True)
class CentroidProbe:
    """Predicts the class whose mean direction has the largest cosine with the row."""

    directions: Tensor  # [K, d], unit or zero

    def hits(self, x: Tensor, y: Tensor) -> Tensor:
        return ((x.double() @ self.directions.T).argmax(1) == y.to(x.device)).double()


def fit_centroids(x: Tensor, y: Tensor, *, classes: int) -> CentroidProbe:
    """Fit class mean directions; unlike a linear probe, this classifier changes with every change of the geometry."""
    _check_rows(x, y)
    target = _checked_labels(x, y, classes=classes, penalty=0.0)
    rows = torch.nn.functional.normalize(x.double(), dim=1)
    sums = rows.new_zeros(classes, rows.shape[1]).index_add_(0, target, rows)
    return CentroidProbe(torch.nn.functional.normalize(sums, dim=1))
