"""`anisoscope selftest`: metrics on synthetic data with known answers, on the user's own device.

Every metric is checked against a value known by construction; known pitfalls (padding, duplicates, a common mean of
norm 3000, rows that are not finite) are checked through the same code that a profile runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anisoscope.measurement.measure import measure
from anisoscope.metrics.catalogue import registry
from anisoscope.metrics.tangent import Draws, gradient_energy, gradient_p, second_moment
from anisoscope.models.placement import choose_device
from anisoscope.numerics.linalg import orthonormal_basis, subspace_overlap
from anisoscope.numerics.semi_nmf import semi_nmf
from anisoscope.option import check_values

_RAW = (("baseline", False),)
_LENGTHS = (40, 12, 25, 31)  # of the contexts of the tiny model


@dataclass(frozen=True)
class ControlResult:
    """The outcome of one control; `seen` describes measured and expected value."""

    metric: str
    control: str
    seen: str
    passed: bool


@dataclass(frozen=True)
class PlantedControl:
    """A metric on synthetic rows, whose value must be within `tolerance` of `expected`."""

    metric: str
    name: str
    rows: Callable[[Planted], Tensor]
    expected: float
    tolerance: float
    options: tuple[tuple[str, object], ...] = ()
    tokens: Callable[[Planted], Tensor] | None = None
    contexts: Callable[[Planted], Tensor] | None = None


@dataclass(frozen=True)
class Planted:
    """Rows with known geometry, made on the host from a seed and moved to the device."""

    device: torch.device
    seed: int

    def normal(self, *shape: int, salt: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.seed + salt)
        return torch.randn(*shape, generator=generator)

    def round(self) -> Tensor:
        return self.normal(20_000, 16).to(self.device)

    def spectrum(self) -> Tensor:
        """Rows whose centred singular values are exactly in the ratio 10 : 2 : 1."""
        left = self.normal(400, 3, salt=1).double()
        left, _ = torch.linalg.qr(left - left.mean(0))
        right, _ = torch.linalg.qr(self.normal(6, 3, salt=2).double())
        return (left * torch.tensor([10.0, 2.0, 1.0], dtype=torch.float64) @ right.T).float().to(self.device)

    def plane(self, dimension: int = 5, width: int = 64) -> Tensor:
        """A flat Gaussian cloud of known dimension in a wide space."""
        return (self.normal(4096, dimension, salt=3) @ self.normal(dimension, width, salt=4)).to(self.device)

    def wide_plane(self) -> Tensor:
        """A space so wide that the cloud has about equal variance in all its 20 directions."""
        return self.plane(20, 1024)

    def cone(self) -> Tensor:
        """Unit rows at a known angle to a common axis: the mean cosine of pairs is 0.64."""
        side = torch.nn.functional.normalize(self.normal(20_000, 63, salt=5), dim=1)
        return torch.cat([torch.full((20_000, 1), 0.8), 0.6 * side], dim=1).to(self.device)

    def types(self) -> Tensor:
        """100 token types of 50 equal rows each."""
        return self.normal(100, 16, salt=6).repeat_interleave(50, 0).to(self.device)

    def labels(self) -> Tensor:
        return torch.arange(100).repeat_interleave(50)

    def far(self) -> Tensor:
        """The plane under a common mean of norm 3000."""
        rows = self.plane().double()
        return (rows + 3000.0 / math.sqrt(rows.shape[1])).float()

    def doubled(self) -> Tensor:
        """The plane with one row in twenty repeated."""
        rows = self.plane()
        return torch.cat([rows, rows[:205]])

    def broken(self) -> Tensor:
        """The plane with rows that are not finite."""
        rows = self.plane().clone()
        rows[::100, 0] = torch.nan
        rows[50::100, 1] = torch.inf
        return rows

    def lines(self) -> Tensor:
        """Three distant clusters, each a line."""
        steps = self.normal(200, 1, salt=8)
        return torch.cat([100.0 * torch.eye(4)[i] + steps * torch.eye(4)[3] for i in range(3)]).to(self.device)

    def ring(self) -> Tensor:
        """Rows at equal distances on a circle: all have the same number of neighbours."""
        angle = torch.arange(1000) * (2 * math.pi / 1000)
        return torch.stack([angle.cos(), angle.sin()], dim=1).to(self.device)


def controls(seed: int = 0) -> list[PlantedControl]:
    """One or more controls for each metric of plain rows; expected values hold for the rows of this seed."""
    plane = Planted(torch.device("cpu"), seed).plane().double()
    sigma = torch.linalg.svdvals(plane - plane.mean(0))
    rows: list[tuple[Any, ...]] = [
        ("svd_ratio", "spectrum 10 : 2 : 1", Planted.spectrum, 10 / 13, 1e-6),
        ("svd_ratio_squared", "spectrum 10 : 2 : 1", Planted.spectrum, 100 / 105, 1e-6),
        ("participation_ratio", "spectrum 10 : 2 : 1", Planted.spectrum, 105**2 / 10017, 1e-5),
        ("participation_ratio", "round cloud", Planted.round, 16, 0.05),
        ("iso_score", "round cloud", Planted.round, 1, 0.005),
        ("iso_score_star", "round cloud", Planted.round, 1, 0.005),
        ("effective_rank", "round cloud", Planted.round, 16, 0.01),
        ("rank_me", "round cloud", Planted.round, 16, 0.01),
        ("stable_rank", "spectrum 10 : 2 : 1", Planted.spectrum, 1.05, 1e-5),
        ("singular_entropy", "round cloud", Planted.round, 0, 0.001),
        ("average_cosine", "round cloud (null)", Planted.round, 0, 0.001),
        ("average_cosine", "cone of cosine 0.64", Planted.cone, 0.64, 0.001),
        ("average_cosine_centred", "cone, mean removed", Planted.cone, 0, 0.001),
        ("drift", "cone of mean norm 0.8", Planted.cone, 0.8, 0.001),
        ("relative_drift", "cone of mean norm 0.8", Planted.cone, 0.8, 0.001),
        ("drift_alignment", "cone: no variance along the mean", Planted.cone, 0, 0.01),
        ("explained_by_drift", "cone: all of it", Planted.cone, 1, 0.001),
        ("mean_norm", "cone of unit rows", Planted.cone, 1, 1e-6),
        ("largest_norm", "cone of unit rows", Planted.cone, 1, 1e-6),
        ("rogue_share", "one common coordinate", Planted.cone, 1, 0.01, (("top", 1),)),
        ("massive_activation", "round cloud", Planted.round, 6.7, 1.5),
        ("partition_isotropy", "round cloud", Planted.round, 1, 0.12),
        ("two_nn", "plane of dimension 5", Planted.plane, 5, 0.4),
        ("two_nn", "plane of dimension 20, calibrated", Planted.wide_plane, 20, 2.5, (("calibrated", True),)),
        ("two_nn", "5 % exact duplicates", Planted.doubled, 5, 0.4),
        ("two_nn", "common mean of norm 3000", Planted.far, 5, 0.4),
        ("two_nn", "2 % rows not finite", Planted.broken, 5, 0.4),
        ("svd_ratio", "common mean of norm 3000", Planted.far, float(sigma[0] / sigma.sum()), 0.001),
        ("levina_bickel", "plane of dimension 5", Planted.plane, 5, 0.4),
        ("gride", "plane of dimension 5", Planted.plane, 5, 0.4),
        ("local_anisotropy", "round cloud", Planted.round, 1 / 16, 0.06),
        ("local_anisotropy", "three lines, one cluster each", Planted.lines, 1, 1e-6, (("clusters", 3),)),
        ("hubness", "ring: all rows alike", Planted.ring, 0, 1e-6),
        ("self_similarity", "equal occurrences", Planted.types, 1, 0.06, (), Planted.labels),
        ("max_explainable_variance", "equal occurrences", Planted.types, 1, 0.05, _RAW, Planted.labels),
        ("context_similarity", "equal rows in a context", Planted.types, 1, 0.02, (), None, Planted.labels),
    ]
    return [PlantedControl(*row) for row in rows]


def run_selftest(device: str = "auto", *, seed: int = 0) -> Iterator[ControlResult]:
    """All controls, one after the other."""
    check_values(run_selftest, {"device": device, "seed": seed}, {"seed": 0})
    planted = Planted(choose_device(device), seed)
    known = registry()
    for control in controls(seed):
        metric = known[control.metric]
        tokens = control.tokens(planted) if control.tokens else None
        contexts = control.contexts(planted) if control.contexts else None
        options: dict[str, Any] = dict(control.options)
        estimate = metric(control.rows(planted), tokens=tokens, contexts=contexts, **options)
        passed = abs(estimate.value - control.expected) <= control.tolerance
        dropped = f", {estimate.dropped} rows dropped" if estimate.dropped else ""
        seen = f"{estimate.value:.4f}, expected {control.expected:.4f} ± {control.tolerance:g}{dropped}"
        yield ControlResult(control.metric, control.name, seen, passed)
    yield from _gradient_controls(planted)
    yield from _model_controls(planted)


def _gradient_controls(planted: Planted) -> Iterator[ControlResult]:
    """Gradients inside a known subspace, isotropic gradients, and semi-NMF recovering a known span."""
    directions = planted.normal(8, 64, salt=5).to(planted.device)
    basis = orthonormal_basis(directions)
    inside = second_moment(planted.normal(512, 8, salt=6).to(planted.device) @ directions)
    share = float(gradient_energy(inside, basis))
    p = gradient_p(share, Draws(64, 8, device=str(planted.device)).of(inside).random().energy)
    seen = f"energy {share:.6f}, expected 1; p {p:.3f}, expected 0.001"
    yield ControlResult("gradient_energy", "all inside", seen, abs(share - 1) < 1e-4 and p == 1 / 1000)
    null = float(gradient_energy(second_moment(planted.normal(4096, 64, salt=7).to(planted.device)), basis)) * 64 / 8
    seen = f"enrichment {null:.4f}, expected 1.0000 ± 0.06"
    yield ControlResult("gradient_enrichment", "knows nothing of it", seen, abs(null - 1) < 0.06)
    codes = planted.normal(512, 8, salt=8).abs().to(planted.device)
    overlap = subspace_overlap(semi_nmf(codes @ directions, 8).directions.cpu(), directions.cpu())
    yield ControlResult("semi_nmf", "planted span", f"overlap {overlap:.6f}, expected 1", overlap > 0.999)


def _model_controls(planted: Planted) -> Iterator[ControlResult]:
    """Masked and unmasked padding, and attention, on a tiny random model."""
    from transformers import BertConfig, BertModel

    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 64, "vocab_size": 64, "max_position_embeddings": 64}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(planted.seed)
        model = BertModel(BertConfig(**sizes)).eval().to(planted.device)
        ids = torch.randint(1, 64, (4, 40)).to(planted.device)

    def cosine(*batches: dict[str, Tensor]) -> float:
        table = measure(model, batches, sites=["resid"], metrics=["average_cosine"], alone=True)
        return table.value(layer=2, metric="average_cosine", variant="")

    alone = [{"input_ids": ids[i : i + 1, :n]} for i, n in enumerate(_LENGTHS)]
    mask = torch.stack([torch.arange(40) < n for n in _LENGTHS]).long().to(planted.device)
    padded = {"input_ids": ids.where(mask.bool(), 0), "attention_mask": mask}
    unmasked = {"input_ids": padded["input_ids"], "attention_mask": torch.ones_like(mask)}
    apart, together, wrong = cosine(*alone), cosine(padded), cosine(unmasked)
    near, off = abs(apart - together), abs(apart - wrong)
    yield ControlResult("average_cosine", "padding does not count", f"difference {near:.1e}", near < 1e-4)
    yield ControlResult("average_cosine", "padding would count if unmasked", f"difference {off:.1e}", off > 1e-3)
    yield from _attention_controls(model, padded)


def _attention_controls(model: torch.nn.Module, batch: dict[str, Tensor]) -> Iterator[ControlResult]:
    """With all query weights zero, attention is uniform: entropy 1, sharpness 0, the first key gets 1/m."""
    for name, value in model.named_parameters():
        if ".query." in name or ".key." in name:
            torch.nn.init.constant_(value, float(name.endswith("bias")))
    table = measure(model, [batch], sites=["query", "key", "scores"], attention_rows=0).where(layer=1, head=0)
    first = sum(n * (1 / n) for n in _LENGTHS) / sum(_LENGTHS)
    known = {"attention_entropy": 1.0, "attention_sharpness": 0.0, "first_key_mass": first, "score_spread": 0.0}
    for name, expected in {**known, "qk_cosine": 1.0}.items():
        seen = table.value(metric=name, variant="")
        description = f"{seen:.4f}, expected {expected:.4f}"
        yield ControlResult(name, "uniform attention", description, abs(seen - expected) < 1e-4)
