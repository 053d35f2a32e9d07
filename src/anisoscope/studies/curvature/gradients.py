"""The gradient half of the theory: where gradients of a layer on a curved manifold go, and what training makes of it.

Rows x around a point x₀ go into a linear layer, y = x − x₀, and a signal g [k] comes back for each row, so that
dL/dW = E[g yᵀ] [k, D]. With T and N the tangent and normal bases at x₀ and y = t T u + (t²/2) N II(u, u) + O(t³):

    tangent part  ‖E[g yᵀ] T‖ ≤ G·t·√E|u|²                (Eq. 9)
    normal part   ‖E[g yᵀ] N‖ ≤ G·(t²/2)·√E|II(u, u)|²    (Eq. 10)
    normal / tangent = O(κ t)                              (Eq. 11)

with G = √E|g|². The orders are those of Revisiting Anisotropy (arXiv 2604.08764); the constants are our reconstruction,
by Cauchy–Schwarz. Without centring at x₀ the term E[g] x₀ᵀ, of order t⁰, would hide both parts. 9 and 10 are upper
bounds on the *mean* gradient, which training follows: rows cancel in it, and how much is left depends on the signal; 11
divides two upper bounds, so it is measured, not proved. The gradients *row by row*, √E|g|²|Bᵀy|², cannot cancel.

`gradient_orders(manifold, signal)` measures all three for any manifold (`numerics.manifolds`) and any signal.

Two consequences for training are tried as well: whether updates give the tangent directions of the inputs more and more
weight (`loop_courses`, the self-reinforcing loop), and whether embeddings of frequent types stay in one place
(`pinned_embeddings`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from anisoscope.errors import AnisoscopeError, check_known
from anisoscope.metrics import curvature as metrics
from anisoscope.metrics.engine.estimation import Estimate
from anisoscope.numerics.manifolds import Manifold, displace, unit_sample
from anisoscope.results.quantity import t_quantile

OUTPUTS = 4  # k, the width of the layer
HIDDEN = 32  # of the small networks
PARTS = ("tangent", "normal")
ORDERS = {"tangent": 1.0, "normal": 2.0, "ratio": 1.0}  # of Eq. 9, 10, 11
FEWEST_SCALES = 3
FIT_LIMIT = 0.03  # largest fitted scale, in units of 1/κ; above it higher orders of the expansion matter
HIGHER = 0.5  # a slope this far above the order of the bound: the leading order vanishes
SAMPLED = 2.0  # a mean gradient of less than this many of its standard errors is sampling error
ROUNDING = 1e-14  # parts of a gradient below this share of the distances involved are rounding
SCALES = tuple(float(f"{t:.3g}") for t in np.geomspace(3e-4, 0.3, 16))
Signal = Callable[[Tensor, Tensor, torch.Generator], Tensor]  # (u [n, m], y [n, D], generator) to g [n, k] or [n]


def length_unit(curvature: float) -> float:
    """The radius of curvature 1/κ, or 1 where nothing is curved."""
    return 1 / curvature if curvature > 0 else 1.0


def over_replicates(values: Sequence[float], *, n: int = 0, log: bool = False, note: str = "") -> Estimate:
    """Mean and 95 % interval over repetitions, on the log scale (a geometric mean) for ratios and variances.

    Repetitions of a simulation are independent, so Student's interval applies; a percentile bootstrap of a dozen values
    would have too low a coverage.

    >>> over_replicates([1.0, 2.0, 3.0], n=3)
    Estimate(2 [-0.4841, 4.484], n=3, sd=1)
    """
    x = np.asarray(values, dtype=float)
    with np.errstate(divide="ignore", invalid="ignore"):
        x = np.log(x) if log else x
    if len(x) < 2 or not np.isfinite(x).all():
        return Estimate(math.nan, n=n, contexts=len(x), note=note or "not finite in every repetition")
    mean, sd = float(x.mean()), float(x.std(ddof=1))
    half = t_quantile(len(x) - 1) * sd / math.sqrt(len(x))
    undo = math.exp if log else float
    spread = float(np.std(np.exp(x) if log else x, ddof=1))
    left_out = tuple(undo(v) for v in (x.sum() - x) / (len(x) - 1))
    ends = undo(mean - half), undo(mean + half)
    return Estimate(undo(mean), *ends, n=n, sd=spread, contexts=len(x), note=note, replicates=left_out)


# -- signals -----------------------------------------------------------------------------------------------------------


def constant_signal(u: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
    """The same g for every row: as E[u] = 0, the tangent part of the mean gradient vanishes to leading order."""
    return torch.randn(OUTPUTS, dtype=u.dtype, generator=generator).expand(len(u), -1)


def noise_signal(u: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
    """An independent g for every row: both parts of the mean gradient are smaller than their bounds by √n."""
    return torch.randn(len(u), OUTPUTS, dtype=u.dtype, generator=generator)


def linear_signal(u: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
    """g = A u: as E[u II(u, u)] = 0, the normal part of the mean gradient vanishes to leading order."""
    return u @ torch.randn(u.shape[1], OUTPUTS, dtype=u.dtype, generator=generator)


def network_signal(u: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
    """g back-propagated from the cross-entropy of a small network behind the layer.

    The class of a row is the sector of the neighbourhood it lies in, as nearby contexts can have different next tokens:
    g depends on u itself, and not only on the position in space.
    """
    sectors = torch.randn(OUTPUTS, u.shape[1], dtype=u.dtype, generator=generator)
    offset = torch.randn(OUTPUTS, dtype=u.dtype, generator=generator)
    label = (u @ sectors.T + offset).argmax(1)
    shapes = ((y.shape[1], OUTPUTS), (OUTPUTS, HIDDEN), (HIDDEN, OUTPUTS))
    weights = [torch.randn(*s, dtype=u.dtype, generator=generator) / math.sqrt(s[0]) for s in shapes]
    with torch.enable_grad():
        hidden = (y @ weights[0]).requires_grad_()
        logits = torch.tanh(hidden @ weights[1]) @ weights[2]
        loss = torch.nn.functional.cross_entropy(logits, label, reduction="sum")
        return torch.autograd.grad(loss, hidden)[0]


SIGNALS: Mapping[str, Signal] = {
    "constant": constant_signal,
    "noise": noise_signal,
    "linear": linear_signal,
    "network": network_signal,
}


# -- Eq. 9, 10, 11 -----------------------------------------------------------------------------------------------------


class GradientOrder(NamedTuple):
    """How one part of the gradient (tangent, normal, or their ratio) grows with the scale."""

    of: str
    per: str  # mean: of the mean gradient; rows: row by row
    slope: Estimate  # of log part on log t, over repetitions; NaN where too few scales lie above rounding
    tightness: Estimate  # the mean gradient over its bound; NaN for the ratio and row by row
    scales: tuple[float, ...]  # the fitted ones
    # of the ratio these two are said if they are true of one of its parts
    vanishes: bool  # the leading order is zero: nothing is left, or what is left is of a higher order
    sampled: bool  # the mean is zero for infinitely many rows: what is measured is its sampling error

    def __str__(self) -> str:
        gone = "vanishes to leading order" if self.vanishes else "is sampling error" if self.sampled else ""
        gone = f"a part of it {gone}" if gone and self.of == "ratio" else gone
        if not math.isfinite(self.slope.value):
            return f"{self.of}, {self.per}: {gone or 'too few scales to fit'}"
        grows = f"grows as t^{self.slope.value:.2f} [{self.slope.low:.2f}, {self.slope.high:.2f}]"
        return f"{self.of}, {self.per}: " + (f"{gone}; what is left {grows}" if gone else grows)


@dataclass(frozen=True)
class GradientLadder:
    """Parts of the gradient, in units of G, of repeated samples at a ladder of scales; arrays [repetitions, scales]."""

    scales: np.ndarray  # [scales] in units of 1/κ
    mean: dict[str, np.ndarray]  # ‖E[g yᵀ] B‖ with B the tangent or the normal basis
    rows: dict[str, np.ndarray]  # √E|g|²|Bᵀy|²
    bound: dict[str, np.ndarray]  # of the mean: t·√E|u|², (t²/2)·√E|II(u, u)|²
    error: dict[str, np.ndarray]  # standard error of the mean, from independent pairs of rows u, −u
    floor: float  # size of rounding errors
    samples: int  # rows of one sample

    def part(self, of: str, per: str) -> np.ndarray:
        """`tangent`, `normal` or their `ratio`, of the `mean` gradient, of the `rows`, or of the `bound`."""
        parts = {"mean": self.mean, "rows": self.rows, "bound": self.bound}[per]
        with np.errstate(divide="ignore", invalid="ignore"):
            return parts["normal"] / parts["tangent"] if of == "ratio" else parts[of]

    def fitted(self, of: str, per: str, *, limit: float = FIT_LIMIT) -> np.ndarray:
        """Mask of the scales of at most `limit` at which no repetition lies below the rounding floor."""
        kept = self.scales <= limit * (1 + 1e-9)
        for name in PARTS if of == "ratio" else (of,):
            kept = kept & (self.part(name, per) > self.floor).all(0)
        return kept

    def slopes(self, of: str, per: str, *, limit: float = FIT_LIMIT) -> np.ndarray:
        """Log–log slope over the fitted scales, of every repetition; NaN with fewer than three scales."""
        kept = self.fitted(of, per, limit=limit)
        if kept.sum() < FEWEST_SCALES:
            return np.full(len(self.mean[PARTS[0]]), np.nan)
        return metrics.manifold_gradient_slope(self.scales[kept], self.part(of, per)[:, kept])

    def tightness(self, of: str, *, limit: float = FIT_LIMIT) -> np.ndarray:
        """Mean gradient over its bound, geometric mean over the fitted scales; 0 where all of it is rounding."""
        kept = self.fitted(of, "mean", limit=limit)
        if kept.sum() < FEWEST_SCALES:
            return np.zeros(len(self.mean[PARTS[0]]))
        return metrics.manifold_gradient_tightness(self.mean[of][:, kept], self.bound[of][:, kept])

    def highest(self, of: str, *, limit: float = FIT_LIMIT) -> np.ndarray:
        """The largest mean gradient over its bound, of every repetition: at most 1 where the bound holds."""
        kept = (self.scales <= limit * (1 + 1e-9)) & (self.bound[of] > self.floor).all(0)
        return (self.mean[of][:, kept] / self.bound[of][:, kept]).max(1, initial=0.0)

    def order(self, of: str, per: str, *, limit: float = FIT_LIMIT) -> GradientOrder:
        """The slope with its interval, the tightness, and whether the leading order vanishes."""
        check_known("part of the gradient", of, ORDERS)
        kept = self.fitted(of, per, limit=limit)
        counted = int(kept.sum())
        inside = int((self.scales <= limit * (1 + 1e-9)).sum())
        note = f"{counted} of {len(kept)} scales are above rounding and ≤ {limit:g}/κ"
        n = self.samples * counted
        slope = over_replicates(self.slopes(of, per, limit=limit).tolist(), n=n, note=note)
        if of == "ratio":  # of two parts: they vanish, not it
            parts = [self.order(name, per, limit=limit) for name in PARTS]
            said = any(part.vanishes for part in parts), any(part.sampled for part in parts)
            return GradientOrder(of, per, slope, Estimate(math.nan), (), *said)
        vanishes = inside >= FEWEST_SCALES > counted or slope.value > ORDERS[of] + HIGHER
        tightness = over_replicates(self.tightness(of, limit=limit).tolist(), n=n) if per == "mean" else None
        scales = tuple(self.scales[kept].tolist())
        errors = self.mean[of][:, kept] / np.maximum(self.error[of][:, kept], 1e-300)
        sampled = per == "mean" and counted > 0 and float(np.exp(np.log(errors).mean())) < SAMPLED
        return GradientOrder(of, per, slope, tightness or Estimate(math.nan), scales, vanishes, sampled)


def gradient_orders(
    manifold: Manifold,
    signal: str | Signal,
    *,
    scales: Sequence[float] = SCALES,
    samples: int = 4096,
    replicates: int = 8,
    kind: str = "gaussian",
    seed: int = 0,
    limit: float = FIT_LIMIT,
) -> dict[tuple[str, str], GradientOrder]:
    """Eq. 9, 10 and 11 measured: slopes with intervals by (tangent | normal | ratio, mean | rows).

    `signal` is one of `SIGNALS` or a function of (u [n, m] tangent coordinates of scale 1, y [n, D] rows about the
    point, a generator) that returns g [n, k]; a random signal must draw from the generator, which gives the same
    numbers at every scale of a repetition. Scales are in units of 1/κ at the manifold's centre.

    >>> from anisoscope.numerics.manifolds import sphere
    >>> found = gradient_orders(sphere(2).rotated(5), "constant", samples=256, replicates=4)
    >>> print(found["normal", "mean"])
    normal, mean: grows as t^1.99 [1.96, 2.01]
    >>> found["tangent", "mean"].vanishes
    True
    """
    chosen = _known_signal(signal)
    if samples < 4 or replicates < 2 or not scales or not all(0 < t < math.inf for t in scales):
        listed = ", ".join(f"{t:g}" for t in scales)
        raise AnisoscopeError(
            f"{samples} samples, {replicates} replicates and scales ({listed}) give no slope with an interval; "
            "expected 4 samples or more, 2 replicates or more and scales above 0."
        )
    sizes = {"scales": tuple(scales), "samples": samples, "replicates": replicates, "kind": kind, "seed": seed}
    ladder = gradient_ladders(manifold, {"signal": chosen}, **sizes)["signal"]  # type: ignore[arg-type]
    return {(of, per): ladder.order(of, per, limit=limit) for of in ORDERS for per in ("mean", "rows")}


def _known_signal(signal: str | Signal) -> Signal:
    if isinstance(signal, str):
        check_known("signal", signal, SIGNALS)
        return SIGNALS[signal]
    if not callable(signal):
        raise AnisoscopeError(
            f"the signal is {type(signal).__name__}; expected one of {', '.join(SIGNALS)}, or a function of "
            "(u, y, generator) that returns one row of numbers for each row of u."
        )
    return signal


def gradient_ladders(
    manifold: Manifold, signals: Mapping[str, Signal], *, scales: tuple[float, ...], samples: int, replicates: int,
    kind: str = "gaussian", seed: int = 0,
) -> dict[str, GradientLadder]:  # fmt: skip
    """Independent samples for every scale and repetition around the manifold's centre, shared by all signals.

    Every u comes with −u, so that E[u] = 0 and all odd moments vanish exactly. In one repetition a random signal has
    the same parameters at all scales.
    """
    if manifold.ambient <= manifold.dim:
        raise AnisoscopeError(
            f"the {manifold.name} of dimension {manifold.dim} fills its {manifold.ambient} ambient dimensions, so no "
            "direction is normal to it; place it in more with rotated(ambient)."
        )
    frames = manifold.frames(manifold.centre)
    unit = length_unit(manifold.curvature(manifold.centre))
    bases = (frames.tangent, frames.normal)
    generator = torch.Generator().manual_seed(seed)
    found = {name: np.zeros((8, replicates, len(scales))) for name in signals}
    for r in range(replicates):
        for i, t in enumerate(scales):
            half = unit_sample(samples // 2, dim=manifold.dim, kind=kind, generator=generator)
            u = torch.cat([half, -half])
            y = displace(manifold, frames, t * unit * u) - frames.position
            bent = torch.einsum("cab,na,nb->nc", frames.form, u, u).square().sum(1).mean().sqrt()
            bounds = [float(t * unit * u.square().sum(1).mean().sqrt()), float((t * unit) ** 2 / 2 * bent)]
            for name, signal in signals.items():
                own = torch.Generator().manual_seed(1_000_003 * (seed + 1) + r)
                g = _checked(signal(u, y, own), samples // 2 * 2)
                parts = [metrics.manifold_gradient(g, y, B, per=per) for per in ("mean", "rows") for B in bases]
                found[name][:, r, i] = [*parts, *bounds, *(_standard_error(g, y @ B) for B in bases)]
    floor = ROUNDING * (float(frames.position.norm()) + unit)
    ladders = {}
    for name, values in found.items():
        mean, rows, bound, error = (dict(zip(PARTS, values[i : i + 2], strict=True)) for i in range(0, 8, 2))
        ladders[name] = GradientLadder(np.array(scales), mean, rows, bound, error, floor, samples)
    return ladders


def _standard_error(g: Tensor, parts: Tensor) -> float:
    """Standard error of ‖E[g partsᵀ]‖ / G; rows i and i + n/2 are the pair u, −u, and pairs are independent."""
    products = torch.einsum("nk,nb->nkb", g, parts).flatten(1)
    pairs = (products[: len(g) // 2] + products[len(g) // 2 :]) / 2
    variance = (pairs - pairs.mean(0)).square().sum() / (len(pairs) - 1)
    return float((variance / len(pairs)).sqrt() / g.square().sum(1).mean().sqrt())


def _checked(g: Tensor, rows: int) -> Tensor:
    """The signal as [n, k] float64; raises where it is not one finite row for each row of the sample."""
    g = torch.as_tensor(g).double()
    g = g[:, None] if g.ndim == 1 else g
    if g.ndim != 2 or len(g) != rows:
        raise AnisoscopeError(
            f"the signal has shape {tuple(g.shape)}; expected one row for each of the {rows} rows: [n, k] or [n]."
        )
    if not bool(g.isfinite().all()) or not bool((g != 0).any()):
        raise AnisoscopeError("the signal is zero for every row or not finite; expected finite numbers, not all 0.")
    return g


# -- the self-reinforcing loop -----------------------------------------------------------------------------------------

LABELS = ("tangent", "normal", "noise")
UPDATES = ("all", "random")
PROBE = 1024  # rows on which the share is measured


class LoopCourses(NamedTuple):
    """The tangent share of the activation variance of independent trainings."""

    steps: list[int]
    shares: np.ndarray  # [runs, steps]


def loop_courses(
    manifold: Manifold, *, layers: int, labels: str, update: str, steps: int, runs: int, seed: int,
    scale: float = 0.1, noise: float = 1.0, rate: float = 0.05, batch: int = 32,
) -> LoopCourses:  # fmt: skip
    """Train linear (`layers=1`) or two-layer models by SGD on rows of a neighbourhood, and watch their activations.

    Rows are y/t plus ambient noise of the variance of a tangent direction, so that the inputs alone do not favour the
    tangent. labels: linear in the `tangent` coordinates, in as many `normal` coordinates of the noisy rows, or `noise`
    that has nothing to do with the rows. update: `all` of the gradient, or of the first layer's only its part in a
    `random` subspace of the inputs that has the rank of the tangent space.
    """
    check_known("kind of labels", labels, LABELS)
    check_known("kind of update", update, UPDATES)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(runs, *shape, dtype=torch.float64, generator=generator)

    frames, width = manifold.frames(manifold.centre), manifold.ambient
    length = scale * length_unit(manifold.curvature(manifold.centre))
    read = frames.normal[:, : manifold.dim]
    target = normal(manifold.dim if labels == "tangent" else read.shape[1], OUTPUTS)
    first = 0.1 * normal(width, HIDDEN if layers == 2 else OUTPUTS) / math.sqrt(width)
    weights = [first, *([normal(HIDDEN, OUTPUTS) / math.sqrt(HIDDEN)] if layers == 2 else [])]
    subspace = torch.linalg.qr(normal(width, manifold.dim))[0]

    def draw(n: int) -> tuple[Tensor, Tensor]:
        u = normal(n, manifold.dim)
        y = (displace(manifold, frames, length * u.flatten(0, 1)) - frames.position).view(runs, n, width) / length
        x = y + noise * normal(n, width)
        if labels == "noise":
            return x, normal(n, OUTPUTS)
        return x, (u if labels == "tangent" else x @ read) @ target

    probe, _ = draw(PROBE)
    kept = sorted({0, *np.geomspace(1, steps, 20).round().astype(int).tolist()})
    shares = []
    for step in range(steps + 1):
        if step in kept:
            pairs = zip(weights[0], probe, strict=True)
            shares.append([metrics.tangent_variance_share(weight, rows, frames.tangent) for weight, rows in pairs])
        gradients = _gradients(weights, *draw(batch))
        if update == "random":
            gradients[0] = subspace @ (subspace.mT @ gradients[0])
        weights = [weight - rate * gradient for weight, gradient in zip(weights, gradients, strict=True)]
    return LoopCourses(kept, np.array(shares).T)


def _gradients(weights: list[Tensor], rows: Tensor, labels: Tensor) -> list[Tensor]:
    """Gradients of half the squared error, a mean over the rows of each run."""
    leaves = [weight.detach().requires_grad_() for weight in weights]
    with torch.enable_grad():
        out = rows @ leaves[0]
        out = torch.tanh(out) @ leaves[1] if len(leaves) == 2 else out
        return list(torch.autograd.grad((out - labels).square().sum() / (2 * rows.shape[1]), leaves))


# -- pinning -----------------------------------------------------------------------------------------------------------

OPTIMISERS: Mapping[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 1.0),
    "adam": lambda parameters: torch.optim.Adam(parameters, 0.01),
}
WINDOWS = ("all", "late")  # the whole training, its second half
FEWEST_DRAWN = 10


class PinnedEmbeddings(NamedTuple):
    """Embeddings of bigram models that were trained on types with Zipf frequencies."""

    frequency: Tensor  # [types]
    drawn: Tensor  # [runs, types] how often a type was drawn
    distance: dict[str, Tensor]  # by window, [runs, types] to the time mean

    def slopes(self, window: str) -> list[float]:
        """Slope of log distance on log frequency of every run, over types drawn often enough."""
        used = self.drawn >= FEWEST_DRAWN
        distances = self.distance[window]
        return [metrics.pinning_slope(d[o], self.frequency[o]) for d, o in zip(distances, used, strict=True)]


def pinned_embeddings(
    types: int, *, zipf: float, optimiser: str, steps: int, runs: int, seed: int, width: int = 16, batch: int = 64
) -> PinnedEmbeddings:
    """Train bigram models on types with Zipf frequencies; each type has its own distribution of followers.

    Embeddings and output head start small. Distances are over 33 evenly spaced steps of each window.
    """
    check_known("optimiser", optimiser, OPTIMISERS)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    frequency = torch.arange(1, types + 1).double() ** -zipf
    frequency /= frequency.sum()
    follower = torch.softmax(frequency.log() + normal(types, 4) @ normal(4, types) / 2, 1)
    table, head = ((0.1 * normal(runs, types, width)).requires_grad_() for _ in range(2))
    optimizer = OPTIMISERS[optimiser]([table, head])
    starts = {"all": 0, "late": steps // 2}
    marks = {name: set(np.linspace(start, steps, 33).round().astype(int).tolist()) for name, start in starts.items()}
    seen: dict[str, list[Tensor]] = {name: [] for name in WINDOWS}
    each, drawn = torch.arange(runs)[:, None], torch.zeros(runs, types)
    for step in range(steps + 1):
        for name in (name for name in WINDOWS if step in marks[name]):
            seen[name].append(table.detach().clone())
        here = torch.multinomial(frequency.expand(runs, -1), batch, replacement=True, generator=generator)
        after = torch.multinomial(follower[here.flatten()], 1, generator=generator)[:, 0]
        drawn += torch.nn.functional.one_hot(here, types).sum(1)
        optimizer.zero_grad()
        with torch.enable_grad():
            logits = (table[each, here] @ head.mT).flatten(0, 1)
            (torch.nn.functional.cross_entropy(logits, after, reduction="sum") / batch).backward()
        optimizer.step()
    distance = {name: metrics.pinning_distance(torch.stack(tables)) for name, tables in seen.items()}
    return PinnedEmbeddings(frequency, drawn, distance)
