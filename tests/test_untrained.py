"""Blocks at initialisation: the reference values, an independent twin, every family as its own model calls it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from anisoscope.capture.arguments import first_tensor
from anisoscope.capture.attention import Call
from anisoscope.errors import AnisoscopeError
from anisoscope.runs.store import RunFolder
from anisoscope.runs.table import Table
from anisoscope.studies import untrained as study
from anisoscope.studies.untrained import Untrained, UntrainedConfig
from anisoscope.studies.untrained_block import Block, biased, block_config, build_block, direction
from anisoscope.studies.untrained_measure import EDGES, Point, measure_point, row_index, score_rows, sequence_numbers
from anisoscope.studies.untrained_weights import initialise
from anisoscope.view.untrained_curves import REFERENCE, prediction

SMALL = {"width": 32, "heads": 2, "length": 24, "sequences": 3}


def small_block(family: str, *, init: str = "normal", seed: int = 0) -> Block:
    block = build_block(family, **SMALL, seed=seed)
    initialise(block, init, seed=seed)
    return block


def values(block: Block, x: torch.Tensor, *, rows: int = 0) -> dict[tuple[str, str], float]:
    records, _ = measure_point(block, x, Point(0.0, "normal", block.width, True), rows=rows)
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


def twin(block: Block, x: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
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
        ("scores", "attention_median"): np.sort(p, -1)[..., 11].mean(),  # of an even number the lower one, as torch's
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
        least, size = [], []
        for sequence in range(2):
            for place, span in zip(range(12 - len(spans), 12), spans, strict=True):
                scores = 0.5 * q[sequence, 0, place].double() @ k[sequence, 0, :span].double().T
                least.append(float(scores.softmax(0).min()))
                size.append(float(scores.abs().mean()))
        assert found["attention_min"]["value"] == pytest.approx(np.mean(least), rel=1e-5)
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


# -- families ----------------------------------------------------------------------------------------------------------

FAMILIES = ["bert", "prenorm", "gpt2", "llama", "gpt_neox", "falcon", "bloom", "modernbert", "t5", "albert", "gpt_neo",
            "mistral", "vit", "wav2vec2", "whisper"]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_alone_gives_what_it_gives_inside_its_model(family: str) -> None:
    from anisoscope.capture.arguments import forward
    from anisoscope.capture.checkpoints import Wish, fresh_model
    from anisoscope.studies.untrained_block import _something

    shape = {"width": 32, "heads": 2, "length": 24}
    block = build_block(family, **shape, sequences=2, seed=3)
    wish = Wish(torch.device("cpu"), seed=3, with_head=False)
    model = fresh_model(block_config(family, **shape), wish).eval()
    inside = next(m for m in model.modules() if type(m) is type(block.module))
    seen: list[Any] = []

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        seen.append((args[0] if args else kwargs["hidden_states"], first_tensor("block", output)))

    handle = inside.register_forward_hook(keep, with_kwargs=True)
    given = _something(model, sequences=2, length=24, seed=3)
    if family == "t5":
        given["decoder_input_ids"] = given["input_ids"][:, :2]
    with torch.inference_mode():
        try:
            forward(model, given)
        except (ValueError, TypeError):
            assert family == "whisper", "its decoder was given nothing, after the encoder was done"
    handle.remove()
    before, after = seen[0]
    out, call = block.run(before)
    torch.testing.assert_close(out, after, rtol=1e-5, atol=1e-5)
    assert call.query.shape[:2] == (len(before), 2)


def test_rows_of_another_bias_change_the_output_of_every_family() -> None:
    """The counter-test: a call that ignored its rows would pass the test above with its own."""
    block = small_block("gpt2")
    x, b = block.rows(3, 24, seed=0), direction(32, seed=0)
    one, two = (block.run(biased(x, b, bias=n, input_norm=True))[0] for n in (0.0, 50.0))
    assert float((one - two).abs().max()) > 1


@pytest.mark.parametrize("family", ["mamba", "deberta-v2", "longformer", "gemma2", "resnet"])
def test_a_family_without_such_a_block_is_refused_in_a_sentence(family: str) -> None:
    with pytest.raises(AnisoscopeError, match="cannot be called alone") as told:
        small_block(family)
    assert str(told.value).count("\n") == 0 and family in str(told.value)


def test_inputs_are_the_same_for_every_initialisation() -> None:
    one, two = (small_block("bert", init=init) for init in ("normal", "orthogonal"))
    assert torch.equal(one.rows(3, 24, seed=0), two.rows(3, 24, seed=0))
    assert not torch.equal(one.rows(3, 24, seed=0), one.rows(3, 24, seed=1))
    assert float(one.rows(3, 24, seed=0).std()) == pytest.approx(0.02, rel=0.05)


# -- weights -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_initialisations_have_the_scales_they_are_named_after(family: str) -> None:
    block = small_block(family, init="normal")
    weights = {name: p for name, p in block.module.named_parameters() if p.dim() == 2}
    assert all(float(p.detach().std()) == pytest.approx(0.02, rel=0.1) for p in weights.values())
    initialise(block, "orthogonal", seed=0)
    name = next(n for n in weights if n.endswith(("query.weight", "c_attn.weight")))
    square = weights[name].detach()[:, :32]  # the queries, also where queries, keys and values are one matrix
    torch.testing.assert_close(square @ square.T, torch.eye(32), rtol=0, atol=1e-5)
    initialise(block, "xavier", seed=0)
    assert float(weights[name].detach().abs().max()) == pytest.approx(math.sqrt(6 / 64), rel=0.01)
    flat = {n: p for n, p in block.module.named_parameters() if p.dim() == 1}
    assert all(not p.any() for n, p in flat.items() if n.endswith("bias"))
    assert all(bool((p == 1).all()) for n, p in flat.items() if n.endswith("weight"))


def test_own_weights_are_left_as_the_family_makes_them() -> None:
    block = build_block("gpt2", **SMALL, seed=0)
    before = {name: p.clone() for name, p in block.module.named_parameters()}
    initialise(block, "own", seed=0)
    assert all(torch.equal(p, before[name]) for name, p in block.module.named_parameters())
    initialise(block, "normal", seed=0)
    assert not all(torch.equal(p, before[name]) for name, p in block.module.named_parameters())


# -- the study ---------------------------------------------------------------------------------------------------------

CONFIG = UntrainedConfig(
    families=("bert", "prenorm"), widths=(32,), heads=2, seeds=(0, 1, 2), sequences=8, length=24,
    biases=(0.0, 1.0, 10.0, 50.0), inits=("normal", "xavier"), device="cpu",
)  # fmt: skip


def run(path: Path, config: UntrainedConfig = CONFIG, *, resume: bool = False) -> RunFolder:
    folder = RunFolder.create(path, asdict(config), resume=resume)
    Untrained(config, folder).run()
    return folder


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return run(tmp_path_factory.mktemp("untrained") / "run")


def test_the_table_names_bias_initialisation_width_and_norm(ran: RunFolder) -> None:
    folder, table = ran, ran.table()
    assert set(table.arrow["kind"].unique().to_pylist()) == {"embed", "resid", "query", "key", "scores"}
    assert set(table.arrow["model"].unique().to_pylist()) == {"bert", "prenorm"}
    where = {"model": "bert", "seed": 2, "kind": "resid", "metric": "average_cosine"}
    low, high = (table.value(variant=f"bias={n};init=xavier;input_norm=1;width=32", **where) for n in ("0", "50"))
    assert low < 0.2 < 0.9 < high
    norm = table.value(**{**where, "metric": "mean_norm"}, variant="bias=10;init=normal;input_norm=0;width=32")
    assert norm == pytest.approx(math.sqrt(32), rel=1e-4), "a norm after the last sum"
    histograms = folder.arrays("histograms")
    assert len(histograms) == 1 + 2 * 2 * 3 * 8 and len(histograms["edges"]) == 161
    assert not (folder.path / "parts").exists()
    assert folder.about()["status"] == "complete"


def test_an_interrupted_study_ends_as_an_undisturbed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(CONFIG, families=("bert",), seeds=(0, 1), input_norm="yes")
    whole = run(tmp_path / "whole", small)
    measure, calls = study.measure_point, []

    def interrupted(*args: Any, **options: Any) -> Any:
        calls.append(None)
        if len(calls) == 11:  # within the third of four blocks
            raise KeyboardInterrupt
        return measure(*args, **options)

    monkeypatch.setattr(study, "measure_point", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", small)
    assert RunFolder(tmp_path / "cut").about()["status"] == "interrupted"
    assert len(list((tmp_path / "cut" / "parts").glob("*.parquet"))) == 2
    calls.clear()
    monkeypatch.setattr(study, "measure_point", lambda *a, **o: (calls.append(None), measure(*a, **o))[1])
    again = run(tmp_path / "cut", small, resume=True)
    assert len(calls) == 8, "two finished blocks of four biases are not measured again"
    one, two = (str(folder.table().arrow.drop(["run"]).to_pylist()) for folder in (whole, again))  # NaN is no number
    assert one == two
    assert (whole.path / "verdicts.json").read_text() == (again.path / "verdicts.json").read_text()


def test_verdicts_over_seeds_tell_the_pre_norm_block_from_the_other(ran: RunFolder) -> None:
    verdicts = json.loads((ran.path / "verdicts.json").read_text())
    pooled = {(v["claim"], v["subject"]): v for v in verdicts if v["details"]["pooled"]}
    status = {key: verdict["status"] for key, verdict in pooled.items()}
    assert status["anisotropic_at_initialisation", "bert"] == "holds"
    assert status["anisotropy_grows_with_bias", "bert"] == "holds"
    assert status["sharpness_grows_with_bias", "bert"] == "holds"
    assert status["sharpness_grows_with_bias", "prenorm"] == "fails", "a norm before attention takes the bias away"
    assert "adds" in pooled["anisotropic_at_initialisation", "bert"]["why"]


# -- claims ------------------------------------------------------------------------------------------------------------


def planted(curve: dict[float, float], *, seeds: int = 3, noise: float = 0.0, metric: str = "average_cosine") -> Table:
    """A table with one arm whose outputs follow a curve; inputs a little less."""
    random = np.random.default_rng(0)
    records = []
    for seed in range(seeds):
        for bias, value in curve.items():
            shaken = value + noise * random.normal()
            variant = f"bias={bias:g};init=normal;input_norm=1;width=64"
            own = {"model": "bert", "seed": seed, "stack": "single", "metric": metric, "variant": variant, "group": ""}
            sites = {"average_cosine": (("embed", 0), ("resid", 1)), "attention_sharpness": (("scores", 1),)}[metric]
            records += [{**own, "kind": kind, "layer": layer, "value": shaken, "n": 10} for kind, layer in sites]
    return Table.from_records(records)


def judged(table: Table, claim: str) -> Any:
    from anisoscope.claims.claim import evaluate_claims

    return evaluate_claims(table, [claim])[0]


RISING = {0.0: 0.01, 10.0: 0.2, 50.0: 0.6, 100.0: 0.9, 200.0: 0.98}


def test_a_rising_curve_holds_and_a_falling_one_fails() -> None:
    falling = dict(zip(RISING, reversed(RISING.values()), strict=True))
    for claim, metric in (
        ("anisotropy_grows_with_bias", "average_cosine"),
        ("sharpness_grows_with_bias", "attention_sharpness"),
    ):
        assert judged(planted(RISING, metric=metric), claim).status == "holds"
        assert judged(planted(falling, metric=metric), claim).status == "fails"
        assert judged(planted(dict.fromkeys(RISING, 0.5), noise=0.1, metric=metric), claim).status != "holds"


def test_anisotropy_is_asked_at_the_bias_that_makes_inputs_half_anisotropic() -> None:
    verdict = judged(planted(RISING), "anisotropic_at_initialisation")
    assert verdict.status == "holds" and verdict.effect == pytest.approx(0.6)
    assert verdict.details["parts"][0]["name"] == "normal, width 64, normed inputs"
    weak = judged(planted({0.0: 0.0, 10.0: 0.02, 50.0: 0.05, 100.0: 0.06}), "anisotropic_at_initialisation")
    assert weak.status == "fails"


def test_few_seeds_leave_it_open_and_other_tables_are_not_asked() -> None:
    two = judged(planted(RISING, seeds=2), "anisotropy_grows_with_bias")
    assert two.status == "undecided" and "2 seeds" in two.why
    plain = Table.from_records(
        [{"model": "m", "seed": 0, "stack": "single", "layer": 1, "kind": "resid", "metric": "average_cosine",
          "variant": "", "group": "", "value": 0.5}]
    )  # fmt: skip
    for claim in study.CLAIMS:
        assert judged(plain, claim).details["missing"] is True, "no block at initialisation in it"
    few = judged(planted({0.0: 0.0, 1.0: 0.5}), "anisotropy_grows_with_bias")
    assert few.status == "undecided" and few.details["missing"] is True


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"preset": "huge"}, "huge"),
        ({"inits": ("norml",)}, "normal"),
        ({"input_norm": "maybe"}, "maybe"),
        ({"biases": (-1.0,)}, "-1"),
        ({"biases": (math.nan,)}, "nan"),
        ({"biases": (1.0, 1.0)}, "twice"),
        ({"widths": (100,)}, "--heads"),
        ({"widths": (96,), "heads": 7}, "7 heads"),
        ({"sequences": 1}, "at least 2"),
        ({"length": 4}, "at least 8"),
        ({"seeds": ()}, "empty"),
    ],
)
def test_bad_settings_are_told_in_a_sentence(options: dict[str, Any], words: str) -> None:
    with pytest.raises(AnisoscopeError, match=words):
        UntrainedConfig(**options)
