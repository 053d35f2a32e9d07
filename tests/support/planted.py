"""For every claim: a table on which it must hold, tables without the effect but with real noise, and the opposite.

A new claim gets an entry in `PLANTED`, or in the table of its paper (`planted_shape`, `planted_inherent`,
`planted_theory`); the contract test tests/contract/test_planted.py fails for a claim without one. A null is a function
of a seed, which also chooses among sizes (layers, models, steps, noise), so that 200 seeds cover them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from anisoscope.claims.catalogue import claims
from anisoscope.results.query import Table
from support.fake_training import FEW_STEPS, NULL, training_table
from support.planted_inherent import INHERENT
from support.planted_shape import SHAPE
from support.planted_theory import THEORY
from support.specimen import Specimen


def run(claim: str, *, seed: int = 0, **effects: Any) -> Table:
    """A small monitored training with the metrics of a claim, and the losses."""
    only = (*claims()[claim].metrics, "loss", "probe_loss", "constant_loss")
    small = {"models": ("decoder",), "steps": FEW_STEPS, "layers": 2, "only": only, "proxies": ("semi_nmf", "pca")}
    small |= {"bins": claim == "frequent_most_enriched"}
    return training_table(**{**small, "seed": seed, **effects})


def tangent(
    claim: str,
    *,
    planted: dict[str, Any] | None = None,
    opposite: dict[str, Any],
    nulls: dict[str, dict[str, Any]] | None = None,
    **more: Any,
) -> Specimen:
    """The specimen of a claim about gradients: effects of `fake_training.Effects` that are planted and their opposite.

    The null has no effect at all and noise that is small or large, with normal or heavy tails; `nulls` are further
    kinds of nothing, such as an effect that is gone at the end.
    """

    def kind(effects: dict[str, Any]) -> Callable[[int], Table]:
        def null(seed: int) -> Table:
            noise = {"noise": (0.005, 0.02)[seed % 2], "scatter": (0.15, 0.3)[seed // 2 % 2], "tails": seed % 3 == 0}
            return run(claim, seed=seed, **{**more, **effects, **noise})

        return null

    kinds = {name: kind(effects) for name, effects in {"null": NULL, **(nulls or {})}.items()}
    return Specimen(lambda: run(claim, **more, **(planted or {})), kinds, lambda: run(claim, **{**more, **opposite}))


BOTH = {"models": ("decoder", "encoder")}
LOST: dict[str, Any] = {"fade": 1.0}  # the effect is there early and in the mean over steps, but gone at the end
EQUAL: dict[str, Any] = {"permuted": 1.0}  # and so it is in directions fitted on column-permuted activations
PLANTED: dict[str, Specimen] = {
    "tangent_energy": tangent("tangent_energy", opposite={"strength": -0.05}, nulls={"lost": LOST, "equal": EQUAL}),
    "anisotropy_share": tangent("anisotropy_share", opposite={"below": True}, nulls={"lost": LOST}),
    "emerges_early_and_persists": tangent(
        "emerges_early_and_persists", opposite={"start": 1.0}, nulls={"lost": LOST, "equal": EQUAL}
    ),
    "amplified": tangent("amplified", opposite={"amplification": 0.0}),
    "embedding_updates_aligned": tangent("embedding_updates_aligned", opposite={"update": -0.02}),
    "frequent_most_enriched": tangent("frequent_most_enriched", opposite={"frequency": -0.5}),
    "rare_tokens_spread": tangent("rare_tokens_spread", opposite={"spread": 0.4, "spread_time": 0.4}),
    "encoder_and_decoder": tangent(
        "encoder_and_decoder", opposite={"strength": -0.05}, nulls={"lost": LOST, "equal": EQUAL}, **BOTH
    ),
    "semi_nmf_beats_pca": tangent("semi_nmf_beats_pca", planted={"pca": -0.1}, opposite={"pca": 0.1}),
    "frequency_intervention": tangent(
        "frequency_intervention",
        opposite={"flat": 1.6},
        nulls={"one seed": {"strength": 1.0, "flat": 1.0, "seeds": (0,), "seed_sd": 0.2}},
        models=("decoder", "decoder-flat", "decoder-flatloss"),
        seeds=(0, 1, 2),
        entropies=True,
    ),
    **SHAPE,
    **INHERENT,
    **THEORY,
}
