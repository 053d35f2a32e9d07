"""Tables with planted effects, and what a claim says of them."""

from __future__ import annotations

from typing import Any

from anisoscope.claims.catalogue import claims, evaluate_claims
from anisoscope.claims.engine.claim import Verdict
from support.fake_training import table

ENERGY = ("gradient_energy", "gradient_enrichment", "gradient_p", "gradient_p_holm")


def verdict(claim: str, **effects: Any) -> Verdict:
    """The first verdict on a claim, on a table of the metrics it reads."""
    return evaluate_claims(table(**{"only": claims()[claim].metrics, **effects}), [claim])[0]


BOTH = {"models": ("decoder", "encoder")}


ARMS = {"models": ("decoder", "decoder-flat")}
