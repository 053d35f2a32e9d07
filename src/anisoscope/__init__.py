"""anisoscope: the geometry of a network's representations, layer by layer, with intervals and controls.

>>> import anisoscope, numpy as np
>>> anisoscope.participation_ratio(np.eye(4)).n
4
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from anisoscope.moved import keep_moved_paths

__version__ = "0.2.0"

_METRICS = {
    "spectrum": "svd_ratio svd_ratio_squared participation_ratio iso_score iso_score_star effective_rank rank_me "
    "stable_rank singular_entropy local_anisotropy",
    "anisotropy": "average_cosine average_cosine_centred drift relative_drift drift_alignment explained_by_drift "
    "mean_norm largest_norm rogue_share massive_activation partition_isotropy",
    "dimension": "two_nn levina_bickel gride hubness",
    "similarity": "self_similarity context_similarity max_explainable_variance linear_cka",
}
_PUBLIC = {
    "Estimate": "metrics.engine.estimation",
    "AnisoscopeError": "errors",
    "Site": "capture.sites.site",
    "Capture": "capture.capture",
    "Table": "results.query",
    "measure": "measurement.measure",
    "measure_rows": "metrics.catalogue",
    "profile": "commands.pipeline",
    "compare": "measurement.compare",
    "Monitor": "monitor.monitor",
    "every": "monitor.schedule",
    "at": "monitor.schedule",
    "log_spaced": "monitor.schedule",
    "watch": "serve.widget",
    "sweep": "commands.pipeline",
    "train": "commands.pipeline",
    "plan": "commands.plan",
    "tangent_test": "tangent.energy",
    "evaluate_claims": "claims.catalogue",
    "semi_nmf": "numerics.semi_nmf",
    "decompose": "numerics.decompositions",
    "principal_angles": "numerics.linalg",
    "subspace_overlap": "numerics.linalg",
}
_PUBLIC |= {name: f"metrics.{module}" for module, names in _METRICS.items() for name in names.split()}

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    # lazy, so that `import anisoscope` costs next to nothing beyond what is used
    if name in _PUBLIC:
        return getattr(importlib.import_module(f"anisoscope.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module 'anisoscope' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


keep_moved_paths()

if TYPE_CHECKING:
    from anisoscope.capture.capture import Capture as Capture
    from anisoscope.errors import AnisoscopeError as AnisoscopeError
    from anisoscope.measurement.measure import measure as measure
    from anisoscope.metrics.catalogue import measure_rows as measure_rows
    from anisoscope.metrics.engine.estimation import Estimate as Estimate
    from anisoscope.results.query import Table as Table
