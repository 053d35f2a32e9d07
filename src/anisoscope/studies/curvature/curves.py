"""The rows of the curvature study as curves over scales, exponents, ranks and steps, and figures made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from anisoscope.results.quantity import Mark
from anisoscope.results.query import Query, Row
from anisoscope.studies.page_parts import files
from anisoscope.view.figure import Figure, Panel, Series, points, sequence, series

FLAT = "flat"
TITLES = {"swiss_roll": "Swiss roll", "quadratic": "quadratic patch", FLAT: "flat (control)"}
MARKERS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x", "circle")
SCALE = "scale t (in units of 1/κ)"
DASHED: dict[str, Any] = {"dash": "dash", "width": 1.2, "size": 0.0, "named": False}


def title(model: str) -> str:
    return TITLES.get(model, model)


def signed(value: float) -> str:
    return f"{value:g}".replace("-", "−")


@dataclass(frozen=True)
class ScaleCurves:
    """The rows of the study as curves over one key of their variants."""

    query: Query
    about: Mapping[str, Any]

    @property
    def reference(self) -> tuple[float, float]:
        """Zipf exponent and β used for the verdicts."""
        return float(self.about["reference"]["zipf"]), float(self.about["reference"]["beta"])

    @property
    def kind(self) -> str:
        return str(self.about["config"].get("kind"))

    @cached_property
    def models(self) -> list[str]:
        return [str(name) for name in self.query.where(metric="curvature_slope").values("model")]

    @property
    def curved(self) -> list[str]:
        return [name for name in self.models if name != FLAT]

    @cached_property
    def shades(self) -> dict[float, str]:
        """The colour of each β, in order; the null (β = 0) is grey."""
        betas = sorted(float(beta) for beta in self.query.where(beta=...).values("beta"))
        hues = [beta for beta in betas if beta != 0]
        return {b: series(6) if b == 0 else sequence(hues.index(b) / max(1, len(hues) - 1)) for b in betas}

    def look(self, model: str) -> dict[str, Any]:
        hue = 6 if model == FLAT else [i for i in range(8) if i != 6][self.curved.index(model) % 7]
        return {"colour": series(hue), "marker": MARKERS[self.models.index(model) % len(MARKERS)]}

    def rows(self, model: str, metric: str, over: str, **fixed: Any) -> list[Row]:
        """The rows with a value whose variant has exactly the keys `over` and `fixed`, sorted by `over`."""
        wanted = {key: f"{v:g}" if isinstance(v, float) else str(v) for key, v in fixed.items()}
        rows = self.query.where(model=model, metric=metric, **{over: ...}, **wanted).known()
        return sorted((r for r in rows if set(r.options) == {over, *wanted}), key=lambda row: float(row[over]))

    def value(self, model: str, metric: str, of: str) -> Row | None:
        """A number of a ladder of scales: of tangent or normal variance, or of visibility."""
        rows = self.query.where(model=model, metric=metric).exactly(of=of, sampling=self.kind)
        return next(iter(rows.known()), None)

    def order(self, model: str, of: str, per: str, signal: str) -> Row | None:
        """The slope of a part of the gradient."""
        return (
            self.query.where(model=model, metric="manifold_gradient_slope").exactly(of=of, per=per, signal=signal).one()
        )

    def shares(self, model: str, **options: Any) -> Query:
        return self.query.where(model=model, metric="tangent_variance_share").exactly(**options).known()

    def line(self, label: str, place: tuple[str, str, str], look: Mapping[str, Any], **fixed: Any) -> list[Series]:
        """A metric of a model over a key as a series with whiskers for the intervals; empty list without rows."""
        style = {"size": 5.0, "width": 1.6, **look}
        rows, over = self.rows(*place, **fixed), place[2]
        marks = rows if style["size"] else [Mark(row.value) for row in rows]
        x, labels = [float(row[over]) for row in rows], [f"{over} {row[over]}" for row in rows]
        return [points(label, x, marks, ends={"bars": "y"}, where=labels, **style)] if rows else []

    def by_beta(self, model: str, *lines: tuple[str, str, Mapping[str, Any], Mapping[str, Any]]) -> list[Series]:
        """Lines over the Zipf exponent for each β; each entry gives a label, a metric, a style and fixed keys."""
        drawn = []
        for beta, shade in self.shades.items():
            for label, metric, look, fixed in lines:
                style = {"colour": shade, **look}
                drawn += self.line(label or beta_label(beta), (model, metric, "zipf"), style, beta=beta, **fixed)
        return drawn

    def by_model(self, models: Sequence[str], metric: str, over: str, **fixed: Any) -> tuple[Series, ...]:
        """A line for each manifold."""
        lines = (self.line(title(model), (model, metric, over), self.look(model), **fixed) for model in models)
        return tuple(drawn for line in lines for drawn in line)


def beta_label(beta: float) -> str:
    return f"β = {signed(beta)}{' (null)' if beta == 0 else ''}"


def lettered_figure(stem: str, panels: Sequence[Panel], *, size: float = 2.4, **look: Any) -> Figure:
    """Panels with letters before their titles."""
    lettered = [
        replace(panel, title=f"({letter}) {panel.title}", alt=f"{panel.title}.", height=280)
        for letter, panel in zip("abcdefgh", panels, strict=False)
    ]
    return files(f"curvature-{stem}", lettered, size=size, **look)
