"""`Table.plot`: a sensible line for every table, and a legend that fits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from anisoscope.errors import AnisoscopeError
from anisoscope.results.query import Table

STEPS = (0, 1, 10, 100)


def row(model: str, layer: int, step: int | None, value: float, **more: Any) -> dict[str, Any]:
    place = {"model": model, "metric": "two_nn", "variant": "", "group": "", "stack": "single", "seed": 0}
    ends = {"value": value, "low": value - 0.1, "high": value + 0.1}
    return place | ends | {"layer": layer, "kind": "resid" if layer else "embed", "step": step} | more


def series(models: int = 1, layers: int = 3, steps: tuple[int | None, ...] = STEPS, **more: Any) -> Table:
    rows = [
        row(f"m{m}", layer, step, 1.0 + m + layer + math.log1p(step or 0), **more)
        for m in range(models)
        for layer in range(layers + 1)
        for step in steps
    ]
    return Table.from_records(rows)


def energies() -> Table:
    variants = {
        "fit=refit;proxy=semi_nmf;rank=4": 1.0,
        "fit=refit;proxy=pca;rank=4": 2.0,
        "average=row;fit=refit;proxy=semi_nmf;rank=4": 3.0,
        "control=next;fit=refit;proxy=semi_nmf;rank=4": 4.0,
        "fit=frozen;proxy=semi_nmf;rank=4": 5.0,
        "fit=refit;of=update;proxy=semi_nmf;rank=4": 6.0,
    }
    return Table.from_records(
        [
            row("m", layer, step, value, metric="gradient_energy", variant=variant)
            for variant, value in variants.items()
            for layer in (0, 1, 2)
            for step in (0, 5)
        ]
    )


def lines(figure: Any) -> list[Any]:
    return [trace for trace in figure.data if trace.fill != "toself"]


def legend(figure: Any) -> list[str]:
    return [trace.name for trace in figure.data if trace.showlegend]


def test_the_layers_of_one_model_are_lines_over_steps_and_the_steps_over_layers() -> None:
    over_steps = series().plot("two_nn")
    assert legend(over_steps) == ["embedding", "block 1", "block 2", "block 3"]
    assert all(len(line.x) == len(STEPS) for line in lines(over_steps))
    over_layers = series().plot("two_nn", over="layer")
    assert legend(over_layers) == ["step 0", "step 1", "step 10", "step 100"]
    assert lines(over_layers)[0].x[-1] == 3 and series().plot("two_nn", "depth").data[-1].x[-1] == 1


def test_several_models_have_a_line_each_at_the_middle_block_or_the_last_step() -> None:
    over_steps = series(3).plot("two_nn", over="step")
    assert legend(over_steps) == ["m0", "m1", "m2"] and "block 2" in over_steps.layout.annotations[0].text
    assert lines(over_steps)[1].y[0] == 4.0, "model 1 at block 2"
    over_depth = series(3).plot("two_nn", over="depth")
    assert legend(over_depth) == ["m0", "m1", "m2"]
    assert lines(over_depth)[0].y[0] == pytest.approx(1 + math.log1p(100)), "the last step"
    assert legend(series(2).plot("two_nn", "step", layer=[1, 2])) == [
        f"m{m} · block {layer}" for m in (0, 1) for layer in (1, 2)
    ]


def test_the_plainest_variant_is_drawn_and_others_where_they_are_asked_for() -> None:
    plain = energies().plot("gradient_energy", over="step")
    assert {value for line in lines(plain) for value in line.y} == {1.0}
    assert "semi-NMF, rank 4" in plain.layout.annotations[0].text
    both = energies().plot("gradient_energy", over="step", proxy=["pca", "semi_nmf"], layer=1)
    assert legend(both) == ["PCA", "semi-NMF"] and [line.y[0] for line in lines(both)] == [2.0, 1.0]
    control = energies().plot("gradient_energy", over="layer", control="next", step=5)
    assert {value for line in lines(control) for value in line.y} == {4.0}


@pytest.mark.parametrize("count", [1, 3, 12, 48])
@pytest.mark.parametrize("over", ["step", "depth"])
def test_the_legend_fits(count: int, over: str) -> None:
    from matplotlib import pyplot

    figure = series(count).plot("two_nn", over=over)
    names = legend(figure)
    assert len(names) == (count if count > 1 else 4)
    room = figure.layout.height - figure.layout.margin.t - figure.layout.margin.b
    assert len(names) * 19 <= room, "no name is behind a scroll bar"
    axes = series(count).plot("two_nn", over=over, backend="matplotlib")
    drawing = axes.figure
    drawing.canvas.draw()
    box, inside = drawing.legends[0].get_window_extent(), axes.get_window_extent()
    assert box.x0 >= inside.x1 and box.x1 <= drawing.bbox.x1 + 1 and box.y0 >= drawing.bbox.y0 - 1
    assert inside.width > 0.3 * drawing.bbox.width and len(drawing.legends[0].get_texts()) == len(names)
    pyplot.close(drawing)


def test_of_many_layers_some_are_named() -> None:
    figure = series(1, 47).plot("two_nn", over="step")
    assert len(lines(figure)) == 48 and legend(figure)[0] == "embedding" and legend(figure)[-1] == "block 47"
    assert len(legend(figure)) == 6 and len(figure.data) == 48, "so many bands would hide each other"


def test_axes_come_back_and_are_drawn_into() -> None:
    from matplotlib import pyplot

    drawing, mine = pyplot.subplots()
    assert series(2).plot("two_nn", over="depth", backend="matplotlib", ax=mine) is mine
    assert len(mine.get_lines()) == 2 and mine.get_legend() is not None
    pyplot.close(drawing)
    two = Table.concat([series(1), series(1, metric="drift")])
    axes = two.plot(over="layer", backend="matplotlib")
    assert isinstance(axes, np.ndarray) and len(axes) == 2
    with pytest.raises(AnisoscopeError, match="ax holds one panel"):
        two.plot(backend="matplotlib", ax=axes[0])
    pyplot.close(axes[0].figure)


def test_what_cannot_be_drawn_is_told() -> None:
    with pytest.raises(AnisoscopeError, match="did you mean 'two_nn'"):
        series().plot("two_n")
    with pytest.raises(AnisoscopeError, match="did you mean 'layer'"):
        series().plot("two_nn", over="layers")
    with pytest.raises(AnisoscopeError, match="did you mean 'matplotlib'"):
        series().plot("two_nn", backend="matplotlb")
    with pytest.raises(AnisoscopeError, match="no steps"):
        series(steps=(None,)).plot("two_nn", over="step")
    with pytest.raises(AnisoscopeError, match="no value where layer=99"):
        series().plot("two_nn", layer=99)
    with pytest.raises(AnisoscopeError, match="no rows"):
        Table.from_records([]).plot()
    loss = Table.from_records([{"metric": "loss", "kind": "training", "variant": "", "step": 3, "value": 1.0}] * 1)
    assert len(loss.plot("loss").data) == 1
    with pytest.raises(AnisoscopeError, match="no layers"):
        loss.plot("loss", over="layer")


def test_the_residual_stream_is_drawn_unless_other_sites_are_asked_for() -> None:
    both = Table.concat([series(1), series(1, kind="mlp_out")])
    for over in ("step", "layer"):
        assert len(lines(both.plot("two_nn", over=over))) == 4
        assert "mlp_out" in str(both.plot("two_nn", over=over, kind="mlp_out", layer=[1, 2]).to_dict())


def test_heads_are_averaged_over_steps() -> None:
    rows = [
        row("m", 1, step, float(head), head=head, kind="scores", metric="attention_entropy")
        for head in range(4)
        for step in (0, 9)
    ]
    (line,) = lines(Table.from_records(rows).plot("attention_entropy"))[-1:]
    assert list(line.y) == [1.5, 1.5]
    each = Table.from_records(rows).plot("attention_entropy", over="step", head=2)
    assert list(lines(each)[-1].y) == [2.0, 2.0]
