"""Pages of this room are written without vector figures unless a test asks for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.pages import figure_names, figures_too, pages_alone


@pytest.fixture(autouse=True, scope="module")
def _pages_alone() -> Iterator[None]:
    with pages_alone():
        yield


@pytest.fixture
def vector_figures(_pages_alone: None) -> Iterator[None]:
    with figures_too():
        yield


@pytest.fixture
def named_figures(_pages_alone: None) -> Iterator[None]:
    """For tests of which figures there are, and where: they are not drawn."""
    with figure_names():
        yield
