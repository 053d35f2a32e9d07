"""Concepts explained: distinctive codes, tokens, examples, matching and turning, on cases with known answers."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anisoscope.errors import AnisoscopeError
from anisoscope.metrics.tangent import concept_turn, match_concepts
from anisoscope.numerics.semi_nmf import semi_nmf
from anisoscope.tangent.concepts import concept_cards, distinctive_codes, example_rows, top_tokens


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def worded(n: int = 600, *, seed: int = 0) -> tuple[torch.Tensor, list[str]]:
    """Centred rows of six words: each word has a direction of its own."""
    words = ["the", "of", "cat", "dog", "run", "."]
    which = torch.randint(6, (n,), generator=torch.Generator().manual_seed(seed))
    x = 3.0 * normal(6, 20, seed=seed)[which] + 0.3 * normal(n, 20, seed=seed + 1)
    return x - x.mean(0), [words[i] for i in which.tolist()]


# distinctive codes


def test_a_part_that_all_concepts_share_is_taken_out() -> None:
    own = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]).repeat(50, 1).double()
    common = torch.empty(150, 1, dtype=torch.float64).exponential_(generator=torch.Generator().manual_seed(0)) * 20
    codes = (own + common) * torch.tensor([1.0, 10.0, 0.1])
    wanted = own.argmax(1)
    assert torch.equal(distinctive_codes(codes).argmax(1), wanted)
    assert float((distinctive_codes(codes) > 0).double().mean()) < 0.7
    most = codes.topk(20, dim=0).indices
    assert len(set(most.flatten().tolist())) < 30, "the counter-test: raw codes are largest in the same rows"


def test_distinctive_codes_do_not_depend_on_the_scale_of_a_concept() -> None:
    codes = normal(40, 3).abs()
    torch.testing.assert_close(distinctive_codes(codes * torch.tensor([1.0, 7.0, 0.01])), distinctive_codes(codes))


def test_signed_codes_and_single_concepts_keep_their_positive_side() -> None:
    signed = normal(30, 2)
    scaled = (signed / signed.square().mean(0).sqrt()).clamp_min(0.0)
    torch.testing.assert_close(distinctive_codes(signed), scaled)
    assert float(distinctive_codes(signed[:, :1].abs()).min()) > 0
    assert not bool(distinctive_codes(torch.zeros(4, 2)).any())


# tokens and examples


@given(n=st.integers(1, 40), k=st.integers(1, 4), seed=st.integers(0, 99))
def test_shares_of_all_tokens_are_those_counted_by_hand(n: int, k: int, seed: int) -> None:
    codes = normal(n, k, seed=seed).clamp_min(0.0)
    tokens = torch.randint(0, 5, (n,), generator=torch.Generator().manual_seed(seed))
    for j, found in enumerate(top_tokens(codes, tokens, 5)):
        mass: dict[int, float] = {}
        for i in range(n):
            mass[int(tokens[i])] = mass.get(int(tokens[i]), 0.0) + float(codes[i, j])
        total = sum(mass.values())
        wanted = sorted((m / total for m in mass.values() if m > 0), reverse=True) if total else []
        np.testing.assert_allclose([share for _, share in found], wanted, rtol=1e-9)
        assert all(math.isclose(mass[word] / total, share) for word, share in found)


def test_only_the_largest_tokens_are_named() -> None:
    codes = torch.tensor([[5.0, 0.0], [1.0, 2.0], [0.5, 2.0]])
    assert [[word for word, _ in found] for found in top_tokens(codes, ["a", "b", "c"], 2)] == [["a", "b"], ["b", "c"]]


@given(n=st.integers(1, 40), contexts=st.integers(1, 8), seed=st.integers(0, 99))
def test_examples_are_the_largest_codes_one_of_each_context(n: int, contexts: int, seed: int) -> None:
    codes = normal(n, 2, seed=seed)
    owner = torch.randint(contexts, (n,), generator=torch.Generator().manual_seed(seed))
    for j, picked in enumerate(example_rows(codes, owner, k=5)):
        wanted, seen = [], set()
        for i in sorted(range(n), key=lambda row: -float(codes[row, j])):
            if codes[i, j] > 0 and int(owner[i]) not in seen:
                wanted.append(i)
                seen.add(int(owner[i]))
        assert picked == wanted[:5]


# matching and turning


@given(k=st.integers(1, 5), seed=st.integers(0, 99), signed=st.booleans())
def test_the_matching_is_the_best_of_all(k: int, seed: int, signed: bool) -> None:
    first, second = normal(k, 7, seed=seed), normal(k, 7, seed=seed + 1)
    pairs, cosines = match_concepts(first, second, signed=signed)
    table = torch.cosine_similarity(first.unsqueeze(1), second.unsqueeze(0), dim=2)
    table = table if signed else table.abs()
    best = max(sum(float(table[i, p[i]]) for i in range(k)) for p in itertools.permutations(range(k)))
    assert float(cosines.sum()) == pytest.approx(best)
    assert pairs[:, 0].tolist() == list(range(k)) and sorted(pairs[:, 1].tolist()) == list(range(k))
    torch.testing.assert_close(cosines, table[pairs[:, 0], pairs[:, 1]])


def test_a_shuffled_set_of_concepts_is_put_back_in_order() -> None:
    directions = normal(6, 20)
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    pairs, cosines = match_concepts(directions, 2.5 * directions[order])
    assert order[pairs[:, 1]].tolist() == list(range(6))
    np.testing.assert_allclose(cosines, 1.0)
    _, opposite = match_concepts(directions, -directions)
    assert float(opposite.max()) < 0.9, "the sign matters"
    np.testing.assert_allclose(match_concepts(directions, -directions, signed=False)[1], 1.0)


def test_sets_of_different_size_are_matched_as_far_as_they_go() -> None:
    pairs, cosines = match_concepts(torch.eye(4)[:3], torch.eye(4)[[2]])
    assert pairs.tolist() == [[2, 0]] and cosines.tolist() == [1.0]


@pytest.mark.parametrize("degrees", [0.0, 1e-6, 10.0, 45.0, 90.0])
def test_turn_is_the_mean_principal_angle(degrees: float) -> None:
    angle = math.radians(degrees)
    eye = torch.eye(6, dtype=torch.float64)
    first = eye[:, :2]
    second = torch.stack([eye[:, 0], math.cos(angle) * eye[:, 1] + math.sin(angle) * eye[:, 4]], 1)
    mixed = second @ torch.tensor([[1.0, 2.0], [0.0, 3.0]], dtype=torch.float64)
    for basis in (second, mixed):
        assert concept_turn(first, basis) == pytest.approx(degrees / 2, abs=1e-7)


# cards


def test_cards_tell_what_the_concepts_are() -> None:
    x, words = worded()
    fit = semi_nmf(x, 6)
    cards = concept_cards(
        fit.codes,
        fit.directions,
        tokens=words,
        contexts=torch.arange(600) // 20,
        around=lambda i: (" ".join(words[max(0, i - 3) : i]), " ".join(words[i + 1 : i + 4])),
    )
    assert [card["concept"] for card in cards] == list(range(6))
    assert sum(card["share"] for card in cards) == pytest.approx(1.0)
    first = [card["tokens"][0] for card in cards]
    assert len({word for word, _ in first}) >= 5, "nearly each concept is a word of its own"
    assert sum(share for _, share in first) / 6 > 0.6
    for card in cards:
        assert len(card["examples"]) == 5 and card["from"] is None
        codes = [example["code"] for example in card["examples"]]
        assert codes == sorted(codes, reverse=True)
        for example in card["examples"]:
            assert set(example) == {"before", "token", "after", "code"}
    assert json.loads(json.dumps(cards)) == cards


def test_cards_say_which_concept_it_was_before() -> None:
    x, words = worded()
    old = semi_nmf(x, 6)
    order = torch.tensor([5, 4, 3, 2, 1, 0])
    cards = concept_cards(
        old.codes[:, order],
        old.directions[order],
        tokens=words,
        contexts=torch.arange(600),
        earlier=(64, old.directions),
    )
    assert [card["from"]["concept"] for card in cards] == order.tolist()
    assert all(card["from"]["step"] == 64 and card["from"]["cosine"] > 0.999 for card in cards)


BAD = {
    "tokens": ("2 tokens for 3 rows", lambda: top_tokens(torch.ones(3, 2), ["a", "b"])),
    "contexts": ("contexts have shape (2,)", lambda: example_rows(torch.ones(3, 2), torch.zeros(2))),
    "codes": ("codes have shape (3,)", lambda: distinctive_codes(torch.ones(3))),
    "widths": ("widths 3 and 4", lambda: match_concepts(torch.eye(3), torch.eye(4))),
    "not finite": ("not finite", lambda: match_concepts(torch.eye(3), torch.eye(3) * torch.nan)),
    "as many": (
        "2 codes and 3 directions",
        lambda: concept_cards(torch.ones(1, 2), torch.eye(3), tokens=["a"], contexts=torch.zeros(1)),
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_told_in_one_sentence(name: str) -> None:
    words, act = BAD[name]
    with pytest.raises(AnisoscopeError) as caught:
        act()
    assert words in str(caught.value)
