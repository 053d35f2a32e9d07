"""The one reader of the table: columns and variant keys as fields."""

from __future__ import annotations

import math
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from anisoscope.errors import AnisoscopeError
from anisoscope.results.query import Query, Row, Table, with_options
from anisoscope.results.row import envelope, largest_gap, last_mean, median_ratio, pairs, seeds_mean


def row(step: int | None, layer: int, value: float | None, variant: str = "", **more: Any) -> dict[str, Any]:
    place = {"model": "m", "metric": "gradient_energy", "kind": "resid", "stack": "single", "group": ""}
    return {**place, "step": step, "layer": layer, "value": value, "variant": variant, **more}


def energies() -> Table:
    return Table.from_records(
        [
            row(9, 1, 0.9, "proxy=pca;rank=16", replicates=[0.8, 1.0, 0.9]),
            row(0, 1, 0.1, "proxy=pca;rank=16", replicates=[0.1, 0.2, 0.0]),
            row(0, 2, 0.2, "proxy=pca;rank=16"),
            row(0, 1, 0.05, "control=next;proxy=pca;rank=16", replicates=[0.05, 0.1, 0.0]),
            row(0, 1, 0.3, "proxy=semi_nmf;rank=8"),
            row(None, 1, None, "", metric="drift", head=2, group=None),
        ],
        {"kind": "training"},
    )


def test_columns_and_variant_keys_are_fields_alike() -> None:
    query = Query(energies())
    assert query.where(proxy="pca", control=None, step=0).column("value") == [0.1, 0.2]
    assert len(query.where(rank=16)) == len(query.where(rank="16")) == 4, "values of variant keys are compared as text"
    assert len(query.where(proxy=["pca", "semi_nmf"], control=None)) == 4
    assert len(query.where(proxy=...)) == 5 and len(query.where(proxy=None)) == 1
    assert len(query.where(layer=lambda layer: layer > 1)) == 1
    assert len(query.where(lambda found: found["proxy"] == "pca" and found.value > 0.15)) == 2
    assert len(query.where(step=None)) == len(query.where(head=2)) == 1
    assert len(query.where(group=None)) == 6, "a missing word and an empty one are the same"


def test_exactly_leaves_no_other_option() -> None:
    query = Query(energies())
    assert query.exactly(proxy="pca", rank=16, control=None, step=None).column("value") == [0.9, 0.1, 0.2]
    assert query.exactly().column("metric") == ["drift"]
    assert with_options("normalised=1;over=time", over="context", normalised=None, best=True) == "best=1;over=context"


def test_rows_know_their_fields_interval_and_folds() -> None:
    last = Query(energies()).where(step=9).one()
    assert last is not None and (last.layer, last["proxy"], last["control"], last.known) == (1, "pca", None, True)
    assert last.quantity.folds == (0.8, 1.0, 0.9) and last.interval is None and last.options["rank"] == "16"
    missing = Query(energies()).one(metric="drift")
    assert missing is not None and not missing.known and math.isnan(missing.value)
    assert len(Query(energies()).known()) == 5
    assert Query(energies()).one(step=77) is None
    with pytest.raises(LookupError, match="2 rows match"):
        Query(energies()).one(step=0, control=None, rank=16)


def test_lines_walk_steps_or_layers_and_groups_keep_their_order() -> None:
    mine = Query(energies()).where(proxy="pca", control=None)
    lines = mine.lines("layer", "kind", along="step")
    assert {place: [r.step for r in rows] for place, rows in lines.items()} == {(1, "resid"): [0, 9], (2, "resid"): [0]}
    assert {step: [r.layer for r in rows] for step, rows in mine.lines("step", along="layer").items()} == {
        9: [1],
        0: [1, 2],
    }
    assert list(Query(energies()).groups("proxy")) == ["pca", "semi_nmf", None]
    assert {key: len(rows) for key, rows in Query(energies()).groups("metric", "rank").items()} == {
        ("gradient_energy", "16"): 4,
        ("gradient_energy", "8"): 1,
        ("drift", None): 1,
    }
    assert not Query().groups("metric") and not Query().values("proxy")


def test_pairs_of_a_control_and_what_it_controls_give_an_interval_of_the_difference() -> None:
    query = Query(energies()).where(proxy="pca")
    found = pairs(query.where(control=None), query.where(control="next"), "step", "layer")
    assert list(found) == [(0, 1)]
    gap = found[0, 1][0].quantity - found[0, 1][1].quantity
    assert gap.value == pytest.approx(0.05) and gap.folds == pytest.approx((0.05, 0.1, 0.0))


def test_several_tables_are_one_and_rows_know_theirs() -> None:
    query = Query(energies(), energies().where(step=9))
    assert [found.source for found in query.where(step=9)] == [0, 1]
    assert len(query) == 7 and query.values("step") == [9, 0, None]


def test_a_table_is_filtered_by_variant_keys_and_misspelt_ones_are_told() -> None:
    table = energies().where(metric="gradient_energy", proxy="pca", control=None)
    assert len(table) == 3 and table.about == {"kind": "training"}
    assert table.value(step=9) == 0.9 and len(table.where()) == 3
    plain = Table.from_records([{"metric": "drift", "variant": ""}])
    assert len(plain.where(metric="drift", control=None)) == 1  # none of its rows has that key
    with pytest.raises(AnisoscopeError, match="did you mean 'proxy'"):
        energies().where(prxy="pca")
    with pytest.raises(AnisoscopeError, match="did you mean 'metric'"):
        energies().where(metrics="drift")


@pytest.mark.parametrize("room", ["results", "claims"])
def test_the_room_loads_no_torch(room: str) -> None:
    code = "import importlib, pkgutil, sys, anisoscope.{0} as room; "
    code += "[importlib.import_module(m.name) for m in pkgutil.walk_packages(room.__path__, 'anisoscope.{0}.')]; "
    code += (
        "print(sorted({{m.split('.')[1] for m in sys.modules if m.startswith('anisoscope.')}}), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code.format(room)], capture_output=True, text=True, check=True)
    checked = {"option"} if room == "claims" else set()  # types of arguments are checked as those of options
    rooms = sorted({"errors", "moved", "results", room, *checked})  # the package itself loads `moved`
    assert done.stdout.strip() == f"{rooms} False"


def test_lines_are_averaged_compared_and_bounded_at_the_steps_they_have() -> None:
    def line(values: dict[int, float], half: float = 0.5) -> list[Row]:
        rows = [{"step": s, "value": v, "low": v - half, "high": v + half} for s, v in values.items()]
        return list(Query(Table.from_records(rows)))

    one, other = line({0: 1.0, 4: 3.0}), line({0: 2.0, 4: math.nan, 8: 6.0})
    means = seeds_mean([one, other])
    assert [(row.step, row.value) for row in means] == [(0, 1.5), (4, 3.0), (8, 6.0)]
    assert (means[0].low, means[0].high) == (1.0, 2.0) and math.isnan(means[1].low)
    assert seeds_mean([one]) is one
    assert (last_mean([one, line({4: 5.0})]), last_mean([one, other]), last_mean([])) == (4.0, 6.0, None)
    assert (largest_gap(one, other), largest_gap(one, line({9: 1.0}))) == (1.0, None)
    assert envelope([one, other])[0] == (0.5, 2.5)
    assert (median_ratio([(one, other)]), median_ratio([])) == (0.5, None)


def test_a_query_as_text_leaves_missing_values_empty() -> None:
    rows = [{"model": "a, b", "layer": 1, "value": 1 / 3}, {"model": "c", "value": math.nan}]
    assert Query(Table.from_records(rows)).csv(["model", "layer", "value"]) == (
        'model,layer,value\n"a, b",1,0.333333333\nc,,\n'
    )


def test_older_tables_are_read_under_the_current_names(tmp_path: Path) -> None:
    """The cosine of every step was called as the alignment is now."""
    rows = [{"metric": "gradient_alignment", "variant": "rows=batch", "value": 0.5}]
    rows += [{"metric": "gradient_alignment", "variant": "", "value": 1.5}]
    Table.from_records(rows).write(tmp_path / "table.parquet")
    table = Table.read(tmp_path / "table.parquet")
    assert table.value(metric="gradient_cosine", variant="rows=batch") == 0.5
    assert table.value(metric="gradient_alignment") == 1.5


def test_a_value_is_that_of_the_default_variant_unless_another_is_named() -> None:
    rows = [{"metric": "drift", "value": 1.0, "variant": ""}, {"metric": "drift", "value": 2.0, "variant": "first=out"}]
    table = Table.from_records(rows)
    assert table.value(metric="drift") == 1.0 and table.value(metric="drift", first="out") == 2.0
    with pytest.raises(LookupError, match="0 rows"):
        table.value(metric="drift", layer=7)
    with pytest.raises(LookupError, match="2 rows"):
        Table.from_records([*rows, rows[0]]).value(metric="drift")


def test_a_misspelt_metric_or_column_is_told_with_the_nearest_name() -> None:
    table = energies()
    with pytest.raises(AnisoscopeError, match="did you mean 'gradient_energy'"):
        table.where(metric="gradient_enrgy")
    with pytest.raises(AnisoscopeError, match="did you mean 'drift'"):
        table.where(metric=["gradient_energy", "drfit"])
    with pytest.raises(AnisoscopeError, match="did you mean 'control'"):
        table.where(contrl=None)  # would choose all rows
    with pytest.raises(AnisoscopeError, match="did you mean 'proxy'"):
        table["proxi"]
    assert len(table.where(sampling=None)) == len(table), "a key of other tables"
    assert len(Table.from_records([]).where(metric="drift")) == 0, "nothing was measured, so nothing is misspelt"


def test_a_table_is_indexed_iterated_and_listed() -> None:
    table = energies()
    assert table.metrics == ["drift", "gradient_energy"] and table.models == ["m"]
    assert table.steps == [0, 9] and table.layers == [1, 2] and table.unique("proxy") == ["pca", "semi_nmf"]
    assert table["value"][:2].tolist() == [0.9, 0.1] and table["rank"][:5].tolist() == [16, 16, 16, 16, 8]
    assert table["proxy"].tolist()[-2:] == ["semi_nmf", None]
    assert [row.layer for row in table] == [1, 1, 2, 1, 1, 1] and len(list(table)) == len(table) == 6
    assert table[0].value == table[-6].value == 0.9 and table[-1].metric == "drift" and table[-1].head == 2
    assert len(table[1:3]) == 2 and table[1:3].about == table.about and len(table.head()) == 5
    with pytest.raises(IndexError):
        table[6]


def test_frames_have_a_column_for_every_variant_key(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = energies().to_pandas()
    assert frame.loc[(frame["proxy"] == "pca") & frame["control"].isna(), "value"].tolist() == [0.9, 0.1, 0.2]
    assert frame["rank"].tolist()[:5] == [16, 16, 16, 16, 8], "numbers where all values are"
    assert len(Table.from_records([]).to_pandas()) == 0
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(AnisoscopeError, match="needs the package polars"):
        energies().to_polars()
    fake = types.ModuleType("polars")
    fake.from_arrow = lambda arrow: arrow.column_names  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "polars", fake)
    assert {"proxy", "rank", "control", "value"} <= set(energies().to_polars())


def test_a_table_shows_what_it_holds() -> None:
    shown = repr(energies())
    assert shown.startswith("Table: 6 rows · model m · steps 0 … 9 (2) · layers 1 … 2 (2) · kind resid · metrics drift")
    assert "control=next;proxy=pca;rank=16" in shown and len(shown.splitlines()) == 8
    many = repr(Table.from_records([row(step, 1, float(step)) for step in range(1000)]))
    assert len(many.splitlines()) == 13 and "steps 0 … 999 (1,000)" in many
    assert repr(Table.from_records([])) == "Table: 0 rows"
    assert max(map(len, repr(Table.from_records([row(0, 1, 1.0, model="x" * 500)] * 2)).splitlines())) < 160


def test_a_table_without_rows_has_no_rows_of_any_variant() -> None:
    """Such as in all processes but the first of a training, where the same script reads it."""
    nothing = Table.from_records([])
    assert not len(nothing.where(metric="gradient_enrichment", proxy="pca", control=None, group=""))
    with pytest.raises(AnisoscopeError, match="unknown column 'proxi'"):
        nothing.where(proxi="pca")


def test_what_was_left_out_is_told_by_its_metric_and_not_as_a_misspelt_column() -> None:
    geometry = Table.from_records([{"metric": "drift", "variant": "", "value": 1.0}])
    with pytest.raises(AnisoscopeError, match=r"unknown metric of this table 'gradient_enrichment'.*drift"):
        geometry.where(metric="gradient_enrichment", proxy="pca", control=None, group="")
    with pytest.raises(AnisoscopeError, match=r"no row of this table has the key 'proxy'.*notes of the run"):
        geometry.where(proxy="pca")
