"""What every page says of anisotropy, drift and attention: sections, their drawings, and the vector twins of those."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anisoscope.view.attention_dynamics import attention_section
from anisoscope.view.attention_figures import write_attention_figures
from anisoscope.view.attention_heads import Heads, head_numbers
from anisoscope.view.catalogue import Catalogue
from anisoscope.view.drift_scatter import drift_section
from anisoscope.view.modalities import Comparison, compare, modality_section
from anisoscope.view.modality_figures import write_modality_figures
from anisoscope.view.series import Source
from anisoscope.view.traces import Spec


@dataclass(frozen=True)
class Sections:
    """The sections for the template, the drawings for the page, and what both were made from."""

    sections: dict[str, Any]
    specs: dict[str, Spec]
    comparison: Comparison
    heads: list[Heads]
    catalogue: Catalogue


def shared_sections(sources: Sequence[Source], catalogue: Catalogue) -> Sections:
    """Modalities, drift and attention of these runs; a section is empty where the table has nothing for it."""
    comparison, heads = compare(sources), head_numbers(sources)
    modalities, one = modality_section(comparison)
    drift, two = drift_section(comparison)
    dynamics, three = attention_section(heads, catalogue)
    sections = {"modalities": modalities, "drift": drift, "dynamics": dynamics}
    return Sections(sections, one | two | three, comparison, heads, catalogue)


def write_section_figures(folder: Path, shared: Sections) -> list[Path]:
    """A PDF and an SVG of every figure of these sections."""
    written = write_modality_figures(folder, shared.comparison)
    return written + write_attention_figures(folder, shared.heads, shared.catalogue)
