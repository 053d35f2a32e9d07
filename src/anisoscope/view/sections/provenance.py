"""What a page says about a run itself: models, data, settings, warnings, dropped rows, the glossary and the table."""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from anisoscope.results.manifest import gravest_first, is_grave
from anisoscope.results.modality import MODALITIES, TEXT
from anisoscope.results.privacy import name_of, placeless
from anisoscope.results.query import SCHEMA, Query, Row
from anisoscope.view import page
from anisoscope.view.page import DataTable, Heading, Prose, Section, TableCell, text
from anisoscope.view.subjects import (
    About,
    RunRows,
    RunView,
    TrainingRows,
    by_stack,
    model_entries,
    place_of,
    role_of,
    short_names,
)
from anisoscope.view.words import Catalogue, listed, number, plural, shortened, spans

COLUMNS = [name for name in SCHEMA.names if name not in ("schema", "run", "depth", "head", "replicates")]
STACK = re.compile(r"(encoder|decoder): ")
SEED = re.compile(r" \(seed (\d+)\)$")
WORDY = ("Model", "Revision", "Kind", "Architecture", "Shape", "A row is", "Measured on")
PAGE_ROWS = 8_000  # limit for the table of a training run on the page
NOTES = 60
# parts of notes that are already visible in figures
USUAL = ("in-sample", "since step", "above", "below", "chance", "bias about", "mean over", "sd between", "Holm over")
# Rows left out of a long table, in this order, until the rest fits.
CUTS: tuple[tuple[str, Callable[[Row], bool]], ...] = (
    ("what the loop logged at every step", lambda row: row.kind == "training"),
    ("controls", lambda row: row["control"] is not None),
    ("halves of the contexts", lambda row: row.group.startswith("half:")),
    ("groups", lambda row: row.group != ""),
    ("other proxies", lambda row: row["proxy"] not in (None, "semi_nmf")),
    ("tests", lambda row: row.metric.endswith(("_p", "_p_holm"))),
    ("means of row ratios", lambda row: row["average"] is not None),
)


def masthead(names: Sequence[str], abouts: Sequence[About]) -> dict[str, Any]:
    """The models and data of a page as text; of more than three models the first two are named."""
    shorten = short_names(names)
    shown = [shorten(name) or "unnamed" for name in names]
    others = len(shown) - 2 if len(shown) > 3 else 0
    days = []
    for started in (str(about["started"]) for about in abouts if about.get("started")):
        try:
            moment = datetime.fromisoformat(started)
            days.append(f"{moment.day} {moment:%B %Y}")
        except ValueError:
            days.append(started)
    return {
        "title": f"{', '.join(shown[:2])} and {others} more" if others else listed(shown),
        "data": data_phrase(abouts),
        "version": ", ".join(dict.fromkeys(str(about["anisoscope"]) for about in abouts if about.get("anisoscope"))),
        "started": listed(list(dict.fromkeys(days))),
    }


def rests_on(head: Mapping[str, Any], abouts: Sequence[About], when: str = "", *more: str) -> Any:
    """What the finding of a page rests on, in one line: data, steps, seeds, day, and whether the run has ended."""
    parts = [f"on {head['data']}" if head["data"] else "", when, *more, head["started"]]
    words = text("Measured {words}.", words=", ".join(part for part in parts if part)) if any(parts) else text("")
    states = [str(about.get("status", "complete")) for about in abouts]
    if left := [state for state in states if state != "complete"]:
        going = "running" in left
        whose = f"{len(left)} of {len(states)} runs" if len(states) > 1 else "This run"
        verb = ("are" if len(left) > 1 and len(states) > 1 else "is") if going else ""
        told = f"{verb} still going: what is shown is what was measured so far" if going else "stopped before its end"
        words += text(" <strong>Partial results.</strong> {whose} {told}.", whose=whose, told=told)
    if count := len([warning for warning in warnings(abouts) if not is_grave(warning)]):
        words += text(' <a href="#dropped">{n}</a>.', n=plural(count, "note"))
    return words


def row_noun(words: str, count: int = 2) -> str:
    """The description of one row in `run.json` as a noun, in the plural unless `count` is 1.

    >>> row_noun("one frame of audio"), row_noun("one patch of an image; class tokens are apart", 1)
    ('frames of audio', 'patch of an image')
    >>> row_noun("one character (or byte) of text"), row_noun("")
    ('characters of text', 'rows')
    """
    plain = re.sub(r"\s*\([^)]*\)", "", words.split(";")[0]).strip().removeprefix("one ") or "row"
    noun, _, rest = plain.partition(" ")
    many = noun if count == 1 else f"{noun}es" if noun.endswith(("ch", "s", "x")) else f"{noun}s"
    return f"{many} {rest}".strip()


def row_nouns(abouts: Sequence[About]) -> list[str]:
    """The nouns for the rows of all runs, without duplicates; empty if no run has a description."""
    described = [by_stack(entry.get("rows")) for entry in model_entries(abouts)]
    return list(dict.fromkeys(row_noun(words) for stacks in described for words in stacks.values()))


def data_phrase(abouts: Sequence[About]) -> str:
    """The data and its amount as text; only the name if models of one run read different amounts."""
    phrases: dict[str, None] = {}
    for about in abouts:
        entries = about.get("models") or [{}]
        seen = list(dict.fromkeys(_seen(entry, entry.get("data") or about.get("data") or {}) for entry in entries))
        names = dict.fromkeys(name for name, _ in seen)
        whole = [f"{name} ({size})" if name and size else name for name, size in seen]
        phrases |= dict.fromkeys(whole if len(seen) == len(names) else names)
    return listed([phrase for phrase in phrases if phrase])


def _seen(entry: About, data: About) -> tuple[str, str]:
    """The name of a model's data, and the numbers of rows (of its first stack) and contexts."""
    modality = MODALITIES.get(next(iter(by_stack(entry.get("modality")).values()), ""), TEXT)
    name = str(data.get("name") or "").replace("\\", "/").rstrip("/").split("/")[-1]
    name = modality.medium.shipped if data.get("name") == "embedded" else name
    rows, contexts = entry.get("row_count") or data.get("tokens"), data.get("contexts") or entry.get("contexts")
    word = next(iter(by_stack(entry.get("rows")).values()), "one token")
    size = [f"{int(rows):,} {row_noun(word, int(rows))}"] if rows else []
    return name, " in ".join([*size, *([plural(int(contexts), "context")] if contexts else [])])


def model_facts(abouts: Sequence[About], others: Iterable[Mapping[str, str]] = ()) -> list[dict[str, str]]:
    """Facts about each model and its data; for runs without model entries, what is known otherwise.

    >>> model_facts([{"models": [{"name": "a", "rows": {"encoder": "one frame", "decoder": "one token"}}]}])
    [{'Model': 'a', 'A row is': 'one frame (encoder), one token (decoder)'}]
    """
    return [_facts(entry) for entry in model_entries(abouts)] or [dict(other) for other in others]


def _size(entry: Mapping[str, Any]) -> str:
    if named := entry.get("modules"):
        return plural(len(named), "module")
    return (
        plural(int(entry["layers"]), "table" if entry.get("type") == "rows" else "block") if entry.get("layers") else ""
    )


def _facts(entry: Mapping[str, Any]) -> dict[str, str]:
    shape = [_size(entry)]
    shape += [f"width {int(entry['width']):,}" if entry.get("width") else ""]
    size, rows = entry.get("parameters") or 0, entry.get("rows")
    units = [f"{number(size / least)} {unit}" for least, unit in ((1e9, "billion"), (1e6, "million")) if size >= least]
    of_stack = by_stack(rows) if isinstance(rows, Mapping) else {}
    several = len(set(of_stack.values())) > 1
    row_is = [f"{words} ({stack})" if several else words for stack, words in of_stack.items()]
    counts = {"Parameters": size, "Rows": entry.get("row_count", rows), "Contexts": entry.get("contexts")}
    numbers = {name: f"{int(n):,}" if n and not isinstance(n, Mapping) else "" for name, n in counts.items()}
    facts = {
        "Model": str(entry.get("name") or "unnamed"),
        "Revision": str(entry.get("revision") or ""),
        "Kind": role_of(entry),
        "Architecture": str(entry.get("architecture") or ""),
        "Shape": ", ".join(part for part in shape if part),
        "Parameters": next(iter(units), numbers["Parameters"]),
        "A row is": ", ".join(row_is if several else row_is[:1]),
        "Measured on": str(entry.get("measured_on") or ""),
        "Rows": numbers["Rows"],
        "Contexts": numbers["Contexts"],
    }
    return {name: words for name, words in facts.items() if words}


def facts_parts(facts: Sequence[Mapping[str, str]], label: str = "Models") -> list[Any]:
    """The facts of one model as a list, of several as a table."""
    if len(facts) == 1:
        return [page.Piece("facts", facts[0])]
    looks = {name: "" if name in WORDY else "num" for fact in facts for name in fact}
    first = next(iter(looks), "")
    rows = [[TableCell(fact.get(n, ""), css=css, head=n == first) for n, css in looks.items()] for fact in facts]
    return [DataTable([[TableCell(name, css=css) for name, css in looks.items()]], [rows], label)]


def warnings(abouts: Sequence[About]) -> list[str]:
    """The warnings without duplicates, in order; notes of a model are prefixed with its name.

    >>> notes = {"name": "b", "notes": ["decoder: odd", "random weights (seed 1)"]}
    >>> warnings([{"warnings": ["a: encoder: odd"], "models": [{"name": "a"}, notes]}])
    ['a (encoder) and b (decoder): odd', 'b: random weights (seed 1)']
    """
    entries = model_entries(abouts)
    names = {str(entry.get("name")) for entry in entries}
    texts = [str(whole) for about in abouts for whole in about.get("warnings") or []]
    texts += [f"{entry.get('name', 'model')}: {note}" for entry in entries for note in entry.get("notes") or []]
    warned: dict[str, tuple[dict[str, set[str]], set[int]]] = {}  # stacks by model, and seeds
    for whole in texts:
        owners, words = _parted(whole, names)
        stack = STACK.match(words) if owners else None
        words = words[stack.end() :] if stack else words
        seed = SEED.search(words) if owners else None
        words = words[: seed.start()] if seed else words
        stacks, seeds = warned.setdefault(words, ({}, set()))
        seeds |= {int(seed[1])} if seed else set()
        for owner in owners:
            stacks.setdefault(owner, set()).update([stack[1]] if stack else [])
    sentences = []
    for words, (stacks, seeds) in warned.items():
        labels = [f"{name} ({listed(sorted(which))})" if which else name for name, which in stacks.items()]
        of = f" (seed{'s' if len(seeds) > 1 else ''} {spans(seeds)})" if seeds else ""
        sentences.append(f"{shortened(labels)}: {words}{of}" if labels else words + of)
    return gravest_first(sentences)


def _parted(words: str, names: Collection[str]) -> tuple[list[str], str]:
    """The models named at the beginning of a warning, without seeds, and the rest of the warning.

    >>> _parted("a-seed1, b: odd", {"a", "b"}), _parted("c: odd", {"a"})
    ((['a', 'b'], 'odd'), ([], 'c: odd'))
    """
    for end in (match.start() for match in re.finditer(": ", words)):
        owners = [word if word in names else re.sub(r"-seed\d+$", "", word) for word in words[:end].split(", ")]
        if all(owner in names for owner in owners):
            return owners, words[end + 2 :]
    return [], words


def grave_box(abouts: Sequence[About]) -> list[Any]:
    """The warnings that must be read before any number, below the finding: the first, and a fold with the others."""
    grave = [words for words in warnings(abouts) if is_grave(words)]
    if not grave:
        return []
    first = Prose(text("<strong>Read this first.</strong> {words}", words=grave[0]))
    more = [page.Fold(f"{len(grave) - 1} more", [page.Piece("listing", grave[1:])], css="behind")]
    return [page.Box([first, *(more if len(grave) > 1 else [])], "warnings", "Warnings")]


def dropped(abouts: Sequence[About]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Dropped rows by model and reason; models with equal entries, such as seeds, share a line."""
    by_reasons: dict[tuple[tuple[str, str], ...], dict[str, None]] = {}
    for entry in model_entries(abouts):
        lost = [(why, count) for why, count in (entry.get("dropped") or {}).items() if count is not None]
        reasons = tuple((str(why).replace("_", " "), f"{count:,}") for why, count in lost)
        by_reasons.setdefault(reasons, {})[str(entry.get("name") or "unnamed")] = None
    return [(shortened(list(names)), list(reasons)) for reasons, names in by_reasons.items() if reasons]


def dropped_section(rows: RunRows, catalogue: Catalogue) -> Section:
    """The section on dropped rows, warnings, and values that could not be computed."""
    lost, warned = dropped(rows.abouts), warnings(rows.abouts)
    tables = {}
    for name, notes in notes_of(rows, catalogue).items():
        cells = [[*map(TableCell, note[:3]), TableCell(note[3], css="prose")] for note in notes]
        tables[name] = DataTable([["Model", "Metric", "Where", "Note"]], [cells], "Notes", "plain notes", numeric=9)
    parts: list[Any] = []
    if lost:
        words = "<strong>{name}</strong>: {why}"
        reasons = [text(words, name=name, why=", ".join(map(" ".join, why))) for name, why in lost]
        parts += [Heading("Rows left out"), page.Piece("listing", reasons)]
    if warned:
        every: Any = page.Piece("listing", warned)
        every = page.Fold(f"All {len(warned)} warnings", [every], css="behind") if len(warned) > 8 else every
        parts += [Heading("Warnings"), every]
    if tables["missing"].groups[0]:
        parts += [Heading("Values that could not be computed"), tables["missing"]]
    if count := len(tables["remarks"].groups[0]):
        parts.append(page.Fold(f"Remarks on computed values ({count})", [tables["remarks"]], open=count <= 12))
    nothing = [Prose("Nothing was dropped, nothing was warned about, and every value was computed.")]
    return Section("dropped", "Dropped, warned about, not computed", parts or nothing, "Dropped, warned")


def notes_of(rows: RunRows, catalogue: Catalogue) -> dict[str, list[tuple[str, ...]]]:
    """The distinct notes (model, metric, where, note), those of missing values separate from remarks.

    Of a training run: with their steps, without what figures show, and only the first ones.
    """
    over_steps = isinstance(rows, TrainingRows)
    books: dict[str, dict[tuple[str, ...], list[Row]]] = {"missing": defaultdict(list), "remarks": defaultdict(list)}
    for row in rows.query:
        note = unusual(row.note) if over_steps else row.note
        if note or not row.known:
            parts = (catalogue.entry(row.metric).title, *(() if over_steps else (row.variant, row.group)))
            title = " · ".join(part for part in parts if part)
            key = rows.subjects[row["subject"]].label, title, note or "no reason was recorded"
            books["remarks" if row.known else "missing"][key].append(row)
    notes = {}
    for name, book in books.items():
        told = [(*key[:2], _when(found) if over_steps else _where(found), key[2]) for key, found in book.items()]
        more = ("", "", "", f"{len(told) - NOTES:,} further notes are in table.parquet.")
        notes[name] = [*told[:NOTES], more] if over_steps and len(told) > NOTES else told
    return notes


def _when(rows: Sequence[Row]) -> str:
    steps = dict.fromkeys(f"{pick(row.step or 0 for row in rows):,}" for pick in (min, max))
    return f"{plural(len(rows), 'row')}, step{'s' if len(steps) > 1 else ''} {' to '.join(steps)}"


def _where(rows: Sequence[Row]) -> str:
    """Sites as short text: ranges of layers, kinds and heads."""
    kinds: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        kinds[row.kind].append(row)
    parts = []
    for kind, found in kinds.items():
        layers = {row.layer or 0 for row in found}
        blocks = f"blocks {spans(layers)}" + ("" if kind == "resid" else f" · {kind}")
        parts.append(place_of(found[0]) if len(layers) == 1 else blocks)
    heads = {row.head for row in rows if row.head is not None}
    return ", ".join(parts) + (f" ({plural(len(heads), 'head')})" if heads else "")


def unusual(note: str) -> str:
    """The parts of a note that are not visible in figures.

    >>> unusual("in-sample; fewer than 10 d rows"), unusual("since step 64")
    ('fewer than 10 d rows', '')
    """
    parts = (part.strip() for part in note.split(";"))
    return "; ".join(part for part in parts if part and not part.startswith(USUAL))


def settings(about: About, path: str) -> dict[str, Any]:
    """All settings needed to repeat the run, as (name, text)."""
    run = {name: about.get(name) for name in ("status", "started", "device", "seed", "schema")}
    spent, peak, guess = (about.get(name) for name in ("monitor_seconds", "peak_memory_mb", "memory_estimate_mb"))
    if about.get("wall_seconds") is not None:
        measuring = f", of which {number(spent)} s measuring" if spent is not None else ""
        run["wall time"] = f"{number(about['wall_seconds'])} s{measuring}"
    if peak is not None:
        run["peak memory"] = f"{number(peak)} MB" + (f" (estimated {number(guess)} MB)" if guess else "")
    elif guess is not None:
        run["estimated memory"] = f"{number(guess)} MB"
    facts = {"Run": [(name, str(value)) for name, value in run.items() if value is not None]}
    code = {name: value for name, value in (about.get("code") or {}).items() if name != "version"}
    versions = {"anisoscope": about.get("anisoscope"), "anisoscope's code": code}
    versions |= {"earlier code": [" ".join(map(str, each.values())) for each in about.get("earlier_code") or ()]}
    versions |= about.get("versions") or {}
    facts |= {"Settings": flat(about.get("config") or {}), "Versions": flat(versions)}
    facts |= {"Data": flat(about.get("data") or {})}
    models = []
    for entry in about.get("models") or []:
        shown = {name: value for name, value in entry.items() if name not in ("notes", "dropped")}
        models.append((f"Model: {entry.get('name', 'unnamed')}", flat(shown)))
    command = about.get("command") or []
    return {
        "command": placeless(command) if isinstance(command, str) else shlex.join(map(str, placeless(command))),
        "path": name_of(path) if path else path,
        "facts": [(name, pairs) for name, pairs in facts.items() if pairs],
        "models": [(name, pairs) for name, pairs in models if pairs],
    }


def flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as a flat list of (name, text).

    >>> flat({"a": {"b": 1}, "c": ["x", "y"], "d": None})
    [('a.b', '1'), ('c', 'x, y')]
    """
    pairs: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            pairs += flat(value, f"{prefix}{key}.")
        elif isinstance(value, list | tuple):
            pairs += [(f"{prefix}{key}", ", ".join(map(str, value)))] if value else []
        elif value is not None and value != "":
            pairs.append((f"{prefix}{key}", f"{value:,}" if type(value) is int and value > 9999 else str(value)))
    return pairs


def record_section(runs: Sequence[RunView], lead: str = "What is needed to run it again.") -> Section:
    shown = page.Piece("record", [settings(run.about, run.path) for run in runs])
    return Section("record", "Record", [Prose(lead), shown], "Record")


def glossary_section(catalogue: Catalogue, metrics: Iterable[str]) -> Section:
    """The glossary of the metrics on the page."""
    terms = []
    for entry in (catalogue.entry(name) for name in catalogue.ordered(metrics)):
        low, high = entry.bounds
        ends = " ".join(part for part, end in ((f"from {low}", low), (f"to {high}", high)) if end is not None)
        texts = [entry.description, f"Convention: {entry.convention}." if entry.convention else ""]
        texts = [part for part in (*texts, f"Range: {ends}." if ends else "") if part]
        terms.append((entry.title, [entry.name], entry.formula, texts, entry.reference))
    return terms_section(terms)


def terms_section(terms: Iterable[tuple[Any, ...]]) -> Section:
    """The glossary of some terms: title, names, formula, explanation and, optionally, reference."""
    names = ("title", "names", "formula", "texts", "reference")
    entries = [dict(zip(names, (*term, ""), strict=False)) for term in terms]
    return Section("glossary", "Glossary", [page.Piece("glossary", entries)], "Glossary")


def table_section(query: Query, *, most: int | None = None) -> Section:
    """The section with the table of results, without rows of single heads and, if it is long, less important rows."""
    return Section("table", "Table", [page.Piece("download", page_table(query, most=most))], "Table")


def page_table(query: Query, *, most: int | None = None) -> dict[str, Any]:
    """The download of a page, from which its script reads the table: all rows that are not per head.

    Of more than `most` rows the most important.
    """
    kept = plain = query.where(head=None)
    most, left_out = len(plain) if most is None else most, []
    for words, unwanted in CUTS:
        if len(kept) > most:
            fewer = kept.where(lambda row, unwanted=unwanted: not unwanted(row))  # type: ignore[misc]
            left_out += [words] if len(fewer) < len(kept) else []
            kept = fewer
    if len(kept) > most:
        kept = kept.at_last_step("source", "model", "seed")
        left_out.append("all steps but the last")
    shown = kept.first(most)
    sizes = {"rows": len(shown), "total": len(plain), "heads": len(query) - len(plain)}
    return {"csv": shown.csv(COLUMNS), "gone": left_out, "cut": len(kept) > most, **sizes}
