"""One line per number that a command measures from something else than rows: planted inputs, the answer on paper.

`of_rows` computes the same number from activations and gradients; a metric that declares an invariance has one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anisoscope.metrics import attention, curvature, frequency, performance, tangent, training
from anisoscope.metrics.tangent import Draws, growth, second_moment
from support.gradients import noise

RANK = 3


@dataclass(frozen=True)
class KnownMeasured:
    """`function(*arguments())` is `expected`; `number` reads what it returns."""

    function: Callable[..., Any]
    arguments: Callable[[], tuple[Any, ...]]
    expected: float
    number: Callable[[Any], float] = float
    of_rows: Callable[[Tensor, Tensor], float] | None = None


def diagonal(*values: float) -> Tensor:
    return torch.diag(torch.tensor(values, dtype=torch.float64))


def axes(*chosen: int, width: int = 4) -> Tensor:
    """A basis of some coordinate axes: d×r."""
    return torch.eye(width, dtype=torch.float64)[:, list(chosen)]


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def principal(x: Tensor, rank: int = RANK) -> Tensor:
    """The first principal directions of some rows: d×r."""
    return torch.linalg.eigh(torch.cov(x.T))[1][:, -rank:].flip(1)


def _power_law() -> frequency.TypeSpread:
    f = torch.arange(1.0, 30.0).double()
    return frequency.TypeSpread(f.log(), f**-0.25, torch.ones(29).double())


def _falling() -> frequency.TypeSpread:
    f = torch.arange(1.0, 30.0).double().log()
    return frequency.TypeSpread(f, 9.0 - 2.0 * f, torch.ones(29).double())


def _spread(x: Tensor, g: Tensor) -> frequency.TypeSpread:
    """Rows as occurrences of sixteen types, frequent ones first."""
    tokens, counts = torch.arange(len(x)) % 16, torch.arange(1, 17).flip(0) ** 2
    return frequency.contextual_spread(x, tokens, counts, order=torch.arange(len(x)))


def _energy(x: Tensor, g: Tensor) -> float:
    return float(tangent.gradient_energy(second_moment(g), principal(x)))


def _drawn(M: Tensor) -> Any:
    return Draws(len(M), RANK, draws=99, seed=1).of(M)


def _ratio(x: Tensor, g: Tensor) -> float:
    return tangent.gradient_ratio(_energy(x, g), float(_drawn(second_moment(g)).normal(principal(x)).energy.mean()))


def _p(x: Tensor, g: Tensor) -> float:
    return tangent.gradient_p(_energy(x, g), _drawn(second_moment(g)).random().energy)


def _grown(x: Tensor, g: Tensor) -> Tensor:
    """What a second set of activations has more of than the first."""
    return growth(torch.cov(x.T), torch.cov(g.T))[0]


def _amplified(x: Tensor, g: Tensor) -> float:
    return float(tangent.amplification(_grown(x, g), principal(x)))


def _amplified_p(x: Tensor, g: Tensor) -> float:
    return tangent.amplification_p(_amplified(x, g), _drawn(_grown(x, g)).random().energy)


def _first(found: np.ndarray) -> float:
    return float(found[0])


_ISO = 49 / (3.55**2 + 3 * 1.15**2)  # participation ratio of 0.8 C + 0.2 tr(C)/d · I, C = diag(4, 1, 1, 1)
_SEEN = torch.tensor([True, True, True, False])
KNOWN_MEASURED: dict[str, KnownMeasured] = {
    "gradient_energy": KnownMeasured(
        tangent.gradient_energy, lambda: (diagonal(3, 0, 1, 0), axes(0, 1)), 0.75, of_rows=_energy
    ),
    "gradient_enrichment": KnownMeasured(
        tangent.gradient_enrichment,
        lambda: (0.75, 4, 2),
        1.5,
        of_rows=lambda x, g: tangent.gradient_enrichment(_energy(x, g), 8, RANK),
    ),
    "gradient_ratio": KnownMeasured(tangent.gradient_ratio, lambda: (0.6, 0.2), 3.0, of_rows=_ratio),
    "gradient_p": KnownMeasured(tangent.gradient_p, lambda: (0.5, numbers(0.2, 0.5, 0.5, 0.7)), 0.8, of_rows=_p),
    "gradient_p_holm": KnownMeasured(tangent.gradient_p_holm, lambda: ([0.01, 0.04, 0.03],), 0.06, lambda p: p[1]),
    "gradient_share": KnownMeasured(
        tangent.gradient_share,
        lambda: (diagonal(4, 0, 0, 0), axes(0)),
        0.75,  # C − I = diag(3, −1, −1, −1): 9 of 12
        of_rows=lambda x, g: float(tangent.gradient_share(second_moment(g), principal(x))),
    ),
    "gradient_isoscore_gain": KnownMeasured(
        tangent.gradient_isoscore_gain,
        lambda: (diagonal(4, 1, 1, 1), axes(0)),
        1.0 - (_ISO - 1) / 3,  # what is left is isotropic
        of_rows=lambda x, g: float(tangent.gradient_isoscore_gain(second_moment(g), principal(x))),
    ),
    "gradient_alignment": KnownMeasured(
        tangent.gradient_alignment,
        lambda: (diagonal(3, 1), diagonal(1, 0)),
        1.5,  # 2 · 3 / (4 · 1)
        of_rows=lambda x, g: float(tangent.gradient_alignment(torch.cov(x.T), second_moment(g))),
    ),
    "gradient_cosine": KnownMeasured(
        tangent.gradient_cosine,
        lambda: (diagonal(1, 1)[None], diagonal(1, 0)[None]),
        math.sqrt(0.5),
        of_rows=lambda x, g: float(tangent.gradient_cosine(torch.cov(x.T)[None], second_moment(g)[None])),
    ),
    "amplification": KnownMeasured(
        tangent.amplification,
        lambda: (growth(diagonal(1, 2, 1, 9), diagonal(4, 3, 1, 0))[0], axes(0)),
        0.75,  # 3 of 3 + 1; what shrank does not count
        of_rows=_amplified,
    ),
    "amplification_p": KnownMeasured(
        tangent.amplification_p, lambda: (0.9, numbers(0.2, 0.5, 0.7)), 0.25, of_rows=_amplified_p
    ),
    "proxy_overlap": KnownMeasured(
        tangent.proxy_overlap,
        lambda: (axes(0, 1), axes(1, 2)),
        0.5,
        of_rows=lambda x, g: tangent.proxy_overlap(principal(x), principal(g)),
    ),
    "proxy_stability": KnownMeasured(
        tangent.proxy_stability,
        lambda: (axes(0, 1), torch.stack([axes(0, 1), axes(1, 2)])),
        0.75,
        of_rows=lambda x, g: tangent.proxy_stability(principal(x), torch.stack([principal(g), principal(x)])),
    ),
    "concept_turn": KnownMeasured(
        tangent.concept_turn,
        lambda: (axes(0, 1), axes(1, 2)),
        45.0,  # of 0° and 90°
        of_rows=lambda x, g: tangent.concept_turn(principal(x), principal(g)),
    ),
    "concept_match": KnownMeasured(
        tangent.concept_match,
        lambda: (axes(0, 1).T, torch.cat([axes(1).T, axes(0).T + axes(2).T])),
        (1 + math.sqrt(0.5)) / 2,
        of_rows=lambda x, g: tangent.concept_match(x[:5], g[:5]),
    ),
    "frequency_spread": KnownMeasured(
        lambda found: frequency.frequency_spread(found, method="pearson", normalised=False),
        lambda: (_falling(),),
        -1.0,
        lambda found: found.value,
        lambda x, g: frequency.frequency_spread(_spread(x, g), method="pearson", normalised=True).value,
    ),
    "frequency_spread_p": KnownMeasured(
        frequency.frequency_spread_p,
        lambda: (frequency.frequency_spread(_falling(), method="spearman", normalised=False),),
        0.001,  # no permutation of 999 is as good
        of_rows=lambda x, g: frequency.frequency_spread_p(
            frequency.frequency_spread(_spread(x, g), method="pearson", normalised=False)
        ),
    ),
    "frequency_beta": KnownMeasured(
        frequency.frequency_beta,
        lambda: (_power_law(),),
        0.25,
        lambda found: found.value,
        lambda x, g: frequency.frequency_beta(_spread(x, g)).value,
    ),
    "unigram_entropy": KnownMeasured(frequency.unigram_entropy, lambda: (torch.tensor([2, 1, 0, 1]),), 1.5),
    "score_magnitude": KnownMeasured(attention.score_magnitude, lambda: (numbers(1, -3, 5, 99), _SEEN), 3.0),
    "attention_median": KnownMeasured(attention.attention_median, lambda: (numbers(0.7, 0.1, 0.2, 0), _SEEN), 0.2),
    "attention_min": KnownMeasured(attention.attention_min, lambda: (numbers(0.7, 0.1, 0.2, 0), _SEEN), 0.1),
    "loss": KnownMeasured(training.loss, lambda: (numbers(1, 3),), 2.0),
    "target_entropy": KnownMeasured(
        frequency.target_entropy, lambda: (torch.tensor([4, 2, 0, 1]), torch.tensor([0.5, 0.5, 7.0, 1.0])), 1.5
    ),
    "weighted_probe_loss": KnownMeasured(training.weighted_probe_loss, lambda: (6.0, 4), 1.5),
    "constant_loss": KnownMeasured(  # (3 + ½)/(3 + 1 + 1) of the first of two types
        training.constant_loss, lambda: (torch.tensor([3, 1]), torch.tensor([0, 0, 0, 0])), -math.log(3.5 / 5)
    ),
    "probe_loss": KnownMeasured(training.probe_loss, lambda: (6.0, 4), 1.5),
    "gradient_norm": KnownMeasured(training.gradient_norm, lambda: ([numbers(3.0), torch.tensor([[4.0]])],), 5.0),
    "learning_rate": KnownMeasured(training.learning_rate, lambda: ([{"lr": 0.1}, {"lr": 1.0}],), 0.1),
    "checkpoint": KnownMeasured(training.checkpoint, lambda: (["it holds NaN"],), 0.0),
    "lm_loss": KnownMeasured(performance.lm_loss, lambda: (numbers(1, 2, 3),), 2.0),
    "probe_accuracy": KnownMeasured(performance.probe_accuracy, lambda: (numbers(1, 0, 1, 1),), 0.75),
    "probe_selectivity": KnownMeasured(
        performance.probe_selectivity, lambda: (numbers(1, 1, 0, 1), numbers(0, 1, 0, 0)), 0.5
    ),
    "performance_correlation": KnownMeasured(
        performance.performance_correlation, lambda: (np.arange(4.0), np.array([1.0, 8.0, 64.0, 27.0]), "spearman"), 0.8
    ),
    "curvature_variance": KnownMeasured(
        curvature.curvature_variance,
        lambda: (torch.tensor([[1.0, 7.0], [-1.0, 9.0]]), torch.tensor([[1.0], [0.0]])),
        2.0,
        of_rows=lambda x, g: curvature.curvature_variance(x, principal(g)),
    ),
    "curvature_floor": KnownMeasured(
        curvature.curvature_floor,
        lambda: (torch.tensor([[1.0, 7.0], [-1.0, 11.0]]), torch.tensor([[0.0], [1.0]])),
        8.0,
        of_rows=lambda x, g: curvature.curvature_floor(x, principal(g)),
    ),
    "curvature_slope": KnownMeasured(
        curvature.curvature_slope, lambda: (np.array([1.0, 2.0, 4.0]), np.array([[3.0, 12.0, 48.0]])), 2.0, _first
    ),
    "curvature_constant": KnownMeasured(
        curvature.curvature_constant, lambda: (np.array([[2.0, 8.0]]), np.array([1.0, 1.0])), 4.0, _first
    ),
    "curvature_visibility": KnownMeasured(
        curvature.curvature_visibility,
        lambda: (numbers(1, 1), numbers(5, 3)),
        0.25,
        of_rows=lambda x, g: curvature.curvature_visibility(
            (x @ principal(g)[:, 1:]).square(), (x @ principal(g)[:, :1]).square()
        ),
    ),
    "curvature_visibility_expected": KnownMeasured(
        curvature.curvature_visibility_expected, lambda: (numbers(1, 2), numbers(4, 4), numbers(0.5, 0.5), 100), 3 / 8
    ),
    "curvature_attenuation": KnownMeasured(curvature.curvature_attenuation, lambda: (1.0, 4.0), 0.25),
    "local_pca_angle": KnownMeasured(
        curvature.local_pca_angle, lambda: (numbers(3, 1, math.nan), numbers(5, 1, 9)), 3.0
    ),
    "curvature_error": KnownMeasured(curvature.curvature_error, lambda: (numbers(0.2, 0.9, 0.4), torch.ones(3)), 0.4),
    "curvature_recovered": KnownMeasured(
        curvature.curvature_recovered, lambda: (numbers(0.2, 0.9, math.nan, 0.4), torch.ones(4)), 0.5
    ),
    "curvature_unmeasured": KnownMeasured(
        curvature.curvature_unmeasured, lambda: (numbers(math.nan, 1, 1, 1), torch.ones(4)), 0.25
    ),
    "parabola_tangent": KnownMeasured(curvature.parabola_tangent, lambda: (9.0, 1.0), 0.9),
    "manifold_gradient": KnownMeasured(  # rows (3, 0), (1, 1) with g = 1, −1: the mean is (1, −½)
        curvature.manifold_gradient,
        lambda: (numbers(1, -1)[:, None], torch.tensor([[3.0, 0.0], [1.0, 1.0]]).double(), axes(0, width=2)),
        1.0,
        of_rows=lambda x, g: curvature.manifold_gradient(g, x, principal(x)),
    ),
    "manifold_gradient_slope": KnownMeasured(
        curvature.manifold_gradient_slope,
        lambda: (np.array([1.0, 2.0]), np.array([[3.0, 6.0]])),
        1.0,
        _first,
    ),
    "manifold_gradient_tightness": KnownMeasured(
        curvature.manifold_gradient_tightness, lambda: (np.array([[1.0, 4.0]]), np.array([[2.0, 8.0]])), 0.5, _first
    ),
    "tangent_variance_share": KnownMeasured(  # inputs vary alike along both axes, the layer reads the first with 3, 1
        curvature.tangent_variance_share,
        lambda: (numbers(3, 1)[:, None], torch.tensor([[1.0, 1.0], [-1.0, -1.0]]).double(), axes(0, width=2)),
        0.9,
        of_rows=lambda x, g: curvature.tangent_variance_share(principal(x, 4)[:, 1:], x, principal(x)),
    ),
    "pinning_distance": KnownMeasured(
        curvature.pinning_distance,
        lambda: (torch.tensor([[3.0, 0.0], [-3.0, 0.0]]).double(),),
        3.0,
        of_rows=lambda x, g: float(curvature.pinning_distance(x)),
    ),
    "pinning_slope": KnownMeasured(curvature.pinning_slope, lambda: (numbers(4, 2, 1), numbers(1, 4, 16)), -0.5),
}


def planted(seed: int) -> tuple[Tensor, Tensor]:
    """Activations and gradients of 240 rows that know a little of each other: [240, 8] both."""
    mix = noise(8, 8, seed=seed) * torch.arange(8, 0, -1).double()
    x = noise(240, 8, seed=seed + 10) @ mix + 0.5
    return x, x @ noise(8, 8, seed=seed + 20) * 0.3 + noise(240, 8, seed=seed + 30) @ mix.T + 0.1
