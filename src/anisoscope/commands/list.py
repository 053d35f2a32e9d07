"""`anisoscope list`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from anisoscope.errors import unknown_name


def list_(what: Annotated[str, typer.Argument(metavar="metrics|models|sites|claims")]) -> None:
    """Explain the metrics, the model families, the sites or the claims."""
    if what not in _LISTS:
        raise unknown_name("list", what, _LISTS)
    _LISTS[what]()


def _metrics() -> None:
    from anisoscope.metrics.catalogue import registry
    from anisoscope.view.console import print_metric

    for name, metric in sorted(registry().items()):
        print_metric(name, metric)


def _sites() -> None:
    from anisoscope.capture.sites.site import KINDS
    from anisoscope.view.console import print_two_columns

    print_two_columns(KINDS.items())


def _models() -> None:
    from anisoscope.capture import list_families
    from anisoscope.view.console import print_two_columns

    print_two_columns((row["name"], f"{row['about']}; {row['verified']}") for row in list_families())


def _claims() -> None:
    from anisoscope.claims.catalogue import claims
    from anisoscope.view.console import print_two_columns

    print_two_columns((name, f"{claim.statement} ({claim.source})") for name, claim in claims().items())


_LISTS: dict[str, Callable[[], None]] = {"metrics": _metrics, "models": _models, "sites": _sites, "claims": _claims}
