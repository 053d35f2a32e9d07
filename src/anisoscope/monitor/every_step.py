"""First and second moments of activations and gradients at every step, without device–host synchronisation.

Hooks sample rows of every site; once per step, one batched product for all sites gives their moments, and a few
quantities derived from them go into a buffer on the device, which the host reads when a step is measured anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from anisoscope.capture.sampled_rows import SampledPass, SampledRows
from anisoscope.capture.sites.site import Site, flow_order
from anisoscope.errors import AnisoscopeError
from anisoscope.monitor.analysis.analysis import Found
from anisoscope.monitor.analysis.ranks import Ranks
from anisoscope.monitor.analysis.step_sums import MISSING, SiteSums, StepSums, step_quantities
from anisoscope.numerics.fused import Fused
from anisoscope.results.folder import replace_file
from anisoscope.results.query import SCHEMA_VERSION, Table
from anisoscope.stats.moments import QUANTITIES, Trace, wide
from anisoscope.tangent.proxy import key

ROWS = 2048  # sampled of each forward pass
FILE = "every_step.parquet"
_STEPS = 1024  # steps of one buffer on the device
_FIRST = len(QUANTITIES)  # first buffer column of the gradients
_COSINE = 2 * _FIRST
# (column of the buffer, metric, variant, column of its row count)
_METRICS: list[tuple[int, str, str, int]] = [
    *((i, QUANTITIES[i], "rows=batch", 0) for i in range(2, _FIRST)),
    *((_FIRST + i, QUANTITIES[i], "of=gradient;rows=batch", _FIRST) for i in range(2, _FIRST - 1)),
    (_COSINE - 1, QUANTITIES[-1], "centred=0;of=gradient;rows=batch", _FIRST),
    (_COSINE, "gradient_cosine", "rows=batch", _FIRST),
]
_WHY = {0: "no row was seen here", _FIRST: "no gradient came here"}  # notes by column of a row count that is 0


_UNSENT = "at measured steps only: second moments of this width are not sent between processes at every step"


@dataclass(frozen=True)
class StepBlock:
    """The quantities of some sites at some steps, on the CPU."""

    sites: tuple[Site, ...]
    steps: Tensor  # [m] int64
    values: Tensor  # [m, sites, quantities] float64

    def where(self, kept: Tensor) -> StepBlock:
        return StepBlock(self.sites, self.steps[kept], self.values[kept])


@dataclass
class _Group:
    """Sites of one width on one device, whose moments are computed in one batched product."""

    sites: tuple[Site, ...]
    width: int
    device: torch.device
    sums: Trace | None = None
    steps: list[int] = field(default_factory=list)
    full: list[Tensor] = field(default_factory=list)  # full buffers, in asynchronous copy to the host
    buffer: Tensor | None = None  # [steps, sites, quantities]
    compiled: bool = False  # whether the training is: then this is compiled as well

    def __post_init__(self) -> None:
        self._trace, self._derive = Fused(self._sums), Fused(self._derived)

    def add(self, seen: SampledPass) -> None:
        """Add the rows of one pass and their gradients; a missing site has no valid row."""
        rows, gradients = (list(map(held.get, self.sites)) for held in (seen.rows, seen.gradients))
        found, flags = rows + gradients, list(map(seen.valid.get, self.sites)) * 2
        lengths = [0 if x is None else x.shape[0] for x in found]
        longest = max(lengths)
        if not longest:
            return
        if min(lengths) == longest and all(flag is flags[0] for flag in flags):  # the rule
            stacked, valid = torch.stack(found), None if flags[0] is None else flags[0][None]  # type: ignore[arg-type]
        else:
            empty = torch.zeros(0, self.width, device=self.device)
            tensors = [empty if x is None else x for x in found]
            stacked = torch.stack([pad(x, (0, 0, 0, longest - len(x))) for x in tensors])
            valid = self._valid(flags, lengths, longest)
        given, half = (stacked,) if valid is None else (stacked, valid), len(self.sites)
        sums = Trace(half, *(self._trace if seen.compiled else self._sums)(*given))
        self.sums, self.compiled = sums if self.sums is None else self.sums.merge(sums), seen.compiled

    def _valid(self, flags: Sequence[Tensor | None], lengths: Sequence[int], length: int) -> Tensor:
        """Mask of valid rows [2·sites, length]."""
        place, parts = torch.arange(length, device=self.device), []
        for flag, own in zip(flags, lengths, strict=True):
            present = place < own
            parts.append(present if flag is None else present & pad(flag, (0, length - len(flag))))
        return torch.stack(parts)

    def close(self, step: int, scale: float) -> None:
        """Write the quantities of a step into the buffer."""
        if self.sums is None:
            return
        sums, self.sums, half = self.sums, None, len(self.sites)
        row = len(self.steps) % _STEPS
        if self.buffer is None or not row:
            if self.buffer is not None:
                self.full.append(self.buffer.to("cpu", non_blocking=True))  # into pinned memory, asynchronously
            shape = (_STEPS, half, _COSINE + 1)
            self.buffer = torch.full(shape, torch.nan, dtype=wide(self.device), device=self.device)
        (found,) = (self._derive if self.compiled else self._derived)(sums.counts, sums.sums, sums.scatter)
        if scale != 1.0:
            found[:, _FIRST + 3 : _FIRST + 5] /= scale  # drift and mean norm of the gradients
        self.buffer[row] = found
        self.steps.append(step)

    def _sums(self, rows: Tensor, valid: Tensor | None = None) -> tuple[Tensor, ...]:
        """The sums of rows [2·sites, k, d]."""
        found = Trace.of(rows, valid, centred=len(self.sites))  # moments of gradients are about 0
        return found.counts, found.sums, found.scatter

    def _derived(self, *sums: Tensor) -> tuple[Tensor, ...]:
        """The row of the buffer [sites, quantities]."""
        return (step_quantities(Trace(len(self.sites), *sums)),)

    def take(self, *, scale: float, whole: bool) -> SiteSums | None:
        """The sums of a step, for the process that joins those of several; None if no row was seen."""
        sums, self.sums = self.sums, None
        return None if sums is None else SiteSums.of(self.sites, sums, scale=scale, whole=whole)

    def read(self) -> StepBlock | None:
        """Everything since the last call, in one transfer, which synchronises with the device."""
        if self.buffer is None or not self.steps:
            return None
        last = self.buffer[: (len(self.steps) - 1) % _STEPS + 1].cpu()  # waits for the earlier copies, too
        block = StepBlock(self.sites, torch.tensor(self.steps), torch.cat([*self.full, last]).double())
        self.steps, self.full, self.buffer = [], [], None
        return block


class EveryStep:
    """Records moments at every training step; `folder` keeps them for resuming."""

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[Site],
        *,
        taken: int,
        folder: Path | None,
        resume: bool,
        ranks: Ranks | None = None,
        **words: Any,
    ) -> None:
        if taken < 2:
            raise AnisoscopeError(f"every_step takes {taken} rows of a pass; expected 2 or more.")
        self.folder, self._stale = folder, not resume  # whether files of the folder are replaced by the next one
        self.blocks: list[StepBlock] = []
        self._unsaved: list[StepBlock] = []
        self._groups: list[_Group] = []
        self._replaced: list[_Group] = []  # replaced when a new site joined; not read yet
        self._homes: dict[Site, tuple[int, torch.device]] = {}
        self._newest = -1
        self._merged: list[StepBlock] = []  # steps of several processes; not with the blocks yet
        self._ranks, turn = ranks, (0, 1) if ranks is None else ranks.turn
        self._sums = None if ranks is None else StepSums(ranks, self._keep)
        self._rows = SampledRows(model, sites, take=self._take, most=taken, turn=turn, **words)
        self._load(resume=resume)

    def __enter__(self) -> EveryStep:
        self._rows.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._rows.__exit__()
        if self._sums is not None:
            self._sums.close()
        self.flush()

    @property
    def seen(self) -> bool:
        """Whether it has seen a step."""
        return self._newest >= 0

    @property
    def notes(self) -> list[str]:
        """What runs uncompiled in a compiled training, and why."""
        groups = [fused for group in (*self._replaced, *self._groups) for fused in (group._trace, group._derive)]
        return list(dict.fromkeys(note for fused in (*self._rows.fused, *groups) for note in fused.notes))

    def lost(self) -> list[str]:
        return self._rows.lost()

    def reattach(self) -> None:
        self._rows.reattach()

    def begin(self, step: int) -> None:
        """Call before the passes of a step."""
        self._rows.begin(step)
        self._regroup()

    def drop(self) -> None:
        """Discard the current step, which failed."""
        self._rows.drop()
        for group in self._groups:
            group.sums = None

    def end(self, step: int, *, scale: float = 1.0, measured: bool = False) -> None:
        """Call after the passes of a step; gradients are divided by `scale`."""
        self._rows.end()
        if self._rows.failed:  # which was reported
            self.drop()
        if self._sums is not None:
            self._give(step, scale=scale, whole=measured)
            return
        if all(group.sums is None for group in self._groups):
            if not self.seen and not self._rows.failed:
                raise AnisoscopeError(
                    f"every_step saw no training pass in step {step}; run the model's forward and loss.backward() "
                    "inside `with monitor.step(…)`, and attach the monitor before torch.compile."
                )
            return
        if step <= self._newest:  # the training was rewound: later steps are measured again
            self.rewind(step)
        with torch.no_grad():
            for group in self._groups:
                group.close(step, scale)
        self._newest = step

    def _give(self, step: int, *, scale: float, whole: bool) -> None:
        """Give the sums of a step to the process that joins them, even if there are none."""
        assert self._sums is not None and self._ranks is not None
        with torch.no_grad():
            scale = scale * self._ranks.averaged
            parts = [part for group in self._groups if (part := group.take(scale=scale, whole=whole)) is not None]
        self._sums.add(step, parts, [group.device for group in self._groups])
        if parts and not self._ranks.first:
            self._newest = step

    def _keep(self, step: int, found: list[tuple[tuple[Site, ...], Tensor]]) -> None:
        """Add a step that was joined from several processes."""
        if step <= self._newest:
            self._forget(step)
        self._merged += [StepBlock(sites, torch.tensor([step]), values[None]) for sites, values in found]
        self._newest = step

    def asked(self, step: int, records: Callable[[int], list[Any]]) -> Future[Found] | None:
        """What `records` gives of a measured step, once it is joined; None in all processes but the first."""
        assert self._sums is not None and self._ranks is not None
        if self._ranks.first:
            return self._sums.ask(step, records)
        self._sums.send()
        return None

    def _take(self, seen: SampledPass) -> None:
        self._homes |= {site: (x.shape[-1], x.device) for site, x in seen.rows.items() if site not in self._homes}
        if not self._groups:
            self._regroup()
        with torch.no_grad(), torch.autocast(next(iter(seen.rows.values())).device.type, enabled=False):
            for group in self._groups:
                group.add(seen)

    def _regroup(self) -> None:
        """Form one group for each width and device; a site first seen within a step counts from the next step on."""
        homes: dict[tuple[int, torch.device], list[Site]] = {}
        for site, home in self._homes.items():
            homes.setdefault(home, []).append(site)
        wanted = {(tuple(sorted(found, key=flow_order)), *home) for home, found in homes.items()}
        existing = {(group.sites, group.width, group.device): group for group in self._groups}
        if wanted != existing.keys():
            self._replaced += [group for key, group in existing.items() if key not in wanted]
            self._groups = [existing.get(key) or _Group(*key) for key in sorted(wanted, key=str)]

    def flush(self) -> None:
        """Copy everything from the device to the host and to disk; the only call that synchronises."""
        if self._sums is not None:
            self._sums.send()
            self._sums.poll()
        fresh = [block for group in (*self._replaced, *self._groups) if (block := group.read()) is not None]
        fresh, self._merged = [*fresh, *_joined(self._merged)], []
        self._replaced = []
        self.blocks += fresh
        self._unsaved += fresh
        if not self._unsaved:
            return
        try:
            self._save(min(int(block.steps[0]) for block in self._unsaved), self._unsaved)
            self._unsaved = []
        except Exception as error:  # they are in memory, and saved with the next
            self._rows.report(error)

    def _save(self, first: int, blocks: Sequence[StepBlock]) -> None:
        plain = [([key(site) for site in block.sites], block.steps, block.values) for block in blocks]
        if self.folder is None:
            return
        place = self.folder / f"every-{first:09d}.pt"
        replace_file(place, lambda path: torch.save(plain, path))
        for path in self.folder.glob("every-*.pt") if self._stale else ():
            if path != place:
                path.unlink()
        self._stale = False

    def rewrite(self, folder: Path | None) -> None:
        """Go on in this folder: everything recorded is saved there with what comes next, in place of what is there."""
        self.folder, self._unsaved, self._stale = folder, list(self.blocks), True

    def rewind(self, step: int) -> None:
        """Forget this step and all after it."""
        self.flush()
        self._forget(step)

    def _forget(self, step: int) -> None:
        self.blocks += _joined(self._merged)
        self._merged = []
        self.blocks = [kept for block in self.blocks if len((kept := block.where(block.steps < step)).steps)]
        self._newest = max((int(block.steps[-1]) for block in self.blocks), default=-1)
        for path in self.folder.glob("every-*.pt") if self.folder is not None else ():
            path.unlink()
        self._unsaved = list(self.blocks)
        if self.blocks:
            self._save(0, self.blocks)
            self._unsaved = []

    def _load(self, *, resume: bool) -> None:
        for path in sorted(self.folder.glob("every-*.pt")) if self.folder is not None and resume else ():
            for sites, steps, values in torch.load(path, map_location="cpu", weights_only=True):
                self.blocks.append(StepBlock(tuple(Site(*site) for site in sites), steps, values))
        self._newest = max((int(block.steps[-1]) for block in self.blocks), default=-1)

    def table(self, columns: Mapping[str, Any], depth: Mapping[str, int], *, step: int | None = None) -> Table:
        """All steps so far, or one, in the long form; `depth` is the number of blocks of each stack."""
        self.flush()
        blocks = self.blocks if step is None else [block.where(block.steps == step) for block in self.blocks]
        parts = [_long(block, columns, depth) for block in blocks if len(block.steps)]
        return Table.concat(parts)


def _joined(blocks: Sequence[StepBlock]) -> list[StepBlock]:
    """Blocks of single steps, those of the same sites as one."""
    found: dict[tuple[Site, ...], list[StepBlock]] = {}
    for block in blocks:
        found.setdefault(block.sites, []).append(block)
    joined = [(sites, [[b.steps for b in same], [b.values for b in same]]) for sites, same in found.items()]
    return [StepBlock(sites, *map(torch.cat, parts)) for sites, parts in joined]


def _long(block: StepBlock, columns: Mapping[str, Any], depth: Mapping[str, int]) -> Table:
    """One row for each step, site and metric."""
    steps, sites, metrics = len(block.steps), len(block.sites), len(_METRICS)
    size = steps * sites * metrics

    def per_site(values: Sequence[Any]) -> Any:
        return np.tile(np.repeat(np.asarray(values), metrics), steps)

    def per_metric(values: Sequence[Any]) -> Any:
        return np.tile(np.asarray(values), steps * sites)

    values = block.values.numpy()
    counts = values[:, :, [rows for *_, rows in _METRICS]].astype(np.int64).reshape(-1)
    dropped = values[:, :, [rows + 1 for *_, rows in _METRICS]].astype(np.int64).reshape(-1)
    found_values = values[:, :, [column for column, *_ in _METRICS]].reshape(-1)
    unsent = found_values == MISSING
    why = np.where(unsent, _UNSENT, np.where(counts > 0, "", per_metric([_WHY[rows] for *_, rows in _METRICS])))
    found = {
        "schema": np.full(size, SCHEMA_VERSION),
        "step": np.repeat(block.steps.numpy(), sites * metrics),
        "stack": per_site([site.stack for site in block.sites]),
        "layer": per_site([site.layer for site in block.sites]),
        "depth": per_site([site.layer / max(1, depth.get(site.stack, 1)) for site in block.sites]),
        "kind": per_site([site.name or site.kind for site in block.sites]),
        "group": np.full(size, ""),
        "metric": per_metric([metric for _, metric, *_ in _METRICS]),
        "variant": per_metric([variant for *_, variant, _ in _METRICS]),
        "value": np.where(unsent, np.nan, found_values),
        "n": counts,
        "dropped": dropped,
        "note": why,
        **{name: np.full(size, value) for name, value in columns.items()},
    }
    return Table.from_columns(found, size)
