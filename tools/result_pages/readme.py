"""The README of one result, from its table, verdicts and run.json; words that people wrote are in limits.md."""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import pyarrow.compute as pc

from anisoscope.results.manifest import PRETRAINED
from anisoscope.results.privacy import without_places
from anisoscope.results.quantity import FEWEST_SEEDS
from anisoscope.view.headline import headline
from anisoscope.view.sections.findings import grid_words, status_counts, unmeasured
from anisoscope.view.sections.provenance import unusual
from anisoscope.view.words import listed, plural, shortened
from result_pages.chosen_rows import BLOCKS
from result_pages.declared import RESULTS, Declared
from result_pages.key_table import markdown, pipes
from result_pages.placeholders import NotInTable, effect_words, filled_in
from result_pages.result import Result, Verdict

UNSURE = {"unknown": "Whether it learned is not known of", "did not learn": "Did not learn by the last step:"}
GRID = 6  # subjects with which verdicts are a grid; more are a list
BESIDE = 4  # subjects of one claim alone that stand beside the grid; of more there is a list below it
PARTS = re.compile(r"\n{2,}|\n(?=- )")  # between paragraphs, and between items of a list
NOTES = 12  # warnings told in full
FINGERPRINT = 16  # characters of it that are shown
WRITTEN = "<!-- Written by `make results` from table.parquet, verdicts.json and run.json; words: limits.md. -->"
FILES = ("report.html", "table.parquet", "verdicts.json", "run.json", "figures")


def readme(result: Result) -> str:
    """README.md of a result."""
    declared = RESULTS.get(result.name, Declared("", "", ()))
    parts = [head(result, declared), _command(result), _pictures(result), _finding(result)]
    parts += [_ran(result), _keys(result, declared), _verdicts(result), _failed(result), _against(result)]
    return "\n".join(line for part in parts for line in part).rstrip() + "\n"


def title(result: Result) -> str:
    """What was found, in a sentence; the question where no verdict says anything."""
    declared = RESULTS.get(result.name)
    found = headline(result.verdicts, str(result.about.get("study") or ""))
    return found.rstrip(".") or (declared.question if declared else result.name)


def head(result: Result, declared: Declared) -> list[str]:
    asked = f"{declared.question} " if declared.question else ""
    how = f"How it is done: [{declared.page}](../../{declared.page}). " if declared.page else ""
    files = [f"[{name}]({name})" for name in FILES if (result.folder / name).exists()]
    lines = [f"# {title(result)}", "", WRITTEN, ""]
    return [*lines, f"{asked}{how}Here: {listed(files)}. [All results](../README.md).", ""]


def _command(result: Result) -> list[str]:
    about = without_places(result.about, share=True)
    commands = about.get("commands") or [about.get("command") or []]
    lines = ["```", *(shlex.join(command) for command in commands if command), "```", ""]
    if any("--resume" in command for command in commands):
        lines += ["It went on in a folder that was there (`--resume`); without it the same command runs it whole.", ""]
    facts = {"anisoscope": about.get("anisoscope")}
    facts |= {name: _of_models(about, "versions", name) for name in ("torch", "transformers", "python")}
    facts |= {"device": _of_models(about, "device_name") or about.get("device"), "seconds": _seconds(about)}
    facts |= {"date": _day(about), "status": about.get("status")}
    shown = {name: str(value) for name, value in facts.items() if value}
    return [*lines, *pipes(list(shown), [list(shown.values())]), ""]


def _of_models(about: Mapping[str, Any], *path: str) -> str:
    """An entry of the models, each once, since an arm may have run elsewhere; of the run where they have none."""
    entries = [*about.get("models", ()), about]
    for name in path:
        entries = [entry.get(name) or {} for entry in entries]
    return listed([str(value) for value in dict.fromkeys(filter(None, entries[:-1]))] or [str(entries[-1] or "")])


def _seconds(about: Mapping[str, Any]) -> str:
    """Those of the run; of arms that were trained side by side those of each as well."""
    arms = [model["seconds"] for model in about.get("models", ()) if model.get("seconds")]
    whole = f"{about['wall_seconds']:,.0f}" if about.get("wall_seconds") else ""
    return f"{whole}; each arm {min(arms):,.0f} to {max(arms):,.0f}" if len(arms) > 1 else whole


def _day(about: Mapping[str, Any]) -> str:
    try:
        moment = datetime.fromisoformat(str(about.get("started")))
    except ValueError:
        return ""
    return f"{moment.day} {moment:%B %Y}"


def _pictures(result: Result) -> list[str]:
    from gallery import PICTURES

    shown = [p for p in PICTURES if p.result == result.name]
    return [line for p in shown for line in (f"![{p.alt}](../../figures/gallery/{p.name}.svg)", "", p.tell(), "")]


def _finding(result: Result) -> list[str]:
    return paragraphs(result, "finding.md")


def paragraphs(result: Result, file: str) -> list[str]:
    """What people wrote into a file, numbers looked up; a part that asks for what is absent is left out."""
    lines: list[str] = []
    for part in filter(None, PARTS.split(result.text(file).strip())):
        try:
            lines += [filled_in(part, result), *([] if part.startswith("- ") else [""])]
        except NotInTable as error:
            print(f"left out of {result.name}/README.md: {error}", file=sys.stderr)
    return lines


# -- what was run ------------------------------------------------------------------------------------------------------


def _ran(result: Result) -> list[str]:
    lines = ["## What was run", "", *_models(result), *_sizes(result), *_data(result)]
    config = {key: value for key, value in (result.about.get("config") or {}).items() if value not in (None, [], "")}
    told = ", ".join(f"`{key}` {_option(value)}" for key, value in config.items())
    return [*lines, *([f"Options: {told}.", ""] if told else [])]


def _option(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _models(result: Result) -> list[str]:
    """A line for each model; seeds of one model are one line."""
    entries: dict[tuple[str, ...], list[Any]] = {}
    for model in result.about.get("models") or []:
        size = f"{model['layers']} × {model['width']}" if model.get("layers") and model.get("width") else ""
        size = size or (str(model["blocks"]) if model.get("blocks") else "")
        words = str(model.get("architecture") or model.get("about") or model.get("block") or "")
        data = (model.get("data") or {}).get("name", "")
        count = f"{model['parameters']:,}" if model.get("parameters") else ""
        key = (str(model.get("name")), words, str(model.get("objective") or ""), size, count, str(data))
        entries.setdefault(key, []).append(model.get("seed"))
    heads = ["model", "architecture", "predicts", "blocks × width", "parameters", "data", "seeds"]
    rows = [[*key, ", ".join(str(seed) for seed in seeds if seed is not None)] for key, seeds in entries.items()]
    if any(row[-1] for row in rows):
        rows = [[*row[:-1], row[-1] or "one set of weights"] for row in rows]
    return [*pipes(heads, rows), ""] if rows else []


def _sizes(result: Result) -> list[str]:
    """How many steps, contexts and rows were measured, from the table."""
    table = result.table
    told = [plural(len(table), "row") + " in the table"]
    if steps := table.steps:
        told.append(f"measured at {plural(len(steps), 'step')}: {', '.join(f'{step:,}' for step in steps)}")
    streams = result.rows.where(group="", kind=["embed", *BLOCKS], of=None)  # those of tables count types
    counts = [int(n) for n in streams.values("contexts") if n]
    told += [f"values rest on up to {plural(max(counts), 'context')}"] if counts else []
    if seeds := table.unique("seed"):
        told.append(f"seeds {', '.join(map(str, seeds))}")
    text = "; ".join(told)
    return [f"{text[:1].upper()}{text[1:]}.", ""]


def _data(result: Result) -> list[str]:
    """A line for each set of data; models are named where they read different sets of one name, or parts of a set."""
    about = result.about
    sets: dict[tuple[str, str, str], dict[str, None]] = {}
    for model in [about, *(about.get("models") or [])]:
        data = model.get("data") or {}
        if isinstance(data, dict) and data.get("name"):
            key = (str(data["name"]), str(data.get("fingerprint") or "")[:FINGERPRINT], _counts(data))
            sets.setdefault(key, {})[str(model.get("name") or "")] = None
    shared = Counter(name for name, *_ in sets)
    lines = []
    for (name, mark, told), models in sets.items():
        named = list(filter(None, models))
        read = f", read by {listed(named)}" if shared[name] > 1 and named else ""
        lines += [f"Data: {name}{f' (fingerprint `{mark}`)' if mark else ''}{read}{told and f': {told}'}.", ""]
    return lines


def _counts(data: Mapping[str, Any]) -> str:
    """How much a set of data has: `3 documents, 512 context length`."""
    numbers = {key: value for key, value in data.items() if isinstance(value, int) and value}
    parts = {f"{part} {key}": value for part, held in (data.get("parts") or {}).items()
             for key, value in held.items() if value}  # fmt: skip
    return ", ".join(f"{value:,} {key.replace('_', ' ')}" for key, value in {**numbers, **parts}.items())


# -- numbers and verdicts ----------------------------------------------------------------------------------------------


def _keys(result: Result, declared: Declared) -> list[str]:
    entries = result.about.get("models") or []
    tables = [line for key in declared.tables for line in markdown(key, result.rows_of(key.of), entries)]
    return ["## Numbers", "", *tables] if tables else []


def _verdicts(result: Result) -> list[str]:
    told = result.told
    if not told:
        return []
    subjects = Counter(str(verdict["subject"]) for verdict in told)
    shared = [name for name, count in subjects.items() if count > 1]
    made = _grid(told, shared) if len(shared) <= GRID and shared else _list(told)
    text = f"Of {plural(len(told), 'verdict')} {status_counts(told)}. {grid_words(result.told)} Effect and 95 % "
    text += f"interval in brackets; what each claim asks, and its margin: {_asked(result)}."
    text = " ".join(text.split())
    return ["## Verdicts", "", text, "", *made, ""]


def _asked(result: Result) -> str:
    """The page of the claims of a result: those of the performance study are on its own."""
    if result.about.get("study") == "performance":
        return "[performance-study.md](../../performance-study.md#verdicts)"
    return "[claims](../../claims.md)"


def _grid(told: Sequence[Verdict], shared: Sequence[str]) -> list[str]:
    """Claims × subjects that several claims speak of; other subjects beside them, or of many below."""
    rows, below = [], []
    for claim in dict.fromkeys(str(verdict["claim"]) for verdict in told):
        found = {str(verdict["subject"]): verdict for verdict in told if verdict["claim"] == claim}
        others = {name: verdict for name, verdict in found.items() if name not in shared}
        if len(others) > BESIDE:
            both = {name for name in others if is_beside(name) or f"{name}, {PRETRAINED}" in others}
            below += [verdict for name, verdict in others.items() if name not in both]
            others = {name: verdict for name, verdict in others.items() if name in both}
        ends = [
            "; ".join(f"{name}: {_verdict(verdict)}" for name, verdict in others.items() if is_beside(name) is beside)
            for beside in (False, True)
        ]
        ends[1] = ends[1].replace(f", {PRETRAINED}: ", ": ")
        rows.append([f"`{claim}`", *(_verdict(found.get(name)) for name in shared), *ends])
    rows = [row for row in rows if any(row[1:])]
    return [*pipes(["claim", *shared, "together", PRETRAINED], rows), *(["", *_list(below)] if below else [])]


def is_beside(subject: str) -> bool:
    """Whether a verdict is on pretrained models beside one on models with seeds."""
    return subject.endswith(f", {PRETRAINED}")


def _list(told: Sequence[Verdict]) -> list[str]:
    return pipes(["claim", "subject", "verdict"], [[f"`{v['claim']}`", v["subject"], _verdict(v)] for v in told])


def _verdict(verdict: Verdict | None) -> str:
    if verdict is None:
        return ""
    words = effect_words(verdict)
    return f"**{verdict['status']}**{f' {words}' if words else ''}"


# -- what failed, and what to hold against it --------------------------------------------------------------------------


def _failed(result: Result) -> list[str]:
    items = [*_unfinished(result), *_warnings(result), *_uncomputed(result), *_unmeasured(result)]
    return ["## What failed or was left out", "", *(f"- {item}" for item in items or ["Nothing."]), ""]


def _unfinished(result: Result) -> Iterator[str]:
    about = result.about
    if about.get("status") not in ("complete", None):
        yield f"The run is {about['status']}: what is here is what was measured until then."
    for key in ("failed", "skipped"):
        for item in about.get(key) or []:
            yield f"{key.capitalize()}: {_entry(item)}"


def _entry(item: Any) -> str:
    return ", ".join(f"{key} {value}" for key, value in item.items()) if isinstance(item, dict) else str(item)


def _warnings(result: Result) -> list[str]:
    counts = Counter(" ".join(str(words).split()) for words in result.about.get("warnings") or [])
    told = [words if count == 1 else f"{words} ({count} times)" for words, count in counts.items()]
    more = [f"{plural(len(told) - NOTES, 'more warning')} in run.json."] if len(told) > NOTES else []
    return [*told[:NOTES], *more]


def _uncomputed(result: Result) -> Iterator[str]:
    """Values that could not be computed, by metric and reason."""
    missing = result.table.arrow.filter(pc.invert(pc.is_finite(pc.fill_null(result.table.arrow["value"], math.nan))))
    reasons = (unusual(note or "") or "no reason was recorded" for note in missing["note"].to_pylist())
    notes = (" ".join(why.split()) for why in reasons)
    counts = Counter(zip(missing["metric"].to_pylist(), notes, strict=True))
    for (metric, why), count in counts.most_common(NOTES):
        yield f"`{metric}`: {plural(count, 'value')} could not be computed: {why.rstrip('.')}."


def _unmeasured(result: Result) -> Iterator[str]:
    if names := unmeasured(result.verdicts):
        yield f"Claims that were not measured: {shortened([f'`{name}`' for name in names], 8)}."
    lacking = Counter(reason for verdict in result.told if (reason := _lacks(verdict)))
    for reason, count in lacking.most_common(NOTES):
        yield f"{plural(count, 'verdict')} undecided because {reason}."


def _lacks(verdict: Verdict) -> str:
    """What an undecided verdict would need that the table has not."""
    reason = str(verdict.get("why") or "").partition("undecided because ")[2].rstrip(".")
    return reason if reason.startswith("the table has no") else ""


def _against(result: Result) -> list[str]:
    items = [*_seeds(result), *_not_learned(result), *_thinned(result)]
    words = paragraphs(result, "limits.md")
    return ["## What to hold against it", "", *(f"- {item}" for item in items), *words]


def _seeds(result: Result) -> Iterator[str]:
    few = {name: len(rows.values("seed")) for name, rows in result.rows.groups("model").items()}
    few = {name: count for name, count in few.items() if count < FEWEST_SEEDS}
    if few and len(result.table.unique("seed")):
        names = shortened(list(few), 4)
        yield f"Fewer than three seeds of {names}: what is said of them is said of these runs, not in general."


def _not_learned(result: Result) -> Iterator[str]:
    """Models of which it is not sure that they learned; a reason that all of them share is told."""
    groups: dict[tuple[str, str], dict[str, None]] = {}
    for verdict in result.told:
        for model, found in ((verdict.get("details") or {}).get("learned") or {}).items():
            why = str(found.get("why") or "")
            alike = "" if any(letter.isdigit() for letter in why) else why  # numbers are those of one model
            groups.setdefault((str(found.get("status")), alike), {})[model] = None
    for (status, why), models in groups.items():
        if status in UNSURE:
            yield f"{UNSURE[status]} {_with_seeds(models)}{f': {why}' if why else ''}."


def _with_seeds(models: Iterable[str]) -> str:
    """Models, each with the seeds that are meant: `decoder (seeds 0, 2)`."""
    seeds: dict[str, list[str]] = {}
    for name in models:
        model, _, seed = name.partition(", seed ")
        seeds.setdefault(model, []).extend([seed] if seed else [])
    return listed([f"{model} (seed {', '.join(found)})" if found else model for model, found in seeds.items()])


def _thinned(result: Result) -> Iterator[str]:
    if how := result.about.get("thinned"):
        yield " ".join(how[name] for name in ("words", "page") if name in how)
