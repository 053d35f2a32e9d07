"""What metrics, variants and groups are called and mean: from declarations, or guessed from names without one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
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


# Used where the registry of metrics has no entry, or one without a description.
ENTRIES = {
    e.name: e
    for e in (
        Entry("gradient_energy", "Gradient energy", "‖GQ‖² / ‖G‖²",
              description="Share of the gradients' energy that lies in the span of the proxy; r/d by chance.",
              bounds=(0, 1)),
        Entry("gradient_enrichment", "Enrichment", "energy / (r/d)",
              description="Energy in units of chance: 1 where gradients know nothing of the proxy.", bounds=(0, None)),
        Entry("gradient_ratio", "Ratio to the normal control", "energy(Q_T) / mean energy(Q_N)",
              description="Energy of the proxy over the mean energy of subspaces orthogonal to it.", bounds=(0, None)),
        Entry("gradient_p", "p against random subspaces", "(1 + #{energy(Q_R) ≥ energy(Q_T)}) / (draws + 1)",
              description="How often a random subspace of the same rank holds as much energy.", bounds=(0, 1)),
        Entry("gradient_p_holm", "p, Holm over layers", "Holm over the layers of a step",
              description="The same p after Holm's correction over the layers of that step.", bounds=(0, 1)),
        Entry("gradient_share", "Anisotropy share", "‖Qᵀ(C − tr(C)/d·I)Q‖² / ‖C − tr(C)/d·I‖²",
              description="Share of the gradients' departure from isotropy that lies in the proxy; "
              "r(r+1)/d² by chance.", bounds=(0, 1)),
        Entry("gradient_isoscore_gain", "IsoScore* gain", "IsoScore*(C outside Q) − IsoScore*(C)",
              description="How much more isotropic the gradients are without the proxy's directions."),
        Entry("amplification", "Amplification", "share of (ΔC_X)₊ in the earlier Q_T",
              description="Share of the variance gained since the previous measured step that lies in the proxy "
              "fitted at that step.", bounds=(0, 1)),
        Entry("frequency_spread", "Frequency and spread", "corr(log f, RMS distance to the type's centroid)",
              description="Correlation, over token types, of log frequency with how far a type's rows lie from "
              "their own centroid.", bounds=(-1, 1)),
        Entry("frequency_spread_p", "Frequency and spread, p", "permutation p",
              description="How often a permutation of the types correlates as strongly.", bounds=(0, 1)),
        Entry("frequency_beta", "Exponent of spread", "β of distance ∝ f^−β",
              description="How fast the distance of a type's rows to their centroid falls with its frequency."),
        Entry("amplification_p", "Amplification, p", "p against random subspaces",
              description="How often a random subspace holds as much of the variance gained.", bounds=(0, 1)),
        Entry("unigram_entropy", "Entropy of the tokens", "−Σ p log₂ p",
              description="Entropy of the token types as they were sampled for training; lower is more uneven."),
        Entry("proxy_overlap", "Overlap with PCA", "‖Q_TᵀQ_PCA‖² / r",
              description="How much of the proxy's span PCA of the same rank shares; 1 = the same span.",
              bounds=(0, 1)),
        Entry("concept_turn", "Turn of the span", "mean principal angle, degrees",
              description="Angle between the spans of this measured step and the one before.", bounds=(0, 90)),
        Entry("concept_match", "Match of concepts", "mean |cos| after optimal assignment",
              description="How alike the concepts are to those of the measured step before, each to its partner.",
              bounds=(0, 1)),
        Entry("gradient_alignment", "Alignment with gradients", "⟨C, G⟩ / (‖C‖ ‖G‖)",
              description="Cosine of the covariance of the activations and the second moment of their gradients, as "
              "matrices: 1 where both have one shape.", bounds=(0, 1)),
        Entry("loss", "Training loss", description="Loss of the training batch of that step."),
        Entry("probe_loss", "Probe loss", description="Mean loss on the held-out probe.", bounds=(0, None)),
        Entry("gradient_norm", "Gradient norm", description="Norm of the gradient of all parameters, before clipping.",
              bounds=(0, None)),
        Entry("learning_rate", "Learning rate", description="Step size of the optimiser.", bounds=(0, None)),
    )
}  # fmt: skip
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
        found, own = self._declared.get(name), ENTRIES.get(name)
        if found is None:
            return own or Entry(name, title_of(name))
        text = {f: str(getattr(found, f, "") or "") for f in ("formula", "reference", "description", "convention")}
        if own is not None and not text["description"]:
            return replace(own, reference=text["reference"], convention=text["convention"])
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
