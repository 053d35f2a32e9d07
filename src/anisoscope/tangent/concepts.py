"""Concept cards: what the concepts of a factorisation stand for, as top tokens and example rows in context.

Notation: Z n×k codes of rows, D k×d directions; a row is a token in a context. On centred rows the codes of semi-NMF
share a common part (see numerics/semi_nmf.py), so that the rows with the largest codes are the same for
every concept. The *distinctive* code is a row's code of a concept minus the mean of its codes of all concepts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anisoscope.capture.sites.site import Site
from anisoscope.errors import AnisoscopeError
from anisoscope.metrics.tangent import match_concepts
from anisoscope.numerics.factors import encode_rows
from anisoscope.tangent.proxy import Half, Proxy

TOKENS, EXAMPLES = 8, 5


def distinctive_codes(codes: Any) -> Tensor:
    """max(0, ẑ_ij − mean over l of ẑ_il), ẑ in units of each concept's own root mean square; n×k in float64.

    Codes with negative entries (scores, sources) have no such common part: the result is their positive part.

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
    """For each concept the k tokens with the largest shares of its code mass (sum of the codes of their rows).

    >>> top_tokens(torch.tensor([[3.0], [1.0], [0.0]]), ["the", "a", "of"], 2)
    [[('the', 0.75), ('a', 0.25)]]
    """
    z = _codes(codes).cpu().numpy()
    listed = tokens.tolist() if isinstance(tokens, Tensor | np.ndarray) else list(tokens)
    if len(listed) != len(z):
        raise AnisoscopeError(
            f"there are {len(listed)} tokens for {len(z)} rows of codes; expected one token for each row."
        )
    place = {word: i for i, word in enumerate(dict.fromkeys(listed))}  # distinct tokens in the order in which they come
    words, kind = list(place), np.array([place[word] for word in listed], dtype=np.int64)
    found = []
    for column in z.clip(min=0.0).T:
        mass = np.bincount(kind, weights=column, minlength=len(words))
        order = np.argsort(-mass, kind="stable")[:k]
        found.append([(words[i], float(mass[i] / mass.sum())) for i in order if mass[i] > 0])
    return found


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
    found = []
    for column in z.T:
        first: dict[int, int] = {}  # row by context
        for i in column.argsort(descending=True, stable=True)[: int((column > 0).sum())].tolist():
            first.setdefault(int(owner[i]), i)
            if len(first) == k:
                break
        found.append(list(first.values()))
    return found


def concept_cards(
    codes: Any,
    directions: Any,
    *,
    tokens: Sequence[str],
    contexts: Any,
    around: Callable[[int], tuple[str, str]] = lambda row: ("", ""),
    earlier: tuple[int, Any] | None = None,
) -> list[dict[str, Any]]:
    """One card per concept: its share, its tokens, example rows in context, and its match at the earlier step.

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
    distinctive = distinctive_codes(z)
    energy = distinctive.square().sum(0) * z.square().mean(0) * rows.square().sum(1)
    share = energy / energy.sum().clamp_min(torch.finfo(torch.float64).tiny)
    tops, picked = top_tokens(distinctive.square(), tokens), example_rows(distinctive, contexts)
    before: dict[int, dict[str, Any]] = {}  # for each concept the one of the earlier step that it is matched with
    if earlier is not None:
        pairs, cosines = match_concepts(earlier[1], rows)
        for (old, new), cosine in zip(pairs.tolist(), cosines.tolist(), strict=True):
            before[int(new)] = {"step": int(earlier[0]), "concept": int(old), "cosine": float(cosine)}
    cards = []
    for j in range(len(rows)):
        examples = []
        for i in picked[j]:
            left, right = around(i)
            examples.append({"before": left, "token": str(tokens[i]), "after": right, "code": float(distinctive[i, j])})
        listed = [[str(word), part] for word, part in tops[j]]
        card = {"concept": j, "share": float(share[j]), "tokens": listed, "examples": examples}
        cards.append({**card, "from": before.get(j)})
    return cards


ROWS = 2048  # rows of the fit half that are encoded
AROUND = 12  # tokens shown on either side


def card_sites(sites: list[Site]) -> list[Site]:
    """The embedding, the middle block and the last block of each stack."""
    chosen = []
    for stack in dict.fromkeys(site.stack for site in sites):
        blocks = [s for s in sites if s.stack == stack and s.kind == "resid"]
        chosen += [s for s in sites if s.stack == stack and s.kind == "embed"]
        chosen += [blocks[len(blocks) // 2 - 1], blocks[-1]] if len(blocks) > 1 else blocks
    return chosen


def surroundings(half: Half, rows: Tensor, decode: Callable[[list[int]], str]) -> Callable[[int], tuple[str, str]]:
    """A function from the i-th of some rows of a half to the text before and after its token, within its context."""
    contexts, tokens = half.context.tolist(), half.token.tolist()
    by_position = half.position.argsort(stable=True)
    order = by_position[half.context[by_position].argsort(stable=True)].tolist()
    place = {row: i for i, row in enumerate(order)}

    def around(i: int) -> tuple[str, str]:
        row = int(rows[i])
        at = place[row]
        sides = order[max(0, at - AROUND) : at], order[at + 1 : at + 1 + AROUND]
        before, after = ([tokens[j] for j in side if contexts[j] == contexts[row]] for side in sides)
        return decode(before) if before else "", decode(after) if after else ""

    return around


def decoder_of(tokenizer: Any) -> Callable[[list[int]], str]:
    """A function from ids to text (numbers without a tokenizer); negative ids are skipped."""

    def decode(ids: list[int]) -> str:
        known = [i for i in ids if i >= 0]
        if tokenizer is None:
            return " ".join(map(str, known))
        try:
            return str(tokenizer.decode(known, clean_up_tokenization_spaces=False))
        except TypeError:
            return str(tokenizer.decode(known))

    return decode


def _encoded(fits: Mapping[Site, Half], proxies: Mapping[Site, Proxy]) -> dict[Site, Tensor]:
    """Codes of a few rows of each site, on the host; on a device those of sites of one shape in one call."""
    alike: dict[Any, list[tuple[Any, ...]]] = {}
    for site, half in fits.items():
        x, directions = half.x[half.few(ROWS).to(half.x.device)], proxies[site].directions
        key = (x.shape, directions.shape) if x.device.type == "cuda" else site
        alike.setdefault(key, []).append((site, x - proxies[site].centre.to(x), directions.to(x)))
    found: dict[Site, Tensor] = {}
    for group in alike.values():
        rows, bases = (torch.stack([line[i] for line in group]) for i in (1, 2))
        codes = encode_rows(rows, bases, method="semi_nmf").cpu()
        found |= dict(zip((site for site, *_ in group), codes, strict=True))
    return found


def cards(
    fits: Mapping[Site, Half], proxies: Mapping[Site, Proxy], tokenizer: Any, *, earlier: dict[Site, tuple[int, Tensor]]
) -> list[dict[str, Any]]:
    """The cards of some sites; `earlier` holds (step, directions) of the previous measured step."""
    found: list[dict[str, Any]] = []
    decode = decoder_of(tokenizer)
    encoded = _encoded(fits, proxies)
    for site, half in fits.items():
        proxy, few, codes = proxies[site], half.few(ROWS), encoded[site]
        shown = half.token[few].tolist()
        spelled = {token: decode([token]) for token in sorted(set(shown))}
        made = concept_cards(
            codes,
            proxy.directions.cpu(),
            tokens=[spelled[token] for token in shown],
            contexts=half.context[few],
            around=surroundings(half, few, decode),
            earlier=earlier.get(site),
        )
        place = {"stack": site.stack, "layer": site.layer, "kind": site.kind}
        found += [{**place, **card} for card in made]
    return found
