"""The rows of one measured step, and tangent proxies: subspaces fitted on activations alone, for all sites at once.

A hash of its content assigns each context of a step to the fit half or to the test half, whose gradients are read. A
proxy is the span of a few concepts of the centred activations of the fit half; its label records how it was fitted and
is the variant in the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from anisoscope.capture.gradient_pass import GradientPass, SiteRows
from anisoscope.capture.sites.site import Site
from anisoscope.errors import AnisoscopeError
from anisoscope.metrics.frequency import bin_of
from anisoscope.metrics.tangent import MOST_OF_WIDTH, check_rank, each_decomposed, next_components
from anisoscope.numerics.decompositions import fit_directions
from anisoscope.numerics.factors import exact_products
from anisoscope.numerics.hashing import FOLDS, even_folds, half_of, row_hash
from anisoscope.numerics.host import together
from anisoscope.numerics.linalg import leading_eigenvectors, orthonormal_bases, small_eigenvalues
from anisoscope.stats.moments import GradientMoments
from anisoscope.tangent.together import on_host


@dataclass(frozen=True)
class Half:
    """Rows of one half at one site, with labels of each row; labels are on the CPU."""

    x: Tensor  # [n, d]
    g: Tensor | None  # [n, d], test half only
    context: Tensor  # [n] hash of the context
    position: Tensor
    token: Tensor  # the original token, never [MASK]
    target: Tensor  # −1 where there is none
    masked: Tensor  # 1 masked, 0 not, −1 where nothing is masked by design
    dropped: int = 0  # rows with NaN or infinity
    folds: Tensor | None = None  # [n] of the jackknife, if some contexts are no longer here
    shared: dict[Any, Any] | None = None  # what follows from the labels, kept for other sites with the same labels

    @classmethod
    def joined(cls, parts: list[tuple[SiteRows, float]], *, known: dict[Any, dict[str, Any]] | None = None) -> Half:
        """Join the finite rows of several passes; the gradients of each are multiplied by its factor.

        `known` keeps the labels of the rows, which are the same at most sites.
        """
        half, good = cls.all_of(parts, {} if known is None else known)
        return half.finite(good, dropped=int((~good).sum()))

    @classmethod
    def all_of(cls, parts: list[tuple[SiteRows, float]], known: dict[Any, dict[str, Any]]) -> tuple[Half, Tensor]:
        """All rows, and which of them are finite."""
        x = torch.cat([rows.x for rows, _ in parts])
        scaled = [rows.g if factor == 1.0 else rows.g * factor for rows, factor in parts if rows.g is not None]
        g = torch.cat(scaled) if len(scaled) == len(parts) else None
        key = tuple((id(rows.index), id(rows.tokens)) for rows, _ in parts)
        if key not in known:
            labels = [_labels(rows) for rows, _ in parts]
            columns: dict[str, Any] = {n: torch.cat([part[n].cpu().long() for part in labels]) for n in labels[0]}
            columns["folds"] = even_folds(columns["context"])  # of all contexts, so that they are the same everywhere
            known[key] = columns | {"shared": {}}
        good = x.isfinite().all(1) if g is None else x.isfinite().all(1) & g.isfinite().all(1)
        return cls(x, g, **known[key]), good

    def finite(self, good: Tensor, *, dropped: int) -> Half:
        """The rows that are finite, of which it is known how many are not."""
        return replace(self.at(good.nonzero().squeeze(1).cpu()), dropped=dropped) if dropped else self

    @classmethod
    def plain(cls, rows: Tensor, context: Tensor, *, dropped: int = 0) -> Half:
        """Plain rows as a test half without labels except their contexts."""
        nothing = torch.full_like(context, -1)
        return cls(rows, rows, context, torch.zeros_like(context), nothing, nothing, nothing, dropped)

    @property
    def fold(self) -> Tensor:
        return even_folds(self.context) if self.folds is None else self.folds

    def once(self, name: Any, make: Callable[[], Any]) -> Any:
        """What follows from the labels alone, made once for all sites that share them."""
        if self.shared is None:
            return make()
        if name not in self.shared:
            self.shared[name] = make()
        return self.shared[name]

    @property
    def contexts(self) -> int:
        return int(self.once("contexts", lambda: int(self.context.unique().numel())))

    def order(self) -> Tensor:
        """A shuffled order of the rows that does not depend on batching."""
        found: Tensor = self.once("order", lambda: row_hash(self.context, self.position, seed=0))
        return found

    def few(self, most: int) -> Tensor:
        """The indices of the first `most` rows in the shuffled order, and in that order."""
        found: Tensor = self.once(("few", most), lambda: self.order().argsort(stable=True)[:most])
        return found

    def at(self, rows: Tensor, name: Any = None) -> Half:
        """Some of the rows, by their indices; with a name they are the same at all sites that share labels."""

        def labels() -> dict[str, Any]:
            names = ("context", "position", "token", "target", "masked")
            found: dict[str, Any] = {name: getattr(self, name)[rows] for name in names} | {"folds": self.fold[rows]}
            return found | {"shared": None if name is None or self.shared is None else {}}

        there = rows.to(self.x.device)
        columns = labels() if name is None else self.once(("at", name), labels)
        return replace(self, x=self.x[there], g=None if self.g is None else self.g[there], **columns)

    def fewer(self, most: int) -> Half:
        """The rows that proxies are fitted on: all, or the `most` with the smallest hashes.

        They are in the order of these hashes, so that fits and permuted controls do not depend on batches or processes.
        """
        return self.at(self.few(most), ("fewer", most))

    def without_first(self) -> Half:
        """The rows that are not at the first position of their context."""
        return self.at(self.once("later", lambda: (self.position > 0).nonzero().squeeze(1)), "later")

    def __len__(self) -> int:
        return len(self.x)


def _labels(rows: SiteRows) -> dict[str, Tensor]:
    index, words = rows.index, rows.tokens
    masked = torch.full((len(rows.x),), -1) if words.masked is None else words.masked
    targets = {"token": words.original, "target": words.target, "masked": masked}
    return {"context": index.context, "position": index.position, **targets}


_MOMENTS = 6  # sets of second moments by fold that a site has while it is tested: of rows and gradients, each reading


@dataclass
class StepRows:
    """The rows that the passes of one step gave, by site."""

    step: int
    fit: dict[Site, list[SiteRows]] = field(default_factory=dict)
    test: dict[Site, list[tuple[SiteRows, float]]] = field(default_factory=dict)
    loss: float = 0.0
    tokens: int = 0
    weighted_loss: float | None = None  # with the weights that training gives to targets; None where it gives none
    weights: dict[int, dict[str, Tensor]] = field(default_factory=dict)  # by fold (or −1): gradients by name
    output: Tensor | None = None  # the gradient of the output head [V, d] in float64, of a tied table as such alone
    embedded: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # ids, gradients
    unreached: set[Site] = field(default_factory=set)
    # of the contexts that the loss is of: hash, summed loss, number of targets, each [B]
    by_context: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    # all contexts with gradients, for further splits: a pass, the hashes of its contexts, the factor of its gradients
    passes: list[tuple[GradientPass, Tensor, float]] = field(default_factory=list)

    def add_fit(self, found: GradientPass) -> None:
        for site, rows in found.sites.items():
            self.fit.setdefault(site, []).append(rows)

    def add_test(self, found: GradientPass, *, factor: float = 1.0) -> None:
        """Add rows with gradients; `factor` turns these into gradients of the summed loss."""
        for site, rows in found.sites.items():
            if rows.g is not None:
                self.test.setdefault(site, []).append((rows, factor))
        self.unreached |= set(found.unreached)
        self.add_loss(found.loss, found.tokens, found.weighted_loss)

    def add_loss(self, loss: float, tokens: int, weighted: float | None) -> None:
        """Add the summed losses of some contexts, and the number of their targets."""
        self.loss += loss
        self.tokens += tokens
        self.weighted_loss = self.weighted_loss if weighted is None else (self.weighted_loss or 0.0) + weighted

    def add_weights(self, fold: int, found: GradientPass, *, output: str | None, tied: bool) -> None:
        """Add the gradients of weights; `output` names the output head, `tied`: it is the input embedding as well.

        They are added up at once: with a large vocabulary that of the head is as large as most of the model.
        """
        mine = self.weights.setdefault(fold, {})
        for name, g in found.weights.items():
            if name != output:
                g = g if g.dtype == torch.float64 else g.float()
                mine[name] = mine[name] + g if name in mine else g
                continue
            if tied and found.embedded is None:  # which part of the total gradient is of the input is not known
                continue
            self.output = g.double() if self.output is None else self.output.add_(g)
            if tied and found.embedded is not None:
                ids, inside = found.embedded
                self.output.index_add_(0, ids.to(g.device), inside.to(g.device, torch.float64), alpha=-1)

    def drop(self, site: Site) -> None:
        """Leave a site out."""
        self.fit.pop(site, None)
        self.test.pop(site, None)
        self.unreached.discard(site)
        for found, _, _ in self.passes:
            found.sites.pop(site, None)

    def at_split(self, split: int) -> StepRows:
        """The same contexts in other halves."""
        other = StepRows(self.step)
        for found, contexts, factor in self.passes:
            test = half_of(contexts, split=split) == 1
            for site, rows in found.sites.items():
                if rows.g is not None:
                    other.fit.setdefault(site, []).append(replace(rows.of_contexts(~test), g=None))
                    other.test.setdefault(site, []).append((rows.of_contexts(test), factor))
        return other

    def fit_half(self, site: Site) -> Half:
        """The fit half of one site, whether or not the site has gradients."""
        return Half.joined([(rows, 1.0) for rows in self.fit[site]])

    def lacking(self) -> str:
        """The reason why the step cannot be measured (no gradients, one half is empty, nothing is finite), or ""."""
        if not self.test:
            return "no gradient reaches any site (what lies before is frozen, or the loss does not depend on it)"
        fit, test = self.fit.values(), [[rows for rows, _ in parts] for parts in self.test.values()]
        if not all(any(len(part.x) for rows in half for part in rows) for half in (fit, test)):
            return f"all contexts of step {self.step} are in one half"
        finite = {
            f"no activation of step {self.step} is finite at {site}": _any_finite(rows.x for rows in mine)
            for site, mine in self.fit.items()
        }
        for site, parts in self.test.items():
            scaled = (rows.g if factor == 1.0 else rows.g * factor for rows, factor in parts if rows.g is not None)
            finite[f"no gradient of step {self.step} is finite at {site}"] = _any_finite(scaled)
        counts = on_host([{"": each} for each in finite.values()])
        return next((reason for reason, count in zip(finite, counts, strict=True) if not count[""]), "")

    def site_groups(self, most: int, moments: Mapping[str, int]) -> list[list[Site]]:
        """The sites with gradients, as many together as have `most` bytes of rows, and at least one.

        Wide sites have larger second moments than rows: `moments` are the bytes of theirs, by device.
        """
        groups: list[list[Site]] = []
        held, squares = 0, 0
        for site in (site for site in self.fit if site in self.test):
            pairs = [(rows.x, rows.g) for rows in (*self.fit[site], *(rows for rows, _ in self.test[site]))]
            size = sum(x.nbytes for pair in pairs for x in pair if x is not None)
            x = pairs[0][0]
            square = _MOMENTS * 8 * FOLDS * x.shape[1] ** 2
            room = moments.get(x.device.type, moments["cuda"])
            if not groups or held + size > most or squares + square > room:
                groups.append([])
                held, squares = 0, 0
            groups[-1].append(site)
            held, squares = held + size, squares + square
        return groups

    def halves(
        self, sites: Sequence[Site] | None = None, known: dict[Any, dict[str, Any]] | None = None
    ) -> Iterator[tuple[Site, Half, Half]]:
        """(site, fit half, test half) of each site, or of these; an error if nothing of a half is finite.

        `known` keeps the labels of rows for other calls.
        """
        known = {} if known is None else known
        every = {
            site: [Half.all_of(parts, known) for parts in ([(rows, 1.0) for rows in self.fit[site]], self.test[site])]
            for site in (self.fit if sites is None else sites)
            if site in self.test
        }
        lost_rows = on_host([{str(i): (~good).sum() for i, (_, good) in enumerate(both)} for both in every.values()])
        for (site, both), counts in zip(every.items(), lost_rows, strict=True):
            fit, test = (half.finite(good, dropped=int(counts[str(i)])) for i, (half, good) in enumerate(both))
            if not len(fit) or not len(test):
                lost = f"{fit.dropped} rows to fit on and {test.dropped} to test on were not finite"
                raise AnisoscopeError(
                    f"nothing is left at {site} in step {self.step}: {lost}; lower the learning rate, or look at the "
                    "step before the loss became NaN."
                )
            yield site, fit, test


def _any_finite(parts: Iterable[Tensor]) -> Tensor:
    """How many of these sets of rows have a finite one, on their device."""
    return torch.stack([x.isfinite().all(1).any().double() for x in parts]).sum()


def take(inputs: Mapping[str, Any], chosen: Tensor) -> dict[str, Any]:
    """Select contexts of a batch; entries that are not per context are kept."""
    tensors = [v for v in inputs.values() if isinstance(v, Tensor) and v.dim()]
    size = len(next((v for v in tensors if v.dim() > 1), tensors[0]))
    per_context = {k: v for k, v in inputs.items() if isinstance(v, Tensor) and v.dim() and len(v) == size}
    return dict(inputs) | {name: value[chosen.to(value.device)] for name, value in per_context.items()}


CONSTANT = 1e-6  # standard deviation relative to the mean, below which a coordinate is constant but for rounding
_KEPT = 1 << 23  # elements of a random order of rows that is kept for the next step
RANK_TOLERANCE = 1e-10  # relative, of squared singular values; rounding errors of float32 rows are far smaller
_BYTES = {"cpu": 1 << 28, "cuda": 1 << 30}  # of stacked activations fitted together


@dataclass(frozen=True)
class Label:
    """How a subspace was fitted; fields with empty values are left out of the variant in the table."""

    proxy: str = "semi_nmf"
    rank: int = 16
    fit: str = "refit"
    balanced: bool = False
    control: str = ""  # next, permuted: fitted controls (normal and random ones are drawn)
    of: str = ""  # what is tested if not the gradients of the rows: embedding_in, update, weight …
    batch: str = ""  # "live" for rows of training batches
    coordinates: str = ""  # "standardised"
    first: str = ""  # "out": rows at the first position are neither fitted on nor tested

    def options(self, **more: Any) -> dict[str, Any]:
        """The variant in the table."""
        found: dict[str, Any] = {"fit": self.fit, "proxy": self.proxy, "rank": self.rank}
        found |= {"balanced": 1} if self.balanced else {}
        found |= {name: value for name in _WORDS if (value := getattr(self, name))}
        return found | {k: v for k, v in more.items() if v}


_WORDS = ("control", "of", "batch", "coordinates", "first")


@dataclass(frozen=True)
class Scale:
    """Standardised coordinates: rows are divided by their standard deviations, gradients multiplied by them.

    A constant coordinate has no standard deviation and is left out, so the width d of energies in these coordinates is
    the number of those that vary.
    """

    kept: Tensor  # [d'] indices of the coordinates that vary
    deviation: Tensor  # [d'], float64

    @classmethod
    def of(cls, rows: Tensor, covariance: Tensor) -> Scale:
        """The standard deviations of rows [n, d]; below rounding of its mean a coordinate counts as constant.

        >>> x = torch.tensor([[1.0, 5.0, 2.0], [3.0, 5.0, 2.0]])
        >>> Scale.of(x, torch.cov(x.T)).kept.tolist()
        [0]
        """
        deviation = covariance.diagonal().double().clamp_min(0.0).sqrt()
        mean = rows.mean(0, dtype=torch.float64)
        kept = (deviation > CONSTANT * mean.abs()).nonzero().squeeze(1)
        return cls(kept, deviation[kept])

    def rows(self, x: Tensor) -> Tensor:
        return (x if len(self.kept) == x.shape[1] else x[:, self.kept]) / self.deviation.to(x.dtype)

    def covariance(self, C: Tensor) -> Tensor:
        """The covariance of `rows(x)` from that of x."""
        return C[self.kept[:, None], self.kept] / (self.deviation[:, None] * self.deviation)

    def gradients(self, g: Tensor) -> Tensor:
        return (g if len(self.kept) == g.shape[1] else g[:, self.kept]) * self.deviation.to(g.dtype)

    def moments(self, moments: GradientMoments) -> GradientMoments:
        """Second moments of the gradients, of which these coordinates are a function."""
        return moments.rescaled(self.kept, self.deviation)

    def to(self, device: torch.device) -> Scale:
        return Scale(self.kept.to(device), self.deviation.to(device))


@dataclass(frozen=True)
class Proxy:
    """A subspace with its concepts: `basis` d×r orthonormal, `directions` k×d, both about `centre`, the mean.

    With `scale` all are in standardised coordinates. `left_out` are the bases of the same fit without each fold of
    contexts, NaN where too little is left, with zero columns where the rows left span less.
    """

    basis: Tensor
    directions: Tensor
    centre: Tensor
    scale: Scale | None = None
    left_out: Tensor | None = None  # [FOLDS, d, r]


def fit_proxies(rows: Mapping[Site, Tensor], label: Label, *, seed: int) -> dict[Site, Proxy]:
    """The same kind of proxy at every site, from its rows [n, d]; sites of one shape are fitted together."""
    return fit_alike(rows, [label], seed=seed)[label]


def fit_alike(rows: Mapping[Site, Tensor], labels: Sequence[Label], *, seed: int) -> dict[Label, dict[Site, Proxy]]:
    """As `fit_proxies` for labels of one method and rank in one batch: rows as they are, and with permuted columns."""
    found: dict[Label, dict[Site, Proxy]] = {label: {} for label in labels}
    first = labels[0]
    for group in _same_shape(rows):
        stacked = torch.stack([rows[site] for site in group])
        check_rank(first.rank, width=stacked.shape[-1], rows=stacked.shape[-2])
        centre = stacked.mean(-2, keepdim=True)
        centred = stacked - centre
        varied = centred.flatten(1).any(1).tolist()
        for site in (site for site, varies in zip(group, varied, strict=True) if not varies):
            raise AnisoscopeError(
                f"all {len(rows[site])} rows at {site} are equal, so they span no tangent; give more, or other, data."
            )
        ranks = spanned(centred, first.rank)
        for rank in sorted(set(ranks)):  # rows that span fewer dimensions get a proxy and controls of lower rank
            numbers = [i for i, r in enumerate(ranks) if r == rank]
            mine = centred if len(numbers) == len(group) else centred[numbers]
            versions = [permute_columns(mine, seed=seed) if how.control == "permuted" else mine for how in labels]
            directions = _directions(versions, rank, method=first.proxy, seed=seed)
            places = [(label, i) for label in labels for i in numbers]
            for (label, i), part, basis in zip(places, directions, orthonormal_bases(directions), strict=True):
                found[label][group[i]] = Proxy(basis, part, centre[i, 0])
    return {label: {site: proxies[site] for site in rows} for label, proxies in found.items()}


def _directions(versions: Sequence[Tensor], rank: int, *, method: str, seed: int) -> Tensor:
    """The directions [b, k, d] of stacked sites: on a device in one batch, on the host one core for each version."""
    if versions[0].device.type != "cpu":
        return fit_directions(torch.cat(list(versions)), rank, method=method, seed=seed)
    with exact_products(versions[0].device):  # set once: parallel threads would reset it for each other
        return torch.cat(together(lambda x: fit_directions(x, rank, method=method, seed=seed), versions))


def fit_with_controls(
    rows: Mapping[Site, Tensor], label: Label, *, seed: int, covariances: Mapping[Site, Tensor] | None = None
) -> dict[Label, dict[Site, Proxy]]:
    """A proxy with its fitted controls."""
    found = fit_alike(rows, [label, replace(label, control="permuted")], seed=seed)
    how: dict[str, Any] = {"seed": seed, "covariances": covariances, "permuted": False}
    return found | fit_controls(rows, label, found[label], **how)


def covariances_of(rows: Mapping[Site, Tensor]) -> dict[Site, Tensor]:
    return {site: torch.cov(x.double().T) for site, x in rows.items()}


def fit_controls(
    rows: Mapping[Site, Tensor],
    label: Label,
    proxies: Mapping[Site, Proxy],
    *,
    seed: int,
    covariances: Mapping[Site, Tensor] | None = None,
    permuted: bool = True,
) -> dict[Label, dict[Site, Proxy]]:
    """Fitted controls of proxies: proxies of column-permuted rows, and the next principal components.

    `covariances` are those of the rows, where they are known. Sites whose rows span too few dimensions have no next
    components: the last of them would be any direction.
    """
    spread = covariances_of(rows) if covariances is None else covariances
    problems = [(spread[site], proxies[site].basis.to(spread[site].device)) for site in rows]

    def following(C: Tensor, Q: Tensor) -> tuple[Tensor, ...]:
        basis = next_components(C, Q)
        return basis, ((C @ basis) * basis).sum(0).min() / C.diagonal().sum()

    found_bases = each_decomposed(following, problems)
    shares = [found[""] for found in on_host([{"": least} for _, least in found_bases])]
    beyond = {
        site: Proxy(basis, basis.T, proxies[site].centre)
        for site, (basis, _), share in zip(rows, found_bases, shares, strict=True)
        if share > RANK_TOLERANCE
    }
    shuffled = replace(label, control="permuted")
    found = {shuffled: fit_proxies(rows, shuffled, seed=seed)} if permuted else {}
    return found | {replace(label, control="next"): beyond}


def fit_standardised(
    rows: Mapping[Site, Tensor],
    labels: Sequence[Label],
    *,
    seed: int,
    covariances: Mapping[Site, Tensor] | None = None,
) -> dict[Label, dict[Site, Proxy]]:
    """Proxies in standardised coordinates, and the next principal components after the first of them.

    Columns that were permuted there have nothing in common but their variance of 1, so that control would be a random
    one. Sites with too few coordinates that vary are left out. `covariances` are those of the rows, where known.
    """
    plain = covariances_of(rows) if covariances is None else covariances
    scales = {site: Scale.of(x, plain[site]) for site, x in rows.items()}
    wide = {site: scale for site, scale in scales.items() if len(scale.kept) >= MOST_OF_WIDTH * labels[0].rank}
    scaled = {site: scale.rows(rows[site]) for site, scale in wide.items()}
    if not scaled:
        return {}
    spread = {site: scale.covariance(plain[site]) for site, scale in wide.items()}
    found = {labels[0]: fit_proxies(scaled, labels[0], seed=seed)}
    for label in labels[1:]:  # principal components need no further pass over the rows
        alike = found[labels[0]]
        pca = label.proxy == "pca"
        found[label] = _principal(spread, alike) if pca else fit_proxies(scaled, label, seed=seed)
    found |= fit_controls(scaled, labels[0], found[labels[0]], seed=seed, covariances=spread, permuted=False)
    return {label: {s: replace(p, scale=wide[s]) for s, p in proxies.items()} for label, proxies in found.items()}


def _principal(covariances: Mapping[Site, Tensor], alike: Mapping[Site, Proxy]) -> dict[Site, Proxy]:
    """PCA from covariances, with as many directions as proxies of the same rows have, and about the same centre."""

    def leading(C: Tensor, like: Tensor) -> tuple[Tensor, ...]:
        axes = leading_eigenvectors(C, len(like))
        largest = axes.gather(0, axes.abs().argmax(0, keepdim=True))
        directions = torch.where(largest < 0, -axes, axes).mT  # signs as those of other principal components
        return directions.to(like.dtype), orthonormal_bases(directions[None])[0]

    problems = [(C, alike[site].directions.to(C.device)) for site, C in covariances.items()]
    parts = zip(covariances, each_decomposed(leading, problems), strict=True)
    return {site: Proxy(basis, directions, alike[site].centre) for site, (directions, basis) in parts}


def spanned(centred: Tensor, most: int) -> list[int]:
    """The rank of each matrix of [b, n, d], up to `most`, from projections on most + 1 random directions.

    >>> spanned(torch.eye(6)[None, :2] - torch.eye(6)[None, :2].mean(1, keepdim=True), 3)
    [1]
    """
    d, generator = centred.shape[-1], torch.Generator().manual_seed(0)
    probes = torch.randn(d, min(d, most + 1), generator=generator, dtype=torch.float64)
    projected = (centred @ probes.to(centred.device, centred.dtype)).double()
    values = small_eigenvalues(projected.mT @ projected)
    ranks = (values > RANK_TOLERANCE * values[:, -1:]).sum(1).tolist()
    return [max(1, min(most, int(number))) for number in ranks]


def _same_shape(rows: Mapping[Site, Tensor]) -> list[list[Site]]:
    """Groups of sites whose rows have the same shape, limited by memory."""
    groups: dict[tuple[int, ...], list[list[Site]]] = {}
    for site, x in rows.items():
        chunks = groups.setdefault(tuple(x.shape), [[]])
        if len(chunks[-1]) >= max(1, _BYTES.get(x.device.type, _BYTES["cpu"]) // max(1, x.nbytes)):
            chunks.append([])
        chunks[-1].append(site)
    return [chunk for chunks in groups.values() for chunk in chunks]


def permute_columns(x: Tensor, *, seed: int) -> Tensor:
    """Permute every column independently: keeps the marginals of the coordinates, removes their dependence."""
    n, d = x.shape[-2:]
    order = (_column_orders if n * d <= _KEPT else _orders)(n, d, seed, str(x.device))
    return x.gather(-2, order.expand_as(x))


def _orders(n: int, d: int, seed: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 7919)
    keys = torch.rand(n, d, generator=generator).to(device)
    columns = keys.T.contiguous()  # sorted where they lie together
    return columns.argsort(dim=1, stable=keys.device.type != "cpu").T.contiguous()  # some keys occur twice


_column_orders = lru_cache(maxsize=2)(_orders)  # of the rows that are fitted on, the same at every step


def rows_to_fit(half: Half, *, most: int) -> Tensor:
    """The rows to fit on: all of them, or the `most` with the smallest hashes."""
    return half.fewer(most).x


def balanced_rows(half: Half, bins: Tensor, *, most: int) -> Half | None:
    """Equally many rows of every frequency bin (those with the smallest hashes); None if a bin has too few."""

    def chosen() -> Tensor | None:
        label, order = bin_of(half.token, bins), half.order().argsort(stable=True)
        by_bin = [order[label[order] == b] for b in bins.unique().tolist() if b >= 0]
        least = min((len(rows) for rows in by_bin), default=0)
        least = min(least, most // max(1, len(by_bin)))
        return None if least < 2 else torch.cat([rows[:least] for rows in by_bin])

    rows: Tensor | None = half.once(("even", most), chosen)
    return None if rows is None else half.at(rows, ("even", most))


def key(site: Site) -> tuple[int, str, str, str]:
    """A site as a tuple of plain values, for saving."""
    return site.layer, site.kind, site.stack, site.name


def proxy_state(proxies: Mapping[Site, Proxy]) -> dict[Any, dict[str, Tensor]]:
    parts = ("basis", "directions", "centre")
    saved = {key(site): {name: getattr(proxy, name).cpu() for name in parts} for site, proxy in proxies.items()}
    for site, proxy in proxies.items():
        if proxy.scale is not None:
            saved[key(site)] |= {name: value.cpu() for name, value in vars(proxy.scale).items()}
        if proxy.left_out is not None:
            saved[key(site)]["left_out"] = proxy.left_out.cpu()
    return saved


def load_proxies(state: Mapping[Any, Mapping[str, Tensor]]) -> dict[Site, Proxy]:
    found = {}
    for k, parts in state.items():
        scale = Scale(parts["kept"], parts["deviation"]) if "kept" in parts else None
        found[Site(*k)] = Proxy(parts["basis"], parts["directions"], parts["centre"], scale, parts.get("left_out"))
    return found
