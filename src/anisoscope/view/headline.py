"""What was found, as the title of a page: one sentence from the verdicts, in words for somebody outside of the field.

Every claim of the catalogue has a label for the grid and a clause for the title, said as it is and denied. A claim
without an entry is named by its statement. A title never says more than its verdicts: what is undecided, or was
decided against, is said as such.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anisoscope.results.manifest import PRETRAINED, SEEDED
from anisoscope.view.sections.findings import leading, measured, stands
from anisoscope.view.words import finite, listed, number, title_of

Verdict = Mapping[str, Any]
SUBJECTS = 2  # subjects that a title names; more are counted
REASONS = (  # of an undecided verdict in fewer words, by what its sentence says
    ("did not learn", "{it} had not learned by the last step"),
    ("decides nothing", "one seed decides nothing"),
    ("a general claim needs 3", "there are fewer than three seeds"),
    ("the table has no", "part of the evidence was not measured"),
    ("random subspaces do as well", "random directions do as well too often"),
    ("not determined at this rank", "the directions are not determined by these contexts"),
    ("go up or down by chance", "chance alone does as well too often"),
    ("too few contexts", "there are too few contexts"),
)
REFITTED = "refitted at every step, late: "  # parts beside those with directions kept from early on
REASON = 80  # characters of another reason at most


@dataclass(frozen=True)
class ClaimWords:
    """The words of one claim: its label in the grid, what it says and the opposite as clauses, numbers that tell.

    `parts` are the parts of a verdict that the numbers are taken from, each with when it was, and `unit` what they are;
    a part without a name is the effect itself. Effects of a claim that speaks of a fall are stored as falls and told
    with the sign of the sentence: `fall`.
    """

    label: str
    yes: str
    no: str
    parts: tuple[tuple[str, str], ...] = ()
    unit: str = ""
    fall: bool = False


_EARLY, _LATE, _CHANCE = "early in training", "late", "times chance"
_PERIODS = {"early": _EARLY, "late": _LATE}  # by how the names of parts begin
_WORDS: dict[str, tuple[Any, ...]] = {
    # Revisiting Anisotropy
    "tangent_energy": (
        "Gradients follow the activations",
        "gradients go where the activations already point",
        "gradients do not go where the activations point more than controls do",
        (("enrichment early", _EARLY), ("enrichment late", _LATE)),
        _CHANCE,
    ),
    "anisotropy_share": (
        "So does their anisotropy",
        "the anisotropy of the gradients lies where the activations point",
        "the anisotropy of the gradients does not lie where the activations point",
    ),
    "emerges_early_and_persists": (
        "It emerges early and lasts",
        "gradients turn to where the activations point early in training, and stay there",
        "no lasting turn of the gradients to where the activations point emerges in training",
        (("early", _EARLY), ("late", _LATE)),
        _CHANCE,
    ),
    "amplified": (
        "Training amplifies it",
        "training amplifies the directions in which activations already point",
        "training does not amplify the directions in which activations point",
    ),
    "embedding_updates_aligned": (
        "Embedding updates follow too",
        "updates of the embedding table follow the activations",
        "updates of the embedding table do not follow the activations",
    ),
    "frequent_most_enriched": (
        "Most for frequent tokens",
        "gradients of frequent tokens follow the activations most",
        "gradients of frequent tokens do not follow the activations more than those of rare ones",
    ),
    "rare_tokens_spread": (
        "Rare tokens lie further out",
        "rare tokens lie further from their centre than frequent ones",
        "rare tokens do not lie further from their centre than frequent ones",
    ),
    "encoder_and_decoder": (
        "Encoder and decoder alike",
        "gradients follow the activations in an encoder as in a decoder",
        "gradients do not follow the activations in an encoder and a decoder alike",
    ),
    "semi_nmf_beats_pca": (
        "Semi-NMF beats PCA",
        "semi-NMF finds more of the gradients than PCA does",
        "semi-NMF finds no more of the gradients than PCA does",
    ),
    "frequency_intervention": (
        "More frequency bias, more of it",
        "a stronger frequency bias in training makes gradients follow the activations more",
        "a stronger frequency bias in training does not make gradients follow the activations more",
    ),
    "tangent_variance_t2": ("Tangent variance grows as t²", "tangent variance grows as t²", ""),
    "normal_variance_t4": ("Normal variance grows as t⁴", "normal variance grows as t⁴", ""),
    "visibility_t2": ("Curvature shows as t²", "the visibility of curvature grows as t²", ""),
    "frequency_hides_curvature": (
        "Frequency hides curvature",
        "drawing tokens by frequency hides curvature",
        "drawing tokens by frequency does not hide curvature",
        (("", ""),),
        "times as much is seen as in a uniform draw",
    ),
    "frequency_null": (
        "Equal widths: no effect",
        "frequency changes nothing where all types are equally wide",
        "frequency changes something even where all types are equally wide",
    ),
    "local_pca_recovers_curvature": (
        "Local PCA sees curvature",
        "local PCA recovers tangent and curvature at one suitable scale",
        "local PCA does not recover tangent and curvature",
    ),
    "local_pca_loses_curvature": (
        "… and loses it by frequency",
        "local PCA loses curvature under frequency bias",
        "local PCA loses no curvature under frequency bias",
    ),
    "local_pca_loses_curvature_all_tokens": (
        "… also with all tokens",
        "local PCA loses curvature under frequency bias, also with all tokens",
        "local PCA loses no curvature under frequency bias with all tokens",
    ),
    "tangent_gradient_order": ("Tangent gradient grows as t", "the tangent part of gradients grows as t", ""),
    "normal_gradient_order": ("Normal gradient grows as t²", "the normal part of gradients grows as t²", ""),
    "gradient_ratio_order": ("Their ratio grows as t", "normal over tangent gradients grow as t", ""),
    "gradient_within_bounds": ("Gradients within bounds", "gradients stay within their bounds", ""),
    "self_reinforcing_loop": ("Training feeds on itself", "training draws variance into the tangent directions", ""),
    "frequent_types_pinned": (
        "Frequent types are pinned",
        "embeddings of frequent types stay closer to their mean",
        "embeddings of frequent types do not stay closer to their mean",
    ),
    "parabola": ("It is no theorem", "gradients can be wholly normal though rows are almost tangent", ""),
    # The Shape of Learning
    "bell_shaped": (
        "Anisotropy is a bell over depth",
        "anisotropy is highest in the middle blocks, a bell over depth",
        "anisotropy over depth is no bell",
    ),
    "encoders_more_uniform": (
        "Encoders are more uniform",
        "anisotropy is more uniform over depth in the encoder than in the decoder",
        "anisotropy is not more uniform over depth in the encoder than in the decoder",
    ),
    "decoders_bell_encoders_flat": (
        "Decoders a bell, encoders flat",
        "every decoder has a bell of anisotropy over depth and every encoder a flatter profile",
        "decoders have no bell of anisotropy over depth that sets them apart from encoders",
    ),
    "two_phases": (
        "Dimension rises, then falls",
        "intrinsic dimension first rises and then falls in training",
        "intrinsic dimension does not first rise and then fall in training",
    ),
    "anisotropy_grows": (
        "Anisotropy grows in training",
        "anisotropy grows in training",
        "anisotropy does not grow in training",
    ),
    "locally_isotropic": (
        "Isotropic inside clusters",
        "rows are anisotropic as a whole and more isotropic inside their clusters",
        "rows are not more isotropic inside their clusters",
    ),
    "estimators_agree": (
        "Dimension estimators agree",
        "three estimators of dimension agree on which blocks have more",
        "three estimators of dimension disagree on which blocks have more",
    ),
    "mask_effect": (
        "The causal mask makes it",
        "taking the causal mask away lowers anisotropy",
        "taking the causal mask away does not lower anisotropy",
        (),
        "",
        True,
    ),
    "objective_effect": (
        "Predicting the next token makes it",
        "predicting masked tokens instead of the next one lowers anisotropy",
        "predicting masked tokens instead of the next one does not lower anisotropy",
        (),
        "",
        True,
    ),
    # Anisotropy Is Inherent to Self-Attention
    "anisotropic_in_every_modality": (
        "Every modality is anisotropic",
        "tokens, characters, speech and pictures are all anisotropic",
        "not every modality is anisotropic",
    ),
    "convolution_differs": (
        "Convolutions differ",
        "convolutions differ in anisotropy from models with attention",
        "convolutions do not differ in anisotropy from models with attention",
    ),
    "not_inherent": (
        "Not inherent to attention",
        "anisotropy is not inherent to attention",
        "no model with attention does without anisotropy",
    ),
    "drift_explains_anisotropy": (
        "Drift explains anisotropy",
        "layers that drifted further from the origin are more anisotropic, and drift explains it",
        "drift from the origin does not explain anisotropy",
    ),
    "queries_and_keys_drift_together": (
        "Queries and keys drift together",
        "the mean query and the mean key grow and align in training",
        "the mean query and the mean key do not grow and align in training",
    ),
    "attention_sharpens": (
        "Attention sharpens",
        "attention becomes sharper in training",
        "attention does not become sharper in training",
    ),
    "anisotropic_at_initialisation": (
        "Anisotropic before training",
        "a block that never learned makes biased inputs more anisotropic",
        "a block that never learned does not make biased inputs more anisotropic",
    ),
    "anisotropy_grows_with_bias": (
        "More bias, more anisotropy",
        "the larger the bias of the inputs, the more anisotropic an untrained block",
        "a larger bias of the inputs does not make an untrained block more anisotropic",
    ),
    "sharpness_grows_with_bias": (
        "More bias, sharper attention",
        "the larger the bias of the inputs, the sharper the attention of an untrained block",
        "a larger bias of the inputs does not sharpen the attention of an untrained block",
    ),
    "anisotropy_without_drift": (
        "Anisotropy needs no drift",
        "anisotropy emerges without drift of queries and keys",
        "anisotropy does not emerge without drift of queries and keys",
    ),
    "sharpness_needs_drift": (
        "Sharp attention needs drift",
        "attention is less sharp where queries and keys may not drift",
        "attention is as sharp where queries and keys may not drift",
    ),
    # does the geometry matter?
    "whitened_improves_probe": (
        "Whitening helps probes",
        "whitening the rows improves linear probes",
        "whitening the rows does not improve linear probes",
    ),
    "anisotropy_worse_loss_checkpoints": (
        "Anisotropy goes with loss",
        "checkpoints that are more anisotropic have a higher loss",
        "checkpoints that are more anisotropic do not have a higher loss",
    ),
}
# what a page is asked first, by study; without one the first claim of the verdicts that was decided
ASKED: dict[str, tuple[str, ...]] = {
    "revisiting": ("tangent_energy",),
    "curvature": ("frequency_hides_curvature", "visibility_t2"),
    "shape": ("decoders_bell_encoders_flat", "bell_shaped"),
    "inherent": ("anisotropic_in_every_modality", "convolution_differs"),
    "sharpness": ("anisotropy_without_drift", "sharpness_needs_drift"),
    "untrained": ("anisotropic_at_initialisation", "anisotropy_grows_with_bias"),
    "performance": ("whitened_improves_probe", "anisotropy_worse_loss_checkpoints"),
}


def words_of_claim(name: str, statement: str = "") -> ClaimWords:
    """The words of a claim; of one without an entry its statement."""
    if name in _WORDS:
        label, yes, no, *rest = _WORDS[name]
        return ClaimWords(label, yes, no or f"it is not so that {yes}", *rest)
    said = statement.rstrip(".") or title_of(name)
    said = said[:1].lower() + said[1:] if said[1:2].islower() else said
    return ClaimWords(title_of(name), said, f"it is not so that {said}")


def headline(verdicts: Sequence[Verdict], study: str = "") -> str:
    """The finding of a page in one sentence, or two for a study that asks two questions; "" without verdicts.

    >>> one = {"claim": "bell_shaped", "subject": "gpt2", "status": "holds"}
    >>> headline([one, {**one, "subject": "bert", "status": "fails"}])
    'In gpt2 anisotropy is highest in the middle blocks, a bell over depth; in bert it is not so.'

    What no study asks leads only if it stands when all verdicts are counted, or says that it does not.
    """
    tested = leading(measured(verdicts))
    names = list(dict.fromkeys(str(verdict.get("claim")) for verdict in tested))
    asked = [name for name in ASKED.get(study, ()) if name in names]
    decided = [str(v.get("claim")) for v in tested if v.get("status") != "undecided"]
    standing = [str(v.get("claim")) for v in tested if v.get("status") != "undecided" and stands(v) is not False]
    lead = asked or standing[:1] or decided[:1] or names[:1]
    shared = Counter(str(v.get("subject") or "") for v in tested)
    found = [_sentence([v for v in tested if v.get("claim") == name], shared) for name in lead[:2]]
    if decided and not (asked or standing):
        found.append("Counting all verdicts, it does not stand.")
    return " ".join(_together(found))


_OPEN = "it stays undecided whether "


def _together(sentences: list[str]) -> list[str]:
    """Two sentences on what is open, for the same subjects and the same reason, as one.

    >>> _together(["In gpt2 it stays undecided whether a is: why.", "In gpt2 it stays undecided whether b is: why."])
    ['In gpt2 it stays undecided whether a is, and whether b is: why.']
    """
    told = [sentence.removesuffix(".").partition(_OPEN) for sentence in sentences]
    clauses = [what.partition(": ") for _, _, what in told]
    alike = len({where for where, *_ in told}) == len({why for *_, why in clauses}) == 1
    if len(told) != 2 or not alike or not all(is_open for _, is_open, _ in told):
        return sentences
    (first, colon, why), (second, *_) = clauses
    return [f"{told[0][0]}{_OPEN}{first}, and whether {second}{colon}{why}."]


def _sentence(verdicts: Sequence[Verdict], shared: Mapping[str, int]) -> str:
    """One claim over its subjects: where it holds, where it fails, where it is open and why.

    The only subject of a claim is not named where no other claim speaks of it (`shared`): the claim itself says it.
    """
    first = verdicts[0]
    own = len(shared) > 1 and len(verdicts) == 1 and shared.get(str(first.get("subject") or "")) == 1
    words = words_of_claim(str(first.get("claim")), str(first.get("statement") or ""))
    beside = {str(v.get("subject") or "") for v in verdicts}
    verdicts = [{**v, "subject": _of_which(str(v.get("subject") or ""), beside)} for v in verdicts]
    by_status = {s: [v for v in verdicts if str(v.get("status")) == s] for s in ("holds", "fails", "undecided")}
    clauses: list[str] = []
    for status, said, after in (
        ("holds", words.yes, "it is so"),
        ("fails", words.no, "it is not so"),
        ("undecided", f"{_OPEN}{words.yes}", "it stays undecided"),
    ):
        if found := by_status[status]:
            where = "" if own else _where(found, every=len(found) == len(verdicts))
            period = _failing(found) if status == "fails" else ""
            clause = " ".join(part for part in (where, said if not clauses else after, _when(period, found)) if part)
            told = "" if clauses else _number(words, found, period)  # of the first clause only: a title is short
            told += _refitted(found) if status == "fails" else ""
            clauses.append(clause + told + (_reason(found) if status == "undecided" else ""))
    text = "; ".join(clauses)
    return f"{text[:1].upper()}{text[1:]}."


def _of_which(subject: str, beside: Collection[str]) -> str:
    """A subject in words, where pretrained models are judged beside those with seeds.

    >>> both = ["all models", "all models, pretrained models"]
    >>> [_of_which(subject, both) for subject in both], _of_which("all models", ["all models"])
    (['models trained from several seeds', 'pretrained models'], 'all models')
    """
    if subject.endswith(f", {PRETRAINED}"):
        return PRETRAINED
    return SEEDED if f"{subject}, {PRETRAINED}" in beside else subject


def _where(verdicts: Sequence[Verdict], *, every: bool) -> str:
    """Where a verdict speaks of: "in gpt2", "in 5 models"; "" for subjects that the claim itself names."""
    names = list(dict.fromkeys(str(v.get("subject") or "") for v in verdicts))
    if len(names) > SUBJECTS + 1:
        return f"in all {len(names)} cases" if every else f"in {len(names)} cases"
    if not any(names):
        return ""
    if set(names) == {SEEDED, PRETRAINED}:
        return f"in {SEEDED} and in pretrained ones"
    return f"in {listed([f'the {name}' if name in ('decoder', 'encoder') else name for name in names])}"


def _parts(verdict: Verdict) -> Sequence[Verdict]:
    return (verdict.get("details") or {}).get("parts") or []


def _failing(verdicts: Sequence[Verdict]) -> str:
    """The period in which verdicts fail that were judged early and late apart; "" where it is not one alone."""
    failed: set[str] = set()
    for verdict in verdicts:
        needed = [part for part in _parts(verdict) if part.get("needed") and part.get("status") == "fails"]
        failed |= {str(part.get("name")).partition(":")[0] for part in needed}
    return _PERIODS.get(failed.pop(), "") if len(failed) == 1 else ""


def _when(period: str, verdicts: Sequence[Verdict]) -> str:
    """A period in words; of an early one until which step it lasted, if that is the same for all."""
    early = {tuple(((v.get("details") or {}).get("periods") or {}).get("early") or ()) for v in verdicts}
    steps = early.pop() if len(early) == 1 else ()
    if period != _EARLY or not steps:
        return period
    return f"{'at' if len(steps) == 1 else 'up to'} step {steps[-1]:,}"


def _number(words: ClaimWords, verdicts: Sequence[Verdict], period: str) -> str:
    """The numbers that tell, of the only subject or the largest ones; when it was, where there are several.

    The period of the first number is not said again if the clause has named it.
    """
    told: list[tuple[str, str]] = []
    for name, when in words.parts:
        values = []
        for verdict in verdicts:
            effects = {str(part.get("name")): part.get("effect") for part in _parts(verdict)}
            effects |= {"": verdict.get("effect")}
            values += [value] if (value := finite(effects.get(name))) is not None else []
        if values:
            told.append((number(max(values), 2), _when(when, verdicts)))
    if not told:
        return ""
    (size, when), *more = told
    most = "at most " if len(verdicts) > 1 else ""
    first = f"{most}{size} {words.unit}" + (f" {when}" if more and when != _when(period, verdicts) else "")
    return f" ({', '.join([first, *(' '.join(each) for each in more)])})"


def _refitted(verdicts: Sequence[Verdict]) -> str:
    """What a figure of refitted directions shows beside a verdict that failed with those kept from early on."""
    for verdict in verdicts:
        late = [part.get("status") for part in _parts(verdict) if str(part.get("name")).startswith(REFITTED)]
        if not late or set(late) != {"holds"}:
            return ""
    return ", though late they do where directions are refitted at every step"


def _reason(verdicts: Sequence[Verdict]) -> str:
    """Why verdicts stay open, in a few words; "" where there is no short reason that all of them share."""
    told = {
        _short(str(verdict.get("why") or "").partition("undecided because ")[2].rstrip(".")) for verdict in verdicts
    }
    shared = told.pop() if len(told) == 1 else ""
    return f": {shared.format(it='it' if len(verdicts) == 1 else 'they')}" if shared else ""


def _short(why: str) -> str:
    for sign, told in REASONS:
        if sign in why:
            return told
    why = re.sub(r"\s*\([^)]*\)", "", why).replace("{", "{{").replace("}", "}}")
    return "the interval reaches across the margin" if not why else why if len(why) <= REASON else ""
