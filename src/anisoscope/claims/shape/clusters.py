"""Local isotropy within global anisotropy: rows of one cluster are spread more evenly than rows drawn at random.

Evidence is the share of variance along the first direction, inside clusters and outside of them. The average cosine of
centred rows is about 0 by construction and says nothing.
"""

from __future__ import annotations

import functools
import math

from anisoscope.claims.engine.blocks import SOURCE, BlockStack, at_step, block_mean, stacks
from anisoscope.claims.engine.claim import claim
from anisoscope.claims.engine.evidence import Missing, last_step, layer_records
from anisoscope.claims.engine.part import Finding, Part, Parts, Status, outcome, span

LOCAL_MARGIN = 0.05
CONSIDERABLE = 0.1  # of all variance along one direction; rows without a preferred one have about 1/d
_PARTITIONS: dict[str, dict[str, str]] = {
    "clusters": {},
    "random": {"partition": "random"},
    "whole": {"partition": "none"},
}
_LESS = {"random": "less than at random", "whole": "less than the whole"}


@claim(
    "locally_isotropic",
    of=stacks,
    statement="The rows are anisotropic as a whole and more isotropic inside their clusters.",
    source=SOURCE,
    metrics=("local_anisotropy", "svd_ratio"),
    margin=LOCAL_MARGIN,
)
def locally_isotropic(stack: BlockStack) -> Finding:
    """σ₁²/Σσ² of the centred cloud, and of random parts of the clusters' sizes, minus that inside k-means clusters.

    K is chosen by the silhouette. Mean over the blocks at the last measured step; the cloud as a whole must hold a
    tenth of its variance along one direction.
    """
    found = {name: stack.needed("local_anisotropy", **options) for name, options in _PARTITIONS.items()}
    step = last_step(found["clusters"])
    there = {name: {c: row for c, row in rows.items() if c.step == step} for name, rows in found.items()}
    layers = sorted(set.intersection(*({cell.layer for cell in rows} for rows in there.values())))
    if not layers:
        raise Missing("block with all three partitions at one step", "measure local_anisotropy with each partition")
    numbers = {name: block_mean(readings, step, layers) for name, readings in found.items()}
    parts = [Part.of(words, numbers[name] - numbers["clusters"], margin=LOCAL_MARGIN) for name, words in _LESS.items()]
    parts.append(Part.of("anisotropic as a whole", numbers["whole"], margin=CONSIDERABLE, p=math.nan, guard=True))
    parts += [Part.described(name, number) for name, number in numbers.items()]
    ratios = stack.blocks("svd_ratio")
    if ratios:
        parts.append(Part.described("svd_ratio", block_mean(ratios, last_step(ratios))))
    details = {"step": step, "layers": {name: layer_records(rows) for name, rows in there.items()}}
    sentence = functools.partial(_sentence, when=at_step(step), blocks=len(layers))
    return Finding(tuple(parts), sentence, details)


def _sentence(parts: Parts, status: Status, part: Part, *, when: str, blocks: int) -> str:
    text = f"over {blocks} block{'s' if blocks > 1 else ''}{when} the first direction holds {span(parts['clusters'])} "
    text += f"of the variance inside clusters, {span(parts['random'])} inside random parts of the same sizes and "
    text += f"{span(parts['whole'])} of the whole cloud; what decides is {_DECIDING[part.name]}{span(part)}, "
    return text + outcome(status, part)


_DECIDING = {
    "less than at random": "random parts minus clusters with ",
    "less than the whole": "the whole minus clusters with ",
    "anisotropic as a whole": "whether the whole is anisotropic at all, with ",
}
