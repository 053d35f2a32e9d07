"""`anisoscope list`."""

from __future__ import annotations

from typing import Annotated

import typer

from anisoscope.errors import check_known

_LISTS = ("metrics", "models", "sites", "claims")


def list_(what: Annotated[str, typer.Argument(metavar="metrics|models|sites|claims")]) -> None:
    """Explain the metrics, the model families, the sites or the claims."""
    check_known("list", what, _LISTS)
    from anisoscope.view.console import print_metric, print_two_columns

    if what == "metrics":
        from anisoscope.metrics.catalogue import registry

        for name, metric in sorted(registry().items()):
            print_metric(name, metric)
    elif what == "models":
        from anisoscope.capture import list_families

        print_two_columns((row["name"], f"{row['about']}; {row['verified']}") for row in list_families())
    elif what == "sites":
        from anisoscope.capture.sites.site import KINDS

        print_two_columns(KINDS.items())
    else:
        from anisoscope.claims.catalogue import claims

        print_two_columns((name, f"{claim.statement} ({claim.source})") for name, claim in claims().items())
