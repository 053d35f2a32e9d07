"""Module paths that earlier documents named: imports from them keep working, with a warning that names the new path."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "anisoscope.capture.loading": "anisoscope.models.load",
    "anisoscope.capture.processors": "anisoscope.models.processor",
    "anisoscope.metrics.calibration": "anisoscope.metrics.dimension",
    "anisoscope.metrics.metric": "anisoscope.metrics.engine.metric",
    "anisoscope.runs": "anisoscope",
    "anisoscope.runs.feed": "anisoscope.measurement.feed",
    "anisoscope.runs.profile": "anisoscope.measurement.config",
    "anisoscope.runs.schedule": "anisoscope.monitor.schedule",
    "anisoscope.runs.table": "anisoscope.results.query",
    "anisoscope.studies.page": "anisoscope.studies.page_parts",
    "anisoscope.studies.study": "anisoscope.studies.study_run",
}


class MovedModules:
    """Finds the old paths, after every other finder; such a module looks its names up at the new path."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in MOVED:
            return None
        package = any(name.startswith(f"{fullname}.") for name in MOVED)
        return ModuleSpec(fullname, self, is_package=package)  # type: ignore[arg-type]  # importlib.abc takes 10 ms

    def create_module(self, spec: ModuleSpec) -> None:
        """An ordinary module."""

    def exec_module(self, module: ModuleType) -> None:
        new = MOVED[module.__name__]
        warnings.warn(f"{module.__name__} is now {new}; import from there.", DeprecationWarning, stacklevel=2)
        module.__dict__["__getattr__"] = lambda name: getattr(importlib.import_module(new), name)


def keep_moved_paths() -> None:
    """Make imports from the old paths work in this process."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(MovedModules())
