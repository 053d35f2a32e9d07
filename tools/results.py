"""Write the pages of docs/results from the tables that lie there, and make a run folder small enough to lie there.

python tools/results.py write docs          READMEs and summary; verdicts and pages where rules changed
python tools/results.py thin FOLDER         what verdicts, page, README and gallery need of a run folder, in its place
python tools/results.py join OUT RUN...     one folder from several runs: tables, records, verdicts and page

The first run that has a number counts; a committed result may be the last of the runs, and keeps what they have not.
Models of another result that are declared to stand beside OUT come along.

`make results` does the first and draws the gallery. What a page shows is declared in result_pages/declared.py.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from result_pages.front_page import front_page
from result_pages.joining import join
from result_pages.judging import judge_again
from result_pages.readme import readme
from result_pages.result import all_results
from result_pages.summary import summary
from result_pages.thinning import MOST_DIGITS, Wish, size_words, thin


def write(docs: Path) -> None:
    """Write every README and the summary page."""
    results = all_results(docs)
    for result in results.values():
        judge_again(result)
        (result.folder / "README.md").write_text(readme(result), encoding="utf-8")
    (docs / "results" / "README.md").write_text(summary(results), encoding="utf-8")
    first = docs.resolve().parent / "README.md"
    first.write_text(front_page(first.read_text(encoding="utf-8")), encoding="utf-8")


def _thin(words: argparse.Namespace) -> None:
    before = size_words(words.folder)
    steps = tuple(int(step) for step in words.steps.split(",") if step)
    thin(words.folder, Wish(steps, words.claims_only, words.plain, words.digits, not words.no_figures))
    print(f"{before} → {size_words(words.folder)}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    writing = commands.add_parser("write")
    writing.add_argument("docs", type=Path)
    writing.set_defaults(run=lambda words: write(words.docs))
    thinning = commands.add_parser("thin")
    thinning.add_argument("folder", type=Path)
    thinning.add_argument("--steps", default="", help="keep these steps only, comma-separated")
    thinning.add_argument("--claims-only", action="store_true", help="without rows that only the page reads")
    thinning.add_argument("--plain", action="store_true", help="without what verdicts under other choices read")
    thinning.add_argument("--no-figures", action="store_true", help="without files of figures")
    thinning.add_argument("--digits", type=int, default=MOST_DIGITS, help="of every number")
    thinning.set_defaults(run=_thin)
    joining = commands.add_parser("join")
    joining.add_argument("out", type=Path)
    joining.add_argument("runs", type=Path, nargs="+")
    joining.set_defaults(run=lambda words: join(words.out, words.runs))
    words = parser.parse_args(arguments)
    words.run(words)


if __name__ == "__main__":
    main()
