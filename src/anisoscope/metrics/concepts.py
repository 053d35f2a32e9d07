"""What concepts stand for, and how they move.

Notation: Z n×k codes of rows, D k×d directions; a row is a token in a context. On centred rows the codes of semi-NMF
share a common part (see numerics/cones.py): the rows with the largest codes are then the same for every concept, and
tell nothing. The *distinctive* code is what a row has of a concept beyond what it has of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anisoscope.errors import AnisoscopeError
from anisoscope.numerics.linalg import principal_angles

TOKENS, EXAMPLES = 8, 5


def distinctive_codes(codes: Any) -> Tensor:
    """max(0, ẑ_ij − mean over l of ẑ_il), ẑ in units of each concept's own root mean square; n×k in float64.

    Codes that are negative somewhere (scores, sources) have no common part of this kind: of them the positive side.

    >>> distinctive_codes(torch.tensor([[3.0, 1.0], [1.0, 3.0]])).round(decimals=4).tolist()
    [[0.4472, 0.0], [0.0, 0.4472]]
    """
    z = _codes(codes)
    size = z.square().mean(0).sqrt()
    z = z / torch.where(size > 0, size, 1.0)
    common = z.mean(1, keepdim=True) if z.shape[1] > 1 and bool((z >= 0).all()) else 0.0
    return (z - common).clamp_min(0.0)


def _codes(codes: Any) -> Tensor:
    z = torch.as_tensor(codes).detach().double()
    if z.ndim != 2 or 0 in z.shape:
        raise AnisoscopeError(f"the codes have shape {tuple(z.shape)}; expected rows × concepts, both at least 1.")
    return z


def top_tokens(codes: Any, tokens: Sequence[Any], k: int = TOKENS) -> list[list[tuple[Any, float]]]:
    """For each concept the k tokens with the largest shares of its code mass, Σ of the codes of their rows.

    >>> top_tokens(torch.tensor([[3.0], [1.0], [0.0]]), ["the", "a", "of"], 2)
    [[('the', 0.75), ('a', 0.25)]]
    """
    z = _codes(codes).cpu().numpy()
    words, kind = _kinds(tokens, len(z))
    found = []
    for column in z.clip(min=0.0).T:
        mass = np.bincount(kind, weights=column, minlength=len(words))
        order = np.lexsort((np.arange(len(words)), -mass))[:k]
        total = mass.sum()
        found.append([(words[i], float(mass[i] / total)) for i in order if mass[i] > 0])
    return found


def _kinds(tokens: Sequence[Any], n: int) -> tuple[list[Any], np.ndarray]:
    """The distinct tokens in the order in which they come, and which of them each row has."""
    listed = tokens.tolist() if isinstance(tokens, Tensor | np.ndarray) else list(tokens)
    if len(listed) != n:
        raise AnisoscopeError(f"there are {len(listed)} tokens for {n} rows of codes; expected one token for each row.")
    place = {word: i for i, word in enumerate(dict.fromkeys(listed))}
    return list(place), np.array([place[word] for word in listed], dtype=np.int64)


def example_rows(codes: Any, contexts: Any, *, k: int = EXAMPLES) -> list[list[int]]:
    """For each concept the k rows with the largest codes, at most one of each context, codes of 0 left out.

    >>> example_rows(torch.tensor([[3.0], [2.0], [1.0], [0.0]]), torch.tensor([7, 7, 8, 9]))
    [[0, 2]]
    """
    z = _codes(codes).cpu()
    owner = torch.as_tensor(contexts).cpu()
    if tuple(owner.shape) != (len(z),):
        raise AnisoscopeError(
            f"contexts have shape {tuple(owner.shape)} for {len(z)} rows of codes; expected one context for each row."
        )
    return [_first_of_each(column, owner, k) for column in z.T]


def _first_of_each(column: Tensor, owner: Tensor, k: int) -> list[int]:
    order = column.argsort(descending=True, stable=True)
    order = order[: int((column > 0).sum())]
    _, inverse = torch.unique(owner[order], return_inverse=True)
    place = torch.arange(len(order))
    first = torch.full((int(inverse.max()) + 1 if len(order) else 0,), len(order)).scatter_reduce(
        0, inverse, place, reduce="amin"
    )
    return [int(i) for i in order[first.sort().values[:k]]]


def match_concepts(first: Any, second: Any, *, signed: bool = True) -> tuple[Tensor, Tensor]:
    """Pairs [m, 2] of concepts of two fits, one to one, with the largest sum of cosines, and these cosines.

    Codes are non-negative, so a direction and its opposite are different concepts; `signed=False` for components
    whose sign means nothing.

    >>> pairs, cosines = match_concepts(torch.eye(3)[:2], torch.eye(3)[[1, 0]])
    >>> pairs.tolist(), cosines.tolist()
    ([[0, 1], [1, 0]], [1.0, 1.0])
    """
    from scipy.optimize import linear_sum_assignment

    one, two = _units(first), _units(second)
    if one.shape[1] != two.shape[1]:
        raise AnisoscopeError(f"the directions have widths {one.shape[1]} and {two.shape[1]}; expected the same space.")
    cosines = one @ two.T
    if not signed:
        cosines = cosines.abs()
    mine, theirs = linear_sum_assignment(-cosines.numpy())
    pairs = torch.stack([torch.as_tensor(mine), torch.as_tensor(theirs)], 1)
    return pairs, cosines[pairs[:, 0], pairs[:, 1]]


def _units(directions: Any) -> Tensor:
    rows = torch.as_tensor(directions).detach().cpu().double()
    if rows.ndim != 2 or 0 in rows.shape or not bool(rows.isfinite().all()):
        raise AnisoscopeError(
            f"the directions have shape {tuple(rows.shape)} or are not finite; expected concepts × width, finite."
        )
    norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return rows / torch.where(norms > 0, norms, 1.0)


def turn(first: Any, second: Any) -> float:
    """The mean principal angle, in degrees, between the spans of two bases d×r.

    >>> round(turn(torch.eye(4)[:, :2], torch.eye(4)[:, 1:3]), 6)
    45.0
    """
    one, two = torch.as_tensor(first), torch.as_tensor(second)
    return float(torch.rad2deg(principal_angles(one.mT, two.mT).mean()))


def concept_cards(
    codes: Any,
    directions: Any,
    *,
    tokens: Sequence[str],
    contexts: Any,
    around: Callable[[int], tuple[str, str]] | None = None,
    earlier: tuple[int, Any] | None = None,
    top: int = TOKENS,
    examples: int = EXAMPLES,
) -> list[dict[str, Any]]:
    """One card per concept: its share, its tokens, example rows in context, and which concept it was before.

    `tokens` and `contexts` belong to the rows of the codes, `around(row)` is the text before and after a row's token,
    `earlier` is (step, directions) of the fit to compare with. Shares, tokens and examples are those of the
    distinctive codes; `share` is the concept's part in their energy, `code` is in units of the concept's root mean
    square.

    >>> cards = concept_cards(torch.eye(2) * 2, torch.eye(2), tokens=["a", "b"], contexts=torch.tensor([0, 1]))
    >>> cards[1]["tokens"], cards[1]["examples"][0]["token"], cards[1]["from"]
    ([['b', 1.0]], 'b', None)
    """
    z, rows = _codes(codes).cpu(), torch.as_tensor(directions).detach().cpu().double()
    if len(rows) != z.shape[1]:
        raise AnisoscopeError(f"there are {z.shape[1]} codes and {len(rows)} directions; expected as many of both.")
    own = distinctive_codes(z)
    energy = own.square().sum(0) * z.square().mean(0) * rows.square().sum(1)
    share = energy / energy.sum().clamp_min(torch.finfo(torch.float64).tiny)
    words, picked = top_tokens(own.square(), tokens, top), example_rows(own, contexts, k=examples)
    before = _origins(rows, earlier)
    return [
        {
            "concept": j,
            "share": float(share[j]),
            "tokens": [[str(word), part] for word, part in words[j]],
            "examples": [_example(i, float(own[i, j]), tokens, around) for i in picked[j]],
            "from": before.get(j),
        }
        for j in range(len(rows))
    ]


def _example(
    row: int, code: float, tokens: Sequence[str], around: Callable[[int], tuple[str, str]] | None
) -> dict[str, Any]:
    before, after = around(row) if around else ("", "")
    return {"before": before, "token": str(tokens[row]), "after": after, "code": code}


def _origins(directions: Tensor, earlier: tuple[int, Any] | None) -> dict[int, dict[str, Any]]:
    """For each concept the one of the earlier step that it is matched with."""
    if earlier is None:
        return {}
    step, old = earlier
    pairs, cosines = match_concepts(old, directions)
    return {
        int(new): {"step": int(step), "concept": int(was), "cosine": float(c)}
        for (was, new), c in zip(pairs.tolist(), cosines.tolist(), strict=True)
    }
