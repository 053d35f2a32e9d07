"""Every row of every site on disk (`--save-rows`): raw while the run goes on, safetensors when it is done."""

from __future__ import annotations

import json
import shutil
import struct
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from anisoscope.capture.rows.row import Rows, Scores
from anisoscope.numerics.hashing import row_hash
from anisoscope.results.folder import replace_file

_DTYPES = {torch.float32: "F32", torch.float64: "F64", torch.int64: "I64"}


@dataclass
class RowWriter:
    """Appends rows and their keys to one pair of raw files per site; `finish` turns each into a safetensors file.

    Each file holds `rows` (n×d, or n×H×d) and `context`, `position`, `token`, `hash` (n).
    """

    folder: Path
    counts: dict[str, int] = field(default_factory=dict)  # rows written, by site
    shapes: dict[str, list[int]] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)

    def rows(self, rows: Rows) -> None:
        name = str(rows.site)
        x = rows.x.detach().cpu()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.shapes[name], self.kinds[name] = list(x.shape[1:]), _DTYPES[x.dtype]
        index = rows.index
        keys = torch.stack([index.context, index.position, index.token, row_hash(index.context, index.position)]).cpu()
        fresh = name not in self.counts  # what a run that died left behind must not come before the first rows
        self._append(self._raw(name, "rows"), x, fresh=fresh)
        self._append(self._raw(name, "keys"), keys.T.contiguous(), fresh=fresh)
        self.counts[name] = self.counts.get(name, 0) + len(x)

    def scores(self, scores: Scores) -> None:
        """Scores are never kept."""

    def state(self) -> dict[str, dict[str, object]]:
        return {"counts": dict(self.counts), "shapes": dict(self.shapes), "kinds": dict(self.kinds)}

    @classmethod
    def resume(cls, folder: Path, state: dict[str, dict]) -> RowWriter:
        """Go on after an interruption: rows written after the last save are cut off."""
        out = cls(folder, dict(state["counts"]), dict(state["shapes"]), dict(state["kinds"]))
        for name, count in out.counts.items():
            item = {"F32": 4, "F64": 8}[out.kinds[name]]
            for part, width in (("rows", item * int(np.prod(out.shapes[name]))), ("keys", 32)):
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

    @staticmethod
    def _append(path: Path, tensor: Tensor, *, fresh: bool) -> None:
        with path.open("wb" if fresh else "ab") as file:
            file.write(tensor.contiguous().numpy().tobytes())

    def _write(self, path: Path, name: str) -> None:
        """One safetensors file: an 8-byte length, a JSON header, then the rows as they are and the four keys."""
        n = self.counts[name]
        size = self._raw(name, "rows").stat().st_size
        header = {"rows": {"dtype": self.kinds[name], "shape": [n, *self.shapes[name]], "data_offsets": [0, size]}}
        for number, key in enumerate(("context", "position", "token", "hash")):
            start = size + number * n * 8
            header[key] = {"dtype": "I64", "shape": [n], "data_offsets": [start, start + n * 8]}
        words = json.dumps(header).encode()
        words += b" " * (-len(words) % 8)
        keys = np.fromfile(self._raw(name, "keys"), dtype="<i8").reshape(n, 4)
        with path.open("wb") as out, self._raw(name, "rows").open("rb") as rows:
            out.write(struct.pack("<Q", len(words)) + words)
            shutil.copyfileobj(rows, out, 16 << 20)
            out.write(np.ascontiguousarray(keys.T).tobytes())
