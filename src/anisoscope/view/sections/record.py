"""The bookkeeping of a page: what was run and on what, what was warned about, dropped or not computed, all numbers."""

from __future__ import annotations

import csv
import io
import math
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any
from urllib.parse import quote

from anisoscope.results.modality import MODALITIES, TEXT
from anisoscope.results.query import Query, Row
from anisoscope.view.page import (
    Box,
    DataTable,
    Download,
    Facts,
    Fold,
    Glossary,
    Heading,
    Listing,
    Prose,
    Record,
    Section,
    TableCell,
    text,
)
from anisoscope.view.subjects import (
    About,
    RunRows,
    RunView,
    TrainingRows,
    by_stack,
    kind_told,
    place_of,
    short_names,
)
from anisoscope.view.words import Catalogue, listed, number, plural, shortened, spans

COLUMNS = (
    "model", "revision", "data", "step", "stack", "layer", "kind", "group", "metric", "variant",
    "value", "low", "high", "sd", "n", "contexts", "dropped", "seed", "note",
)  # fmt: skip
WHOLE = ("step", "layer", "n", "contexts", "dropped", "seed")
STACK = re.compile(r"(encoder|decoder): ")
SEED = re.compile(r" \(seed (\d+)\)$")
WORDY = ("Model", "Revision", "Kind", "Architecture", "Shape", "A row is")
PAGE_ROWS = 8_000  # of the table of a training run that the page carries
NOTES = 60
# parts of a note that figures already tell
USUAL = ("in-sample", "since step", "above", "below", "chance", "bias about", "mean over", "sd between")
# What is left out of a long table, in this order, until the rest fits.
CUTS: tuple[tuple[str, Callable[[Row], bool]], ...] = (
    ("what the loop logged at every step", lambda row: row.kind == "training"),
    ("controls", lambda row: row["control"] is not None),
    ("halves of the contexts", lambda row: row.group.startswith("half:")),
    ("groups", lambda row: row.group != ""),
    ("other proxies", lambda row: row["proxy"] not in (None, "semi_nmf")),
    ("tests", lambda row: row.metric.endswith(("_p", "_p_holm"))),
    ("means of row ratios", lambda row: row["average"] is not None),
)


# whose page it is


def partial_banner(head: Mapping[str, Any]) -> list[Prose]:
    """Said first of a run that stopped before the end."""
    if not head["partial"]:
        return []
    whose = f"{head['partial']} of {head['runs']} runs" if head["runs"] > 1 else "This run"
    words = (
        "<strong>Partial results.</strong> {whose} stopped before the end; what follows is what had been finished. "
        "The same command with <code>--resume</code> goes on from here."
    )
    return [Prose(text(words, whose=whose), css="banner")]


def masthead(names: Sequence[str], abouts: Sequence[About]) -> dict[str, Any]:
    """Who and what a page is about."""
    shorten = short_names(names)
    shown = [shorten(name) or "unnamed" for name in names]
    partial = [a for a in abouts if a.get("status", "complete") != "complete"]
    versions = dict.fromkeys(str(a["anisoscope"]) for a in abouts if a.get("anisoscope"))
    return {
        "title": listed(shown) if len(shown) <= 3 else f"{', '.join(shown[:2])} and {len(shown) - 2} more",
        "names": shown if len(shown) <= 3 else shown[:2],
        "others": max(0, len(shown) - 2) if len(shown) > 3 else 0,
        "data": data_phrase(abouts),
        "partial": len(partial),
        "runs": len(abouts),
        "version": ", ".join(versions),
        "started": listed(list(dict.fromkeys(day(a["started"]) for a in abouts if a.get("started")))),
    }


def heading(head: Mapping[str, Any], manner: str) -> Any:
    """The first line of a page: whose geometry, and how it is looked at."""
    names = [text('<span class="name"><i>{n}</i>,</span>', n=name) for name in head["names"]]
    if not head["others"] and len(names) > 1:
        *first, last = names
        first[-1] = text('<span class="name"><i>{n}</i></span>', n=head["names"][-2])
        names = [*first, text("and"), last]
    more = [text("and {n} more,", n=head["others"])] if head["others"] else []
    return text(" ").join([text("The geometry of"), *names, *more, text(manner)])


def day(started: Any) -> str:
    try:
        moment = datetime.fromisoformat(str(started))
    except ValueError:
        return str(started)
    return f"{moment.day} {moment:%B %Y}"


# what was read


def row_noun(words: str, count: int = 2) -> str:
    """What `run.json` says of one row as a noun.

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
    """What the rows of all these runs are, each once; empty where no run says."""
    entries = [entry for about in abouts for entry in about.get("models") or []]
    words = [str(word) for entry in entries for word in by_stack(entry.get("rows")).values()]
    return list(dict.fromkeys(row_noun(word) for word in words))


def data_phrase(abouts: Sequence[About]) -> str:
    """Which data, and how much of it; models of one run that saw different amounts share the name alone."""
    phrases: dict[str, None] = {}
    for about in abouts:
        entries = about.get("models") or [{}]
        seen = list(dict.fromkeys(_seen(entry, entry.get("data") or about.get("data") or {}) for entry in entries))
        names = dict.fromkeys(name for name, _ in seen)
        whole = [f"{name} ({size})" if name and size else name for name, size in seen]
        phrases |= dict.fromkeys(whole if len(seen) == len(names) else names)
    return listed([phrase for phrase in phrases if phrase])


def _seen(entry: About, data: About) -> tuple[str, str]:
    """The name of what a model read, and how many rows of its first stack in how many contexts that gave."""
    modality = MODALITIES.get(next(iter(by_stack(entry.get("modality")).values()), ""), TEXT)
    name = str(data.get("name") or "").replace("\\", "/").rstrip("/").split("/")[-1]
    name = modality.medium.shipped if data.get("name") == "embedded" else name
    rows, contexts = entry.get("row_count") or data.get("tokens"), data.get("contexts") or entry.get("contexts")
    word = next(iter(by_stack(entry.get("rows")).values()), "one token")
    size = [f"{int(rows):,} {row_noun(word, int(rows))}"] if rows else []
    size += [f"{int(contexts):,} context{'s' if int(contexts) != 1 else ''}"] if contexts else []
    return name, " in ".join(size)


# what the models are


def model_facts(abouts: Sequence[About], others: Iterable[Mapping[str, str]] = ()) -> list[dict[str, str]]:
    """What each model is and how much of it was seen; of runs that recorded no model, what is known otherwise."""
    facts = [_facts(model) for about in abouts for model in about.get("models") or []]
    return facts or [dict(other) for other in others]


def _facts(model: Mapping[str, Any]) -> dict[str, str]:
    shape = [plural(int(model["layers"]), "block") if model.get("layers") else ""]
    shape += [f"width {int(model['width']):,}" if model.get("width") else ""]
    found = {
        "Model": str(model.get("name") or "unnamed"),
        "Revision": str(model.get("revision") or ""),
        "Kind": kind_told(model),
        "Architecture": str(model.get("architecture") or ""),
        "Shape": ", ".join(part for part in shape if part),
        "Parameters": _millions(model.get("parameters")),
        "A row is": _row_words(model.get("rows")),
        "Rows": _count(model.get("row_count", model.get("rows"))),
        "Contexts": _count(model.get("contexts")),
    }
    return {name: text for name, text in found.items() if text}


def _count(value: Any) -> str:
    return f"{int(value):,}" if value and not isinstance(value, Mapping) else ""


def _row_words(rows: Any) -> str:
    """What one row is, by stack where the stacks differ.

    >>> _row_words({"encoder": "one frame of audio", "decoder": "one token"}), _row_words({"single": "one token"})
    ('one frame of audio (encoder), one token (decoder)', 'one token')
    """
    words = {str(k): str(v) for k, v in rows.items()} if isinstance(rows, Mapping) else {}
    if len(set(words.values())) < 2:
        return next(iter(words.values()), "")
    return ", ".join(f"{word} ({stack})" for stack, word in words.items())


def _millions(value: Any) -> str:
    if not value:
        return ""
    for size, unit in ((1e9, "billion"), (1e6, "million")):
        if value >= size:
            return f"{number(value / size)} {unit}"
    return f"{int(value):,}"


def facts_parts(facts: Sequence[Mapping[str, str]], label: str = "Models") -> list[Any]:
    """One model as a list of facts, several as a table."""
    if len(facts) == 1:
        return [Facts(facts[0])]
    heads = list(dict.fromkeys(name for fact in facts for name in fact))
    numeric = ["" if name in WORDY else "num" for name in heads]
    row = [
        [
            TableCell(fact.get(name, ""), css=css, head=i == 0)
            for i, (name, css) in enumerate(zip(heads, numeric, strict=True))
        ]
        for fact in facts
    ]
    return [DataTable([[TableCell(name, css=css) for name, css in zip(heads, numeric, strict=True)]], [row], label)]


# warnings


def warnings(abouts: Sequence[About]) -> list[str]:
    """Each warning once, in order; a model's own notes carry its name.

    >>> notes = {"name": "b", "notes": ["decoder: odd", "random weights (seed 1)"]}
    >>> warnings([{"warnings": ["a: encoder: odd"], "models": [{"name": "a"}, notes]}])
    ['a (encoder) and b (decoder): odd', 'b: random weights (seed 1)']
    """
    entries = [entry for about in abouts for entry in about.get("models") or []]
    names = {str(entry.get("name")) for entry in entries}
    found: dict[str, dict[str, set[str]]] = {}
    seeds: dict[str, set[int]] = {}
    for whole in _said(abouts):
        owners, text = _parted(whole, names)
        stack = STACK.match(text) if owners else None
        text = text[stack.end() :] if stack else text
        seed = SEED.search(text) if owners else None
        text = text[: seed.start()] if seed else text
        seeds.setdefault(text, set()).update([int(seed[1])] if seed else [])
        mine = found.setdefault(text, {})
        for owner in owners:
            mine.setdefault(owner, set()).update([stack[1]] if stack else [])
    return [_sentence(text, owners, seeds[text]) for text, owners in found.items()]


def _said(abouts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for about in abouts:
        yield from (str(text) for text in about.get("warnings") or [])
    for about in abouts:
        for model in about.get("models") or []:
            yield from (f"{model.get('name', 'model')}: {note}" for note in model.get("notes") or [])


def _parted(text: str, names: Collection[str]) -> tuple[list[str], str]:
    """The models that a warning names at its beginning, without their seeds, and what it says of them.

    >>> _parted("a-seed1, b: odd", {"a", "b"}), _parted("c: odd", {"a"})
    ((['a', 'b'], 'odd'), ([], 'c: odd'))
    """
    for end in (match.start() for match in re.finditer(": ", text)):
        owners = [word if word in names else re.sub(r"-seed\d+$", "", word) for word in text[:end].split(", ")]
        if all(owner in names for owner in owners):
            return owners, text[end + 2 :]
    return [], text


def _sentence(text: str, owners: Mapping[str, Collection[str]], seeds: Collection[int]) -> str:
    if seeds:
        text += f" (seed{'s' if len(seeds) > 1 else ''} {spans(seeds)})"
    whose = [f"{name} ({listed(sorted(stacks))})" if stacks else name for name, stacks in owners.items()]
    return f"{shortened(whose)}: {text}" if whose else text


def warnings_box(said: Sequence[str]) -> list[Any]:
    """The first few warnings, where a reader sees them at once."""
    if not said:
        return []
    parts: list[Any] = [Heading("Warning" if len(said) == 1 else "Warnings"), Listing(said[:5])]
    more = [Prose(text('<a href="#dropped">{n} more below.</a>', n=len(said) - 5))] if len(said) > 5 else []
    return [Box([*parts, *more], "warnings", "Warnings")]


# what was dropped and not computed


def dropped(abouts: Sequence[About]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Rows that were left out, by model and reason; models that lost the same, as seeds of one do, share a line."""
    found: dict[tuple[tuple[str, str], ...], dict[str, None]] = {}
    for about in abouts:
        for model in about.get("models") or []:
            reasons = [
                (str(k).replace("_", " "), f"{v:,}") for k, v in (model.get("dropped") or {}).items() if v is not None
            ]
            if reasons:
                found.setdefault(tuple(reasons), {})[str(model.get("name") or "unnamed")] = None
    return [(shortened(list(names)), list(reasons)) for reasons, names in found.items()]


def dropped_section(abouts: Sequence[About], notes: Mapping[str, list[tuple[str, ...]]]) -> Section:
    """Rows that were left out, warnings, and values that could not be computed."""
    lost, said = dropped(abouts), warnings(abouts)
    parts: list[Any] = []
    if not lost and not said and not notes["missing"] and not notes["remarks"]:
        parts.append(Prose("Nothing was dropped, nothing was warned about, and every value was computed."))
    if lost:
        told = [
            text("<strong>{name}</strong>: {why}", name=name, why=", ".join(map(" ".join, why))) for name, why in lost
        ]
        parts += [Heading("Rows left out"), Listing(told)]
    if said:
        every = Listing(said)
        parts += [
            Heading("Warnings"),
            Fold(f"All {len(said)} warnings", [every], css="behind") if len(said) > 8 else every,
        ]
    if notes["missing"]:
        parts += [Heading("Values that could not be computed"), _note_table(notes["missing"])]
    if notes["remarks"]:
        remarks = notes["remarks"]
        words = f"Remarks on computed values ({len(remarks)})"
        parts.append(Fold(words, [_note_table(remarks)], open=len(remarks) <= 12))
    return Section("dropped", "Dropped, warned about, not computed", parts, "Dropped, warned")


def _note_table(rows: Sequence[tuple[str, ...]]) -> DataTable:
    cells = [[*map(TableCell, row[:3]), TableCell(row[3], css="prose")] for row in rows]
    return DataTable([["Model", "Metric", "Where", "Note"]], [cells], "Notes", "plain notes", numeric=9)


def profile_notes(rows: RunRows, catalogue: Catalogue) -> dict[str, list[tuple[str, ...]]]:
    """Notes of the table, once each with the places they hold for: values that are missing apart from remarks."""
    books: dict[str, dict[tuple[str, ...], list[Row]]] = {"missing": defaultdict(list), "remarks": defaultdict(list)}
    for row in rows.query.where(lambda row: not row.known or bool(row.note)):
        key = (rows.subjects[row["subject"]].label, row.metric, row.variant, row.group)
        books["remarks" if row.known else "missing"][*key, row.note or "no reason was recorded"].append(row)
    return {name: [_noted(catalogue, key, found) for key, found in book.items()] for name, book in books.items()}


def _noted(catalogue: Catalogue, key: tuple[str, ...], rows: Sequence[Row]) -> tuple[str, ...]:
    model, metric, variant, group, note = key
    title = " · ".join(part for part in (catalogue.entry(metric).title, variant, group) if part)
    return model, title, _where(rows), note


def _where(rows: Sequence[Row]) -> str:
    """Places in a few words: layers as ranges, kinds and heads named."""
    kinds: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        kinds[row.kind].append(row)
    parts = []
    for kind, found in kinds.items():
        layers = {row.layer or 0 for row in found}
        one = place_of(found[0])
        parts.append(one if len(layers) == 1 else f"blocks {spans(layers)}" + ("" if kind == "resid" else f" · {kind}"))
    heads = {row.head for row in rows if row.head is not None}
    return ", ".join(parts) + (f" ({plural(len(heads), 'head')})" if heads else "")


def step_notes(rows: TrainingRows, catalogue: Catalogue) -> dict[str, list[tuple[str, ...]]]:
    """Notes that figures do not tell, once each with the steps they hold for: what is missing apart from remarks."""
    books: dict[str, dict[tuple[str, str, str], list[int]]] = {
        "missing": defaultdict(list),
        "remarks": defaultdict(list),
    }
    for row in rows.query.where(lambda row: not row.known or bool(unusual(row.note))):
        key = rows.subjects[row["subject"]].label, catalogue.entry(row.metric).title, unusual(row.note)
        book = books["remarks" if row.known else "missing"]
        book[key[0], key[1], key[2] or "no reason was recorded"].append(row.step or 0)
    return {name: _at_steps(book) for name, book in books.items()}


def _at_steps(book: Mapping[tuple[str, str, str], list[int]]) -> list[tuple[str, ...]]:
    rows = [(model, metric, _when(steps), note) for (model, metric, note), steps in book.items()]
    left = len(rows) - NOTES
    more = [("", "", "", f"{left:,} further notes are in table.parquet.")] if left > 0 else []
    return [*rows[:NOTES], *more]


def unusual(note: str) -> str:
    """What a note says beyond what figures already tell.

    >>> unusual("in-sample; fewer than 10 d rows"), unusual("since step 64")
    ('fewer than 10 d rows', '')
    """
    parts = (part.strip() for part in note.split(";"))
    return "; ".join(part for part in parts if part and not part.startswith(USUAL))


def _when(steps: Sequence[int]) -> str:
    """How many rows, and at which steps."""
    low, high = min(steps), max(steps)
    return f"{plural(len(steps), 'row')}, " + (f"step {low:,}" if low == high else f"steps {low:,} to {high:,}")


# what is needed to run it again


def settings(about: About, path: str) -> dict[str, Any]:
    """Everything needed to run it again."""
    command = about.get("command") or []
    groups = [
        ("Run", _run_facts(about)),
        ("Settings", flat(about.get("config") or {})),
        ("Versions", flat({"anisoscope": about.get("anisoscope"), **(about.get("versions") or {})})),
        ("Data", flat(about.get("data") or {})),
    ]
    models = []
    for model in about.get("models") or []:
        shown = {k: v for k, v in model.items() if k not in ("notes", "dropped")}
        models.append((f"Model: {model.get('name', 'unnamed')}", flat(shown)))
    return {
        "command": command if isinstance(command, str) else shlex.join(map(str, command)),
        "path": path,
        "facts": [(name, pairs) for name, pairs in groups if pairs],
        "models": [(name, pairs) for name, pairs in models if pairs],
    }


def _run_facts(about: About) -> list[tuple[str, str]]:
    facts = {k: about.get(k) for k in ("status", "started", "device", "seed", "schema")}
    found = [(k, str(v)) for k, v in facts.items() if v is not None]
    if about.get("wall_seconds") is not None:
        spent = about.get("monitor_seconds")
        measuring = f", of which {number(spent)} s measuring" if spent is not None else ""
        found.append(("wall time", f"{number(about['wall_seconds'])} s{measuring}"))
    peak, guess = about.get("peak_memory_mb"), about.get("memory_estimate_mb")
    if peak is not None:
        found.append(("peak memory", f"{number(peak)} MB" + (f" (estimated {number(guess)} MB)" if guess else "")))
    elif guess is not None:
        found.append(("estimated memory", f"{number(guess)} MB"))
    return found


def flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as name and text.

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
    return Section("record", "Record", [Prose(lead), Record([settings(run.about, run.path) for run in runs])], "Record")


def glossary_section(catalogue: Catalogue, metrics: Iterable[str]) -> Section:
    """What every metric of the page is."""
    entries = [catalogue.entry(name) for name in catalogue.ordered(metrics)]
    told = []
    for entry in entries:
        low, high = entry.bounds
        ends = " ".join(part for part, end in ((f"from {low}", low), (f"to {high}", high)) if end is not None)
        texts = [entry.description, f"Convention: {entry.convention}." if entry.convention else ""]
        texts += [f"Range: {ends}." if ends else ""]
        told.append(
            {
                "title": entry.title,
                "names": [entry.name],
                "formula": entry.formula,
                "reference": entry.reference,
                "texts": [part for part in texts if part],
            }
        )
    return Section("glossary", "Glossary", [Glossary(told)], "Glossary")


def terms_section(terms: Iterable[tuple[str, Sequence[str], str, Sequence[str]]]) -> Section:
    """A glossary of a study's own terms: title, names, formula, and what is said of it."""
    told = [{"title": t, "names": names, "formula": formula, "texts": texts, "reference": ""}
            for t, names, formula, texts in terms]  # fmt: skip
    return Section("glossary", "Glossary", [Glossary(told)], "Glossary")


# all numbers


def csv_link(query: Query) -> dict[str, Any]:
    """Rows as a data URI; the page's own table is read back from it."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([_plain(getattr(row, name)) for name in COLUMNS] for row in query)
    href = "data:text/csv;charset=utf-8," + quote(out.getvalue(), safe=",;=:/()")
    return {"href": href, "rows": len(query), "total": len(query), "heads": 0, "gone": [], "cut": False}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.9g}" if math.isfinite(value) else ""
    return "" if value is None else value


def table_section(query: Query, *, most: int | None = None) -> Section:
    """The table of results without the rows of single heads; of a long one without the least important rows."""
    return Section("table", "Table", [Download(page_table(query, most=most))], "Table")


def page_table(query: Query, *, most: int | None = None) -> dict[str, Any]:
    """The download of a page: all rows that are not per head, or what is left without the least important ones."""
    plain = query.where(head=None)
    kept, gone = plain, []
    for words, unwanted in CUTS:
        if most is None or len(kept) <= most:
            break
        fewer = kept.where(lambda row, unwanted=unwanted: not unwanted(row))  # type: ignore[misc]
        gone += [words] if len(fewer) < len(kept) else []
        kept = fewer
    if most is not None and len(kept) > most:
        kept, gone = _last_steps(kept), [*gone, "all steps but the last"]
    cut = most is not None and len(kept) > most
    found = csv_link(kept.first(most) if cut and most is not None else kept)
    return found | {"total": len(plain), "gone": gone, "cut": cut, "heads": len(query) - len(plain)}


def _last_steps(query: Query) -> Query:
    """The rows of each model and seed at its last step, and those of no step."""
    ends = {key: max((step for step in rows.values("step") if step is not None), default=None)
            for key, rows in query.groups("source", "model", "seed").items()}  # fmt: skip
    return query.where(lambda row: row.step is None or row.step == ends[row.source, row.model, row.seed])
