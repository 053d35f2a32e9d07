"""What metrics, variants and groups are called and mean: from declarations, or guessed from names without one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from anisoscope.results.query import options_of
from anisoscope.results.schema import variant_name

# The order in which a reader wants them; anything else follows alphabetically.
ORDER = (
    "average_cosine",
    "svd_ratio",
    "two_nn",
    "participation_ratio",
    "iso_score",
    "drift",
    "effective_rank",
    "mean_norm",
    "relative_drift",
    "svd_ratio_squared",
    "stable_rank",
    "levina_bickel",
    "gride",
    "hubness",
    "partition_isotropy",
    "rogue_share",
    "self_similarity",
)
MAIN = 6
TANGENT = ("gradient_energy", "gradient_enrichment", "gradient_ratio", "gradient_share", "gradient_isoscore_gain")
TESTS = ("gradient_p", "gradient_p_holm")
FREQUENCY = ("frequency_spread", "frequency_spread_p")
MOVEMENT = ("amplification", "proxy_overlap", "concept_turn", "concept_match")
LOOP = ("loss", "probe_loss", "gradient_norm", "learning_rate")
OF_TRAINING = (*TANGENT, "gradient_p_holm", "gradient_p", *MOVEMENT, *FREQUENCY, *LOOP)  # in the order of a page
SUBJECT_OPTIONS = ("proxy", "rank", "control", "of")  # what is measured; the other options say how
ACRONYMS = {"svd": "SVD", "qk": "QK", "nn": "NN", "cka": "CKA", "iso": "Iso", "mle": "MLE"}


@dataclass(frozen=True)
class Entry:
    """What the page says about one metric."""

    name: str
    title: str
    formula: str = ""
    reference: str = ""
    description: str = ""
    convention: str = ""
    bounds: tuple[float | None, float | None] = (None, None)


PROXIES = {
    "semi_nmf": "semi-NMF", "pca": "PCA", "svd": "truncated SVD", "ica": "ICA", "kmeans": "k-means",
    "random": "random directions",
}  # fmt: skip
CONTROLS = {"normal": "normal subspaces", "random": "random subspaces", "next": "next r", "permuted": "permuted"}
SOURCES = {
    "embedding_in": "Embedding gradients, input role",
    "embedding_out": "Embedding gradients, output role",
    "update": "Embedding updates, weight decay removed",
    "update_raw": "Embedding updates, raw",
    "weight": "Weight gradients",
}
KINDS = {"attn_in": "attention input", "mlp_in": "MLP input"}
READINGS = {
    "fit=refit": "refitted at each step",
    "fit=frozen": "frozen after the first 30 %",
    "average=row": "mean of row ratios",
    "balanced=1": "balanced over frequency",
    "batch=live": "training batch",
    "rows=batch": "rows of the training batch",
}


class Catalogue:
    """Entries by metric name; a metric that nobody declared still gets a readable title."""

    def __init__(self, declared: Mapping[str, Any] | None = None) -> None:
        self._declared = declared or {}

    def entry(self, name: str) -> Entry:
        found = self._declared.get(name)
        if found is None:
            return Entry(name, title_of(name))
        text = {f: str(getattr(found, f, "") or "") for f in ("formula", "reference", "description", "convention")}
        bounds = tuple(getattr(found, "bounds", None) or (None, None))
        return Entry(name, str(getattr(found, "title", "") or title_of(name)), bounds=(bounds[0], bounds[1]), **text)

    def ordered(self, names: Iterable[str]) -> list[str]:
        """Names in reading order: gradients, movement, frequency and the loop of a training run, then geometry."""
        place = {name: i for i, name in enumerate((*OF_TRAINING, *ORDER))}
        return sorted(set(names), key=lambda name: (place.get(name, len(place)), name))

    def main(self, names: Iterable[str]) -> list[str]:
        """The few that come first: the best known, then whatever else was measured."""
        return self.ordered(names)[:MAIN]


def title_of(name: str) -> str:
    """A title made from a name.

    >>> title_of("svd_ratio"), title_of("first_key_mass")
    ('SVD ratio', 'First key mass')
    """
    words = [ACRONYMS.get(word, word) for word in name.split("_") if word]
    text = " ".join(words)
    return text[:1].upper() + text[1:]


def sentences(*parts: str) -> str:
    """Parts as sentences."""
    return " ".join(part if part.endswith(".") else f"{part}." for part in parts if part)


@cache
def reading_of(variant: str) -> str:
    """How a number was made, without which proxy, rank, control or gradient it is of.

    >>> reading_of("control=normal;fit=frozen;proxy=semi_nmf;rank=16")
    'fit=frozen'
    """
    return variant_name({k: v for k, v in options_of(variant).items() if k not in SUBJECT_OPTIONS})


def reading_words(reading: str) -> str:
    """How a number was made, in words.

    >>> reading_words("average=row;fit=refit"), reading_words("")
    ('refitted at each step, mean of row ratios', 'as measured')
    """
    pairs = sorted(options_of(reading).items(), key=lambda pair: pair[0] != "fit")
    words = [READINGS.get(f"{key}={value}", f"{key} {value}") for key, value in pairs]
    return ", ".join(words) or "as measured"


def variant_words(variant: str) -> str:
    """A variant in words.

    >>> variant_words("centred=1;first=out"), variant_words("fit=refit;proxy=semi_nmf;rank=16")
    ('centred, without first position', 'semi-NMF, rank 16, refitted at each step')
    """
    flags = {"first=out": "without first position", "centred=1": "centred", "centred=0": "uncentred"}
    flags |= {"normalised=1": "divided by the mean norm", "over=context": "over contexts", "over=time": "over time"}
    flags |= {"correlation=pearson": "Pearson", "correlation=spearman": "Spearman", "batches=1": "mean over batches"}
    flags |= {"calibrated=1": "bias taken out", "partition=random": "random parts", "partition=none": "in one part"}
    order = ("correlation", "proxy", "control", "rank", "of")
    pairs = sorted(options_of(variant).items(), key=lambda p: (order.index(p[0]) if p[0] in order else 9, p[0]))
    return ", ".join(_option_words(key, value, flags) for key, value in pairs)


def _option_words(key: str, value: str, flags: dict[str, str]) -> str:
    named = {"proxy": PROXIES, "control": CONTROLS}.get(key, {})
    return named.get(value) or flags.get(f"{key}={value}") or READINGS.get(f"{key}={value}") or f"{key} {value}"


def bin_words(group: str, last: str) -> str:
    """A frequency bin in words.

    >>> bin_words("frequency:1", "5"), bin_words("target:5", "5"), bin_words("frequency:3", "5")
    ('1 (most frequent)', '5 (rarest)', '3')
    """
    number = group.partition(":")[2]
    return "1 (most frequent)" if number == "1" else f"{number} (rarest)" if number == last else number
