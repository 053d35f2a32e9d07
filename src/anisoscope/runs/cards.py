"""Concept cards: what the concepts of a few sites stand for, in tokens and in context."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from anisoscope.capture.sites import Site
from anisoscope.metrics.concepts import concept_cards
from anisoscope.numerics.factors import encode_rows
from anisoscope.runs.proxies import Proxy
from anisoscope.runs.steprows import Half

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


class Text:
    """The text of the rows of one half: a context's tokens in their order."""

    def __init__(self, half: Half, decode: Callable[[list[int]], str]) -> None:
        self.decode = decode
        self.contexts, self.tokens = half.context.tolist(), half.token.tolist()
        order = half.position.argsort(stable=True)
        self.order = order[half.context[order].argsort(stable=True)].tolist()
        self.place = {row: i for i, row in enumerate(self.order)}

    def around(self, row: int) -> tuple[str, str]:
        """The text before and after a row's token, within its context."""
        at, mine = self.place[row], self.contexts[row]
        before = [i for i in self.order[max(0, at - AROUND) : at] if self.contexts[i] == mine]
        after = [i for i in self.order[at + 1 : at + 1 + AROUND] if self.contexts[i] == mine]
        return self._text(before), self._text(after)

    def _text(self, rows: list[int]) -> str:
        return self.decode([self.tokens[i] for i in rows]) if rows else ""


def decoder_of(tokenizer: Any) -> Callable[[list[int]], str]:
    """Ids as text; as numbers where there is no tokenizer, and where there is no token."""

    def decode(ids: list[int]) -> str:
        known = [i for i in ids if i >= 0]
        if tokenizer is None:
            return " ".join(map(str, known))
        try:
            return str(tokenizer.decode(known, clean_up_tokenization_spaces=False))
        except TypeError:
            return str(tokenizer.decode(known))

    return decode


def cards(
    fits: Mapping[Site, Half], proxies: Mapping[Site, Proxy], tokenizer: Any, *, earlier: dict[Site, tuple[int, Tensor]]
) -> list[dict[str, Any]]:
    """The cards of some sites; `earlier` holds (step, directions) of the step before."""
    found: list[dict[str, Any]] = []
    for site, half in fits.items():
        proxy = proxies[site]
        few = half.order().argsort()[:ROWS].sort().values
        rows = half.x[few.to(half.x.device)]
        codes = encode_rows(rows - proxy.centre.to(rows), proxy.directions.to(rows), method="semi_nmf")
        text = Text(half, decoder_of(tokenizer))
        shown = half.token[few].tolist()
        spelled = {token: text.decode([token]) for token in sorted(set(shown))}
        words = [spelled[token] for token in shown]
        made = concept_cards(
            codes.cpu(),
            proxy.directions.cpu(),
            tokens=words,
            contexts=half.context[few],
            around=lambda row, text=text, few=few: text.around(int(few[row])),  # type: ignore[misc]
            earlier=earlier.get(site),
        )
        place = {"stack": site.stack, "layer": site.layer, "kind": site.kind}
        found += [{**place, **card} for card in made]
    return found
