"""The summary of a training run in sentences, made from numbers and their intervals.

Two values are called different only where their intervals do not meet; steps and layers of one run are not independent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from anisoscope.view.findings import Finding
from anisoscope.view.training import History, Learner, Mark, Site, known
from anisoscope.view.training_course import logged
from anisoscope.view.words import estimate, number, site_phrase

TELL_EACH = 4  # with more learners than this the verdicts and figures speak


def find_training(history: History) -> list[Finding]:
    """All sentences the table supports, most important first."""
    said = {
        "Energy": _each(history, _energy),
        "Layers": _each(history, _layers),
        "Frequency": _each(history, _frequency),
        "Loss": _each(history, _loss),
        "Caution": _caution(history),
    }
    whole = {topic: tuple(text.replace(" ± ", "\u00a0±\u00a0") for text in texts) for topic, texts in said.items()}
    return [Finding(topic, texts) for topic, texts in whole.items() if texts]


def _each(history: History, tell: Callable[[History, Learner], str]) -> list[str]:
    if len(history.learners) > TELL_EACH:
        return []
    told = [(learner, text) for learner in history.learners if (text := tell(history, learner))]
    if len(history.learners) > 1:
        return [f"{learner.label}: {text}" for learner, text in told]
    return [text[:1].upper() + text[1:] for _, text in told]


def tell(mark: Mark) -> str:
    return estimate(mark.value, mark.low, mark.high)


def apart(a: Mark, b: Mark) -> bool:
    """Whether the intervals of two marks do not meet; without intervals nothing is claimed."""
    return bool(a.interval and b.interval and (a.interval[1] < b.interval[0] or b.interval[1] < a.interval[0]))


def _middle(history: History, learner: Learner) -> Site | None:
    sites = [s for s in history.sites(["gradient_energy"]) if history.tangent(learner, "gradient_energy", s)]
    return sites[history.middle(sites)] if sites else None


def _at(history: History, mark: Mark) -> str:
    return f" at step {mark.step:,}" if history.dated else ""


def _finally(history: History) -> str:
    """Where a sentence speaks of the last of several steps."""
    return "at the last step " if len(history.steps()) > 1 else ""


def _energy(history: History, learner: Learner) -> str:
    """The course of energy in the middle of the model, against chance and the normal control."""
    site = _middle(history, learner)
    line = known(history.tangent(learner, "gradient_energy", site)) if site else []
    if not site or not line:
        return ""
    peak = max(line, key=lambda m: m.value or 0.0)
    text = f"the proxy of rank {history.rank} holds {tell(line[0])} of the gradient energy "
    text += f"{site_phrase(site.layer, site.kind)}{_at(history, line[0])}"
    if len(line) > 1:
        text += f", {tell(line[-1])}{_at(history, line[-1])}"
        if peak not in (line[0], line[-1]) and apart(peak, line[-1]):
            text += f", after a peak of {tell(peak)}{_at(history, peak)}"
    chance = history.chance(learner)
    text += f"; chance is {number(chance)}." if chance else "."
    return text + _controls(history, learner, site, line)


def _controls(history: History, learner: Learner, site: Site, line: Sequence[Mark]) -> str:
    normal = [m.high for m in history.tangent(learner, "gradient_energy", site, control="normal") if m.high is not None]
    text = f" Subspaces orthogonal to it stay below {number(max(normal))}." if normal else ""
    pca = {m.step: m.value for m in known(history.tangent(learner, "gradient_energy", site, proxy="pca"))}
    gaps = [abs((m.value or 0.0) - (pca[m.step] or 0.0)) for m in line if m.step in pca]
    if gaps and history.proxy != "pca":
        text += f" PCA of the same rank differs by at most {number(max(gaps), 2)}."
    return text


def _layers(history: History, learner: Learner) -> str:
    """Where energy is highest and lowest at the last step."""
    sites = history.sites(["gradient_energy"])
    ends = [(s, line[-1]) for s in sites if (line := known(history.tangent(learner, "gradient_energy", s)))]
    if len(ends) < 2:
        return ""
    high, low = (f(ends, key=lambda pair: pair[1].value or 0.0) for f in (max, min))
    if not apart(high[1], low[1]):
        ends_words = f"{number(low[1].value)} and {number(high[1].value)}"
        return f"{_finally(history)}all layers lie between {ends_words}, which the intervals cannot tell apart."
    places = [f"{tell(mark)} {site_phrase(site.layer, site.kind)}" for site, mark in (high, low)]
    return f"{_finally(history)}energy is highest with {places[0]}, lowest with {places[1]}."


def _frequency(history: History, learner: Learner) -> str:
    """The most frequent bin against the rarest, in the middle of the model at the last step."""
    site = _middle(history, learner)
    bins = sorted({k[3] for k in history.keys(["gradient_enrichment"]) if k[3].startswith("frequency:")})
    if not site or len(bins) < 2:
        return ""
    ends = [known(history.tangent(learner, "gradient_enrichment", site, group=g)) for g in (bins[0], bins[-1])]
    if not all(ends):
        return ""
    first, last = ends[0][-1], ends[1][-1]
    text = f"{_finally(history)}enrichment {site_phrase(site.layer, site.kind)} is {tell(first)} for the most "
    text += f"frequent tokens and {tell(last)} for the rarest"
    return text + ("." if apart(first, last) else ", which the intervals cannot tell apart.")


def _loss(history: History, learner: Learner) -> str:
    for metric, name in (("probe_loss", "the loss on the held-out probe"), ("loss", "the training loss")):
        line = known(logged(history, learner, metric))
        if len(line) == 1:
            return f"{name} is {tell(line[0])}."
        if line:
            first, last = line[0], line[-1]
            if tell(first) == tell(last):
                return f"{name} is {tell(first)} at step {first.step:,} and at step {last.step:,}."
            ends = f"from {tell(first)} at step {first.step:,} to {tell(last)} at step {last.step:,}"
            falls = (last.value or 0.0) < (first.value or 0.0)
            return f"{name} {'falls' if falls else 'goes'} {ends}."
    return ""


def _caution(history: History) -> list[str]:
    keys = history.keys(history.metrics())
    texts = []
    if any("fewer than 10 d" in mark.note for key in keys for mark in history.line_at(key)):
        texts.append("Fewer than 10 d rows at some sites: shares of anisotropy are then rough.")
    if history.dated and len({learner.seed for learner in history.learners}) == 1:
        texts.append("One seed of each model: what is said holds for this run, not for models like it.")
    return texts
