"""What every test shares: helpers beside the tests can be imported, randomness repeats, nothing reaches a network."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # processes that tests fork would wait for threads that they do not have
sys.path.insert(0, str(Path(__file__).parent))

from hypothesis import HealthCheck, settings

from anisoscope.view import matplotlib_renderer
from support.pages import figure_names, figures_once, figures_too, pages_alone

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
    """The collector of cycles need not look at young objects after every 700: tests make many that live as they do."""
    _keep()
    gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    yield
    if nextitem is None or nextitem.path != item.path:
        _keep()


def _keep() -> None:
    """What was imported or made for all tests stays: no later collection looks at its million objects again.

    Trainers of others collect whenever they begin and end, which took longer than their training.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _pages_alone() -> Iterator[None]:
    """Pages are written without vector figures unless a test asks for them."""
    with pages_alone():
        yield


@pytest.fixture
def vector_figures(_pages_alone: None) -> Iterator[None]:
    with figures_too():
        yield


@pytest.fixture
def drawn_figures(_pages_alone: None) -> Iterator[None]:
    """For tests of whether every figure can be drawn: in one of its two formats."""
    with figures_once():
        yield


@pytest.fixture
def named_figures(_pages_alone: None) -> Iterator[None]:
    """For tests of which figures there are, and where: they are not drawn."""
    with figure_names():
        yield
