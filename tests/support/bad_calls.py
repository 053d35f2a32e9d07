"""Calls of the library with bad arguments; each is a function of the shelf and of a place that does not exist.

A name that begins with ~ may also end well.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

Call = Callable[[Path, Path], Any]
GPT = "gpt2:n_layer=1,n_embd=16,n_head=2,vocab_size=300"


def _rows() -> Any:
    import numpy as np

    return np.random.default_rng(0).normal(size=(200, 6))


def _net() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=60, bos_token_id=1, eos_token_id=2))


def _batch(low: int = 0, high: int = 60) -> Any:
    import torch

    ids = torch.randint(low, high, (8, 12))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _metric(name: str, rows: Any, **options: Any) -> Call:
    def call(_: Path, __: Path) -> Any:
        import anisoscope

        return getattr(anisoscope, name)(rows() if callable(rows) else rows, **options)

    return call


def _of_rows(change: Callable[[Any], Any], **options: Any) -> Call:
    def call(_: Path, __: Path) -> Any:
        import anisoscope

        return anisoscope.measure_rows(change(_rows()), **options)

    return call


def _measure(*, model: Any = _net, batches: Any = None, **options: Any) -> Call:
    def call(_: Path, __: Path) -> Any:
        import anisoscope

        given = [_batch()] if batches is None else batches() if callable(batches) else batches
        return anisoscope.measure(model() if callable(model) else model, given, **options)

    return call


def _monitor(**options: Any) -> Call:
    def call(_: Path, place: Path) -> Any:
        import anisoscope

        made = {name: value(place) if callable(value) else value for name, value in options.items()}
        return anisoscope.Monitor(made.pop("model", None) or _net(), **made)

    return call


def _public(name: str, *values: Any, **options: Any) -> Call:
    """A public function; texts may name {s} and {o}."""

    def call(shelf: Path, place: Path) -> Any:
        import anisoscope

        def filled(value: Any) -> Any:
            return value.format(s=shelf, o=place) if isinstance(value, str) else value() if callable(value) else value

        given = {key: filled(value) for key, value in options.items()}
        return getattr(anisoscope, name)(*map(filled, values), **given)

    return call


def _table(**columns: Any) -> Call:
    def call(_: Path, __: Path) -> Any:
        from anisoscope import Table

        return Table.from_records([{"metric": "drift", "value": 1.0, "layer": 1, "kind": "resid", **columns}])

    return call


def _queried(act: Callable[[Any], Any]) -> Call:
    def call(shelf: Path, _: Path) -> Any:
        from anisoscope.results.folder import RunFolder

        return act(RunFolder.open(shelf / "run").table())

    return call


def _read(name: str) -> Call:
    def call(shelf: Path, _: Path) -> Any:
        from anisoscope import Table

        return Table.read(shelf / name)

    return call


def _nan(rows: Any) -> Any:
    rows[:] = float("nan")
    return rows


_FEW: dict[str, Any] = {"tokens": 64, "context": 16, "metrics": ("drift",)}
_RANDOM: dict[str, Any] = {"random_init": True, **_FEW}

CALLS: dict[str, Call] = {
    # rows
    "measure_rows of a vector": _of_rows(lambda x: x[0]),
    "measure_rows of a cube": _of_rows(lambda x: x[None]),
    "measure_rows of nothing": _of_rows(lambda x: x[:0]),
    "measure_rows of no columns": _of_rows(lambda x: x[:, :0]),
    "measure_rows of text": _of_rows(lambda x: "rows"),
    "measure_rows of None": _of_rows(lambda x: None),
    "measure_rows of words": _of_rows(lambda x: [["a", "b"]]),
    "measure_rows of a ragged list": _of_rows(lambda x: [[1.0, 2.0], [3.0]]),
    "~measure_rows of whole numbers": _of_rows(lambda x: x.astype(int)),
    "measure_rows of complex numbers": _of_rows(lambda x: x * 1j),
    "measure_rows of a mapping": _of_rows(lambda x: {"x": x}),
    "~measure_rows of NaN": _of_rows(_nan),
    "~measure_rows of one": _of_rows(lambda x: x[:1]),
    "~measure_rows of 1e300": _of_rows(lambda x: x * 1e300),
    "~measure_rows of zeros": _of_rows(lambda x: x * 0),
    "measure_rows, unknown metric": _of_rows(lambda x: x, metrics="two_n"),
    "measure_rows, metric of attention": _of_rows(lambda x: x, metrics="attention_entropy"),
    "measure_rows, short contexts": _of_rows(lambda x: x, contexts=[1, 2]),
    "~measure_rows, contexts of text": _of_rows(lambda x: x, contexts=["a"] * 200),
    "~measure_rows, contexts of NaN": _of_rows(lambda x: x, contexts=[float("nan")] * 200),
    **{f"{name} of {what}": _metric(name, rows)
       for name in ("two_nn", "average_cosine", "svd_ratio", "levina_bickel", "participation_ratio", "drift")
       for what, rows in {"text": "x", "None": None, "nothing": [], "a number": 3.0, "a vector": [1.0, 2.0],
                          "NaN": [[float("nan")] * 3] * 9}.items()},
    "two_nn keep=nan": _metric("two_nn", _rows, keep=float("nan")),
    "two_nn keep=2": _metric("two_nn", _rows, keep=2),
    "two_nn method=nope": _metric("two_nn", _rows, method="nope"),
    "two_nn of one row": _metric("two_nn", [[1.0, 2.0]]),
    "levina_bickel k=0": _metric("levina_bickel", _rows, k=0),
    "levina_bickel k=-1": _metric("levina_bickel", _rows, k=-1),
    "levina_bickel k=9999": _metric("levina_bickel", _rows, k=9999),
    "levina_bickel k='x'": _metric("levina_bickel", _rows, k="x"),
    "iso_score_star zeta=3": _metric("iso_score_star", _rows, zeta=3),
    "average_cosine, short contexts": _metric("average_cosine", _rows, contexts=[1]),
    "self_similarity without tokens": _metric("self_similarity", _rows),
    "linear_cka of different rows": _public("linear_cka", _rows, [[1.0, 2.0]]),
    # directions
    "semi_nmf rank 0": _public("semi_nmf", _rows, 0),
    "semi_nmf rank -1": _public("semi_nmf", _rows, -1),
    "semi_nmf rank 999": _public("semi_nmf", _rows, 999),
    "semi_nmf rank text": _public("semi_nmf", _rows, "x"),
    "semi_nmf rank 1.5": _public("semi_nmf", _rows, 1.5),
    "semi_nmf of text": _public("semi_nmf", "x", 2),
    "semi_nmf of NaN": _public("semi_nmf", lambda: _nan(_rows()), 2),
    "semi_nmf of nothing": _public("semi_nmf", lambda: _rows()[:0], 2),
    "semi_nmf of a vector": _public("semi_nmf", lambda: _rows()[0], 2),
    "decompose method nope": _public("decompose", _rows, 2, method="nope"),
    "decompose rank 0": _public("decompose", _rows, 0, method="pca"),
    "decompose of NaN": _public("decompose", lambda: _nan(_rows()), 2, method="pca"),
    "tangent_test, other width": _public("tangent_test", _rows, lambda: _rows()[:2, :3]),
    "tangent_test, no directions": _public("tangent_test", _rows, lambda: _rows()[:0]),
    "tangent_test, many directions": _public("tangent_test", _rows, _rows),
    "tangent_test of text": _public("tangent_test", "x", _rows),
    "tangent_test of zeros": _public("tangent_test", lambda: _rows() * 0, lambda: _rows()[:2]),
    "tangent_test of NaN": _public("tangent_test", lambda: _nan(_rows()), lambda: _rows()[:2]),
    "tangent_test draws=0": _public("tangent_test", _rows, lambda: _rows()[:2], draws=0),
    "tangent_test draws=-3": _public("tangent_test", _rows, lambda: _rows()[:2], draws=-3),
    "tangent_test, short contexts": _public("tangent_test", _rows, lambda: _rows()[:2], contexts=[1, 2]),
    "principal_angles of text": _public("principal_angles", "x", "y"),
    "principal_angles of widths": _public("principal_angles", lambda: _rows()[:2], lambda: _rows()[:2, :3]),
    "subspace_overlap of nothing": _public("subspace_overlap", lambda: _rows()[:0], lambda: _rows()[:2]),
    # a model and batches
    "measure None": _measure(model=lambda: None),
    "measure a text": _measure(model="gpt2"),
    "measure without batches": _measure(batches=[]),
    "measure None as batches": _measure(batches=lambda: None),
    "measure a number as batches": _measure(batches=3),
    "measure texts as batches": _measure(batches=["a b c"]),
    "measure lists as batches": _measure(batches=[[1, 2, 3]]),
    "measure an empty mapping": _measure(batches=[{}]),
    "~measure one mapping": _measure(batches=_batch),
    "measure foreign keys": _measure(batches=[{"nope": 3}]),
    "measure ids beyond the vocabulary": _measure(batches=lambda: [_batch(60, 99)]),
    "measure negative ids": _measure(batches=lambda: [_batch(-9, -1)]),
    "~measure all padding": _measure(batches=lambda: [{k: v * (k == "input_ids") for k, v in _batch().items()}]),
    "measure ids of floats": _measure(batches=lambda: [{"input_ids": _batch()["input_ids"].float()}]),
    "measure unknown sites": _measure(sites="residual"),
    "measure sites of a number": _measure(sites=3),
    "measure layers beyond": _measure(layers=9),
    "measure layers of text": _measure(layers="two"),
    "measure negative layers": _measure(layers=[-1]),
    "measure unknown metrics": _measure(metrics="two_n"),
    "measure metrics of numbers": _measure(metrics=[3]),
    "~measure no metrics": _measure(metrics=[]),
    "measure unknown modules": _measure(modules="nope"),
    "measure modules and sites": _measure(modules="transformer.h.0", sites="resid"),
    "measure pool nope": _measure(pool="nope"),
    "measure first nope": _measure(first="nope"),
    "measure special nope": _measure(special="nope"),
    "measure sample_size 0": _measure(sample_size=0),
    "measure sample_size text": _measure(sample_size="x"),
    "measure attention_rows -1": _measure(attention_rows=-1),
    "measure seed -1": _measure(seed=-1),
    "measure seed text": _measure(seed="x"),
    "measure rows no function": _measure(rows=3),
    # profile, sweep, train, compare, claims
    "profile nothing": _public("profile", out="{o}"),
    "profile a number": _public("profile", 3, out="{o}"),
    "profile None": _public("profile", None, out="{o}"),
    "profile nowhere": _public("profile", "{s}/nowhere", out="{o}"),
    "profile tokens text": _public("profile", GPT, out="{o}", **_RANDOM | {"tokens": "many"}),
    "profile tokens 1.5": _public("profile", GPT, out="{o}", **_RANDOM | {"tokens": 1.5}),
    "profile tokens nan": _public("profile", GPT, out="{o}", **_RANDOM | {"tokens": float("nan")}),
    "profile tokens None": _public("profile", GPT, out="{o}", **_RANDOM | {"tokens": None}),
    "profile metrics number": _public("profile", GPT, out="{o}", **_RANDOM | {"metrics": 3}),
    "~profile metrics text": _public("profile", GPT, out="{o}", **_RANDOM | {"metrics": "drift"}),
    "~profile layers text": _public("profile", GPT, out="{o}", **_RANDOM | {"layers": "1"}),
    "~profile layers number": _public("profile", GPT, out="{o}", **_RANDOM | {"layers": 1}),
    "profile sites number": _public("profile", GPT, out="{o}", **_RANDOM | {"sites": 3}),
    "profile data number": _public("profile", GPT, out="{o}", **_RANDOM | {"data": 3}),
    "profile data None": _public("profile", GPT, out="{o}", **_RANDOM | {"data": None}),
    "profile device number": _public("profile", GPT, out="{o}", **_RANDOM | {"device": 3}),
    "profile dtype number": _public("profile", GPT, out="{o}", **_RANDOM | {"dtype": 3}),
    "profile pool None": _public("profile", GPT, out="{o}", **_RANDOM | {"pool": None}),
    "profile first yes": _public("profile", GPT, out="{o}", **_RANDOM | {"first": "yes"}),
    "profile special True": _public("profile", GPT, out="{o}", **_RANDOM | {"special": True}),
    "profile seed 1.5": _public("profile", GPT, out="{o}", **_RANDOM | {"seed": 1.5}),
    "profile unknown option": _public("profile", GPT, out="{o}", **_RANDOM | {"token": 5}),
    "profile into a file": _public("profile", GPT, out="{s}/plain.txt", **_RANDOM),
    "~profile out None": _public("profile", GPT, out=None, **_RANDOM),
    "profile out number": _public("profile", GPT, out=3, **_RANDOM),
    "sweep nothing": _public("sweep", []),
    "sweep a number": _public("sweep", 3),
    "sweep None": _public("sweep", None),
    "sweep nowhere": _public("sweep", "{s}/nowhere", **_FEW),
    "sweep preset nope": _public("sweep", "{s}/series", preset="nope"),
    "sweep rank 1.5": _public("sweep", "{s}/series", rank=1.5),
    "sweep draws text": _public("sweep", "{s}/series", draws="x"),
    "sweep unknown option": _public("sweep", "{s}/series", rnk=3),
    "sweep tokens None": _public("sweep", "{s}/series", tokens=None),
    "sweep revisions number": _public("sweep", "{s}/series", revisions=3),
    "train None": _public("train", None, "{o}"),
    "train a mapping": _public("train", {"steps": 3}, "{o}"),
    "compare nothing": _public("compare", "{s}/nowhere"),
    "compare a number": _public("compare", 3),
    "compare None": _public("compare", None),
    "evaluate_claims of nothing": _public("evaluate_claims", None),
    "evaluate_claims of text": _public("evaluate_claims", "x"),
    "evaluate_claims of a path": _public("evaluate_claims", "{s}/run"),
    "evaluate_claims unknown": _queried(lambda t: __import__("anisoscope").evaluate_claims(t, ["nope"])),
    "evaluate_claims proxy nope": _queried(lambda t: __import__("anisoscope").evaluate_claims(t, proxy="nope")),
    "evaluate_claims fit nope": _queried(lambda t: __import__("anisoscope").evaluate_claims(t, fit="nope")),
    "evaluate_claims of numbers": _queried(lambda t: __import__("anisoscope").evaluate_claims(t, [3])),
    # a monitor
    "Monitor of None": _monitor(model=lambda _: 3),
    "Monitor when nope": _monitor(when="nope"),
    "Monitor when -1": _monitor(when=[-1]),
    "Monitor when text in a list": _monitor(when=["x"]),
    "Monitor when 3.5": _monitor(when=3.5),
    "Monitor metrics nope": _monitor(when=[0], metrics="nope"),
    "Monitor metrics number": _monitor(when=[0], metrics=3),
    "Monitor rank 0": _monitor(when=[0], rank=0),
    "Monitor rank 1.5": _monitor(when=[0], rank=1.5),
    "Monitor rank 999": _monitor(when=[0], rank=999),
    "Monitor layers 9": _monitor(when=[0], layers=[9]),
    "Monitor layers text": _monitor(when=[0], layers="x"),
    "Monitor split text": _monitor(when=[0], split="x"),
    "Monitor split without gradients": _monitor(when=[0], metrics=["drift"], split=[1]),
    "Monitor rank without gradients": _monitor(when=[0], metrics=["drift"], rank=3),
    "Monitor standardised without gradients": _monitor(when=[0], metrics=["drift"], standardised=True),
    "Monitor frozen_window without gradients": _monitor(when=[0], metrics=["drift"], frozen_window="steps:0.3"),
    "Monitor frozen_window nope": _monitor(when=[0], frozen_window="nope"),
    "Monitor weighted_gradients alone": _monitor(when=[0], weighted_gradients=True),
    "~Monitor resume without out": _monitor(when=[0], resume=True),
    "Monitor out a file": _monitor(when=[0], out=lambda p: __file__),
    "Monitor out number": _monitor(when=[0], out=3),
    "Monitor probe number": _monitor(when=[0], probe=3),
    "Monitor probe empty": _monitor(when=[0], probe=[]),
    "Monitor probe of texts": _monitor(when=[0], probe=["a b"]),
    "Monitor probe of foreign keys": _monitor(when=[0], probe=[{"nope": 3}]),
    "Monitor counts short": _monitor(when=[0], counts=[1, 2]),
    "Monitor counts text": _monitor(when=[0], counts="x"),
    "Monitor target_weights short": _monitor(when=[0], target_weights=[1.0, 2.0]),
    "Monitor batch_size 0": _monitor(when=[0], batch_size=0),
    "Monitor total_steps -1": _monitor(total_steps=-1),
    "Monitor total_steps text": _monitor(total_steps="x"),
    "Monitor every_step -1": _monitor(when=[0], every_step=-1),
    "Monitor seed -1": _monitor(when=[0], seed=-1),
    "Monitor sinks number": _monitor(when=[0], sinks=3),
    "Monitor optimizer number": _monitor(when=[0], optimizer=3),
    "Monitor loss number": _monitor(when=[0], loss=3),
    "log_spaced -1": _public("log_spaced", -1),
    "log_spaced text": _public("log_spaced", "x"),
    "log_spaced count 0": _public("log_spaced", 10, count=0),
    "every 0": _public("every", 0),
    "every text": _public("every", "x"),
    "at text": _public("at", "x"),
    "at -1": _public("at", [-1]),
    "at nothing": _public("at", []),
    # the table
    "Table value text": _table(value="x"),
    "~Table value inf": _table(value=float("inf")),
    "Table layer text": _table(layer="x"),
    "Table layer huge": _table(layer=10**12),
    "Table metric number": _table(metric=3),
    "~Table foreign column": _table(zebra=3),
    "Table replicates text": _table(replicates="x"),
    "Table read missing": _read("nowhere"),
    "Table read text": _read("plain.txt"),
    "Table read other columns": _read("ints.parquet"),
    "Table read a folder": _read("nothing"),
    "Table read a pipe": _read("pipe"),
    "Table where foreign field": _queried(lambda t: t.where(zebra=3)),
    "Table plot unknown metric": _queried(lambda t: t.plot("nope")),
    "Table plot number": _queried(lambda t: t.plot(3)),
    "Table value of many": _queried(lambda t: t.value(kind="rows")),
    "Table value of none": _queried(lambda t: t.value(metric="nope")),
}  # fmt: skip
