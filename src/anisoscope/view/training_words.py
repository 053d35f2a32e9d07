"""What the training page calls things: controls, readings, groups, steps."""

from __future__ import annotations

from collections.abc import Sequence

from anisoscope.view.catalogue import Catalogue, Entry
from anisoscope.view.training import LOOP, MOVEMENT, TANGENT, options_of

ORDER = (*TANGENT, "gradient_p_holm", "gradient_p", *MOVEMENT, "frequency_spread", "frequency_spread_p", *LOOP)
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


def entry_of(catalogue: Catalogue, name: str) -> Entry:
    """The declaration of a metric."""
    return catalogue.entry(name)


def ordered(catalogue: Catalogue, names: set[str]) -> list[str]:
    """Metrics in the order of the page: gradients, movement, frequency, loop, then geometry."""
    own = [name for name in ORDER if name in names]
    return [*own, *catalogue.ordered(names - set(own))]


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


def step_words(step: int) -> str:
    """A step on an axis.

    >>> [step_words(n) for n in (0, 64, 1000, 20000, 1500, 2_000_000)]
    ['0', '64', '1k', '20k', '1.5k', '2M']
    """
    for size, unit in ((1_000_000, "M"), (1000, "k")):
        if step >= size:
            return f"{step / size:.4g}{unit}"
    return str(step)


def few(values: Sequence[int], most: int) -> list[int]:
    """At most so many of the values, the first and the last among them, evenly chosen.

    >>> few([0, 1, 2, 3, 4, 5], 3)
    [0, 2, 5]
    """
    if len(values) <= most:
        return list(values)
    if most < 2:
        return list(values[-1:])
    picks = {round(i * (len(values) - 1) / (most - 1)) for i in range(most)}
    return [values[i] for i in sorted(picks)]
