"""What the page says of queries, keys and attention: two norms and an angle for each head, and the spread of heads."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anisoscope.commands.drawing import write_report
from anisoscope.results.query import Table
from anisoscope.view.document import TEMPLATES
from anisoscope.view.page import Controls
from anisoscope.view.sections import attention
from anisoscope.view.sections.attention import Carried, Heads, attention_sections, carried, head_numbers
from anisoscope.view.subjects import RunView
from anisoscope.view.words import Catalogue
from support.fake_runs import CATALOGUE, HOSTILE
from support.pages import Page, figures_too, page_of

STEPS = (0, 1, 4, 16, 64)
MEASURES = ("attention_entropy", "attention_sharpness", "attention_max")


def planted(step: int | None, layer: int, head: int) -> tuple[float, float, float]:
    """‖mean q‖, ‖mean k‖ and their cosine."""
    late = math.log1p(64 if step is None else step)
    return 0.1 + head + late, 0.2 + layer + late, (-1) ** head * (0.1 + 0.2 * late)


class Scribe:
    """Rows of queries, keys and scores of a model that never was."""

    def __init__(self, model: str = "m", *, steps: Any = STEPS, layers: int = 2, heads: int = 4, keys: int = 4) -> None:
        self.rows: list[dict[str, Any]] = []
        self.model, self.steps, self.layers, self.heads, self.keys = model, steps, layers, heads, keys

    def put(self, step: Any, layer: int, kind: str, metric: str, value: float, head: int | None, **more: Any) -> None:
        base = {"run": "r", "model": self.model, "revision": "", "data": "d", "stack": "single", "seed": 0}
        base |= {"step": step, "layer": layer, "depth": layer / self.layers, "kind": kind, "group": "", "variant": ""}
        self.rows.append(base | {"metric": metric, "value": value, "head": head, "note": ""} | more)

    def pair(self, query: str = "query", key: str = "key") -> Scribe:
        for step in self.steps:
            for layer in range(1, self.layers + 1):
                for head in range(self.heads):
                    length, _, cosine = planted(step, layer, head)
                    self.put(step, layer, query, "drift", length, head)
                    self.put(step, layer, query, "qk_cosine", cosine, head)
                for head in range(self.keys):
                    self.put(step, layer, key, "drift", planted(step, layer, 0)[1] + 10 * head, head)
        return self

    def scores(self, kind: str = "scores") -> Scribe:
        for step in self.steps:
            for layer in range(1, self.layers + 1):
                for metric in MEASURES:
                    for head in range(self.heads):
                        self.put(step, layer, kind, metric, 1 / (1 + head + layer), head)
                    self.put(step, layer, kind, metric, 0.5, None)
        return self

    def table(self) -> Table:
        return Table.from_records(self.rows, {"models": [{"name": self.model, "layers": self.layers}]})


def heads_of(*scribes: Scribe) -> list[Heads]:
    tables = [scribe.table() for scribe in scribes]
    return head_numbers([RunView(table, dict(table.about), path=f"runs/{i}") for i, table in enumerate(tables)])


def carried_of(*scribes: Scribe) -> Carried:
    found = carried(heads_of(*scribes))
    assert found is not None
    return found


def view_of(scribe: Scribe) -> RunView:
    table = scribe.table()
    return RunView(table, dict(table.about), path="runs/demo")


def ids(page: Page) -> set[str | None]:
    return {attributes.get("id") for tag, attributes in page.elements if tag == "section"}


def arrays_of(page: Page) -> dict[str, Any]:
    return dict(page.data["arrays"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    scribe = Scribe().pair().scores()
    return write_report(tmp_path_factory.mktemp("attention"), [view_of(scribe)], catalogue=CATALOGUE).parent


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    return page_of(folder / "report.html")


def test_a_plane_holds_the_norms_and_the_cosine_of_the_table() -> None:
    plane = heads_of(Scribe().pair())[0].planes[0]
    for t, step in enumerate(STEPS):
        for layer in (1, 2):
            for head in range(4):
                q, _, c = planted(step, layer, head)
                place = (t, layer - 1, head)
                assert (plane.query[place], plane.cosine[place]) == pytest.approx((q, c))
                assert plane.key[place] == pytest.approx(planted(step, layer, 0)[1] + 10 * head)


def test_the_mean_query_lies_at_its_angle_and_length_in_the_plane() -> None:
    plane = heads_of(Scribe().pair())[0].planes[0]
    x, y = plane.tips()
    assert np.hypot(x, y) == pytest.approx(plane.query)
    assert x / np.hypot(x, y) == pytest.approx(plane.cosine)
    assert (y >= 0).all()


def test_grouped_heads_meet_the_key_of_their_group() -> None:
    shared = heads_of(Scribe(heads=4, keys=2).pair())[0].planes[0].key[0, 0]
    own = heads_of(Scribe(heads=4, keys=4).pair())[0].planes[0].key[0, 0]
    first = planted(0, 1, 0)[1]
    assert shared == pytest.approx([first, first, first + 10, first + 10])
    assert own == pytest.approx([first, first + 10, first + 20, first + 30])


def test_layers_with_fewer_heads_keep_their_places_empty() -> None:
    scribe = Scribe(steps=(None,), layers=1, heads=2, keys=1).pair()
    wide = Scribe(steps=(None,), layers=2, heads=4, keys=4).pair()
    scribe.rows += [row for row in wide.rows if row["layer"] == 2]
    plane = heads_of(scribe)[0].planes[0]
    assert np.isfinite(plane.cosine[0]).sum(1).tolist() == [2, 4]
    assert plane.key[0, 0, :2] == pytest.approx([planted(None, 1, 0)[1]] * 2)


def test_a_pair_that_was_measured_in_part_has_no_plane() -> None:
    whole = Scribe().pair("cross_query", "cross_key")
    assert [plane.kind for plane in heads_of(whole)[0].planes] == ["cross_query"]
    whole.rows = [row for row in whole.rows if row["kind"] != "cross_key"]
    assert heads_of(whole)[0].planes == []


def test_the_spread_is_that_of_the_heads_and_not_of_their_mean_row() -> None:
    spread = heads_of(Scribe().scores())[0].spreads[0]
    values = [1 / (1 + head + 1) for head in range(4)]
    truth = [np.mean(values), min(values), *np.quantile(values, [0.25, 0.75]), max(values)]
    assert spread.values[0, 0] == pytest.approx(truth)


def test_every_model_comes_before_the_second_seed_of_any() -> None:
    first, second, other = Scribe("a").pair(), Scribe("a").pair(), Scribe("b").pair()
    second.rows = [row | {"seed": 1} for row in second.rows]
    table = Table.from_records([*first.rows, *second.rows, *other.rows])
    labels = [heads.label for heads in head_numbers([RunView(table)])]
    assert labels == ["a · seed 0", "b", "a · seed 1"]


def test_a_run_over_steps_has_paths_and_sharpness_and_a_profile_has_heads_alone(page: Page, tmp_path: Path) -> None:
    assert {"mean-qk", "sharpness"} <= ids(page)
    assert page.specs().keys() >= {"qk-heads-1", "paths-1", "paths-2", "sharp-all-1", "spread-1", "spread-2"}
    once = page_of(write_report(tmp_path, [view_of(Scribe(steps=(None,)).pair().scores())], catalogue=CATALOGUE))
    assert "mean-qk" in ids(once)
    assert "sharpness" not in ids(once)
    assert "paths-1" not in once.specs()


def test_a_run_without_heads_says_nothing_of_them(tmp_path: Path) -> None:
    scribe = Scribe(steps=(None,))
    scribe.put(None, 1, "resid", "average_cosine", 0.2, None)
    page = page_of(write_report(tmp_path, [view_of(scribe)], catalogue=CATALOGUE))
    assert ids(page).isdisjoint({"mean-qk", "sharpness"})
    assert not [name for name in arrays_of(page) if name.startswith(("qk/", "sharp/"))]


def test_the_page_carries_the_numbers_and_says_what_the_plane_is(page: Page) -> None:
    arrays = arrays_of(page)
    q, _, c = planted(16, 2, 3)
    assert len(arrays["qk/0/query/q"]) == len(STEPS)
    assert arrays["qk/0/query/q"][3][1][3] == pytest.approx(q, rel=5e-3)
    assert arrays["qk/0/query/c"][3][1][3] == pytest.approx(c, rel=5e-3)
    assert "The plane is spanned anew at every step by the two means themselves" in page.text


def test_several_pairs_are_named_for_what_they_are(tmp_path: Path) -> None:
    scribe = Scribe(steps=(None,)).pair().pair("query_unrotated", "key_unrotated").pair("cross_query", "cross_key")
    page = page_of(write_report(tmp_path, [view_of(scribe)], catalogue=CATALOGUE))
    assert "self-attention, before rotation" in page.text
    assert "cross-attention" in page.text
    kinds = {name.split("/")[2] for name in arrays_of(page) if name.startswith("qk/")}
    assert kinds == {"query", "query_unrotated", "cross_query"}


def test_many_layers_are_turned_over_in_pages_of_panels() -> None:
    (section,) = attention_sections([view_of(Scribe(layers=30, heads=2, keys=2).pair())], Catalogue(CATALOGUE))
    pages = [part.switch for part in section.parts if isinstance(part, Controls) and part.switch.id == "qkpage"]
    assert [option.label for option in pages[0].choices[0].options] == ["1 to 12", "13 to 24", "25 to 30"]
    paths = next(part for part in section.parts if getattr(part, "id", "") == "paths")
    assert len(paths.panels) == 12
    (few,) = attention_sections([view_of(Scribe(layers=3).pair())], Catalogue(CATALOGUE))
    assert not [part for part in few.parts if isinstance(part, Controls) and part.switch.id == "qkpage"]


def test_what_does_not_fit_is_left_out_by_steps_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    scribe = Scribe(steps=tuple(range(30)), layers=8, heads=8, keys=8).pair()
    whole = carried_of(scribe)
    monkeypatch.setattr(attention, "SIZE", 24_000)
    cut = carried_of(scribe)
    assert (len(whole.steps), whole.left_out) == (30, [])
    assert len(json.dumps(cut.arrays)) <= 24_000
    assert cut.steps[-1] == 29
    assert cut.left_out[0].endswith(" of 30 steps")


def test_a_large_model_stays_within_the_weight_of_a_page() -> None:
    found = carried_of(Scribe(steps=tuple(range(20)), layers=30, heads=32, keys=8).pair().scores())
    assert len(json.dumps(found.arrays)) <= attention.SIZE
    plane = found.arrays["qk/0/query/q"]
    assert (len(plane[0]), len(plane[0][0])) == (30, 32)


def test_what_was_not_computed_is_null_and_names_never_become_markup(tmp_path: Path) -> None:
    scribe = Scribe(HOSTILE).pair()
    scribe.rows = [row | {"value": math.nan} if row["head"] == 1 else row for row in scribe.rows]
    page = page_of(write_report(tmp_path, [view_of(scribe)], catalogue=CATALOGUE))
    assert arrays_of(page)["qk/0/query/q"][0][0][1] is None
    assert "<script>alert" not in json.dumps(page.specs())
    assert page.fetched() == []


def test_vector_twins_are_written_and_the_same_every_time(tmp_path: Path) -> None:
    names = ("qk-heads", "qk-paths", "attention-over-training")
    view = view_of(Scribe().pair().scores())
    with figures_too(*names):
        first, again = (write_report(tmp_path / n, [view], catalogue=CATALOGUE).parent / "figures" for n in "ab")
    files = [first / f"{name}{suffix}" for name in names for suffix in (".pdf", ".svg")]
    assert all(file.stat().st_size > 2000 for file in files)
    assert all(file.read_bytes() == (again / file.name).read_bytes() for file in files)


@pytest.mark.usefixtures("named_figures")
def test_a_model_without_steps_beside_a_training_has_a_file_of_its_heads(tmp_path: Path) -> None:
    untrained = Scribe(model="random", steps=(None,)).pair()
    write_report(tmp_path, [view_of(Scribe().pair()), view_of(untrained)], catalogue=CATALOGUE)
    files = {path.stem for path in (tmp_path / "figures").glob("qk-heads*.svg")}
    assert files == {"qk-heads", "qk-heads-random"}


@pytest.mark.skipif(shutil.which("node") is None, reason="node runs the page's script")
def test_the_script_draws_the_table_s_planes(page: Page, tmp_path: Path) -> None:
    """The script in a page that is not there: what it would hand to the drawing library."""
    harness = tmp_path / "harness.js"
    script = (TEMPLATES / "charts.js").read_text("utf-8").replace("  page.charts =", _SHOWN + "  page.charts =", 1)
    harness.write_text(_HARNESS % (script, json.dumps(page.data)))
    done = subprocess.run(["node", str(harness)], capture_output=True, text=True, check=True, timeout=60)
    drawn = json.loads(done.stdout)
    q, k, c = planted(64, 2, 1)
    own = [
        trace for trace in drawn["paths-2"] if trace["name"] == "block 2 · head 1" and trace["mode"] == "lines+markers"
    ]
    key, path = own  # of each head first the key, then the query
    assert path["x"][-1] == pytest.approx(q * c, rel=1e-2)
    assert path["y"][-1] == pytest.approx(q * math.sqrt(1 - c * c), rel=1e-2)
    assert key["x"][-1] == pytest.approx(k + 10, rel=1e-2)
    assert set(key["y"]) == {0}
    strokes = [trace for trace in drawn["qk-heads-1"] if trace["mode"] == "lines"]
    keys, queries = strokes[1:]  # the first are the rules beneath
    assert len(keys["x"]) == len(queries["x"]) == 3 * 2 * 4
    angle = (queries["x"][1] - queries["x"][0]) / math.hypot(*(queries[a][1] - queries[a][0] for a in "xy"))
    assert angle == pytest.approx(planted(64, 1, 0)[2], abs=1e-2)
    line = next(trace for trace in drawn["spread-1"] if trace.get("name") == "block 1")
    assert line["y"][0] == pytest.approx(np.mean([1 / (2 + head) for head in range(4)]), rel=1e-3)


_SHOWN = """
  page.shown = function (id) { return [].concat.apply([], view(specs[id]).data.map(complete)); };
"""
_HARNESS = """
global.window = { matchMedia: function () { return {}; } };
global.document = { documentElement: {} };
%s
window.anisoscope.charts.load(%s);
Object.assign(window.anisoscope.charts.chosen, { "qkstep.0": 4 });
const drawn = {};
const names = ["qk-heads-1", "paths-2", "sharp-all-1", "spread-1"];
names.forEach(function (id) { drawn[id] = window.anisoscope.shown(id); });
console.log(JSON.stringify(drawn));
"""


def test_every_figure_of_the_sections_has_a_drawing_and_words(page: Page) -> None:
    plots = {a["id"]: a for tag, a in page.elements if tag == "div" and "plot" in (a.get("class") or "").split()}
    specs = page.specs()
    assert set(plots) <= set(specs)
    mine = [name for name in plots if re.match(r"(qk-heads|paths|sharp|spread)", str(name))]
    assert len(mine) == 6
    assert all(len(plots[name].get("aria-label") or "") > 20 for name in mine)
