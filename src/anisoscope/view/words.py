"""Text for numbers, sites, metrics and variants; undeclared metrics get a title made from their name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any

from anisoscope.results.query import options_of, variant_name


def finite(value: float | None) -> float | None:
    """The value, or None if it is missing, NaN or infinite, as JSON and plots need it.

    >>> finite(float("nan")), finite(None), finite(2.5)
    (None, None, 2.5)
    """
    return float(value) if value is not None and math.isfinite(value) else None


def number(value: float | None, digits: int = 3) -> str:
    """A number with `digits` significant digits, never in e-notation.

    >>> number(0.31249), number(1234.5), number(2e-7), number(None)
    ('0.312', '1,234', '2×10⁻⁷', '–')
    """
    value = finite(value)
    if not value:
        return "–" if value is None else "0"
    exponent = math.floor(math.log10(abs(value)))
    if -4 <= exponent <= 6:
        return _signed(f"{value:,.{max(0, digits - 1 - exponent)}f}")
    mantissa, power_of_ten = f"{value:.{digits - 1}e}".split("e")
    mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return _signed(f"{mantissa}×10{str(int(power_of_ten)).translate(_SUPERSCRIPT)}")


def power(value: float) -> str:
    """A power of ten as text.

    >>> power(0.001), power(1.0), power(1e12)
    ('10⁻³', '1', '10¹²')
    """
    exponent = round(math.log10(value))
    return "1" if exponent == 0 else f"10{str(exponent).translate(_SUPERSCRIPT)}"


_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def _signed(text: str) -> str:
    return text.replace("-", "−") if text.startswith("-") else text


def estimate(value: float | None, low: float | None = None, high: float | None = None) -> str:
    """A value with its interval: ± half-width, or both ends if it is asymmetric or ± would cross 0 or 1.

    >>> estimate(0.3123, 0.3011, 0.3236), estimate(0.31, 0.10, 0.33), estimate(4.2), estimate(2.1, 0, 5.6)
    ('0.312 ± 0.011', '0.31 [0.10, 0.33]', '4.20', '2.1 [0.0, 5.6]')
    """
    value, low, high = finite(value), finite(low), finite(high)
    if value is None or low is None or high is None:
        return number(value)
    half = (high - low) / 2
    if half <= 0 or not 1e-4 <= max(abs(value), half) < 1e7:
        return number(value)
    exponent = math.floor(math.log10(half))
    # decimals for one digit of the half-width, two digits if the first is 1 or 2
    places = min(6, max(0, -exponent + (half / 10**exponent < 2.95)))
    small, large = sorted((value - low, high - value))
    cut = low >= 0 > value - half or high <= 1 < value + half  # an interval clipped at a bound
    if small < 0 or large > 2 * small or cut:
        return f"{_fixed(value, places)} [{_fixed(low, places)}, {_fixed(high, places)}]"
    shown = _fixed(half, places)
    shown = shown if float(shown.replace(",", "")) > 0 else f"<{_fixed(10**-places, places)}"
    return f"{_fixed(value, places)} ± {shown}"


def _fixed(value: float, places: int) -> str:
    text = f"{value:,.{places}f}"
    return _signed(text) if float(text.replace(",", "")) != 0 else text.lstrip("-")


def spans(numbers: Iterable[int]) -> str:
    """Whole numbers as ranges.

    >>> spans([3, 1, 2, 7, 9, 10])
    '1–3, 7, 9, 10'
    """
    whole = enumerate(sorted(set(numbers)))
    runs = [[n for _, n in run] for _, run in groupby(whole, key=lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{r[0]}–{r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in runs)


def listed(words: Sequence[str]) -> str:
    """Words as an enumeration.

    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""


def shortened(words: Sequence[str], most: int = 3) -> str:
    """Words as an enumeration of the first few, with the number of further ones.

    >>> shortened(["a", "b", "c", "d"]), shortened(["a", "b", "c", "d", "e"])
    ('a, b, c and d', 'a, b, c and 2 more')
    """
    if len(words) <= most + 1:  # "and 1 more" would not be shorter than the word
        return listed(words)
    return f"{', '.join(words[:most])} and {len(words) - most} more"


def plural(count: int, noun: str, many: str = "") -> str:
    """A count with its noun.

    >>> plural(1, "row"), plural(65536, "row")
    ('1 row', '65,536 rows')
    """
    return f"{count:,} {noun if count == 1 else many or noun + 's'}"


SITES = {  # by kind: the name of a site on axes and in tables, and as a phrase
    "embed": ("embedding", "at the embedding"),
    "resid": ("block {}", "after block {}"),
    "stage": ("block {} · stage", "after the stage that ends with block {}"),
    "final": ("final norm", "after the final norm"),
    "rows": ("rows", "in the rows"),
    "unembed": ("output head", "in the output head"),
    "embed_weight": ("embedding table", "in the embedding table"),
}


# kinds that a block has; every other kind is the name of a module or of a table of rows
OF_BLOCK = (
    *("stage_mean", "cls", "attn_in", "attn_out", "mlp_in", "mlp_out", "query", "key", "scores"),
    *("query_unrotated", "key_unrotated", "cross_query", "cross_key", "cross_scores"),
)


def is_module(kind: str) -> bool:
    """Whether a kind of site is the name of a module that a user named.

    >>> is_module("encoder.0"), is_module("resid"), is_module("training")
    (True, False, False)
    """
    return bool(kind) and kind not in SITES and kind not in OF_BLOCK and kind != "training"


def site_name(layer: int, kind: str) -> str:
    """A short name of a site, for axes and table rows.

    >>> site_name(0, "embed"), site_name(3, "resid"), site_name(6, "final"), site_name(2, "mlp_out")
    ('embedding', 'block 3', 'final norm', 'block 2 · mlp_out')
    >>> site_name(0, "my.table")
    'my.table'
    """
    if kind in SITES:
        return SITES[kind][0].format(layer)
    return f"block {layer} · {kind}" if kind in OF_BLOCK else kind


def site_phrase(layer: int, kind: str) -> str:
    """A site as a phrase in a sentence.

    >>> site_phrase(0, "embed"), site_phrase(3, "resid")
    ('at the embedding', 'after block 3')
    """
    if kind in SITES:
        return SITES[kind][1].format(layer)
    return f"at {kind} of block {layer}" if kind in OF_BLOCK else f"at {kind}"


def step_words(step: int) -> str:
    """A step as an axis label.

    >>> [step_words(n) for n in (0, 64, 1000, 20000, 1500, 2_000_000)]
    ['0', '64', '1k', '20k', '1.5k', '2M']
    """
    for size, unit in ((1_000_000, "M"), (1000, "k")):
        if step >= size:
            return f"{step / size:.4g}{unit}"
    return str(step)


def few(values: Sequence[int], most: int) -> list[int]:
    """At most `most` of the values, evenly chosen, including the first and the last.

    >>> few([0, 1, 2, 3, 4, 5], 3)
    [0, 2, 5]
    """
    if len(values) <= most:
        return list(values)
    if most < 2:
        return list(values[-1:])
    picks = {round(i * (len(values) - 1) / (most - 1)) for i in range(most)}
    return [values[i] for i in sorted(picks)]


def strided(count: int, most: int) -> list[int]:
    """At most `most` evenly spaced indices below `count`, from 0 on.

    >>> strided(5, 8), strided(14, 7)
    ([0, 1, 2, 3, 4], [0, 2, 4, 6, 8, 10, 12])
    """
    return list(range(0, count, max(1, math.ceil(count / most))))


def neat(value: float | None, digits: int = 3) -> str:
    """A number without trailing zeros.

    >>> neat(0.005), neat(120.0), neat(0.31)
    ('0.005', '120', '0.31')
    """
    text = number(value, digits)
    return text.rstrip("0").rstrip(".") if "." in text and "×" not in text else text


def p_words(p: float | None) -> str:
    """A p-value as text.

    >>> p_words(0.0333), p_words(1e-9), p_words(float("nan"))
    ('0.033', '< 0.0001', '–')
    """
    known = finite(p)
    return "–" if known is None else "< 0.0001" if known < 1e-4 else neat(known, 2)


def interval_words(value: float | None, low: float | None, high: float | None) -> str:
    """A correlation with both ends of its interval, two decimals.

    >>> interval_words(0.982, 0.97, 0.991), interval_words(0.5, None, None), interval_words(float("nan"), 0, 1)
    ('0.98 [0.97, 0.99]', '0.50', '–')
    """
    if finite(value) is None:
        return "–"
    shown = [f"{v:.2f}".replace("-", "−") for v in (value, low, high) if finite(v) is not None and v is not None]
    return f"{shown[0]} [{shown[1]}, {shown[2]}]" if len(shown) == 3 else shown[0]


def range_words(values: Sequence[float]) -> str:
    """The range of several values as text; empty for one value."""
    return f"{number(min(values))} to {number(max(values))}" if len(values) > 1 else ""


# Metrics in reading order; others follow alphabetically.
ORDER: tuple[str, ...] = ("average_cosine", "svd_ratio", "two_nn", "participation_ratio", "iso_score", "drift")
ORDER += ("effective_rank", "mean_norm", "relative_drift", "svd_ratio_squared", "stable_rank", "levina_bickel", "gride")
ORDER += ("hubness", "partition_isotropy", "rogue_share", "self_similarity")
MAIN = 6
TANGENT: tuple[str, ...] = ("gradient_energy", "gradient_enrichment", "gradient_alignment", "gradient_ratio")
TANGENT += ("gradient_share", "gradient_isoscore_gain")
TESTS = ("gradient_p", "gradient_p_holm")
FREQUENCY = ("frequency_spread", "frequency_spread_p")
MOVEMENT = ("amplification", "proxy_overlap", "concept_turn", "concept_match")
LOOP = ("loss", "probe_loss", "gradient_norm", "learning_rate")
OF_TRAINING = (*TANGENT, "gradient_p_holm", "gradient_p", *MOVEMENT, *FREQUENCY, *LOOP)  # in page order
SUBJECT_OPTIONS = ("proxy", "rank", "control", "of")  # options for what is measured; the others are for how
ACRONYMS = {"svd": "SVD", "qk": "QK", "nn": "NN", "cka": "CKA", "iso": "Iso", "mle": "MLE"}


@dataclass(frozen=True)
class Entry:
    """The description of one metric on the page."""

    name: str
    title: str
    formula: str = ""
    reference: str = ""
    description: str = ""
    convention: str = ""
    bounds: tuple[float | None, float | None] = (None, None)


PROXIES = {"semi_nmf": "semi-NMF", "pca": "PCA", "svd": "truncated SVD", "ica": "ICA", "kmeans": "k-means"}
PROXIES |= {"random": "random directions"}
CONTROLS = {"normal": "normal subspaces", "random": "random subspaces", "next": "next r", "permuted": "permuted"}
SOURCES = {
    "embedding_in": "Embedding gradients, input role",
    "embedding_out": "Embedding gradients, output role",
    "update": "Embedding updates, weight decay removed",
    "update_raw": "Embedding updates, raw",
    "weight": "Weight gradients",
}
KINDS = {"attn_in": "attention input", "mlp_in": "MLP input"}
READINGS = {"fit=refit": "refitted at each step", "fit=frozen": "frozen after the first 30 %"}
READINGS |= {"average=row": "mean of row ratios", "balanced=1": "balanced over frequency"}
READINGS |= {"batch=live": "training batch", "rows=batch": "rows of the training batch"}
READINGS |= {"coordinates=standardised": "standardised coordinates", "first=out": "without first position"}
FLAGS = {"centred=1": "centred", "centred=0": "uncentred"} | READINGS
FLAGS |= {"normalised=1": "divided by the mean norm", "over=context": "over contexts", "over=time": "over time"}
FLAGS |= {"correlation=pearson": "Pearson", "correlation=spearman": "Spearman", "batches=1": "mean over batches"}
FLAGS |= {"calibrated=1": "bias taken out", "partition=random": "random parts", "partition=none": "in one part"}


class Catalogue:
    """Entries by metric name; undeclared metrics get a title made from their name."""

    def __init__(self, declared: Mapping[str, Any] | None = None) -> None:
        self._declared = declared or {}

    def entry(self, name: str) -> Entry:
        found = self._declared.get(name)
        if found is None:
            return Entry(name, title_of(name))
        fields = {f: str(getattr(found, f, "") or "") for f in ("formula", "reference", "description", "convention")}
        low, high = getattr(found, "bounds", None) or (None, None)
        return Entry(name, str(getattr(found, "title", "") or title_of(name)), bounds=(low, high), **fields)

    def ordered(self, names: Iterable[str]) -> list[str]:
        """Names in reading order: gradients, movement, frequency and the loop of a training run, then geometry."""
        place = {name: i for i, name in enumerate((*OF_TRAINING, *ORDER))}
        return sorted(set(names), key=lambda name: (place.get(name, len(place)), name))

    def main(self, names: Iterable[str]) -> list[str]:
        """The main metrics: the best known, then others that were measured."""
        return self.ordered(names)[:MAIN]


def title_of(name: str) -> str:
    """A title made from a name.

    >>> title_of("svd_ratio"), title_of("first_key_mass")
    ('SVD ratio', 'First key mass')
    """
    text = " ".join(ACRONYMS.get(word, word) for word in name.split("_") if word)
    return text[:1].upper() + text[1:]


def sentences(*parts: str) -> str:
    """Parts joined as sentences."""
    return " ".join(part if part.endswith(".") else f"{part}." for part in parts if part)


@cache
def reading_of(variant: str) -> str:
    """The options of a variant for how it was measured, without proxy, rank, control and kind of gradient.

    >>> reading_of("control=normal;fit=frozen;proxy=semi_nmf;rank=16")
    'fit=frozen'
    """
    return variant_name({k: v for k, v in options_of(variant).items() if k not in SUBJECT_OPTIONS})


def reading_words(reading: str) -> str:
    """A reading (options for how it was measured) as text.

    >>> reading_words("average=row;fit=refit"), reading_words("")
    ('refitted at each step, mean of row ratios', 'as measured')
    """
    pairs = sorted(options_of(reading).items(), key=lambda pair: pair[0] != "fit")
    words = [READINGS.get(f"{key}={value}", f"{key} {value}") for key, value in pairs]
    return ", ".join(words) or "as measured"


def variant_words(variant: str) -> str:
    """A variant as text.

    >>> variant_words("centred=1;first=out"), variant_words("fit=refit;proxy=semi_nmf;rank=16")
    ('centred, without first position', 'semi-NMF, rank 16, refitted at each step')
    """
    order = ("correlation", "proxy", "control", "rank", "of")
    pairs = sorted(options_of(variant).items(), key=lambda p: (order.index(p[0]) if p[0] in order else 9, p[0]))
    named: dict[str, dict[str, str]] = {"proxy": PROXIES, "control": CONTROLS}
    words = [named.get(key, {}).get(value) or FLAGS.get(f"{key}={value}") for key, value in pairs]
    return ", ".join(word or f"{key} {value}" for word, (key, value) in zip(words, pairs, strict=True))


def bin_words(group: str, last: str) -> str:
    """A frequency bin as text.

    >>> bin_words("frequency:1", "5"), bin_words("target:5", "5"), bin_words("frequency:3", "5")
    ('1 (most frequent)', '5 (rarest)', '3')
    """
    number = group.partition(":")[2]
    return "1 (most frequent)" if number == "1" else f"{number} (rarest)" if number == last else number


def spoken(seconds: float) -> str:
    """A time of two or three digits.

    >>> [spoken(s) for s in (0.034, 4.26, 75, 4000, 200_000, 3e7)]
    ['34 ms', '4.3 s', '75 s', '67 min', '56 h', '347 days']
    """
    if seconds < 0.1:
        return f"{1000 * seconds:.0f} ms"
    for most, size, unit in ((10, 1, "s"), (100, 1, "s"), (100 * 60, 60, "min"), (100 * 3600, 3600, "h")):
        if seconds < most:
            value = seconds / size
            return f"{value:.1f} {unit}" if value < 10 else f"{value:.0f} {unit}"
    return f"{seconds / 86_400:,.0f} days"


def sized(count: float) -> str:
    """Bytes of two or three digits.

    >>> [sized(b) for b in (900, 3.4e6, 845e6, 1.41e11, 2.3e12)]
    ['0.9 kB', '3.4 MB', '845 MB', '141 GB', '2.3 TB']
    """
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if count >= size:
            value = count / size
            return f"{value:.1f} {unit}" if value < 10 else f"{value:,.0f} {unit}"
    return f"{count / 1e3:.1f} kB"
