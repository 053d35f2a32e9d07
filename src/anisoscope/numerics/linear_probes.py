"""Linear probes: multinomial logistic regression, and the nearest class mean by cosine.

Notation: X n×d rows, y their classes 0 … K−1, W d×K weights, b K intercepts, λ penalty.

    minimise  (1/n) Σᵢ −log softmax(xᵢ W + b)[yᵢ]  +  (λ v/2) ‖W‖²,   v = tr C/d the mean variance of the fit rows

The intercept is free, so a shift of the rows changes nothing at all. Without a penalty no invertible affine map of the
rows changes the minimum: raw, mean-removed and whitened rows then give the same probabilities, and what difference
there is between them comes from the penalty. λ is relative to the variance, so that a common factor does not count.

The minimum is found by L-BFGS in float64, in the coordinates W = U (S ∘ V): U the principal axes of the rows, and
S_jk = (λ_j π_k (1 − π_k) + λ v)^(−½) with λ_j the variance along axis j and π_k the share of class k. There the problem
is well conditioned for every penalty and cloud, so that no repair is favoured because it is easier to optimise on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anisoscope.errors import AnisoscopeError

STEPS = 100  # L-BFGS iterations at most
TOLERANCE = 1e-4  # nats that the minimum may lie lower, by ½‖g‖² in the coordinates V, where the curvature is about 1
ROUGH = 10.0  # times the tolerance, while penalties are compared
GRID = (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0)


@dataclass(frozen=True)
class LinearProbe:
    """Fitted weights; `excess` is how much lower the minimum may lie, in nats."""

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
        """1 where the likeliest class is the right one [n]."""
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
    """Multinomial logistic regression with a relative penalty λ and a free intercept; `start` only saves time.

    >>> x = torch.tensor([[-1.0], [-2.0], [1.0], [2.0]])
    >>> fit_probe(x, torch.tensor([0, 0, 1, 1]), classes=2).hits(x, torch.tensor([0, 0, 1, 1])).tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    problem = _Problem.of(x, y, classes=classes, penalty=penalty)
    at = problem.start(start)
    excess = _search(problem, at, steps=steps, tolerance=tolerance)
    return problem.probe(at, penalty, excess)


@dataclass(frozen=True)
class _Problem:
    """The loss in the coordinates in which it is well conditioned: principal axes, each entry with its own scale."""

    rows: Tensor  # [n, d] centred, in the principal axes
    target: Tensor
    mean: Tensor
    axes: Tensor  # U
    scale: Tensor  # [d + 1, K]: S, and the scale of the intercepts last
    cost: float  # λ v
    shares: Tensor  # [K] π

    @classmethod
    def of(cls, x: Tensor, y: Tensor, *, classes: int, penalty: float) -> _Problem:
        target = _checked(x, y, classes=classes, penalty=penalty)
        mean = x.double().mean(0)
        centred = x.double() - mean
        values, axes = torch.linalg.eigh(centred.T @ centred / len(centred))
        values = values.clamp_min(0.0)
        alive = values > centred.shape[1] * torch.finfo(torch.float64).eps * values[-1]
        cost = penalty * max(float(values.mean()), torch.finfo(torch.float64).tiny)
        shares = torch.bincount(target, minlength=classes).double().clamp_min(0.5) / len(target)
        bend = shares * (1 - shares).clamp_min(1e-3)  # curvature of the loss in the logit of each class
        scale = (values[:, None] * bend + cost).clamp_min(1e-300).rsqrt() * alive[:, None]  # empty axes get no weight
        return cls(centred @ axes, target, mean, axes, torch.cat([scale, bend.rsqrt()[None]]), cost, shares)

    def start(self, probe: LinearProbe | None) -> Tensor:
        """[d + 1, K]: the entries of V, and the intercepts last."""
        if probe is None:
            plain = torch.cat([torch.zeros_like(self.scale[:-1]), self.shares.log()[None]])
        else:
            plain = torch.cat([self.axes.T @ probe.weight, (probe.bias + self.mean @ probe.weight)[None]])
        return torch.where(self.scale > 0, plain / self.scale.clamp_min(1e-300), 0.0)

    def loss(self, at: Tensor) -> tuple[float, Tensor]:
        """The loss and its gradient."""
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

    def probe(self, at: Tensor, penalty: float, excess: float) -> LinearProbe:
        plain = self.scale * at
        weight = self.axes @ plain[:-1]
        return LinearProbe(weight, plain[-1] - self.mean @ weight, penalty, excess)


def _checked(x: Tensor, y: Tensor, *, classes: int, penalty: float) -> Tensor:
    if x.ndim != 2 or len(x) < 2 or y.shape != (len(x),):
        raise AnisoscopeError(
            f"a probe was given rows of shape {tuple(x.shape)} and {tuple(y.shape)} labels; expected n×d and n, n > 1."
        )
    target = y.to(x.device).long()
    if not 0 <= int(target.min()) <= int(target.max()) < classes:
        raise AnisoscopeError(f"labels run from {int(y.min())} to {int(y.max())}; expected 0 to {classes - 1}.")
    if not (penalty >= 0 and math.isfinite(penalty)):
        raise AnisoscopeError(f"the penalty is {penalty}; expected a number from 0 on.")
    if not bool(x.isfinite().all()):
        raise AnisoscopeError("a probe was given rows that are not all finite; leave those out first.")
    return target


def _search(problem: _Problem, at: Tensor, *, steps: int, tolerance: float, memory: int = 10) -> float:
    """L-BFGS with backtracking, in place; ½‖g‖² at the end (Nocedal and Wright, section 7.2)."""
    value, gradient = problem.loss(at)
    pairs: list[tuple[Tensor, Tensor, float]] = []
    for _ in range(steps):
        if 0.5 * float(gradient.square().sum()) <= tolerance:
            break
        direction = _direction(gradient, pairs)
        slope = float((direction * gradient).sum())
        if slope >= 0:  # not downhill any more: rounding has eaten the curvature
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
    """−H g by the two-loop recursion."""
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
    """A step that lowers the loss enough (Armijo), its loss and gradient; None where rounding allows no more."""
    step = 1.0
    for _ in range(30):
        lower, gradient = problem.loss(at + step * direction)
        if lower <= value + 1e-4 * step * slope:
            return step, lower, gradient
        curve = 2 * (lower - value - step * slope)
        step = max(0.1 * step, -slope * step * step / curve) if curve > 0 and math.isfinite(curve) else 0.5 * step
    return None


def choose_probe(
    x: Tensor,
    y: Tensor,
    held: Tensor,
    *,
    classes: int,
    grid: Sequence[float] = GRID,
    steps: int = STEPS,
    tolerance: float = TOLERANCE,
) -> LinearProbe:
    """The probe with the penalty of `grid` that does best on the rows in `held` (bool), fitted again on all rows.

    Strong penalties first, each search starting where the one before ended, until two in a row
    do worse than the best so far. Without held rows the middle one is taken.
    """
    ordered = sorted(grid, reverse=True)
    mine, theirs = (~held).nonzero().squeeze(1), held.nonzero().squeeze(1)
    options: dict[str, Any] = {"classes": classes, "steps": steps}
    rough: dict[str, Any] = {**options, "tolerance": ROUGH * tolerance}
    probe: LinearProbe | None = None
    best, least, worse = ordered[len(ordered) // 2], math.inf, 0
    chosen: LinearProbe | None = None
    for penalty in ordered if len(theirs) and len(mine) > 1 and len(ordered) > 1 else ():
        probe = fit_probe(x[mine.to(x.device)], y[mine], penalty=penalty, start=probe, **rough)
        loss = float(probe.losses(x[theirs.to(x.device)], y[theirs]).mean())
        worse = worse + 1 if loss >= least else 0
        if worse == 2:
            break
        if not worse:
            best, least, chosen = penalty, loss, probe
    return fit_probe(x, y, penalty=best, start=chosen, tolerance=tolerance, **options)


@dataclass(frozen=True)
class CentroidProbe:
    """Class means as directions: a row belongs to the class whose mean it makes the smallest angle with."""

    directions: Tensor  # [K, d], unit or zero

    def hits(self, x: Tensor, y: Tensor) -> Tensor:
        return ((x.double() @ self.directions.T).argmax(1) == y.to(x.device)).double()


def fit_centroids(x: Tensor, y: Tensor, *, classes: int) -> CentroidProbe:
    """The nearest class mean by cosine: unlike a linear probe it sees every change of the geometry."""
    target = _checked(x, y, classes=classes, penalty=0.0)
    rows = torch.nn.functional.normalize(x.double(), dim=1)
    sums = rows.new_zeros(classes, rows.shape[1]).index_add_(0, target, rows)
    return CentroidProbe(torch.nn.functional.normalize(sums, dim=1))
