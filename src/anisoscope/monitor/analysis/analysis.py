"""What is computed from the rows of a measured step; it needs no model, so that any process can do it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from anisoscope.capture.sites.site import Site, flow_order
from anisoscope.errors import AnisoscopeError
from anisoscope.measurement.bank import Bank, Setup
from anisoscope.measurement.evaluation import evaluate_pass
from anisoscope.metrics.engine.metric import Request
from anisoscope.metrics.frequency import target_entropy, unigram_entropy
from anisoscope.monitor.held_out import loss_records
from anisoscope.numerics.host import each_on_host, few_threads, single_steps
from anisoscope.numerics.linalg import full_float32
from anisoscope.option import Progress
from anisoscope.tangent.change import StepAlone
from anisoscope.tangent.concepts import card_sites, cards
from anisoscope.tangent.energy import Record, holm_records, placed
from anisoscope.tangent.proxy import Label, StepRows
from anisoscope.tangent.row_map import OpenRows
from anisoscope.tangent.tables import TypeFit, input_role, table_records, weight_records
from anisoscope.tangent.tangent_study import TangentStudy


@dataclass
class TableSeen:
    """The input embedding table of the model at one step."""

    size: int
    width: int
    since: int | None = None  # the step that updates are counted from
    updates: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)  # name, types, rows of the change
    read: Tensor | None = None  # [V] types read since then, if updates are of all that this process holds


@dataclass
class Seen:
    """What the passes of one step gave: everything that the analysis of the step reads."""

    rows: StepRows
    bank: Bank | None = None
    study: str = "study"  # which of the studies tests its gradients
    constants: list[Record] = field(default_factory=list)  # columns of the best constant's loss
    table: TableSeen | None = None
    readers: dict[Site, list[str]] = field(default_factory=dict)  # weights that read a site
    weights: dict[Site, Tensor] = field(default_factory=dict)  # their gradients by fold [FOLDS, out, d]
    described: bool = False  # whether concepts get cards
    saved: bool = False  # whether the state after it is wanted
    shown: int = 0  # the sum of the hashes of its contexts
    together: tuple[int, ...] = ()  # the processes that look at the same contexts, if there are several
    stage: tuple[int, int] | None = None  # of a pipeline: blocks before those of this process, and in all
    mapped: OpenRows | None = None  # rows for the map, which is kept in the training process
    parameters: Tensor | None = None  # a few numbers of them, the same in all processes that train one model

    @property
    def on_host(self) -> bool:
        """Whether the rows of the step are on the host."""
        return all(part.x.device.type == "cpu" for parts in self.rows.fit.values() for part in parts)


@dataclass
class GradientsAlone:
    """What the gradients of one step give by themselves, whatever was measured before it."""

    rows: StepAlone
    entropies: list[Record] = field(default_factory=list)
    tables: list[Record] = field(default_factory=list)
    weights: list[Record] = field(default_factory=list)
    embed: Site | None = None  # where updates of the table are tested, if they can be
    types: TypeFit | None = None  # what they are tested in


@dataclass(frozen=True)
class _Role:
    """Gradients of an embedding table in one of its roles, and the site whose proxies they are tested in."""

    site: Site
    of: str
    types: Tensor  # [m]
    rows: Tensor  # [m, d]


@dataclass
class Found:
    """What the analysis of one step gives."""

    records: list[Record] = field(default_factory=list)
    cards: list[dict[str, Any]] = field(default_factory=list)
    fault: str = ""  # why there are no cards
    notes: list[str] = field(default_factory=list)
    study_notes: dict[str, list[str]] = field(default_factory=dict)  # by study
    row_count: int = 0
    state: dict[str, Any] = field(default_factory=dict)  # by study
    window: dict[str, Any] = field(default_factory=dict)  # moments of the step for the frozen proxy, by study
    seconds: float = 0.0


@dataclass
class Analysis:
    """The analysis of one model over its steps; without studies there is only the geometry."""

    setup: Setup
    requests: Sequence[Request]
    studies: dict[str, TangentStudy]  # `study`, and `live` for training batches beside a probe
    sites: list[Site]
    seed: int = 0
    target_weights: Tensor | None = None  # weights of the training loss by target token
    tokenizer: Any = None
    notes: list[str] = field(default_factory=list)
    earlier: dict[Site, tuple[int, Tensor]] = field(default_factory=dict)  # step and concepts before this one
    row_count: int = 0  # of the site that saw most, at the last measured step
    unfitted: int = 0  # steps whose gradients were left out
    progress: Progress | None = None  # called after the metrics of each site

    def run(self, seen: Seen) -> Found:
        """Everything of one step; on the host sites side by side, one core each, rather than each operation on all."""
        with single_steps() if seen.on_host else few_threads("cuda"):
            return self._run(seen)

    def _run(self, seen: Seen) -> Found:
        start = time.perf_counter()
        if seen.stage is not None:  # other processes have the other blocks
            self.sites = sorted({*self.sites, *seen.rows.fit}, key=flow_order)
        found = Found(self.measure(seen))
        if seen.described:
            try:
                found.cards = self.concepts(seen.rows)
            except Exception as error:  # cards are a description: the numbers of the step stand without them
                found.fault = f"{type(error).__name__}: {error}"
        found.notes, found.row_count = list(self.notes), self.row_count
        found.study_notes = {name: list(study.notes) for name, study in self.studies.items()}
        if seen.saved:
            found.state, found.window = self.state(), self.window(seen.rows.step)
        found.seconds = time.perf_counter() - start
        return found

    def measure(self, seen: Seen) -> list[Record]:
        """All records of one step."""
        records, study = self._geometry(seen), self.studies.get(seen.study)
        if study is None or self.left_out(seen.rows):
            return records
        try:
            found = study.measure(seen.rows) if seen.study != "study" else self._gradients(study, seen)
        except AnisoscopeError as error:  # such as fewer rows than the rank: the geometry of the step stands without it
            if not records:
                raise
            study.fitted = {}
            self._note_unfitted(seen.rows.step, error)
            return records
        return records + found

    def _note_unfitted(self, step: int, error: AnisoscopeError) -> None:
        """Tell it once: where one step has too few rows, all those of its training may."""
        self.unfitted += 1
        if self.unfitted == 1:
            self.note(f"gradients of step {step}, and of others like it, are left out: {error}")

    def alone(self, seen: Seen, *, types: bool) -> tuple[list[Record], GradientsAlone | None]:
        """What one step gives by itself: its records, and its gradients before they are `compared`, if it has any."""
        records, study = self._geometry(seen), self.studies[seen.study]
        return records, None if self.left_out(seen.rows) else self.gradients_alone(study, seen, types=types)

    def _geometry(self, seen: Seen) -> list[Record]:
        """Metrics of the sites, and the loss."""
        rows, study, records = seen.rows, self.studies.get(seen.study), []
        if seen.bank is not None:
            measured, counts = evaluate_pass(seen.bank, self.requests, self.setup, progress=self.progress)
            self.row_count = counts["row_count"]
            for note in counts["notes"]:
                self.note(f"step {rows.step}: {note}")
            records += [{**row, "step": rows.step} for row in measured]
        if study is None or not study.source:  # not for training batches
            records += loss_records(rows, seen.constants)
        return records

    def _gradients(self, study: TangentStudy, seen: Seen) -> list[Record]:
        """Gradients of the rows, of the embedding table and of weights."""
        since, updates = (None, []) if seen.table is None else (seen.table.since, seen.table.updates)
        alone = self.gradients_alone(study, seen, types=bool(updates))
        records, notes = compared(study, alone, since=since, updates=updates, seed=self.seed)
        for text in notes:
            self.note(text)
        return records

    def gradients_alone(self, study: TangentStudy, seen: Seen, *, types: bool) -> GradientsAlone:
        """The same before it is compared with earlier steps; `types`: with what updates of the table are tested in."""
        rows = seen.rows
        place: Record = {"kind": "training", "step": rows.step, "variant": "", "group": ""}
        if rows.unreached:
            names = ", ".join(site.name or str(site) for site in sorted(rows.unreached))
            self.note(f"no gradient reaches {names}: what lies before is frozen, or the loss does not depend on it")
        alone = GradientsAlone(study.alone(rows))
        if study.counts is not None:
            entropies = {"unigram_entropy": unigram_entropy(study.counts)}
            entropies["target_entropy"] = target_entropy(study.counts, self.target_weights)
            alone.entropies = [{**place, "metric": name, "value": bits, "layer": 0} for name, bits in entropies.items()]
        self._tables(study, seen, alone, types=types)
        if seen.weights:
            sizes: dict[str, Any] = {"plan": study.plan, "rank": study.main_rank, "seed": self.seed}
            alone.weights = list(weight_records(seen.weights, seen.readers, rows, **sizes))
        return alone

    def left_out(self, rows: StepRows) -> bool:
        """Whether a step has nothing to test; adds a note instead of stopping the training."""
        reason = rows.lacking()
        if reason:
            self.note(f"{reason}, so its gradients were left out")
        return bool(reason)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def concepts(self, rows: StepRows) -> list[dict[str, Any]]:
        """Concept cards of a few sites at one step."""
        study = self.studies.get("study")
        if study is None or study.plan.proxies[0] != "semi_nmf" or rows.lacking():
            return []
        proxies = study.fitted.get("semi_nmf", {})
        sites = [site for site in card_sites(self.sites) if site in proxies]
        if not sites:
            return []
        fits = {site: rows.fit_half(site) for site in sites}
        found = cards(fits, proxies, self.tokenizer, earlier=self.earlier)
        self.earlier = {site: (rows.step, proxies[site].directions.cpu()) for site in sites}
        return [{"step": rows.step, **card} for card in found]

    def _tables(self, study: TangentStudy, seen: Seen, alone: GradientsAlone, *, types: bool) -> None:
        """Gradients of the embedding table, and what its updates are tested in."""
        rows, table, sites = seen.rows, seen.table, alone.rows.sites
        embed = next((s for s in self.sites if s.kind == "embed" and s in sites), None)
        if table is None or embed is None:  # not among the requested layers, or frozen, which is noted
            return
        if study.fitted[study.plan.proxies[0]][embed].basis.shape[0] != table.width:
            self.note("the embedding table has another width than the stream, so its gradients are left out")
            return
        sizes: dict[str, Any] = {"bins": study.bins, "draws": study.plan.draws, "seed": self.seed}

        def tested(role: _Role) -> list[Record]:
            used = role.rows.any(1).nonzero().squeeze(1)
            whole = len(used) == len(role.rows)  # not copied: with a large vocabulary it is as large as the model
            found, types = role.rows if whole else role.rows[used], role.types if whole else role.types[used]
            mine = {Label(p, study.main_rank): study.fitted[p][role.site] for p in study.plan.proxies[:2]}
            return placed(role.site, rows.step, table_records(found, types.cpu(), mine, of=role.of, **sizes))

        roles = list(self._roles(study, rows, embed, sites))
        with full_float32():  # set once: parallel threads would reset it for each other
            by_role = each_on_host(tested, roles, roles[0].rows.device.type if roles else "cpu")
        alone.tables += [row for found in by_role for row in found]
        alone.embed = embed
        if types:
            labels = [Label(name, study.main_rank) for name in study.plan.proxies[:2]]
            how: dict[str, Any] = {"site": embed, "seed": self.seed, "standardised": study.plan.standardised}
            alone.types = TypeFit.of(rows.fit_half(embed), labels, **how)

    def _roles(self, study: TangentStudy, rows: StepRows, embed: Site, sites: Iterable[Site]) -> Iterator[_Role]:
        """The gradients of the table as input embedding and of the output head."""
        if rows.embedded:
            yield _Role(embed, "embedding_in", *input_role(rows.embedded))
        last = [s for s in sites if s.stack == embed.stack or s.stack == "decoder"]
        outside = rows.output
        if outside is None or not last:
            return
        site = max(last, key=lambda s: (s.layer, s.kind == "final"))
        if outside.shape[1] == len(study.fitted[study.plan.proxies[0]][site].basis):
            yield _Role(site, "embedding_out", torch.arange(len(outside), device=outside.device), outside)

    def finish(self) -> tuple[list[Record], bool]:
        """Records that need the whole training, and whether a window is still open, so that its files are needed."""
        frozen = [study.frozen for study in self.studies.values() if study.frozen is not None]
        still_open = any(proxies.window for proxies in frozen)
        return [record for study in self.studies.values() for record in study.finish()], still_open

    def basis(self, site: Site, *, proxy: str, fit: str) -> Tensor:
        """The orthonormal basis d×r of a proxy at a site, as last fitted (or frozen)."""
        return self.studies["study"].basis(site, proxy=proxy, fit=fit)

    def state(self) -> dict[str, Any]:
        """The state that later steps need, by study."""
        return {name: study.state() for name, study in self.studies.items()}

    def load(self, states: Mapping[str, Any], windows: Mapping[int, Any]) -> None:
        """Restore what `state` and `windows` gave."""
        for name, study in self.studies.items():
            if states.get(name) is not None:
                study.load(states[name], {step: found[name] for step, found in windows.items()})

    def window(self, step: int) -> dict[str, Any]:
        """The moments of a step inside an open window, by study."""
        frozen = {name: study.frozen for name, study in self.studies.items()}
        return {name: f.window_state(step) if f is not None else None for name, f in frozen.items()}

    def windows(self) -> dict[int, dict[str, Any]]:
        """The moments of all steps inside open windows."""
        frozen = [study.frozen for study in self.studies.values() if study.frozen is not None]
        return {step: self.window(step) for step in sorted({step for proxies in frozen for step in proxies.window})}

    def proxies(self) -> dict[str, tuple[Any, Any]]:
        """What was fitted, by study: the proxies of the last step, and the frozen ones."""
        return {name: (s.fitted, s.frozen.proxies if s.frozen else None) for name, s in self.studies.items()}

    def take_proxies(self, found: Mapping[str, tuple[Any, Any]]) -> None:
        """Take over what another process has fitted."""
        for name, (fitted, frozen) in found.items():
            study = self.studies[name]
            study.fitted = fitted
            if study.frozen is not None and frozen is not None:
                study.frozen.proxies = frozen


Updates = Sequence[tuple[str, Tensor, Tensor]]  # of an embedding table: name, types, rows of the change


def compared(
    study: TangentStudy, alone: GradientsAlone, *, since: int | None, updates: Updates, seed: int
) -> tuple[list[Record], list[str]]:
    """All records of the gradients of a step, with `updates` of the table since an earlier one; and notes."""
    records, notes = study.compared(alone.rows), []
    sizes: dict[str, Any] = {"bins": study.bins, "draws": study.plan.draws, "seed": seed}
    beside = list(alone.tables)
    if updates and alone.embed is not None and alone.types is None:
        notes.append("too few types in the probe to fit a proxy on half of them; updates are left out")
    elif alone.embed is not None and alone.types is not None:
        for of, types, change in updates:
            tested = alone.types.records(change, types, of=of, **sizes)
            beside += placed(alone.embed, alone.rows.step, [{**r, "note": f"since step {since}"} for r in tested])
    beside += alone.weights
    return [*records, *alone.entropies, *beside, *holm_records(beside)], notes
