"""docs/results/README.md: claims × results, and what was learned that the papers do not say."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence

from anisoscope.claims.catalogue import claims
from result_pages.declared import LEARNED, RESULTS
from result_pages.key_table import pipes
from result_pages.placeholders import NotInTable, filled_in
from result_pages.readme import title
from result_pages.result import Result

STATUSES = ("holds", "fails", "undecided")


def summary(results: Mapping[str, Result]) -> str:
    """The summary page of all results."""
    lines = ["# Results", "", "Written by `make results` from the tables, verdicts and records of the folders here. "
             "Each page says what was run, what was found, and what to hold against it; the [gallery](../gallery.md) "
             "draws figures from the same tables. `anisoscope claims docs/results/inherent` judges a committed table "
             "again.", ""]  # fmt: skip
    lines += [*_findings(results), "", "## Claims and results", "", *_claims(results), ""]
    lines += [*_learned(results), *_contents(results)]
    return "\n".join(lines)


def _findings(results: Mapping[str, Result]) -> list[str]:
    rows = []
    for name, result in results.items():
        declared = RESULTS.get(name)
        question, page = (declared.question, declared.page) if declared else ("", "")
        rows.append(
            [f"[{name}]({name}/README.md)", question, f"{title(result)}.", f"[{page}](../{page})" if page else ""]
        )
    return pipes(["result", "question", "found", "how it is done"], rows)


def _claims(results: Mapping[str, Result]) -> list[str]:
    """A line for each claim that a result speaks of, a column for each result: how many subjects have which verdict."""
    text = "How many models (or pairs of them) each verdict is about, over all seeds. What each claim asks: "
    rows = []
    known = claims()
    own = {str(verdict["claim"]): None for result in results.values() for verdict in result.told}
    for claim in (*known, *(name for name in own if name not in known)):
        cells = [_badges(result, claim) for result in results.values()]
        rows += [[f"`{claim}`", *cells]] if any(cells) else []
    return [f"{text}[claims](../claims.md).", "", *pipes(["claim", *results], rows)]


def _badges(result: Result, claim: str) -> str:
    """The verdicts of a result on one claim as words with a link: `[holds](…) 2, fails 1`."""
    counts = Counter(str(verdict["status"]) for verdict in result.told if verdict["claim"] == claim)
    total = sum(counts.values())
    words = [status if total == 1 else f"{status} {counts[status]}" for status in STATUSES if counts[status]]
    return f"[{', '.join(words)}]({result.name}/README.md#verdicts)" if words else ""


def learned_sentences(results: Mapping[str, Result]) -> list[str]:
    """The sentences on what was learned, numbers looked up; one that asks for what is not there is left out."""
    found = []
    for sentence in LEARNED:
        try:
            found.append(filled_in(sentence, results))
        except NotInTable as error:
            print(f"left out of results/README.md: {error}", file=sys.stderr)
    return found


def _learned(results: Mapping[str, Result]) -> list[str]:
    sentences = learned_sentences(results)
    numbered = [f"{place}. {words}" for place, words in enumerate(sentences, 1)]
    return ["## What was learned that the papers do not say", "", *numbered, ""] if numbered else []


def _contents(results: Sequence[str] | Mapping[str, Result]) -> list[str]:
    """The list of pages for the navigation of the site."""
    return ["```{toctree}", ":hidden:", "", *(f"{name} <{name}/README>" for name in results), "```", ""]
