"""The reference pages docs/metrics.md, docs/sites.md and docs/claims.md, written from the declarations.

python -m anisoscope.commands.reference docs
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path


def metrics_page() -> str:
    """Every metric with its formula, convention, options and reference."""
    from anisoscope.metrics.engine.metric import registry

    lines = ["# Metrics", "", "Written by `make docs` from the declarations in `src/anisoscope/metrics`.", ""]
    for name, metric in sorted(registry().items()):
        lines += [
            f"## `{name}`{' (default)' if metric.default else ''}",
            "",
            f"**{metric.title}.** {metric.description}",
            "",
        ]
        options = ", ".join(f"`{key}={value}`" for key, value in metric.options.items())
        facts = {
            "Formula": metric.formula,
            "Convention": metric.convention,
            "Options": options,
            "Unchanged by": ", ".join(sorted(metric.invariant)),
            "Measured at": ", ".join(sorted(metric.kinds)),
            "Reference": metric.reference,
        }
        lines += [f"- {label}: {words}" for label, words in facts.items() if words] + [""]
    return "\n".join(lines)


def sites_page() -> str:
    """Every kind of site."""
    from anisoscope.capture.sites.site import KINDS

    rows = [f"| `{name}` | {words} |" for name, words in KINDS.items()]
    return "\n".join(["# Sites", "", "| kind | what it is |", "|---|---|", *rows, ""])


def claims_page() -> str:
    """Every claim with its statement, its margin and how it is tested."""
    from anisoscope.claims.engine.claim import claims

    lines = ["# Claims", "", "Written by `make docs` from the declarations in `src/anisoscope/claims`.", ""]
    lines += [
        "*Holds* when the 95 % interval of the effect lies wholly beyond the margin, *fails* when it lies short of"
    ]
    lines += ["it, else *undecided*. One run speaks for itself; a general claim needs three seeds.", ""]
    for name, claim in claims().items():
        lines += [f"## `{name}`", "", f"**{claim.statement}**", "", claim.description, ""]
        lines += [f"- Margin: {claim.margin:g}", f"- Reads: {', '.join(f'`{m}`' for m in claim.metrics)}"]
        lines += [f"- Source: {claim.source}", ""]
    return "\n".join(lines)


def pages() -> Iterator[tuple[str, str]]:
    yield "metrics.md", metrics_page()
    yield "sites.md", sites_page()
    yield "claims.md", claims_page()


def write(folder: Path) -> None:
    for name, text in pages():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
