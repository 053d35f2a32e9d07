"""Claims of *Revisiting Anisotropy: The Geometry of Learning Dynamics*: where the gradients go.

Directions fitted on activations alone (the tangent proxy Q_T) are held against the true gradients of the same sites.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from anisoscope.claims.engine.claim import claim
from anisoscope.claims.engine.evidence import (
    Cell,
    Missing,
    Readings,
    Run,
    layer_records,
    models,
    site_record,
    step_records,
)
from anisoscope.claims.engine.part import Finding, Part, Parts, Status, figure, judge, outcome, span
from anisoscope.claims.revisiting.controls import (
    CONTROLS,
    MARGIN,
    average,
    cell_records,
    chance_levels,
    control_parts,
    differences,
    trained,
)
from anisoscope.results.quantity import Quantity, mean
from anisoscope.results.query import Row

SOURCE = "arXiv:2604.08764"
SHARE_MARGIN = 0.05
ENERGY_METRICS = ("gradient_energy", "gradient_enrichment", "gradient_p", "gradient_p_holm")
_ROWS = {"masked": "masked rows", "unmasked": "unmasked rows"}  # groups of a masked language model
_CONTROL_WORDS = {
    "normal": "directions normal to them",
    "random": "random directions",
    "next": "the next principal components",
    "permuted": "directions fitted on column-permuted activations",
}


@claim(
    "tangent_energy",
    of=models,
    statement="Directions fitted on activations hold more gradient energy than every control of the same rank.",
    source=SOURCE,
    metrics=ENERGY_METRICS,
    margin=MARGIN,
)
def tangent_energy(run: Run) -> Finding:
    """Mean over sites and steps after initialisation of (energy − control)/(r/d), against each of four controls."""
    parts = control_parts(run)
    cells, layers = cell_records(run), _layers(run)
    told = [*described_energy(run), *_where(cells, layers)]
    for group, rows in _ROWS.items():
        if run.tangent("gradient_energy", group):
            told.append(replace(described_energy(run, group)[0], name=rows))
    details: dict[str, Any] = {"cells": cells, "layers": layers, "steps": step_records(_scaled(run))}
    details |= {"groups": _row_kinds(run)}
    return Finding((*parts, *told), energy_sentence, details, aspects={c: (c,) for c in CONTROLS})


def energy_sentence(parts: Parts, status: Status, part: Part, *, what: str = "gradients' energy") -> str:
    """How many times chance, how much above the control that comes closest, where."""
    text = f"the tangent directions hold {span(parts['enrichment'])} times as much of the {what} as chance would give; "
    text += f"their lead over the control that decides, {_CONTROL_WORDS[part.name]}, is {span(part)} in the same unit, "
    told = [f"at the last step {figure(parts['enrichment at the last step'].effect)} times chance"]
    told += [f"on {rows} {figure(parts[rows].effect)} times" for rows in _ROWS.values() if rows in parts]
    if "layers beyond the margin" in parts:
        told.append(f"the lead is beyond the margin in {_part_of(parts['layers beyond the margin'].effect)} layers")
    return f"{text}{outcome(status, part)} ({'; '.join(told)})"


def _part_of(share: float) -> str:
    """A share of layers in words.

    >>> _part_of(1.0), _part_of(0.0), _part_of(0.25)
    ('all', 'none of the', '25 % of the')
    """
    return "all" if share >= 1 else "none of the" if share <= 0 else f"{100 * share:.0f} % of the"


def described_energy(run: Run, group: str = "", **options: Any) -> list[Part]:
    """Mean enrichment after initialisation and at the last step, pooled and as a mean of per-row ratios."""
    scaled = _scaled(run, group, **options)
    cells = [cell for cell in trained(run.needed("gradient_energy", group, **options)) if cell in scaled]
    last = max(-1 if cell.step is None else cell.step for cell in cells)
    ends = [cell for cell in cells if cell.step in (None, last)]
    parts = [
        Part.described("enrichment", mean([scaled[cell] for cell in cells])),
        Part.described("enrichment at the last step", mean([scaled[cell] for cell in ends])),
    ]
    rows = _scaled(run, group, average="row", **options)
    shared = [rows[cell] for cell in cells if cell in rows]
    return [*parts, Part.described("enrichment of single rows", mean(shared))] if shared else parts


def _scaled(run: Run, group: str = "", **options: Any) -> dict[Cell, Quantity]:
    """Energy in units of chance at every cell."""
    levels = chance_levels(run, group, **{k: v for k, v in options.items() if k != "average"})
    found = run.tangent("gradient_energy", group, **options)
    return {cell: reading.quantity / levels[cell] for cell, reading in found.items() if cell in levels}


def _where(cells: list[dict[str, Any]], layers: list[dict[str, Any]]) -> list[Part]:
    """In which part of the layers, and of the layer-steps after initialisation, it lies above every control."""
    found = {
        "layer-steps above every control": [c["above"] for c in cells if c["step"] is None or c["step"] > 0],
        "layers beyond the margin": [layer["beyond"] for layer in layers],
    }
    return [Part.described(name, Quantity.constant(sum(v) / len(v))) for name, v in found.items() if v]


def _layers(run: Run) -> list[dict[str, Any]]:
    """Every site, its mean distance from each control and whether all of them lie beyond the margin."""
    found = {control: layer_records(differences(run, control)) for control in CONTROLS}
    records: dict[tuple[Any, ...], dict[str, Any]] = {}
    for control, layers in found.items():
        for layer in layers:
            site = (layer["stack"], layer["layer"], layer["kind"])
            record = records.setdefault(site, site_record(site))
            record[control] = {name: layer[name] for name in ("value", "low", "high")}
    for record in records.values():
        record["beyond"] = all(record[c]["low"] > MARGIN for c in CONTROLS if c in record)
    return list(records.values())


def _row_kinds(run: Run) -> dict[str, Any]:
    """Masked and unmasked rows of a masked language model, judged apart."""
    found = {}
    for group in _ROWS:
        if run.tangent("gradient_energy", group):
            status, part = judge(control_parts(run, group))
            told = [p.record() for p in described_energy(run, group)]
            found[group] = {**part.record(), "status": status, "control": part.name, "told": told}
            found[group]["steps"] = step_records(_scaled(run, group))
    return found


@claim(
    "anisotropy_share",
    of=models,
    statement="Tangent directions hold a larger share of the gradients' anisotropy than normal directions do.",
    source=SOURCE,
    metrics=("gradient_share", "gradient_isoscore_gain"),
    margin=SHARE_MARGIN,
)
def anisotropy_share(run: Run) -> Finding:
    """Mean over sites and steps of the spectral share minus that of the normal control; ΔIsoScore* must not object."""
    share = run.needed("gradient_share")
    cells = trained(share)
    gaps = {c: _above(share, run.tangent("gradient_share", control=c)) for c in CONTROLS}
    if not gaps["normal"]:
        raise Missing("gradient_share with control=normal")
    parts = [Part.of("normal", _mean_over(gaps["normal"], cells), margin=SHARE_MARGIN)]
    parts += [Part.described(c, _mean_over(gaps[c], cells)) for c in CONTROLS[1:] if gaps[c]]
    parts.append(Part.described("share", average(share, cells)))
    lacking = sum(_below(share[cell]) for cell in cells) / len(cells)
    parts.append(Part.described("sites and steps below average", Quantity.constant(lacking)))
    gain = run.tangent("gradient_isoscore_gain")
    isotropy = _above(gain, run.tangent("gradient_isoscore_gain", control="normal"))
    if isotropy:
        shared = [isotropy[c] for c in trained(gain) if c in isotropy]
        parts.append(Part.of("IsoScore* gain", mean(shared), margin=0.0, needed=False))
    signed = {cell: _signed(reading) for cell, reading in share.items()}
    details: dict[str, Any] = {"steps": step_records(signed), "layers": layer_records(signed)}
    details |= {"flagged": sorted({share[c].note for c in cells if "fewer than" in share[c].note})}
    return Finding(tuple(parts), _share_sentence, details, doubt=_share_doubt)


def _above(readings: Readings, drawn: Readings) -> dict[Cell, Quantity]:
    return {c: _signed(r) - Quantity.constant(drawn[c].value) for c, r in readings.items() if c in drawn}


def _signed(reading: Row) -> Quantity:
    """A share that comes from too *little* gradient in the tangent directions counts against the claim."""
    return -reading.quantity if _below(reading) else reading.quantity


def _below(reading: Row) -> bool:
    return bool(re.search(r"\bbelow\b", reading.note)) and not re.search(r"\babove\b", reading.note)


def _mean_over(found: dict[Cell, Quantity], cells: list[Cell]) -> Quantity:
    return mean([found[cell] for cell in cells if cell in found])


def _share_sentence(parts: Parts, status: Status, part: Part) -> str:
    text = f"the tangent directions hold a share of {span(parts['share'])} of the gradients' spectral anisotropy, the "
    text += f"unevenness of their energy over directions; compared with normal directions that is {span(part)} more, "
    text += outcome(status, part)
    told, gain = [], parts.get("IsoScore* gain")
    lacking = parts["sites and steps below average"].effect
    if lacking > 0:
        told.append(f"at {100 * lacking:.0f} % of the sites and steps it is a lack of gradient and counts as minus")
    if gain:
        told.append(
            f"IsoScore*, a measure of evenness, changes by {span(gain)} more without them than without normal ones"
        )
    return text + (f" ({'; '.join(told)})" if told else "")


def _share_doubt(parts: Parts) -> str:
    gain = parts.get("IsoScore* gain")
    if gain is None or gain.low > 0:
        return ""
    return "the second measure, IsoScore*, does not confirm it"
