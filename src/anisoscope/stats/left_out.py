"""Sums over the spectra of scatter matrices without each fold on the host, from few eigenvalue problems.

Notation: λ eigenvalues of the scatter S of all rows, S₍ₖ₎ the scatter without fold k with eigenvalues λ₍ₖ₎; q leading
ones; f the function that is summed, √λ or √λ log √λ; t nodes, J of them.

On the spectrum of S, which is solved exactly, f is fitted by
    f̂(λ) = a λ + b λ² + Σⱼ wⱼ log(λ + tⱼ),
so that λ f̂′ is closest to λ f′ in least squares: a relative change of λ is what the rows of a fold make. Then Σ
f(λ₍ₖ₎) follows from tr S₍ₖ₎, ‖S₍ₖ₎‖² and log det(S₍ₖ₎ + tⱼ), and a determinant is a Cholesky factor, a tenth of an
eigenvalue problem on a processor. Nodes are added until what is left of the derivative is below a bound; the q leading
eigenvalues (Rayleigh–Ritz, from those of S) are summed as they are and taken out of the fit, since one that dominates
would hide the others. S₍ₖ₎ of one fold is solved, too: by what its sums differ those of all folds are corrected. Where
that is more than a share of the spread between folds and of what leaving out a fold changes in all, nodes are added
until the fit is closer; where that does not help, every line is solved.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anisoscope.numerics.host import together
from anisoscope.numerics.linalg import eigenvalues, leading_axes
from anisoscope.stats.spectra import Spectrum

_LEADING, _AXES = 4, 16  # q, and in how many directions of S they are looked for
_NEAR = 0.015  # of the spread between folds, what the largest eigenvalue in these directions may differ by
_POINTS, _GRID = 32, 12  # eigenvalues that f is fitted on, and nodes to choose from
_SHRUNK = np.array([0.7, 0.8, 0.875, 0.95])  # of an eigenvalue, what is left of it without a fold
_MOST = 6  # nodes beyond which all folds are solved
_CLOSE = (0.01, 0.0015)  # largest relative error of the derivative, in Σ√λ and in the entropy
_CLOSER = (1.0, 0.3, 0.1)  # shares of it that are tried in turn, until the fold that was solved agrees
_GRADED = 1e4  # largest entry over a node up to which float32 factors do
_AGREE, _ALIKE = 0.07, 0.035  # of the spread between folds, and of their common change, what one may differ by
_FEWEST = 2  # rows per dimension, without a fold


def enough_rows(counts: Tensor, width: int) -> bool:
    """Whether there are enough rows without each fold, so that no eigenvalue comes near 0 for the want of them."""
    return len(counts) > 3 and float(counts.min()) >= _FEWEST * width


class LeftOutSpectra:
    """Sums over the spectra of lines [L, d, d], the first of all rows, the others without a fold."""

    def __init__(self, lines: Tensor) -> None:
        self.lines = lines
        self.values, self.known = together(eigenvalues, [lines[0], lines[1]])  # of all rows, and of the first fold
        self.total = lines.diagonal(dim1=-2, dim2=-1).sum(-1)
        self.squares = torch.stack([line.flatten() @ line.flatten() for line in lines])
        self.determinants: dict[float, Tensor] = {}  # log det by node, of the folds
        self.leading = self._leading() if float(self.values[0]) > 0 else None  # [L, q]

    def spectrum(self, *, entropy: bool) -> Spectrum | None:
        """The sums, those of the logarithms only for an `entropy`; None where all lines must be solved."""
        found = None if self.leading is None else self._found(self.leading, entropy=entropy)
        if found is None:
            return None
        solved = Spectrum.of(self.known)
        for ours, theirs in ((found.top, solved.top), (found.roots, solved.roots), (found.logs, solved.logs)):
            ours[1:] += theirs - ours[1]
        return found if entropy else replace(found, logs=found.logs * torch.nan)

    def _found(self, leading: Tensor, *, entropy: bool) -> Spectrum | None:
        """The sums of the first fit with which the fold that was solved agrees, if there is one."""
        fit = _Fit.of(self.values[_LEADING:].numpy())
        for share in _CLOSER:
            fit = fit and fit.within(share, entropy=entropy)
            if fit is None:
                return None
            found = Spectrum(leading[:, 0].clone(), self.total, self.squares, *self._sums(fit, leading))
            if self._agrees(found, entropy=entropy):
                return found
        return None

    def _leading(self) -> Tensor | None:
        """The q largest eigenvalues of every line, those of the first exactly; None if their space was not found."""
        axes = leading_axes(self.lines[0].float(), _AXES // 2, keep=_AXES, cycles=1).directions.double()
        axes = torch.linalg.qr(axes)[0]
        found, exact = torch.stack(together(lambda line: _ritz(line, axes), list(self.lines))), self.values[:_LEADING]
        near = (found[0, 0] / exact[0] - 1.0).abs() <= _NEAR * (found[1:, 0] / exact[0]).std()
        return found / found[0] * exact if bool(near) else None

    def _sums(self, fit: _Fit, top: Tensor) -> tuple[Tensor, Tensor]:
        """Σ√λ and Σ√λ log √λ of every line, whose leading eigenvalues are `top` [L, q]."""
        scale, rest = fit.scale, self.values[_LEADING:]
        squared = self.squares - top.square().sum(1)
        features = [(self.total - top.sum(1)) / scale, squared / scale**2]
        for node in fit.nodes:
            whole = torch.cat([(rest / scale + node).log().sum()[None], self._determinants(node * scale)])
            shift = (top[1:] / scale + node).log().sum(1) + len(self.lines[0]) * float(np.log(scale))
            whole[1:] -= shift
            features.append(whole)
        change = torch.stack(features, 1) @ torch.from_numpy(fit.weights)
        change = change - change[0]
        sigma, root = rest.sqrt(), scale**0.5
        # √λ log √λ of λ in units of the scale s: √s (f + √λ log √s)
        roots = root * change[:, 0]
        logs = root * (change[:, 1] + change[:, 0] * float(np.log(root)))
        leading = top.sqrt()
        return (
            leading.sum(1) + sigma.sum() + roots,
            torch.xlogy(leading, leading).sum(1) + torch.xlogy(sigma, sigma).sum() + logs,
        )

    def _determinants(self, node: float) -> Tensor:
        """log det(S₍ₖ₎ + t) of every fold."""
        if node not in self.determinants:
            largest = float(self.lines[0].diagonal().max())
            kind = torch.float32 if largest <= _GRADED * node else torch.float64
            found = together(lambda line: _log_determinant(line, node, kind), list(self.lines[1:]))
            self.determinants[node] = torch.tensor(found, dtype=torch.float64)
        return self.determinants[node]

    def _agrees(self, found: Spectrum, *, entropy: bool) -> bool:
        """Whether the fold that was solved has these sums, as far as an interval can tell."""
        solved = Spectrum.of(self.known)
        pairs = [(found.top.sqrt() / found.roots, solved.top.sqrt() / solved.roots)]
        pairs += [(found.entropy(), solved.entropy())] if entropy else []
        for ours, theirs in pairs:
            allowed = _AGREE * ours[1:].std() + _ALIKE * (ours[1:].mean() - ours[0]).abs()
            if not bool(ours.isfinite().all() & ((ours[1] - theirs).abs() <= allowed)):
                return False
        return True


def _ritz(line: Tensor, axes: Tensor) -> Tensor:
    """The q largest eigenvalues of a line from a space that nearly holds their eigenvectors, extended by residuals."""
    image = line @ axes
    inner = axes.T @ image
    values, turn = torch.linalg.eigh(inner)
    turn = turn[:, -_LEADING:]
    rest = image @ turn - axes @ (turn * values[-_LEADING:])
    more = torch.linalg.qr(rest - axes @ (axes.T @ rest))[0]
    beside = line @ more
    corner = axes.T @ beside
    whole = torch.cat([torch.cat([inner, corner], 1), torch.cat([corner.T, more.T @ beside], 1)])
    return torch.linalg.eigvalsh(whole).flip(0)[:_LEADING]


def _log_determinant(line: Tensor, node: float, kind: torch.dtype) -> float:
    from scipy.linalg.lapack import dpotrf, spotrf

    shifted = line.to(kind, copy=True)
    shifted.diagonal().add_(node)
    # a symmetric matrix is its own transpose, which LAPACK factors in place
    factor, failed = (spotrf if kind is torch.float32 else dpotrf)(shifted.numpy().T, overwrite_a=1, clean=0)
    return float("nan") if failed else 2.0 * float(np.log(factor.diagonal().astype(np.float64)).sum())


@dataclass(frozen=True)
class _Fit:
    """Weights [2 + J, 2] of λ, λ² and log(λ + tⱼ) for both functions, λ in units of `scale`."""

    target: _Target
    grid: list[float]
    scale: float
    nodes: tuple[float, ...] = ()
    weights: np.ndarray = field(default_factory=lambda: np.zeros((2, 2)))
    errors: tuple[float, float] = (1.0, 1.0)

    @classmethod
    def of(cls, rest: np.ndarray) -> _Fit | None:
        """A fit of √λ to the eigenvalues that are not leading; None where the most nodes do not suffice."""
        rest = rest[rest > 0]
        if not len(rest):
            return None
        scale = float(rest.mean())
        points = rest[np.linspace(0, len(rest) - 1, min(len(rest), _POINTS)).round().astype(int)] / scale
        sigma = np.sqrt(rest / scale)
        target = _Target(np.outer(_SHRUNK, points).ravel(), float((sigma * np.log(sigma)).sum() / sigma.sum()))
        return cls(target, np.geomspace(points[-1] / 16, points[0], _GRID).tolist(), scale).within(1.0, entropy=False)

    def within(self, share: float, *, entropy: bool) -> _Fit | None:
        """With nodes added, the first two together, until the errors are a share of the bounds; None beyond the most.

        The errors of an `entropy` count where it is wanted.
        """
        found = self
        while found.errors[0] > share * _CLOSE[0] or (entropy and found.errors[1] > share * _CLOSE[1]):
            if len(found.nodes) == _MOST:
                return None
            tried: Any = ((*found.nodes, node) for node in self.grid if node not in found.nodes)
            if len(found.nodes) == 1 and not self.nodes:
                tried = combinations(self.grid, 2)
            nodes, weights, errors = self.target.best(list(tried), entropy=entropy)
            found = replace(found, nodes=nodes, weights=weights, errors=errors)
        return found


class _Target:
    """λ f′ of both functions at some points."""

    def __init__(self, points: np.ndarray, mean_log: float) -> None:
        sigma = np.sqrt(points)
        self.points, self.about = points, 1.0 + mean_log
        self.wanted = np.stack([0.5 * sigma, 0.5 * sigma * (np.log(sigma) + 1.0)], 1)  # [points, 2]

    def best(
        self, tried: list[tuple[float, ...]], *, entropy: bool
    ) -> tuple[tuple[float, ...], np.ndarray, tuple[float, float]]:
        """Of several choices of nodes that with the smallest errors: the nodes, their weights, the relative errors."""
        x = self.points
        logs = x / (x + np.array(tried)[..., None])  # [choices, nodes, points]
        plain = np.broadcast_to(np.stack([x, 2.0 * x**2]), (len(tried), 2, len(x)))
        rows = np.concatenate([plain, logs], 1)
        size = np.sqrt(np.square(rows).sum(-1, keepdims=True))
        rows = rows / size
        weights = np.linalg.pinv(rows.swapaxes(1, 2)) @ self.wanted
        left = rows.swapaxes(1, 2) @ weights - self.wanted  # [choices, points, 2]
        # the entropy log Σσ − Σσ log σ / Σσ changes by (1 + Σσ log σ / Σσ) d Σσ − d Σσ log σ, but for a factor
        both = np.stack([left[..., 0], self.about * left[..., 0] - left[..., 1]], -1)
        norm = np.stack([self.wanted[:, 0], self.about * self.wanted[:, 0] - self.wanted[:, 1]], -1)
        errors = np.sqrt(np.square(both).sum(1) / np.square(norm).sum(0))  # [choices, 2]
        share = errors / np.array(_CLOSE)
        at = int((share.max(1) if entropy else share[:, 0]).argmin())
        return tried[at], weights[at] / size[at], (float(errors[at, 0]), float(errors[at, 1]))
