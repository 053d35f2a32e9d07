"""What the pages of docs/results show: the key tables of every result, and sentences on all of them.

A new result is a folder with table.parquet, verdicts.json and run.json, and an entry of `RESULTS`: the question, the
page that says how it is done, and its key tables (`KeyTable`; how rows are chosen: `chosen_rows`). A row or a column
that the table does not have is left out. Words about limits are in limits.md of the folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from result_pages.chosen_rows import Choice
from result_pages.key_table import KeyTable


@dataclass(frozen=True)
class Beside:
    """Models of another result that are joined to one, with the metrics that are asked of both."""

    result: str
    models: tuple[str, ...]
    metrics: tuple[str, ...]


@dataclass(frozen=True)
class Declared:
    """A result: the question that it answers, the page on how it is done, and what its README shows."""

    question: str
    page: str
    tables: tuple[KeyTable, ...]
    beside: tuple[Beside, ...] = ()


SITES = {site: {"site": site} for site in ("embedding", "first block", "middle block", "last block")}
PROXY = {"proxy": "semi_nmf", "rank": ..., "fit": "refit"}
ENERGY = {**PROXY, "metric": "gradient_energy"}
ENRICHMENT = {**PROXY, "metric": "gradient_enrichment"}
FREQUENCIES = {f"{place} {of}": {"group": f"{field}:{bin}"} for field, of in (("frequency", "tokens"),
               ("target", "targets")) for place, bin in (("most frequent fifth of", 1), ("middle fifth of", 3),
               ("rarest fifth of", 5))}  # fmt: skip
LOSSES = {"held-out loss": {"metric": "probe_loss"}, "of the best constant": {"metric": "constant_loss"},
          "weighted held-out loss": {"metric": "weighted_probe_loss"},
          "of the best constant, weighted": {"metric": "constant_loss", "weighted": "1"},
          "entropy of single tokens": {"metric": "unigram_entropy"}}  # fmt: skip
ENDS = {"first step": {"step": "first"}, "last step": {"step": "last"}}


def learned() -> KeyTable:
    """Losses at both ends: whether a model left the frequencies of single tokens."""
    return KeyTable("Whether they learned", {}, ENDS, LOSSES, note="Nats for each prediction, on held-out contexts.")


def over_steps(title: str, *, where: Choice, rows: Mapping[str, Choice] | None = None, note: str = "") -> KeyTable:
    """A table over steps, by model."""
    return KeyTable(title, where, "step", rows or {"": {}}, note=note, most=9 if rows else 14)


CONTROLS = {"proxy (semi-NMF)": {}, "PCA of that rank": {"proxy": "pca"}, "next components": {"control": "next"},
            "permuted columns": {"control": "permuted"}, "normal directions": {"control": "normal"},
            "random directions": {"control": "random"}}  # fmt: skip
FROZEN = {label: {**choice, "fit": "frozen"} for label, choice in CONTROLS.items()}
FROZEN_NOTE = "Frozen directions were fitted on the first measured steps and kept from then on."

NORMS = {"mean norm of inputs": {"metric": "mean_norm", "kind": "embed", "init": "normal"},
         **{f"mean norm of outputs, {init}": {"metric": "mean_norm", "kind": "resid", "init": init}
            for init in ("normal", "xavier", "orthogonal")},
         "norm of the mean input": {"metric": "drift", "kind": "embed", "init": "normal"},
         **{f"norm of the mean output, {init}": {"metric": "drift", "kind": "resid", "init": init}
            for init in ("normal", "xavier", "orthogonal")}}  # fmt: skip
FIXED_POINT = ("A norm has a fixed point where a block gives back what it gets: shorter rows come out longer, and "
               "longer ones shorter.")  # fmt: skip

READINGS = {"plain": {"site": "blocks"}, "without the first position": {"site": "blocks", "first": "out"},
            "standardised": {"site": "blocks", "coordinates": "standardised"},
            "standardised, without the first position":
            {"site": "blocks", "coordinates": "standardised", "first": "out"}}  # fmt: skip
BY_LAYER = {words: {key: value for key, value in choice.items() if key != "site"} for words, choice in READINGS.items()}
BLOCKS = {"mean over blocks": {"site": "blocks"}}
RATIOS = {"σ₁/Σσ": {"metric": "svd_ratio"},
          "σ₁/Σσ, without the first position": {"metric": "svd_ratio", "first": "out"},
          "σ₁²/Σσ²": {"metric": "svd_ratio_squared"},
          "σ₁²/Σσ², without the first position": {"metric": "svd_ratio_squared", "first": "out"}}  # fmt: skip
STREAM = {"kind": ["embed", "resid"]}
REPAIRS = {"raw": "raw", "mean": "mean removed", "all_but_top": "all but the top", "whitened": "whitened"}
REPAIRED = {words: {"repair": repair} for repair, words in REPAIRS.items()}
DEPTHS = {**SITES, "final norm": {"site": "final norm"}}
PATCHED = {"metric": "lm_loss", "reading": "patched"}
READOUT = {"metric": "lm_loss", "reading": "readout"}
PROBES = {"metric": "probe_accuracy", "task": ...}
TASKS = {task.replace("_", " "): {"task": task} for task in
         ("space_next", "token_class", "place_in_word", "article", "order")}  # fmt: skip
SPEARMAN = {"metric": "performance_correlation", "method": "spearman", "kind": "study"}
CHECKPOINTS = {"over": "checkpoints", "interval": "checkpoints", "sites": "mean"}
LAYERS = {"over": "layers", "interval": "layers", "step": "last"}
DECODERS = {"SmolLM2": "SmolLM2-135M", "Gemma": "Gemma-3-270M"}
SMOLLM2 = ["SmolLM2-135M", "SmolLM2-135M-rounded", "SmolLM2-135M-articles", "SmolLM2-135M-chat"]

# one model of each training: copies, and later stages of one lineage, would count twice among models
PUBLISHED = ("MiniLM-L6", "SmolLM2-135M", "Gemma-3-270M", "stories260K", "IgLM", "IgLM-S", "AntiBERTy",
             "RXNFP-1-pretrained", "RXNMapper", "Whisper-tiny", "EfficientNet-Lite0", "EfficientNet-Lite1",
             "MobileNetV2")  # fmt: skip
_COSINES = {"metric": "qk_cosine", "head": ..., "show": "size"}
AT_THE_END = {"average cosine": {"metric": "average_cosine", "site": "blocks"},
              "explained by drift": {"metric": "explained_by_drift", "site": "blocks"},
              "drift of queries": {"metric": "drift", "kind": "query"},
              "drift of keys": {"metric": "drift", "kind": "key"},
              "cosine of mean query and mean key": {**_COSINES, "kind": "query"},
              "before rotation": {**_COSINES, "kind": "query_unrotated"},
              "sharpness": {"metric": "attention_sharpness", "kind": "scores"},
              "entropy over log length": {"metric": "attention_entropy", "kind": "scores"}}  # fmt: skip
AT_THE_END_NOTE = (
    "Of a pretrained model there is one set of weights: intervals are over contexts, and say nothing of "
    "another training. The cosine of mean query and mean key is the mean of its size over heads."
)
OF_INHERENT = ("average_cosine", "drift", "mean_norm", "explained_by_drift", "qk_cosine", "attention_entropy",
               "attention_sharpness")  # fmt: skip

TRAINED_TANGENT = (
    learned(),
    over_steps("Enrichment of gradients, times chance", where=ENRICHMENT, rows=SITES),
    over_steps("The same in standardised coordinates", where={**ENRICHMENT, "coordinates": "standardised"}, rows=SITES),
    over_steps("Enrichment after the middle block, beside other ways to fit", note=FROZEN_NOTE,
               where={**ENRICHMENT, "site": "middle block"},
               rows={"PCA": {"proxy": "pca"}, "frozen": {"fit": "frozen"},
                     "PCA, frozen": {"proxy": "pca", "fit": "frozen"},
                     "frozen, standardised": {"fit": "frozen", "coordinates": "standardised"},
                     "masked rows": {"group": "masked"}, "unmasked rows": {"group": "unmasked"}}),
    over_steps("Share of gradient energy after the middle block, beside controls of the same rank",
               where={**ENERGY, "site": "middle block"}, rows=CONTROLS),
    over_steps("The same with frozen directions", where={**ENERGY, "site": "middle block"}, rows=FROZEN),
    KeyTable("Enrichment by frequency, last step, mean over blocks", {**ENRICHMENT, "site": "blocks", "step": "last"},
             FREQUENCIES),
)  # fmt: skip

RESULTS: dict[str, Declared] = {
    "revisiting": Declared("Do gradients go where activations already point?", "tangent.md", TRAINED_TANGENT),
    "long": Declared("Does the enrichment of gradients decay in a long training, and does a bell form?", "tangent.md", (
        learned(),
        over_steps("Enrichment of gradients, times chance", where=ENRICHMENT, rows={**SITES, **BLOCKS}),
        over_steps("The same in standardised coordinates", where={**ENRICHMENT, "coordinates": "standardised"},
                   rows={**SITES, **BLOCKS}),
        KeyTable("Enrichment by layer at the last step, in four readings", {**ENRICHMENT, **STREAM, "step": "last"},
                 "layer", BY_LAYER, most=13),
        KeyTable("Beside it: SmolLM2 by layer, a finished model", {**ENRICHMENT, "model": "SmolLM2-135M", **STREAM},
                 "layer", BY_LAYER, most=13, of="real"),
        *TRAINED_TANGENT[3:],
        KeyTable("Share of gradient energy by layer at the last step, beside controls of the same rank",
                 {**ENERGY, **STREAM, "step": "last"}, "layer", CONTROLS, most=13),
        over_steps("Anisotropy: σ₁/Σσ", where={"metric": "svd_ratio"}, rows=SITES),
        KeyTable("σ₁/Σσ and σ₁²/Σσ² by layer at the last step", {**STREAM, "step": "last"}, "layer", RATIOS, most=13),
        over_steps("Intrinsic dimension, middle block", where={"site": "middle block"},
                   rows={"TwoNN": {"metric": "two_nn"}, "GRIDE": {"metric": "gride"},
                         "Levina–Bickel": {"metric": "levina_bickel"}}),
        over_steps("Average cosine", where={"metric": "average_cosine"}, rows=SITES),
    )),
    "real": Declared("What do pretrained models look like?", "tangent.md", (
        KeyTable("Enrichment of gradients in the proxy, mean over blocks, times chance", ENRICHMENT, READINGS,
                 by=("model", "stack")),
        KeyTable("How well the proxy is determined, and the loss", {}, {
            "proxy stability, mean over blocks": {**PROXY, "metric": "proxy_stability", "site": "blocks"},
            "loss": {"metric": "probe_loss"}}),
        *(KeyTable(f"{name} by layer: enrichment in four readings", {**ENRICHMENT, "model": model, **STREAM}, "layer",
                   BY_LAYER, most=12) for name, model in DECODERS.items()),
        *(KeyTable(f"{name} by layer: share of gradient energy beside controls of the same rank",
                   {**ENERGY, "model": model, **STREAM}, "layer", CONTROLS, most=12)
          for name, model in DECODERS.items()),
        KeyTable("SmolLM2 and its copies by layer: enrichment", {**ENRICHMENT, "model": SMOLLM2, **STREAM}, "layer",
                 {"plain": {}, "standardised, without the first position":
                  {"coordinates": "standardised", "first": "out"}}, most=12),
        KeyTable("σ₁/Σσ and σ₁²/Σσ² by layer, decoders of words", {"model": [*SMOLLM2, "Gemma-3-270M"], **STREAM},
                 "layer", RATIOS, most=12),
        KeyTable("Queries, keys and attention, mean over blocks", {}, {
            words: choice for words, choice in AT_THE_END.items() if "site" not in choice}, by=("model", "stack")),
        *(KeyTable(f"{title} by depth", {"metric": metric}, SITES, by=("model", "stack")) for metric, title in
          (("average_cosine", "Average cosine"), ("svd_ratio", "σ₁/Σσ"), ("two_nn", "Intrinsic dimension (TwoNN)"))),
    )),
    "shape": Declared("How do dimension and anisotropy change over training and depth?", "shape.md", (
        learned(),
        over_steps("Intrinsic dimension (TwoNN)", where={"metric": "two_nn"}, rows=SITES),
        over_steps("Other estimators of dimension, middle block", where={"site": "middle block"},
                   rows={"TwoNN": {"metric": "two_nn"}, "GRIDE": {"metric": "gride"},
                         "Levina–Bickel": {"metric": "levina_bickel"}}),
        over_steps("Anisotropy: σ₁/Σσ", where={"metric": "svd_ratio"}, rows=SITES),
        KeyTable("Attention and cosine, last step, mean over blocks", {"step": "last"},
                 {"average cosine": {"metric": "average_cosine", "site": "blocks"},
                  "attention sharpness": {"metric": "attention_sharpness", "head": ..., "kind": "scores"}}),
    )),
    "long-characters": Declared("Does a bell form, and does dimension fall again, in a long training on characters?",
                                "shape.md", (
        learned(),
        over_steps("Intrinsic dimension (TwoNN)", where={"metric": "two_nn"}, rows=SITES),
        over_steps("Other estimators of dimension, middle block", where={"site": "middle block"},
                   rows={"TwoNN": {"metric": "two_nn"},
                         "TwoNN, without the first position": {"metric": "two_nn", "first": "out"},
                         **{f"GRIDE, scale {scale}": {"metric": "gride", "scale": scale} for scale in ("1", "4", "8")},
                         "Levina–Bickel": {"metric": "levina_bickel"}}),
        over_steps("Anisotropy: σ₁/Σσ", where={"metric": "svd_ratio"}, rows=SITES),
        KeyTable("σ₁/Σσ and σ₁²/Σσ² by layer at the last step", {**STREAM, "step": "last"}, "layer", RATIOS, most=13),
        over_steps("Average cosine", where={"metric": "average_cosine"}, rows=SITES),
    )),
    "inherent": Declared("Is anisotropy inherent to attention, in every modality?", "inherent.md", (
        learned(),
        over_steps("Average cosine, mean over blocks", where={"metric": "average_cosine", "site": "blocks"}),
        over_steps("Enrichment of gradients of sounds and pictures, times chance, mean over blocks",
                   where={**ENRICHMENT, "site": "blocks"}),
        over_steps("The same in standardised coordinates",
                   where={**ENRICHMENT, "coordinates": "standardised", "site": "blocks"}),
        KeyTable("Share of gradient energy at the last step, mean over blocks, beside controls of the same rank",
                 {**ENERGY, "site": "blocks", "step": "last"}, CONTROLS),
        KeyTable("The same with frozen directions", {**ENERGY, "site": "blocks", "step": "last"}, FROZEN,
                 note=FROZEN_NOTE),
        KeyTable("At the last step, mean over blocks: trained here, pretrained, and with random weights",
                 {"step": "last"}, AT_THE_END, by=("model", "stack"), modalities=True, note=AT_THE_END_NOTE),
    ), (Beside("real", PUBLISHED, OF_INHERENT),)),
    "untrained": Declared("What does a block do before it has learned anything?", "untrained.md", (
        *(KeyTable(f"Average cosine of outputs against the bias of inputs, width 768, {words} inputs",
                   {"metric": "average_cosine", "width": "768", "input_norm": norm, "bias": biases},
                   "bias", {"inputs": {"init": "normal", "kind": "embed"},
                            **{f"outputs, {init}": {"init": init, "kind": "resid"}
                               for init in ("normal", "xavier", "orthogonal")}}, most=11)
          for norm, words, biases in (("1", "normed", ...), ("0", "plain", ["0", "0.5", "1", "2", "5", "10"]))),
        KeyTable("Entropy of attention over log length, width 768, normed inputs",
                 {"metric": "attention_entropy", "width": "768", "input_norm": "1"}, "bias",
                 {init: {"init": init} for init in ("normal", "xavier", "orthogonal")}, most=11),
        KeyTable("Sharpness of attention, width 768, normed inputs",
                 {"metric": "attention_sharpness", "width": "768", "input_norm": "1"}, "bias",
                 {init: {"init": init} for init in ("normal", "xavier", "orthogonal")}, most=11),
        *(KeyTable(f"Norms in and out against the bias, width 768, {words} inputs",
                   {"width": "768", "input_norm": norm}, "bias", NORMS, most=11, note=note)
          for norm, words, note in (("1", "normed", FIXED_POINT), ("0", "plain", ""))),
    )),
    "performance": Declared("Does the geometry matter for what can be done with the rows?", "performance-study.md", (
        KeyTable("What a repair changes against raw rows, mean over sites", {"against": "raw", "step": "last"},
                 {"own loss, rows repaired inside": PATCHED, "loss of a fresh readout": READOUT,
                  "accuracy of linear probes": PROBES, "accuracy by cosine": {**PROBES, "probe": "cosine"}},
                 {words: choice for words, choice in REPAIRED.items() if words != "raw"},
                 note="Nats and shares of test rows; a loss that falls and an accuracy that rises are gains."),
        KeyTable("The model's own loss with the rows of one site repaired", {**PATCHED, "step": "last"}, DEPTHS,
                 REPAIRED),
        KeyTable("Loss of a fresh readout", {**READOUT, "step": "last"}, DEPTHS,
                 {**REPAIRED, "frequencies of tokens alone": {"control": "constant"}}),
        KeyTable("Accuracy of linear probes, mean over tasks", {**PROBES, "step": "last"}, DEPTHS, REPAIRED),
        KeyTable("Accuracy of the nearest class mean by cosine, mean over tasks",
                 {**PROBES, "probe": "cosine", "step": "last"}, DEPTHS, REPAIRED),
        KeyTable("Accuracy of linear probes by task, mean over sites, beside controls",
                 {"metric": "probe_accuracy", "step": "last"}, TASKS,
                 {**REPAIRED, "raw, shuffled labels": {"repair": "raw", "control": "shuffled"},
                  "most frequent class": {"control": "majority"}}),
        *(KeyTable(title, {"metric": metric, "step": "last"}, DEPTHS, REPAIRED) for metric, title in
          (("svd_ratio", "Geometry: σ₁/Σσ"), ("average_cosine", "Geometry: average cosine"),
           ("two_nn", "Geometry: intrinsic dimension (TwoNN)"))),
        over_steps("Over checkpoints, raw rows, mean over sites", where={"repair": "raw"},
                   rows={"own loss": PATCHED, "loss of a fresh readout": READOUT, "accuracy of linear probes": PROBES,
                         "σ₁/Σσ": {"metric": "svd_ratio"}, "average cosine": {"metric": "average_cosine"},
                         "intrinsic dimension (TwoNN)": {"metric": "two_nn"}}),
        KeyTable("Rank correlation of geometry with performance", SPEARMAN,
                 {"σ₁/Σσ": {"geometry": "svd_ratio"}, "average cosine": {"geometry": "average_cosine"},
                  "TwoNN": {"geometry": "two_nn"}, "IsoScore": {"geometry": "iso_score"}},
                 {"own loss, over checkpoints": {"performance": "loss", **CHECKPOINTS},
                  "readout, over checkpoints": {"performance": "readout", **CHECKPOINTS},
                  "probes, over checkpoints": {"performance": "probe", **CHECKPOINTS},
                  "readout, over layers": {"performance": "readout", **LAYERS},
                  "probes, over layers": {"performance": "probe", **LAYERS}},
                 note="Intervals leave out one checkpoint or layer at a time; those of a model are not independent."),
    )),
    "sharpness": Declared("Does attention need drift to be sharp?", "sharpness.md", (
        KeyTable("At the last step", {"step": "last"}, "model",
                 {"held-out loss": {"metric": "probe_loss"},
                  "average cosine of blocks": {"metric": "average_cosine", "site": "blocks"},
                  "drift of queries": {"metric": "drift", "kind": "query", "head": ...},
                  "drift of keys": {"metric": "drift", "kind": "key", "head": ...},
                  "cosine of mean query and mean key": {"metric": "qk_cosine", "kind": "query", "head": ...},
                  "sharpness": {"metric": "attention_sharpness", "head": ...},
                  "entropy over log length": {"metric": "attention_entropy", "head": ...}}, by=()),
        over_steps("Average cosine, mean over blocks", where={"metric": "average_cosine", "site": "blocks"}),
        over_steps("Sharpness of attention, mean over blocks and heads",
                   where={"metric": "attention_sharpness", "head": ...}),
    )),
    "curvature": Declared("Does the theory hold on known manifolds?", "curvature.md", (
        KeyTable("Slopes of variance against scale", {"metric": "curvature_slope", "sampling": "gaussian"},
                 {"tangent (expected: two)": {"of": "tangent"}, "normal (four)": {"of": "normal"},
                  "visibility (two)": {"of": "visibility"}}),
        KeyTable("Slopes of gradients against scale, curved manifolds",
                 {"metric": "manifold_gradient_slope", "model": lambda model: model not in ("flat", "parabola")},
                 {"tangent (expected: one)": {"of": "tangent"}, "normal (two)": {"of": "normal"},
                  "ratio (one)": {"of": "ratio"}},
                 {f"{words}, {signal}": {"per": per, "signal": signal} for per, words in
                  (("rows", "row by row"), ("mean", "mean"))
                  for signal in ("constant", "noise", "linear", "network")}, by=(), show="range"),
        KeyTable("Tangent share of variance in training", {"metric": "tangent_variance_share"}, ENDS,
                 {f"{labels} labels, {layers} layers, {update} updates":
                  {"labels": labels, "layers": layers, "update": update} for layers in "12"
                  for labels, update in
                  (("tangent", "all"), ("tangent", "random"), ("noise", "all"), ("normal", "all"))},
                 by=(), show="range"),
        KeyTable("β of the model by block", {"metric": "frequency_beta", "over": "context"}, "layer", most=8),
        KeyTable("Slope of distance on frequency", {"metric": "pinning_slope"},
                 {"whole training": {"window": "all"}, "second half": {"window": "late"}},
                 {"SGD": {"optimiser": "sgd"}, "Adam": {"optimiser": "adam"}}, by=()),
    )),
}  # fmt: skip

# What was learned that the papers do not say, on the summary page; numbers are looked up (`placeholders`).
_MIDDLE = 'model=decoder proxy=semi_nmf rank=any fit=refit site="middle block"'
_REAL = "metric=gradient_enrichment proxy=semi_nmf rank=any fit=refit site=blocks"
_COSINE = "metric=average_cosine site=blocks"
LEARNED: tuple[str, ...] = (
    "Gradients go where activations point only once a model learns, and then less and less: after the middle block of "
    "the decoder of [revisiting](revisiting/README.md) enrichment is at chance at the initialisation "
    f"({{{{revisiting metric=gradient_enrichment {_MIDDLE} step=first}}}} times), "
    f"{{{{revisiting metric=gradient_enrichment {_MIDDLE} step=16}}}} times chance after sixteen updates, "
    f"{{{{revisiting metric=gradient_enrichment {_MIDDLE} | peak}}}} times at its peak, at step "
    f"{{{{revisiting metric=gradient_enrichment {_MIDDLE} | peak step}}}}, and "
    f"{{{{revisiting metric=gradient_enrichment {_MIDDLE} step=last}}}} at the end; a claim that asks for it in those "
    "first sixteen updates, too, fails in {{revisiting count claim=tangent_energy status=fails}} of the arms. In a "
    "training of three times as many updates ([long](long/README.md)), whose early steps are spread more widely, it "
    "{{long verdict claim=tangent_energy subject=decoder}}; there enrichment goes on to fall after the first and the "
    f"last block, from {{{{long metric=gradient_enrichment {_MIDDLE.replace('middle', 'first')} | peak}}}} to "
    f"{{{{long metric=gradient_enrichment {_MIDDLE.replace('middle', 'first')} step=last}}}} and from "
    f"{{{{long metric=gradient_enrichment {_MIDDLE.replace('middle', 'last')} | peak}}}} to "
    f"{{{{long metric=gradient_enrichment {_MIDDLE.replace('middle', 'last')} step=last}}}}, and less after the middle "
    f"one (from {{{{long metric=gradient_enrichment {_MIDDLE} | peak}}}} to "
    f"{{{{long metric=gradient_enrichment {_MIDDLE} step=last}}}}).",
    "The proxy needs no concepts: semi-NMF holds no more of the gradients than PCA of the same rank "
    "(`semi_nmf_beats_pca` fails in {{revisiting count claim=semi_nmf_beats_pca status=fails}} and holds in "
    "{{revisiting count claim=semi_nmf_beats_pca status=holds}} of the arms), and the components that follow hold "
    f"{{{{revisiting metric=gradient_energy {_MIDDLE} control=next step=last | 2}}}} of the energy beside "
    f"{{{{revisiting metric=gradient_energy {_MIDDLE} step=last | 2}}}}.",
    "The narrow cone is an event of the first updates, and needs neither drift of queries and keys nor scores: in "
    "[sharpness](sharpness/README.md) the average cosine has its peak, "
    f"{{{{sharpness {_COSINE} model=uniform-12x512 | peak}}}}, at step "
    f"{{{{sharpness {_COSINE} model=uniform-12x512 | peak step}}}} without any scores, as with ordinary attention "
    f"({{{{sharpness {_COSINE} model=softmax-12x512 | peak}}}}), and ends at "
    f"{{{{sharpness {_COSINE} model=uniform-12x512 step=last | 2}}}} and "
    f"{{{{sharpness {_COSINE} model=softmax-12x512 step=last | 2}}}}.",
    "In finished models gradients lie in the large directions of the activations by much, by little or not at all: "
    f"{{{{real {_REAL} model=SmolLM2-135M | 2}}}} times chance in SmolLM2, "
    f"{{{{real {_REAL} model=IgLM | 2}}}} in IgLM, {{{{real {_REAL} model=RXNFP-1-pretrained | 2}}}} in RXNFP, mean "
    "over blocks; in Gemma they avoid them, "
    f"{{{{real {_REAL} model=Gemma-3-270M | 2}}}} times chance, and only in standardised coordinates seek them "
    f"({{{{real {_REAL} model=Gemma-3-270M coordinates=standardised | 2}}}} times). Rounding the weights of SmolLM2 "
    f"once more to four bits leaves {{{{real {_REAL} model=SmolLM2-135M-rounded | 2}}}}; and its bell "
    "of σ₁/Σσ over depth is its first position (largest value of a block "
    "{{real metric=svd_ratio model=SmolLM2-135M site=blocks | most}}, without that position "
    "{{real metric=svd_ratio model=SmolLM2-135M site=blocks first=out | most}}; [real](real/README.md)).",
    "Frequent tokens need not be the narrow ones: in a pretrained model rows of frequent types spread more than those "
    "of rare ones (β is {{curvature metric=frequency_beta from=measured used=1 | interval}}), so that drawing tokens "
    "by frequency shows more curvature, not less; and whether frequent types are pinned depends on the optimiser "
    "(slope {{curvature metric=pinning_slope optimiser=adam window=all | interval}} with Adam, "
    "{{curvature metric=pinning_slope optimiser=sgd window=all | interval}} with SGD; "
    "[curvature](curvature/README.md)).",
)
