"""The reference pages docs/metrics.md and docs/sites.md, written from the declarations.

python -m anisoscope.view.reference docs
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path


def metrics_page() -> str:
    """Every metric with its formula, convention, options and reference."""
    from anisoscope.metrics.metric import registry

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
    from anisoscope.capture.sites import KINDS

    rows = [f"| `{name}` | {words} |" for name, words in KINDS.items()]
    return "\n".join(["# Sites", "", "| kind | what it is |", "|---|---|", *rows, ""])


def pages() -> Iterator[tuple[str, str]]:
    yield "metrics.md", metrics_page()
    yield "sites.md", sites_page()


def write(folder: Path) -> None:
    for name, text in pages():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
