"""What the row map promises: the same rows at every step, on axes that are the pooled principal axes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from anisoscope import sweep
from anisoscope.capture.row import Index, Rows
from anisoscope.capture.sites.site import Site
from anisoscope.measurement.measure import joined_sinks
from anisoscope.results.folder import RunFolder, join_maps, shares_in, write_joined
from anisoscope.tangent.row_map import DENSE, RowMap, _leading, map_sites, write_map
from support.monitored import resumable
from support.tiny_series import LOOK, make_series

SITES = [Site(0, "embed"), *(Site(n, "resid") for n in range(1, 5)), Site(4, "final")]
CONTEXTS, LENGTH, WIDTH = 12, 10, 16


def index_of(contexts: range, groups: tuple[str, ...] | None = None) -> Index:
    context = torch.tensor([1000 + c for c in contexts]).repeat_interleave(LENGTH)
    position = torch.arange(LENGTH).repeat(len(contexts))
    token = (context + position) % 7
    return Index(len(contexts), LENGTH, torch.arange(len(context)), context, position, token, groups)


def rows_at(step: int, *, site: Site = SITES[0], dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows whose place depends on (step, site) and on which row it is, nothing else."""
    generator = torch.Generator().manual_seed(97 * site.layer + step)
    x = torch.randn(CONTEXTS * LENGTH, WIDTH, generator=generator)
    x[:, 3] *= 9  # planted axes, the same at every step
    x[:, 11] *= 5
    x[:, 5] *= 3
    return (x + 0.5 * step).to(dtype)


def feed(found: RowMap, step: int, *, pieces: int = 3, sites: list[Site] = SITES, change: Any = None) -> None:
    each = CONTEXTS // pieces
    for start in range(0, CONTEXTS, each):
        for site in sites:
            x = rows_at(step, site=site)
            x = x if change is None else change(x)
            mine = x[start * LENGTH : (start + each) * LENGTH]
            found.rows(Rows(site, mine, index_of(range(start, start + each))))
    found.close(step)


def filled(steps: tuple[int, ...] = (0, 4, 16), **more: Any) -> RowMap:
    found = RowMap(rows=50, **more)
    for step in steps:
        feed(found, step)
    return found


def records(found: RowMap, **more: Any) -> list[dict[str, Any]]:
    return list(found.records("m", 0, **more))


def test_axes_are_the_principal_axes_of_all_steps_weighted_alike() -> None:
    site = SITES[1]
    found = filled()
    axes = found.axes()[site]
    rows = {r["row"] for r in records(found) if r["layer"] == 1}
    assert len(rows) == 50
    # the slow twin: all rows kept, each step weighted alike, in float64
    kept = [k["rows"].double() * k["scale"] + k["mean"] for k in (kept[site] for _, kept in found._each())]
    centre = torch.stack([x.mean(0) for x in kept]).mean(0)
    cov = torch.stack([(x - centre).T @ (x - centre) / len(x) for x in kept]).mean(0)
    values, vectors = torch.linalg.eigh(cov)
    for i in range(3):
        assert abs(float(axes.directions[:, i] @ vectors[:, -1 - i])) == pytest.approx(1, abs=1e-9)
        assert axes.shares[i] == pytest.approx(float(values[-1 - i] / values.sum()))
    planted = {int(axes.directions[:, i].abs().argmax()) for i in range(2)}
    assert 3 in planted
    assert found.about()["1.resid"] == pytest.approx(axes.shares, abs=1e-6)


def test_a_step_with_many_rows_weighs_no_more_than_one_with_few() -> None:
    def maps(copies: int) -> Tensor:
        found = RowMap(rows=10_000)
        feed(found, 0, sites=SITES[:1])
        for start in range(copies):
            context = index_of(range(CONTEXTS * start, CONTEXTS * (start + 1)))
            found.rows(Rows(SITES[0], rows_at(1), context))
        found.close(1)
        return found.axes()[SITES[0]].directions

    assert torch.allclose(maps(1), maps(8), atol=1e-4)


def test_the_same_rows_are_looked_at_at_every_step_however_they_come() -> None:
    found = RowMap(rows=50)
    for step, pieces in ((0, 1), (4, 3), (16, 6)):
        feed(found, step, pieces=pieces)
    seen: dict[tuple[int, int, str], set[tuple[int, int, str]]] = {}
    for r in records(found):
        seen.setdefault((r["step"], r["layer"], r["kind"]), set()).add((r["row"], r["position"], r["token"]))
    assert len({frozenset(rows) for rows in seen.values()}) == 1
    assert {(layer, kind) for _, layer, kind in seen} == {(s.layer, s.kind) for s in map_sites(SITES)}
    other = RowMap(rows=50)  # the counter-test: other contexts are other rows
    other.rows(Rows(SITES[0], rows_at(0)[:LENGTH], index_of(range(90, 91))))
    other.close(0)
    assert {(r["row"], r["position"], r["token"]) for r in records(other)} not in [set(rows) for rows in seen.values()]


def test_rows_that_are_not_finite_are_left_out_and_take_no_other_with_them() -> None:
    def spoil(x: Tensor) -> Tensor:
        out = x.clone()
        out[::3] = torch.nan
        out[1, 2] = torch.inf
        return out

    whole, found = filled(), RowMap(rows=50)
    for step in (0, 4, 16):
        feed(found, step, change=spoil if step == 4 else None)
    lost = {(r["step"], r["row"], r["layer"], r["kind"]) for r in records(whole)} - {
        (r["step"], r["row"], r["layer"], r["kind"]) for r in records(found)
    }
    assert lost
    assert {key[0] for key in lost} == {4}
    assert all(abs(r["x"]) < 1e6 for r in records(found))
    nothing = RowMap(rows=50)
    feed(nothing, 0, change=lambda x: x * torch.nan)
    assert records(nothing) == []
    assert nothing.about() == {}


@pytest.mark.parametrize("inside", [True, False])
def test_a_killed_run_that_goes_on_ends_with_the_same_map(inside: bool, tmp_path: Path) -> None:
    folder = None if inside else tmp_path / "state"
    undisturbed = filled((0, 4, 16))
    first = filled((0, 4), folder=folder)
    state = first.state()
    feed(first, 16, change=lambda x: x * 0 + 1)  # measured, then killed before its state was kept
    torch.save(state, tmp_path / "s.pt")
    second = RowMap(rows=50, folder=folder).load(torch.load(tmp_path / "s.pt", weights_only=True))
    assert second.steps == [0, 4]
    feed(second, 16)
    assert records(second) == records(undisturbed)
    assert records(filled((0, 16))) != records(undisturbed)  # the counter-test
    assert second.about() == undisturbed.about()
    if folder is not None:
        assert list(folder.glob("map-*.pt"))


def test_few_rows_narrow_sites_and_half_precision_are_enough() -> None:
    found = RowMap(rows=400)
    for step in (0, 1):
        x = torch.tensor([[1.0, 2.0], [3.0, 4.0 + step]], dtype=torch.bfloat16)
        index = Index(1, 2, torch.arange(2), torch.tensor([5, 5]), torch.arange(2), torch.tensor([-1, 3]))
        found.rows(Rows(SITES[0], x, index))
        found.close(step)
    got = records(found, counts=torch.tensor([5, 1, 1, 9]))
    assert len(got) == 4
    assert {r["frequency"] for r in got if r["position"] == 0} == {None}
    assert {r["frequency"] for r in got if r["position"] == 1} == {2}  # 9 of 16 tokens: the middle of its mass
    assert all("z" not in r for r in got)
    assert sum(found.about()["0.embed"]) == pytest.approx(1, abs=1e-5)
    one = RowMap()
    one.rows(Rows(SITES[0], torch.ones(1, 8), _one()))
    one.close(0)
    assert [(r["x"], r["y"]) for r in records(one)] == [(0.0, 0.0)]


def _one() -> Index:
    return Index(1, 1, torch.arange(1), torch.tensor([5]), torch.tensor([0]), torch.tensor([2]))


def test_models_of_another_width_have_no_place_on_these_axes() -> None:
    found = filled((0, 4))
    found.rows(Rows(SITES[0], torch.randn(CONTEXTS * LENGTH, 2 * WIDTH), index_of(range(CONTEXTS))))
    found.close(8)
    assert {r["step"] for r in records(found)} == {0, 4}
    assert found.about() == filled((0, 4)).about()


def test_wide_sites_find_the_same_axes_without_all_eigenvectors() -> None:
    generator = torch.Generator().manual_seed(3)
    width = DENSE + 40
    planted = torch.linalg.qr(torch.randn(width, 3, generator=generator, dtype=torch.float64)).Q
    cov = planted @ torch.diag(torch.tensor([9.0, 5.0, 3.0]).double()) @ planted.T + 0.5 * torch.eye(width).double()
    values, vectors = _leading(cov, 3)
    assert values.tolist() == pytest.approx([9.5, 5.5, 3.5], rel=1e-9)
    assert (vectors.T @ planted).abs().diagonal().tolist() == pytest.approx([1, 1, 1], abs=1e-8)


def test_groups_tokens_and_frequencies_are_told() -> None:
    class Speller:
        def decode(self, ids: list[int]) -> str:
            return "abcdefg"[ids[0]]

    found = RowMap(rows=100)
    index = index_of(range(2), ("left", "right"))
    found.rows(Rows(SITES[0], rows_at(0)[: 2 * LENGTH], index))
    found.close(0)
    assert {r["token"] for r in records(found)} == set("0123456")  # without a tokenizer, numbers
    found.rows(Rows(SITES[0], rows_at(0)[: 2 * LENGTH], index))
    found.close(0, tokenizer=Speller())
    got = records(found, counts=torch.tensor([100, 1, 1, 1, 1, 1, 1]))
    assert {r["group"] for r in got} == {"left", "right"}
    assert {r["token"] for r in got} == set("abcdefg")
    assert all(r["frequency"] == (5 if r["token"] != "a" else 3) for r in got)
    index = index_of(range(2))
    found.rows(Rows(SITES[0], rows_at(1)[: 2 * LENGTH], index))
    found.close(1, tokenizer=Speller())  # spelled while the tokenizer is at hand, and kept with the state
    again = RowMap(rows=100).load(found.state())
    assert {r["token"] for r in records(again)} == set("abcdefg")


def test_a_map_is_written_read_and_joined(tmp_path: Path) -> None:
    def arms() -> Iterator[Path]:
        for seed in (0, 1):
            folder = tmp_path / f"arm-{seed}"
            assert set(write_map(folder, filled(), model="arm", seed=seed)) == {f"arm-seed{seed}"}
            yield folder

    table, shares = join_maps([*arms(), tmp_path / "nowhere"])
    assert len(table) == 2 * 50 * 5 * 3
    assert set(shares) == {"arm-seed0", "arm-seed1"}
    assert shares["arm-seed1"]["4.final"] == filled().about()["4.final"]
    assert write_joined(tmp_path, [tmp_path / "arm-0", tmp_path / "arm-1"]) == shares
    again = pq.read_table(tmp_path / "map.parquet")
    assert again.equals(table)
    assert shares_in(again) == shares
    assert write_map(tmp_path, RowMap(), model="m", seed=0) == {}


def test_bank_and_map_are_given_the_same_rows() -> None:
    one, two = RowMap(rows=50), RowMap(rows=50)
    both = joined_sinks(one, two)
    assert both is not None
    both.rows(Rows(SITES[0], rows_at(0), index_of(range(CONTEXTS))))
    one.close(0)
    two.close(0)
    assert records(one) == records(two) != []
    assert joined_sinks(None, None) is None
    assert joined_sinks(None, one) is one


def test_a_monitored_run_writes_its_map_also_when_it_was_killed(tmp_path: Path) -> None:
    resumable(tmp_path / "whole", steps=2)
    with pytest.raises(KeyboardInterrupt):
        resumable(tmp_path / "killed", stop=1, steps=2)
    assert not (tmp_path / "killed" / "map.parquet").exists()
    resumable(tmp_path / "killed", resume=True, steps=2)
    whole, again = (pq.read_table(tmp_path / name / "map.parquet") for name in ("whole", "killed"))
    assert sorted(set(whole["step"].to_pylist())) == [0, 1, 2]
    assert whole.drop(["x", "y", "z"]).equals(again.drop(["x", "y", "z"]))
    for axis in ("x", "y"):
        assert again[axis].to_pylist() == pytest.approx(whole[axis].to_pylist(), rel=1e-3, abs=1e-3)
    assert set(whole["frequency"].to_pylist()) - {None}
    assert shares_in(whole)


def test_a_live_run_has_no_map_since_its_rows_are_never_the_same(tmp_path: Path) -> None:
    resumable(tmp_path, live=True, steps=1)
    assert not (tmp_path / "map.parquet").exists()


def test_a_sweep_writes_the_map_of_its_checkpoints(tmp_path: Path) -> None:
    make_series(tmp_path / "series", range(0, 30, 10))
    sweep(str(tmp_path / "series"), out=tmp_path / "out", **LOOK)
    table = pq.read_table(tmp_path / "out" / "map.parquet")
    assert sorted(set(table["step"].to_pylist())) == [0, 10, 20]
    by_step = [set(table.filter(pc.equal(table["step"], step))["row"].to_pylist()) for step in (0, 10, 20)]
    assert by_step[0] == by_step[1] == by_step[2]
    assert RunFolder(tmp_path / "out").about()["map"] == shares_in(table)
    assert set(table["frequency"].to_pylist()) - {None}, "coloured by frequency without gradients, too"
