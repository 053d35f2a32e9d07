"""What every test shares: helpers beside the tests can be imported, randomness repeats, nothing reaches a network."""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent))

from hypothesis import HealthCheck, settings

from anisoscope.view import matplotlib_renderer

settings.register_profile(
    "anisoscope",
    deadline=None,
    derandomize=True,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("anisoscope")

# a shell without job control starts background jobs with Ctrl-C ignored; tests send it to themselves
signal.signal(signal.SIGINT, signal.default_int_handler)

# pages are drawn by the process of the test: others would import for longer than the drawing of a test takes
matplotlib_renderer.MOST_HELPERS = 0

pytest_plugins = ["support.tiny_profiles", "support.tiny_runs", "support.watched"]


def pytest_collection_finish() -> None:
    """What was imported stays: the collector of cycles need not look at half a million of its objects again."""
    gc.collect()
    gc.freeze()
