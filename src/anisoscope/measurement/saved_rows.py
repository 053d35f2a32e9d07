"""Rows of a profile as files of arrays: those that are sampled, and with --save-rows all of them."""

from __future__ import annotations

import json
import shutil
import struct
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anisoscope.capture.row import Rows, Scores
from anisoscope.measurement.bank import Bank
from anisoscope.measurement.evaluation import mean_spectrum
from anisoscope.numerics.hashing import row_hash
from anisoscope.results.folder import RunFolder, replace_file

KEPT_ROWS = 1024  # sampled rows of each site that stay in the run folder, for CKA and comparisons
_BYTES = {"F32": 4, "F64": 8}
_DTYPES = {torch.float32: "F32", torch.float64: "F64"}


def save_arrays(folder: RunFolder, key: str, bank: Bank) -> None:
    """Save spectra, and the sampled rows with the smallest hashes together with their keys."""
    arrays: dict[str, Tensor] = {}
    for site, stats in bank.sites.items():
        spectrum = mean_spectrum(stats)
        if spectrum is not None:
            arrays[f"{site}/spectrum"] = spectrum
        if stats.sample is not None and len(stats.sample) and not stats.heads:
            arrays[f"{site}/rows"] = stats.sample.rows[:KEPT_ROWS].float()
            arrays[f"{site}/keys"] = stats.sample.label("hash")[:KEPT_ROWS]
    folder.write_arrays(key, {name: array.detach().cpu().numpy() for name, array in arrays.items()})


@dataclass
class RowWriter:
    """Saves every row (`--save-rows`): raw files per site during the run, which `finish` turns into safetensors.

    Each file holds `rows` (n×d, or n×H×d) and `context`, `position`, `token`, `hash` (n).
    """

    folder: Path
    counts: dict[str, int] = field(default_factory=dict)  # rows written, by site
    shapes: dict[str, list[int]] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)

    def rows(self, rows: Rows) -> None:
        name, x, index = str(rows.site), rows.x.detach().cpu(), rows.index
        self.folder.mkdir(parents=True, exist_ok=True)
        self.shapes[name], self.kinds[name] = list(x.shape[1:]), _DTYPES[x.dtype]
        keys = torch.stack([index.context, index.position, index.token, row_hash(index.context, index.position)]).cpu()
        # the first rows overwrite what a killed run left
        mode = "ab" if name in self.counts else "wb"
        for part, tensor in (("rows", x), ("keys", keys.T)):
            with self._raw(name, part).open(mode) as file:
                file.write(tensor.contiguous().numpy().tobytes())
        self.counts[name] = self.counts.get(name, 0) + len(x)

    def scores(self, scores: Scores) -> None:
        """Attention scores are not saved."""

    def state(self) -> dict[str, dict[str, Any]]:
        return {name: dict(getattr(self, name)) for name in ("counts", "shapes", "kinds")}

    @classmethod
    def resume(cls, folder: Path, state: dict[str, dict[str, Any]]) -> RowWriter:
        """Continue after an interruption: rows written after the last save are truncated."""
        out = cls(folder, **{name: dict(part) for name, part in state.items()})
        for name, count in out.counts.items():
            size = _BYTES[out.kinds[name]] * int(np.prod(out.shapes[name]))
            for part, width in (("rows", size), ("keys", 32)):
                with out._raw(name, part).open("r+b") as file:
                    file.truncate(count * width)
        return out

    def finish(self) -> None:
        for name in self.counts:
            replace_file(self.folder / f"{name}.safetensors", partial(self._write, name=name))
        for name in self.counts:
            for part in ("rows", "keys"):
                self._raw(name, part).unlink()

    def _raw(self, name: str, part: str) -> Path:
        return self.folder / f".{name}.{part}.raw"

    def _write(self, path: Path, name: str) -> None:
        """Write one safetensors file: 8-byte header length, JSON header, the raw rows and the four keys."""
        n = self.counts[name]
        size = self._raw(name, "rows").stat().st_size
        header = {"rows": {"dtype": self.kinds[name], "shape": [n, *self.shapes[name]], "data_offsets": [0, size]}}
        for number, key in enumerate(("context", "position", "token", "hash")):
            start = size + number * n * 8
            header[key] = {"dtype": "I64", "shape": [n], "data_offsets": [start, start + n * 8]}
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % 8)
        keys = np.fromfile(self._raw(name, "keys"), dtype="<i8").reshape(n, 4)
        with path.open("wb") as out, self._raw(name, "rows").open("rb") as rows:
            out.write(struct.pack("<Q", len(encoded)) + encoded)
            shutil.copyfileobj(rows, out, 16 << 20)
            out.write(np.ascontiguousarray(keys.T).tobytes())
