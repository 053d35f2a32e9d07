"""Planted and null tables of the claims about depth, training and the arms of an ablation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from anisoscope.results.query import Table
from support.fake_profiles import Sheet, Truth, bell, flat, hump, joined
from support.specimen import Specimen

STEPS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000)
ESTIMATORS = {"two_nn": 1.0, "levina_bickel": 1.1, "gride": 0.9}
# layers, standard error of a number, tails of its noise: from small and sure to deep and shaky
SIZES: tuple[dict[str, Any], ...] = (
    {"layers": 6, "noise": 0.002},
    {"layers": 12, "noise": 0.02},
    {"layers": 24, "noise": 0.005, "tails": 3.0},
    {"layers": 8, "noise": 0.05, "common": 0.0},
)


def size_of(seed: int) -> dict[str, Any]:
    return SIZES[seed % len(SIZES)]


def walk(seed: Any, points: Iterable[Any], *, by: float) -> dict[Any, float]:
    """A walk from 0 over some points, with normal steps of this standard deviation: autocorrelated, without a trend."""
    points = tuple(points)
    steps = by * np.random.default_rng(seed).normal(size=len(points))
    return dict(zip(points, np.cumsum([0.0, *steps[1:]]).tolist(), strict=True))


def profile(truth: Truth | float, *, model: str = "m", seed: int = 0, seeds: int = 1, **more: Any) -> list[Sheet]:
    """svd_ratio over depth after training, for some seeds."""
    given = {"steps": (1000,), "layers": 12, **more}
    found = []
    for number in range(seeds):
        sheet = Sheet(model, number=number, entropy=(seed, number, *map(ord, model)), **given)
        found.append(sheet.add("svd_ratio", truth).losses())
    return found


def both(decoder: Truth | float, encoder: Truth | float, **more: Any) -> Table:
    more = {"seeds": 3, **more}
    sheets = [*profile(decoder, model="decoder-12x512", **more), *profile(encoder, model="encoder-12x512", **more)]
    return joined(*sheets, types={"decoder-12x512": "decoder", "encoder-12x512": "encoder"})


def constant_profile(seed: int) -> Table:
    return joined(*profile(0.2, seed=seed, **size_of(seed)))


def outlier_block(seed: int) -> Table:
    """A flat profile with one block far above the others."""
    size = {**size_of(seed), "noise": 0.005}
    odd = int(np.random.default_rng(seed).integers(1, size["layers"] + 1)) / size["layers"]
    return joined(*profile(lambda step, depth: 0.2 + 0.2 * math.isclose(depth, odd), seed=seed, **size))


def tilted_profile(seed: int) -> Table:
    """A profile that only rises, or only falls."""
    sign = (-1) ** seed
    return joined(*profile(lambda step, depth: 0.3 + 0.2 * sign * depth, seed=seed, **size_of(seed)))


def alike(seed: int) -> Table:
    """An encoder and a decoder with the same profile, a bell or none."""
    truth = bell() if seed % 2 else flat()
    return both(truth, truth, seed=seed, **{**size_of(seed), "noise": min(size_of(seed)["noise"], 0.02)})


def loud_decoder(seed: int) -> Table:
    """Two flat profiles, of which that of the decoder was measured on fewer contexts and is noisier by far."""
    layers, times = (6, 12, 24)[seed % 3], (2, 5, 20)[seed // 3 % 3]
    sheets = [
        *profile(flat(), model="decoder-12x512", seed=seed, layers=layers, noise=0.001 * times, common=0.0),
        *profile(flat(), model="encoder-12x512", seed=seed + 1, layers=layers, noise=0.001, common=0.0),
    ]
    return joined(*sheets, types={"decoder-12x512": "decoder", "encoder-12x512": "encoder"})


def lucky_pair(seed: int) -> Table:
    """An encoder and a decoder from one law: every training has a profile of its own, measured well."""
    layers = (6, 12)[seed % 2]
    walks = {(n, i): walk((seed, n, i), range(1, layers + 1), by=0.02) for n in range(3) for i in (1, 2)}
    sheets = []
    for n, (i, model) in itertools.product(range((1, 3)[seed // 2 % 2]), enumerate(("decoder", "encoder"), start=1)):
        truth = lambda step, depth, w=walks[n, i]: max(0.2 + w[round(depth * layers)], 0.01)  # noqa: E731
        sheet = Sheet(f"{model}-12x512", number=n, entropy=(seed, n, i), steps=(1000,), layers=layers, noise=0.001)
        sheets.append(sheet.add("svd_ratio", truth).losses())
    return joined(*sheets, types={"decoder-12x512": "decoder", "encoder-12x512": "encoder"})


def barely_less(seed: int) -> Table:
    """An encoder whose profile is the decoder's bell, a tenth lower."""
    return both(bell(0.15), bell(0.135), seed=seed, layers=(6, 12, 24)[seed % 3], noise=(0.002, 0.01)[seed % 2])


def walking_profile(seed: int) -> Table:
    """Neighbouring blocks are alike, and there is nothing else."""
    layers = (6, 12, 24)[seed % 3]
    values = walk((seed, 1), range(1, layers + 1), by=(0.05, 0.1)[seed % 2])
    return joined(*profile(lambda step, depth: 0.5 + values[round(depth * layers)], seed=seed, layers=layers))


def walking_both(seed: int) -> Table:
    layers = (6, 12)[seed % 2]
    one, two = (walk((seed, i), range(1, layers + 1), by=0.07) for i in (1, 2))
    at: Any = lambda values: lambda step, depth: 0.5 + values[round(depth * layers)]  # noqa: E731
    return both(at(one), at(two), seed=seed, layers=layers)


def trained(course: Callable[[int], float], *, seed: int = 0, seeds: int = 1, **more: Any) -> Table:
    """svd_ratio and average cosine over training, the same at every block."""
    sheets = []
    for number in range(seeds):
        given = {"steps": STEPS, "layers": 4, "noise": 0.002, **more}
        sheet = Sheet("m", number=number, entropy=(seed, number), **given)
        sheets.append(sheet.add("svd_ratio", lambda step, depth: course(step)).losses())
        sheet.add("average_cosine", lambda step, depth: course(step))
    return joined(*sheets)


def grown(step: int, *, by: float = 1.0) -> float:
    return 0.1 * (1 + by * math.log1p(step) / math.log1p(STEPS[-1]))


def wandering(seed: int) -> Table:
    """A course without a trend whose steps are small or large."""
    course = walk((seed, 7), STEPS, by=(0.005, 0.01, 0.02)[seed % 3])
    return trained(lambda step: max(0.2 + course[step], 0.02), seed=seed)


def wandering_seeds(seed: int) -> Table:
    """The same in three trainings or more, each on its own way."""
    sheets = []
    for number in range((3, 5)[seed % 2]):
        course = walk((seed, 8, number), STEPS, by=(0.01, 0.03)[seed % 2])
        sheet = Sheet("m", number=number, entropy=(seed, number), steps=STEPS, layers=3, noise=0.002)
        sheets.append(sheet.add("svd_ratio", lambda step, _, c=course: max(0.2 + c[step], 0.02)).losses())
    return joined(*sheets)


def jump(seed: int) -> Table:
    """All of the growth between step 0 and the first step after it."""
    return trained(lambda step: 0.3 if step else 0.1, seed=seed, noise=(0.002, 0.02)[seed % 2])


def passing(seed: int) -> Table:
    """A rise in the middle of training that is gone late."""
    return trained(lambda step: 0.1 + 0.2 * (8 <= step <= 32), seed=seed, noise=(0.001, 0.005)[seed % 2])


def still(seed: int) -> Table:
    level, tails = (0.2, math.inf) if seed % 2 else (0.002, 3.0)
    return trained(lambda step: level, seed=seed, noise=level * (0.01, 0.1, 0.3)[seed % 3], tails=tails)


def phases(course: Callable[[int], float], *, seed: int = 0, steps: tuple[int, ...] = STEPS, **more: Any) -> Table:
    """Intrinsic dimension over training by three estimators, with the halves of the contexts."""
    sheet = Sheet("m", entropy=seed, **{"steps": steps, "layers": 4, "noise": 0.1, **more})
    for name, scale in ESTIMATORS.items():
        sheet.halves(name, lambda step, depth, scale=scale: scale * course(step))
    return joined(sheet.losses())


def noisy_dimension(seed: int) -> Table:
    return phases(lambda step: 10.0, seed=seed, noise=(0.1, 0.5, 1.5)[seed % 3], tails=(math.inf, 3.0)[seed % 2])


def trembling_dimension(seed: int) -> Table:
    """Training itself moves the dimension up and down from step to step, in all contexts alike."""
    luck = np.random.default_rng((seed, 3)).normal(size=len(STEPS))
    return phases(lambda step: 10 * (1 + 0.03 * luck[STEPS.index(step)]), seed=seed)


def walking_dimension(seed: int) -> Table:
    """Training wanders, in all contexts alike."""
    course = walk((seed, 4), STEPS, by=(0.05, 0.1, 0.2)[seed % 3])
    return phases(lambda step: 10 * math.exp(course[step]), seed=seed)


def long_walking_dimension(seed: int) -> Table:
    """The same over more steps."""
    steps = tuple(range(0, 200, (10, 5)[seed % 2]))
    course = walk((seed, 9), steps, by=(0.04, 0.08)[seed // 2 % 2])
    return phases(lambda step: 10 * math.exp(course[step]), seed=seed, steps=steps, layers=2)


def partitions(clusters: float, random: float, whole: float, *, seed: int = 0, **more: Any) -> Table:
    sheet = Sheet("m", entropy=seed, **{"layers": 6, "noise": 0.005, **more})
    for variant, level in (("", clusters), ("partition=random", random), ("partition=none", whole)):
        sheet.add("local_anisotropy", level, variant=variant)
    return joined(sheet)


def even_partitions(seed: int) -> Table:
    level = (0.05, 0.3, 0.9)[seed % 3]
    return partitions(level, level, level, seed=seed, **{**size_of(seed), "noise": min(size_of(seed)["noise"], 0.02)})


def estimated(profiles: Mapping[str, Truth | float], *, seed: int = 0, **more: Any) -> Table:
    sheet = Sheet("m", entropy=seed, **{"layers": 12, "noise": 0.1, **more})
    for name, truth in profiles.items():
        sheet.add(name, truth)
    return joined(sheet)


def unrelated_estimators(seed: int) -> Table:
    """Three profiles that have nothing to do with each other, each measured well."""
    random = np.random.default_rng((seed, 5))
    layers = (5, 6, 8, 12)[seed % 4]
    own = {name: random.normal(size=layers + 1) for name in ESTIMATORS}
    truths = {n: (lambda step, depth, n=n: 10 + own[n][round(depth * layers)]) for n in ESTIMATORS}
    return estimated(truths, seed=seed, layers=layers, noise=(0.01, 0.3)[seed % 2])


def walking_estimators(seed: int) -> Table:
    """Three profiles that have nothing to do with each other, in which neighbours are alike."""
    layers = (6, 12, 24)[seed % 3]
    own = {name: walk((seed, i), range(1, layers + 1), by=1.0) for i, name in enumerate(ESTIMATORS)}
    truths = {n: (lambda step, depth, n=n: 10 + own[n][round(depth * layers)]) for n in ESTIMATORS}
    return estimated(truths, seed=seed, layers=layers, noise=0.05)


def sister_estimators(seed: int) -> Table:
    """The same in several seeds, whose profiles are those of the architecture and alike."""
    layers, sheets = (7, 12)[seed % 2], []
    own = {name: walk((seed, i), range(1, layers + 1), by=1.0) for i, name in enumerate(ESTIMATORS)}
    for number in range((3, 5)[seed // 2 % 2]):
        luck = 0.2 * np.random.default_rng((seed, number)).normal(size=(3, layers + 1))
        sheet = Sheet("m", number=number, entropy=(seed, number), layers=layers, noise=0.05)
        for i, name in enumerate(ESTIMATORS):
            sheet.add(name, lambda s, d, n=name, w=luck[i]: 10 + own[n][round(d * layers)] + w[round(d * layers)])
        sheets.append(sheet)
    return joined(*sheets)


def noisy_estimators(seed: int) -> Table:
    return estimated(dict.fromkeys(ESTIMATORS, 10.0), seed=seed, layers=(5, 12, 24)[seed % 3], noise=0.3, common=0.0)


ARMS = ("causal-next", "causal-masked", "bidirectional-masked")


def arms(levels: Mapping[str, float], *, seed: int = 0, seeds: int = 3, scatter: float = 0.03, **more: Any) -> Table:
    """Three arms whose svd_ratio ends at these levels, from the same start; seeds scatter around them, relatively."""
    random = np.random.default_rng((seed, 11))
    sheets = []
    for number, arm in itertools.product(range(seeds), ARMS):
        level = max(levels[arm] * (1 + scatter * random.normal()), 1e-4)
        given = {"steps": (0, 10, 100, 1000), "layers": 4, "noise": 0.02 * level, **more}
        sheet = Sheet(f"{arm}-4x64", number=number, entropy=(seed, number, *map(ord, arm)), **given)
        sheets.append(sheet.add("svd_ratio", lambda step, depth, end=level: end if step else 0.1).losses())
    return joined(*sheets)


def equal_arms(seed: int) -> Table:
    level = (0.1, 0.001, 0.5)[seed % 3]
    scatter = (0.02, 0.1, 0.3)[seed // 3 % 3]
    return arms(dict.fromkeys(ARMS, level), seed=seed, scatter=scatter, seeds=(1, 3, 5)[seed % 3])


def levels(*, mask: float = 0.0, objective: float = 0.0) -> dict[str, float]:
    """The levels of arms between which anisotropy falls by these parts."""
    second = 0.2 * (1 - objective)
    return {"causal-next": 0.2, "causal-masked": second, "bidirectional-masked": second * (1 - mask)}


SHAPE: dict[str, Specimen] = {
    "bell_shaped": Specimen(
        lambda: joined(*profile(bell())),
        {"constant": constant_profile, "tilted": tilted_profile, "outlier": outlier_block, "walk": walking_profile},
        lambda: joined(*profile(lambda step, depth: 0.1 + 0.2 * depth)),
    ),
    "encoders_more_uniform": Specimen(
        lambda: both(bell(), flat()),
        {"alike": alike, "loud": loud_decoder, "barely": barely_less, "luck": lucky_pair},
        lambda: both(flat(), bell()),
    ),
    "decoders_bell_encoders_flat": Specimen(
        lambda: both(bell(), flat()),
        {"alike": alike, "loud": loud_decoder, "walk": walking_both},
        lambda: both(flat(), bell()),
    ),
    "two_phases": Specimen(
        lambda: phases(lambda step: hump(STEPS)(step, 0.5)),
        {
            "noise": noisy_dimension,
            "trembling": trembling_dimension,
            "walk": walking_dimension,
            "long walk": long_walking_dimension,
        },
        lambda: phases(lambda step: 5 + math.log1p(step)),
    ),
    "anisotropy_grows": Specimen(
        lambda: trained(grown),
        {"still": still, "walk": wandering, "walks": wandering_seeds, "jump": jump, "peak": passing},
        lambda: trained(lambda step: grown(step, by=-0.5)),
    ),
    "locally_isotropic": Specimen(
        lambda: partitions(0.2, 0.5, 0.6), {"even": even_partitions}, lambda: partitions(0.6, 0.5, 0.5)
    ),
    "estimators_agree": Specimen(
        lambda: estimated({n: (lambda step, depth, s=s: 10 + 8 * s * depth) for n, s in ESTIMATORS.items()}),
        {
            "noise": noisy_estimators,
            "unrelated": unrelated_estimators,
            "walk": walking_estimators,
            "seeds": sister_estimators,
        },
        lambda: estimated({n: (lambda step, depth, i=i: 10 + 8 * (-1) ** i * depth) for i, n in enumerate(ESTIMATORS)}),
    ),
    "mask_effect": Specimen(
        lambda: arms(levels(mask=0.5)), {"equal": equal_arms}, lambda: arms(levels(mask=-0.5), scatter=0.02)
    ),
    "objective_effect": Specimen(
        lambda: arms(levels(objective=0.5)), {"equal": equal_arms}, lambda: arms(levels(objective=-0.5), scatter=0.02)
    ),
}
