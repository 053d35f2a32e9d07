"""Planted and null tables of the claims about modalities, drift, attention, untrained blocks and arms of attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from anisoscope.results.query import Table
from support.fake_modalities import STEPS, Course, Media, media_table
from support.fake_profiles import Sheet, joined
from support.planted_shape import walk
from support.specimen import Specimen

# -- models of several modalities --------------------------------------------------------------------------------------

ATTENDING = ("text", "characters", "speech", "vision")


def media(
    levels: Mapping[str, Any],
    *,
    seed: int = 0,
    models: int = 3,
    scatter: float = 0.02,
    architecture: str = "ConvNextModel",
    **more: Any,
) -> Table:
    """Models of every modality whose average cosine is a number or a function of depth, plus luck of the model."""
    random = np.random.default_rng((seed, 1))
    sheets = []
    for modality, level in levels.items():
        for i in range(models):
            luck = scatter * random.normal()
            entry = {"architecture": architecture} if modality == "convolution" else None
            given = {"layers": 6, "steps": (0, 1000), "noise": 0.005, "entropy": (seed, i, *map(ord, modality)), **more}
            sheet = Media(f"{modality}-{i}", modality, entry=entry, **given)
            truth = (lambda depth, f=level, luck=luck: f(depth) + luck) if callable(level) else level + luck
            sheet.stream(truth).losses()
            sheets.append(sheet)
    return media_table(*sheets)


def isotropic(seed: int) -> Table:
    """No common direction in any model."""
    models = (1, 3, 8)[seed % 3]
    return media(
        dict.fromkeys((*ATTENDING, "convolution"), 0.0), seed=seed, models=models, scatter=(0.01, 0.05)[seed % 2]
    )


def one_modality_without(seed: int) -> Table:
    levels = {**dict.fromkeys(ATTENDING, 0.5), ATTENDING[seed % 4]: 0.02}
    return media(levels, seed=seed, models=(2, 3, 6)[seed % 3], scatter=0.05)


def no_difference(seed: int) -> Table:
    """Models that scatter, with attention and without alike."""
    levels = dict.fromkeys((*ATTENDING, "convolution"), 0.4)
    return media(levels, seed=seed, models=(2, 3, 8)[seed % 3], scatter=(0.03, 0.1)[seed % 2])


def inherent(seed: int) -> Table:
    """Every model with attention is anisotropic, and none without."""
    levels = {**dict.fromkeys(ATTENDING, 0.4), "convolution": 0.02}
    return media(levels, seed=seed, models=(2, 3, 6)[seed % 3], scatter=0.05, tails=(math.inf, 3.0)[seed % 2])


def weakly_inherent(seed: int) -> Table:
    """All models with attention are weakly anisotropic, and those without hardly at all: .09 below them."""
    return media({**dict.fromkeys(ATTENDING, 0.15), "convolution": 0.06}, seed=seed, scatter=0.01)


def rectified(seed: int) -> Table:
    """Convolutions whose cosine is that of a ReLU, beside models with attention that differ from them or do not."""
    levels = {**dict.fromkeys(ATTENDING, (0.1, 0.3)[seed % 2]), "convolution": 0.5}
    return media(levels, seed=seed, models=(2, 4)[seed % 2], architecture="ResNetModel", scatter=0.03)


def single_models(seed: int) -> Table:
    """One model of each kind: they scatter, and so any two of them differ."""
    return media(dict.fromkeys((*ATTENDING, "convolution"), 0.4), seed=seed, models=1, scatter=0.2)


def untrained(seed: int) -> Table:
    """A model with attention that never learned is isotropic, beside others that are not."""
    table = inherent(seed)
    sheet = Media("text-lazy", layers=6, steps=(0, 1000), noise=0.005, entropy=(seed, 99))
    sheet.stream(0.0).losses(end=2.95, constant=3.0)
    return Table.concat([table, media_table(sheet)], table.about)


def sites(seed: Any, drift: Any, cosine: Any, *, layers: int = 12, share: float = 0.95, **more: Any) -> Table:
    """One model whose drift and average cosine are functions of depth."""
    sheet = Media("m", layers=layers, entropy=seed, **{"noise": 0.002, **more})
    return media_table(sheet.stream(cosine, drift, share=share))


def unrelated_sites(seed: int) -> Table:
    """Drift and average cosine each have a profile, of independent blocks; few or many."""
    layers = (6, 12, 24)[seed % 3]
    one, two = np.random.default_rng((seed, 2)).normal(size=(2, layers + 1))
    drift, cosine = (lambda d: 5 + one[round(d * layers)]), (lambda d: 0.4 + 0.1 * two[round(d * layers)])
    return sites(seed, drift, cosine, layers=layers)


def walking_sites(seed: int) -> Table:
    """Neighbouring layers are alike in drift and in average cosine, which have nothing to do with each other."""
    layers = (6, 12, 24)[seed % 3]
    one, two = (walk((seed, i), range(layers + 1), by=1.0) for i in (1, 2))
    drift, cosine = (lambda d: 20 + one[round(d * layers)]), (lambda d: 0.5 + 0.03 * two[round(d * layers)])
    return sites(seed, drift, cosine, layers=layers)


def walking_models(seed: int) -> Table:
    """The same in several models, judged together."""
    sheets = []
    for i in range((3, 6)[seed % 2]):
        one, two = (walk((seed, i, side), range(13), by=1.0) for side in (1, 2))
        sheet = Media(f"m{i}", layers=12, entropy=(seed, i), noise=0.002)
        drift, cosine = (lambda d, w=one: 20 + w[round(12 * d)]), (lambda d, w=two: 0.5 + 0.03 * w[round(12 * d)])
        sheets.append(sheet.stream(cosine, drift))
    return media_table(*sheets)


def sister_models(seed: int) -> Table:
    """One profile of drift and one of average cosine, unrelated, in several seeds or models of one architecture."""
    models, seeds = ((1, 3), (1, 5), (4, 1), (3, 3))[seed % 4]
    one, two = (walk((seed, side), range(13), by=1.0) for side in (1, 2))
    sheets = []
    for i in range(models * seeds):
        own = 0.2 * np.random.default_rng((seed, i)).normal(size=(2, 13))
        sheet = Media(f"m{i % models}", number=i // models, layers=12, entropy=(seed, i), noise=0.002)
        drift = lambda d, w=own[0]: 20 + one[round(12 * d)] + w[round(12 * d)]  # noqa: E731
        cosine = lambda d, w=own[1]: 0.5 + 0.03 * (two[round(12 * d)] + w[round(12 * d)])  # noqa: E731
        sheets.append(sheet.stream(cosine, drift))
    return media_table(*sheets)


def related(depth: float) -> float:
    return 1 + 3 * depth


# -- attention over training -------------------------------------------------------------------------------------------


def attention(
    truths: Mapping[str, Callable[[int], float]], *, seed: int = 0, seeds: int = 1, layers: int = 3, **more: Any
) -> Table:
    """Norms of mean query and key, |cos| and attention over training: `query`, `key`, `cosine`, `sharp`, `entropy`."""
    sheets = []
    for number in range(seeds):
        given = {"layers": layers, "number": number, "entropy": (seed, number), "noise": 0.002, **more}
        sheet = Course(width=128, **given)
        for kind in ("query", "key"):
            if kind in truths:
                sheet.add("drift", lambda step, _, f=truths[kind]: f(step), kind=kind)
        if "cosine" in truths:
            for head in range(2):
                sign = (-1) ** head
                truth = lambda step, _, s=sign: s * truths["cosine"](step)  # noqa: E731
                sheet.add("qk_cosine", truth, kind="query", head=head)
        for name, metric in (("sharp", "attention_sharpness"), ("entropy", "attention_entropy")):
            if name in truths:
                sheet.add(metric, lambda step, _, f=truths[name]: f(step), kind="scores")
        sheet.losses()
        sheets.append(sheet)
    return media_table(*sheets)


def rising(low: float, high: float, *, steps: Iterable[int] = STEPS) -> Callable[[int], float]:
    last = max(steps)
    return lambda step: low + (high - low) * math.log1p(step) / math.log1p(last)


LEVELS = {"query": 2.0, "key": 2.0, "cosine": 0.4, "sharp": 0.3, "entropy": 0.7}


def still_attention(seed: int) -> Table:
    noise = (0.001, 0.01, 0.05)[seed % 3]
    return attention({n: (lambda step, v=v: v) for n, v in LEVELS.items()}, seed=seed, noise=noise, common=0.3)


def wandering_attention(seed: int) -> Table:
    """Every quantity wanders from step to step, all of them and all layers together: the worst case."""
    course = walk((seed, 3), STEPS, by=1.0)
    sizes = {"query": 0.2, "key": 0.2, "cosine": 0.05, "sharp": 0.04, "entropy": -0.04}
    truths = {n: (lambda step, n=n: LEVELS[n] + sizes[n] * course[step]) for n in LEVELS}
    return attention(truths, seed=seed, layers=(1, 4)[seed % 2])


def long_wandering_attention(seed: int) -> Table:
    """Twenty steps, over which every layer goes its own way as well."""
    steps = tuple(range(0, 1000, 50))
    course, layers = walk((seed, 5), steps, by=1.0), 4
    own = [walk((seed, 6, n), steps, by=1.0) for n in range(layers + 1)]
    sheet = Course(width=128, layers=layers, steps=steps, entropy=seed, noise=0.002)
    for metric, base, by in (("attention_sharpness", 0.4, 0.04), ("attention_entropy", 0.6, -0.04)):
        truth = lambda s, d, b=base, by=by: b + by * (0.3 * course[s] + 0.7 * own[round(d * layers)][s])  # noqa: E731
        sheet.add(metric, truth, kind="scores")
    return media_table(sheet.losses())


def hardly_sharper(seed: int) -> Table:
    """A perfect order of steps in which nothing happens."""
    truths = {"sharp": rising(0.0012, 0.0014), "entropy": rising(0.999, 0.998)}
    return attention(truths, seed=seed, noise=1e-6)


# -- untrained blocks --------------------------------------------------------------------------------------------------

BIASES = (0.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0)
LENGTH = 16.0  # of a row without a bias, at width 256 and with a norm


def passed_on(bias: float) -> float:
    """The average cosine of inputs with this bias."""
    return bias**2 / (bias**2 + LENGTH**2)


def block(
    outputs: Callable[[float], float],
    *,
    sharp: Callable[[float], float] = lambda bias: 0.01,
    inputs: Callable[[float], float] = passed_on,
    seed: int = 0,
    seeds: int = 5,
    scatter: float = 0.002,
    biases: Iterable[float] = BIASES,
    inits: Iterable[str] = ("normal", "xavier"),
) -> Table:
    """A block at initialisation whose outputs and sharpness are functions of the bias; seeds scatter."""
    random = np.random.default_rng((seed, 4))
    sheets = []
    for number in range(seeds):
        for init in inits:
            for bias in biases:
                sheet = Sheet(
                    "bert", number=number, entropy=(seed, number, int(10 * bias)), noise=scatter / 2, layers=1
                )
                variant = f"bias={bias:g};init={init};input_norm=1;width=256"
                place = {"step": None, "depth": 0.0, "group": "", "head": None, "variant": variant}
                numbers = {
                    ("average_cosine", "embed", 0): inputs(bias) + 0.1 * scatter * random.normal(),
                    ("average_cosine", "resid", 1): outputs(bias) + scatter * random.normal(),
                    ("attention_sharpness", "scores", 1): sharp(bias) + scatter * random.normal(),
                }
                for (metric, kind, layer), value in numbers.items():
                    value = min(max(value, -0.01), 0.9999)
                    sheet.rows.append(sheet._row({**place, "metric": metric, "kind": kind, "layer": layer}, value))
                sheets.append(sheet)
    return joined(*sheets)


def odds(cosine: float, factor: float) -> float:
    """The average cosine whose odds are a multiple of those of another.

    >>> odds(0.5, 3.0)
    0.75
    """
    return factor * cosine / (1 + (factor - 1) * cosine)


def identity(seed: int) -> Table:
    scatter = (0.001, 0.01, 0.03)[seed % 3]
    return block(passed_on, seed=seed, scatter=scatter, seeds=(3, 5, 8)[seed % 3], inits=("normal",))


def unmoved(seed: int) -> Table:
    """Outputs and attention that do not know the bias."""
    scatter = (0.0005, 0.01, 0.05)[seed % 3]
    level = (0.01, 0.3)[seed % 2]
    return block(lambda bias: level, sharp=lambda bias: level, seed=seed, scatter=scatter, inits=("normal",))


def own_offset(seed: int) -> Table:
    """A block that adds a little of its own to what it lets pass, whatever the bias."""
    own = (0.005, 0.012)[seed % 2]
    return block(lambda bias: own + (1 - own) * passed_on(bias), seed=seed, inits=("normal",))


def hardly_moved(seed: int) -> Table:
    """A perfect order of biases in which nothing happens."""
    tiny = lambda bias: 0.01 + 0.0003 * bias / 200  # noqa: E731
    return block(tiny, sharp=tiny, seed=seed, scatter=1e-6, inits=("normal",))


# -- arms of attention -------------------------------------------------------------------------------------------------

ARM_STEPS = (0, 1, 4, 16, 64, 256, 1000)
DRIFTS = {"softmax": 0.4, "mean-removed": 0.02, "uniform": 0.0}


def attention_arms(
    cosines: Mapping[str, Callable[[int, int], float]],
    sharp: Mapping[str, float],
    *,
    seed: int = 0,
    seeds: int = 3,
    scatter: float = 0.01,
    drifts: Mapping[str, float] = DRIFTS,
) -> Table:
    """Arms of attention: average cosine of step and seed, and sharpness at the end."""
    random = np.random.default_rng((seed, 6))
    sheets = []
    for number in range(seeds):
        for i, (arm, cosine) in enumerate(cosines.items()):
            luck = scatter * random.normal()
            options: dict[str, Any] = {"number": number, "layers": 3, "steps": ARM_STEPS, "entropy": (seed, number, i)}
            sheet = Sheet(f"{arm}-3x64", **options, noise=1e-3)
            sheet.add("average_cosine", lambda s, _, f=cosine, n=number, luck=luck: f(s, n) + luck * (s > 0)).losses()
            end = sharp[arm] * (1 + luck)
            sheet.add("attention_sharpness", lambda s, _, e=end: 0.02 + (e - 0.02) * late(s), kind="scores")
            norm = 0.0 if arm == "uniform" else 2.0
            exact = Sheet(f"{arm}-3x64", **options, noise=0.0 if arm == "uniform" else 1e-3)
            for kind in ("query", "key"):
                exact.add("drift", drifts[arm] * norm, kind=kind).add("mean_norm", norm, kind=kind)
            sheets += [sheet, exact]
    return joined(*sheets)


def late(step: int) -> float:
    return math.log1p(step) / math.log1p(ARM_STEPS[-1])


def risen(step: int, number: int) -> float:
    return 0.2 + 0.5 * late(step)


def level(step: int, number: int) -> float:
    return 0.2


SHARP = {"softmax": 0.4, "mean-removed": 0.4, "uniform": 0.0}


def arms_without_rise(seed: int) -> Table:
    """Ordinary attention becomes anisotropic, and nothing does without drift."""
    arms = {"softmax": risen, "mean-removed": level, "uniform": level}
    return attention_arms(arms, SHARP, seed=seed, scatter=(0.005, 0.03)[seed % 2], seeds=(3, 6)[seed % 2])


def wandering_arms(seed: int) -> Table:
    """No arm has a trend, but all move from step to step, in part together, as arms of one seed do."""
    by = (0.02, 0.06)[seed % 2]
    shared = [walk((seed, 8, n), ARM_STEPS, by=by) for n in range(5)]
    own = [[walk((seed, 9, n, i), ARM_STEPS, by=by) for n in range(5)] for i in range(3)]
    arms = {
        arm: (lambda step, n, i=i: 0.4 + 0.7 * shared[n][step] + 0.7 * own[i][n][step]) for i, arm in enumerate(SHARP)
    }
    return attention_arms(arms, SHARP, seed=seed, seeds=(3, 5)[seed % 2])


def passing_arms(seed: int) -> Table:
    """In all arms alike the average cosine rises in the first steps and is gone at the end."""
    course = {0: 0.3, 1: 0.4, 4: 0.8, 16: 0.7, 64: 0.4, 256: 0.3, 1000: 0.3}
    arms = dict.fromkeys(SHARP, lambda step, number: course[step])
    return attention_arms(arms, SHARP, seed=seed, scatter=(0.005, 0.03)[seed % 2])


def equally_sharp(seed: int) -> Table:
    sharp = dict.fromkeys(SHARP, (0.3, 0.02)[seed % 2])
    return attention_arms(dict.fromkeys(SHARP, risen), sharp, seed=seed, scatter=(0.02, 0.2)[seed % 2])


INHERENT: dict[str, Specimen] = {
    "anisotropic_in_every_modality": Specimen(
        lambda: media(dict.fromkeys(ATTENDING, 0.4)),
        {"isotropic": isotropic, "one without": one_modality_without},
        lambda: media({**dict.fromkeys(ATTENDING, 0.4), "speech": 0.0}),
    ),
    "convolution_differs": Specimen(
        lambda: media({**dict.fromkeys(ATTENDING, 0.5), "convolution": 0.1}),
        {"no difference": no_difference, "isotropic": isotropic, "relu": rectified, "single": single_models},
        lambda: media(dict.fromkeys((*ATTENDING, "convolution"), 0.4)),
    ),
    "not_inherent": Specimen(
        lambda: media(dict.fromkeys((*ATTENDING, "convolution"), 0.4)),
        {"inherent": inherent, "relu": rectified, "weak": weakly_inherent, "untrained": untrained},
        lambda: media({**dict.fromkeys(ATTENDING, 0.5), "convolution": 0.02}),
    ),
    "drift_explains_anisotropy": Specimen(
        lambda: sites(0, related, lambda depth: 0.2 + 0.5 * depth),
        {"unrelated": unrelated_sites, "walk": walking_sites, "models": walking_models, "sisters": sister_models},
        lambda: sites(0, related, lambda depth: 0.8 - 0.5 * depth),
    ),
    "queries_and_keys_drift_together": Specimen(
        lambda: attention({"query": rising(1, 4), "key": rising(1, 4), "cosine": rising(0.05, 0.6)}),
        {"still": still_attention, "walk": wandering_attention},
        lambda: attention({"query": rising(4, 1), "key": rising(4, 1), "cosine": rising(0.6, 0.05)}),
    ),
    "attention_sharpens": Specimen(
        lambda: attention({"sharp": rising(0.1, 0.6), "entropy": rising(0.9, 0.4)}),
        {
            "still": still_attention,
            "walk": wandering_attention,
            "long walk": long_wandering_attention,
            "tiny": hardly_sharper,
        },
        lambda: attention({"sharp": rising(0.6, 0.1), "entropy": rising(0.4, 0.9)}),
    ),
    "anisotropic_at_initialisation": Specimen(
        lambda: block(lambda bias: odds(passed_on(bias), 2.0)),
        {"identity": identity, "offset": own_offset},
        lambda: block(lambda bias: odds(passed_on(bias), 0.5)),
    ),
    "anisotropy_grows_with_bias": Specimen(
        lambda: block(passed_on),
        {"unmoved": unmoved, "tiny": hardly_moved},
        lambda: block(lambda bias: 0.9 * (1 - passed_on(bias))),
    ),
    "sharpness_grows_with_bias": Specimen(
        lambda: block(passed_on, sharp=lambda bias: 0.02 + 0.5 * (bias / 200) ** 1.5),
        {"unmoved": unmoved, "tiny": hardly_moved},
        lambda: block(passed_on, sharp=lambda bias: 0.5 - 0.4 * bias / 200),
    ),
    "anisotropy_without_drift": Specimen(
        lambda: attention_arms(dict.fromkeys(SHARP, risen), SHARP),
        {"no rise": arms_without_rise, "wandering": wandering_arms, "transient": passing_arms},
        lambda: attention_arms({"softmax": risen, "mean-removed": level, "uniform": level}, SHARP),
    ),
    "sharpness_needs_drift": Specimen(
        lambda: attention_arms(dict.fromkeys(SHARP, risen), {**SHARP, "mean-removed": 0.1}),
        {"equally sharp": equally_sharp},
        lambda: attention_arms(dict.fromkeys(SHARP, risen), {**SHARP, "mean-removed": 0.6}),
    ),
}
