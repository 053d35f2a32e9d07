"""Numbers of blocks at initialisation: the reference values, and a block written out in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from anisoscope.capture.attention_call import Call
from anisoscope.studies.untrained.figures import REFERENCE, prediction
from anisoscope.studies.untrained.fresh_block import UntrainedBlock, biased, build_block, direction, initialise
from anisoscope.studies.untrained.protocol import (
    EDGES,
    BiasPoint,
    measure_point,
    row_index,
    score_rows,
    sequence_numbers,
)
from support.small_block import small_block


def values(block: UntrainedBlock, x: torch.Tensor, *, rows: int = 0) -> dict[tuple[str, str], float]:
    records, _ = measure_point(block, x, BiasPoint(0.0, "normal", block.width, True), rows=rows)
    return {(row["kind"], row["metric"]): row["value"] for row in records}


# -- the reference -----------------------------------------------------------------------------------------------------


def base_values(*, sequences: int, seed: int) -> list[tuple[float, float, float]]:
    """Cosine in, cosine out and entropy at the points of the reference, for a block of BERT-base size."""
    block = build_block("bert", width=768, heads=12, length=512, sequences=sequences, seed=seed)
    initialise(block, "normal", seed=seed)
    x, b = block.rows(sequences, 512, seed=seed), direction(768, seed=seed)
    found = []
    for norm, bias, *_ in REFERENCE:
        got = values(block, biased(x, b, bias=bias, input_norm=norm), rows=32)
        found.append(
            (got["embed", "average_cosine"], got["resid", "average_cosine"], got["scores", "attention_entropy"])
        )
    return found


@pytest.mark.slow
def test_two_sequences_of_bert_base_size_are_near_the_reference() -> None:
    near = (0.004, 0.01, 0.03)  # one seed; the entropy at N = 200 varies most
    for got, (norm, bias, *expected) in zip(base_values(sequences=2, seed=0), REFERENCE, strict=True):
        for value, wanted, tolerance in zip(got, expected, near, strict=True):
            assert wanted is None or value == pytest.approx(wanted, abs=tolerance), (norm, bias)


@pytest.mark.slow
def test_the_reference_lies_where_one_further_seed_would_fall() -> None:
    seeds = np.array([base_values(sequences=16, seed=seed) for seed in range(4)])  # [seeds, points, quantities]
    for i, (norm, bias, *expected) in enumerate(REFERENCE):
        for j, wanted in enumerate(expected):
            low, high = prediction(seeds[:, i, j].tolist())
            assert wanted is None or low - 0.0006 <= wanted <= high + 0.0006, (norm, bias, seeds[:, i, j])


def test_cosine_of_the_inputs_is_that_of_a_shifted_cloud() -> None:
    """A = N²/(N² + ‖x‖²) for rows of norm ‖x‖ around 0: 768 with a LayerNorm, 768·0.02² without."""
    block = small_block("bert")
    x, b = block.rows(8, 512, seed=0), direction(32, seed=0)
    for norm, bias, square in ((True, 5.0, 32.0), (False, 0.1, 32 * 0.02**2)):
        rows = biased(x, b, bias=bias, input_norm=norm).flatten(0, 1).double()
        units = rows / rows.norm(dim=1, keepdim=True)
        n = len(units)
        cosine = (float(units.sum(0).square().sum()) - n) / (n * (n - 1))
        assert cosine == pytest.approx(bias**2 / (bias**2 + square), abs=0.02)


def test_scores_grow_as_the_square_of_the_bias_only_without_a_norm_before_attention() -> None:
    slopes = {}
    for family in ("bert", "prenorm"):
        block = small_block(family)
        x, b = block.rows(3, 24, seed=0), direction(32, seed=0)
        sizes = [values(block, biased(x, b, bias=n, input_norm=True))["scores", "score_magnitude"] for n in (100, 400)]
        slopes[family] = math.log(sizes[1] / sizes[0]) / math.log(4)
    assert slopes["bert"] == pytest.approx(2, abs=0.05)
    assert slopes["prenorm"] == pytest.approx(0, abs=0.05), "a norm takes the size of the bias away"


# -- an independent twin -----------------------------------------------------------------------------------------------


def twin(block: UntrainedBlock, x: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """BERT's block written out in float64: output, queries, keys [S, T, H, e] and scores [S, H, T, T]."""
    weights = {k: v.detach().double().numpy() for k, v in block.module.named_parameters()}

    def linear(name: str, h: np.ndarray) -> np.ndarray:
        return h @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(h: np.ndarray) -> np.ndarray:
        return (h - h.mean(-1, keepdims=True)) / np.sqrt(h.var(-1, keepdims=True) + 1e-12)

    h = x.double().numpy()
    q, k, v = (
        linear(f"attention.self.{n}", h).reshape(*h.shape[:2], block.heads, -1) for n in ("query", "key", "value")
    )
    scores = np.einsum("stha,suha->shtu", q, k) / math.sqrt(q.shape[-1])
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    mixed = np.einsum("shtu,suha->stha", p, v).reshape(h.shape)
    h = norm(linear("attention.output.dense", mixed) + h)
    inner = linear("intermediate.dense", h)
    gelu = 0.5 * inner * (1 + np.vectorize(math.erf)(inner / math.sqrt(2)))
    return norm(linear("output.dense", gelu) + h), q, k, scores


def pair_cosine(rows: np.ndarray) -> float:
    units = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    product = units @ units.T
    return float((product.sum() - np.trace(product)) / (len(rows) * (len(rows) - 1)))


@pytest.mark.parametrize("bias", [0.0, 30.0])
def test_every_number_equals_that_of_a_block_written_out(bias: float) -> None:
    block = small_block("bert", init="xavier")
    x = biased(block.rows(3, 24, seed=1), direction(32, seed=1), bias=bias, input_norm=True)
    out, q, k, s = twin(block, x)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    got = values(block, x)
    flat = out.reshape(-1, 32)
    heads = [(q[:, :, h].reshape(-1, 16), k[:, :, h].reshape(-1, 16)) for h in range(2)]
    means = [(a.mean(0), b.mean(0)) for a, b in heads]
    expected = {
        ("embed", "average_cosine"): pair_cosine(x.double().numpy().reshape(-1, 32)),
        ("resid", "average_cosine"): pair_cosine(flat),
        ("resid", "mean_norm"): np.linalg.norm(flat, axis=1).mean(),
        ("resid", "drift"): np.linalg.norm(flat.mean(0)),
        ("query", "average_cosine"): np.mean([pair_cosine(a) for a, _ in heads]),
        ("key", "average_cosine"): np.mean([pair_cosine(b) for _, b in heads]),
        ("query", "drift"): np.mean([np.linalg.norm(a) for a, _ in means]),
        ("key", "mean_norm"): np.mean([np.linalg.norm(b, axis=1).mean() for _, b in heads]),
        ("query", "qk_cosine"): np.mean([a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in means]),
        ("scores", "attention_entropy"): np.mean(-(p * np.log(p)).sum(-1)) / math.log(24),
        ("scores", "attention_max"): p.max(-1).mean(),
        ("scores", "attention_median"): np.median(p, -1).mean(),
        ("scores", "attention_min"): p.min(-1).mean(),
        ("scores", "score_spread"): s.std(-1).mean(),
        ("scores", "score_magnitude"): np.abs(s).mean(),
        ("scores", "attention_sharpness"): np.mean((p.max(-1) - 1 / 24) / (1 - 1 / 24)),
    }
    for place, value in expected.items():
        assert got[place] == pytest.approx(value, rel=2e-4, abs=2e-5), place


def test_masked_keys_and_short_rows_count_in_no_score() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 12, 4), torch.randn(2, 1, 12, 4)
    index = row_index(2, 12)
    causal, free = (score_rows(Call(q, k, 0.5, causal=way), index, 0) for way in (True, False))
    for rows, spans in ((causal, range(8, 13)), (free, [12] * 12)):
        found = {row["metric"]: row for row in rows.records()}
        least, middle, size = [], [], []
        for sequence in range(2):
            for place, span in zip(range(12 - len(spans), 12), spans, strict=True):
                scores = 0.5 * q[sequence, 0, place].double() @ k[sequence, 0, :span].double().T
                least.append(float(scores.softmax(0).min()))
                middle.append(float(np.median(scores.softmax(0).numpy())))  # of odd and even numbers of keys
                size.append(float(scores.abs().mean()))
        assert found["attention_min"]["value"] == pytest.approx(np.mean(least), rel=1e-5)
        assert found["attention_median"]["value"] == pytest.approx(np.mean(middle), rel=1e-5)
        assert found["score_magnitude"]["value"] == pytest.approx(np.mean(size), rel=1e-5)
        assert found["attention_min"]["dropped"] == 2 * (12 - len(spans)), "rows that see fewer than 8 keys"
    assert causal.histogram().sum() == 2 * 78 and free.histogram().sum() == 2 * 144


def test_scores_beyond_the_bins_are_counted_at_their_ends() -> None:
    q, k = torch.full((1, 1, 8, 1), 1e3), torch.full((1, 1, 8, 1), 1e3)
    counts = score_rows(Call(q, k, 1.0), row_index(1, 8), 0).histogram()
    assert counts[-1] == 64 and counts.sum() == 64 and EDGES[-1] < 1e6


def test_sequences_fall_evenly_into_the_folds() -> None:
    from anisoscope.numerics.hashing import fold_of

    folds = fold_of(torch.tensor(sequence_numbers(16))).bincount(minlength=8)
    assert folds.tolist() == [2] * 8
    assert fold_of(torch.arange(16)).bincount(minlength=8).tolist() != [2] * 8, "plain numbers do not"
