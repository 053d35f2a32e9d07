"""A bounded sample of rows (those with the smallest hashes) that is the same for any batching, order or sharding."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from anisoscope.numerics.hashing import fold_of, row_hash

_LABELS = ("hash", "context", "position", "token", "group", "first")


@dataclass
class Sample:
    """The `size` rows with the smallest hashes, sorted by hash (which is a shuffled order), with their labels.

    `group` is the index of the row's stratum, `first` is 1 at the first position of a context.

    >>> one = Sample(2).update(torch.eye(3), context=torch.arange(3))
    >>> two = Sample(2).update(torch.eye(3).flip(0), context=torch.arange(3).flip(0))
    >>> torch.equal(one.rows, two.rows)
    True
    """

    size: int
    seed: int = 0
    _rows: list[Tensor] = field(default_factory=list)
    _labels: dict[str, list[Tensor]] = field(default_factory=lambda: {name: [] for name in _LABELS})
    _limit: int = torch.iinfo(torch.int64).max
    _ordered: bool = False  # whether `_rows` is known to be one tensor sorted by hash

    def update(
        self,
        x: Tensor,
        *,
        context: Tensor,
        position: Tensor | None = None,
        token: Tensor | None = None,
        group: Tensor | None = None,
        first: Tensor | None = None,
    ) -> Sample:
        zeros = torch.zeros_like(context)
        position = zeros if position is None else position
        labels = {
            "hash": row_hash(context, position, seed=self.seed),
            "context": context,
            "position": position,
            "token": zeros - 1 if token is None else token,
            "group": zeros if group is None else group,
            "first": zeros if first is None else first.to(torch.int64),
        }
        return self._take(x, {name: value.cpu() for name, value in labels.items()})

    def merge(self, other: Sample) -> Sample:
        out = Sample(self.size, self.seed)
        for part in (self, other):
            if part._rows:
                part._compact()
                out._take(part._rows[0], {name: part._labels[name][0] for name in _LABELS})
        return out

    @property
    def rows(self) -> Tensor:
        self._compact()
        return self._rows[0] if self._rows else torch.empty(0, 0)

    def label(self, name: str) -> Tensor:
        self._compact()
        return self._labels[name][0] if self._rows else torch.empty(0, dtype=torch.int64)

    @property
    def fold(self) -> Tensor:
        return fold_of(self.label("context"))

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, mask: Tensor) -> Sample:
        """The sample of the rows where the mask holds."""
        index = mask.nonzero().squeeze(1)
        if not len(index):
            return Sample(self.size, self.seed)
        rows = self.rows
        labels = {name: [self._labels[name][0][index]] for name in _LABELS}
        return Sample(self.size, self.seed, [rows[index.to(rows.device, non_blocking=True)]], labels, _ordered=True)

    def part(self, start: int, stop: int) -> Sample:
        """The sample of rows start…stop−1; they share their memory with this one.

        >>> Sample(4).update(torch.eye(4), context=torch.arange(4)).part(1, 3).rows.shape
        torch.Size([2, 4])
        """
        rows = self.rows[start:stop]
        labels = {name: [self._labels[name][0][start:stop]] for name in _LABELS}
        return Sample(self.size, self.seed, [rows], labels, _ordered=True)

    def one_per_context(self) -> Sample:
        """The row with the smallest hash of each context."""
        contexts = self.label("context")
        _, inverse = torch.unique(contexts, return_inverse=True)
        first = torch.full((int(inverse.max()) + 1 if len(inverse) else 0,), len(contexts), dtype=torch.int64)
        first.scatter_reduce_(0, inverse, torch.arange(len(contexts)), reduce="amin")
        mask = torch.zeros(len(contexts), dtype=torch.bool)
        mask[first] = True
        return self.select(mask)

    def relabel(self, name: str, numbers: Tensor) -> Sample:
        """The same rows with one label mapped: i becomes numbers[i]."""
        if not len(self):
            return self
        labels = {n: numbers[self.label(n)] if n == name else self.label(n) for n in _LABELS}
        return Sample(self.size, self.seed)._take(self.rows, labels)

    def head(self, index: int) -> Sample:
        out = Sample(self.size, self.seed)
        return out._take(self.rows[:, index], {n: self.label(n) for n in _LABELS}) if len(self) else out

    def state(self) -> dict[str, Tensor]:
        self._compact()
        sizes = {"size": torch.tensor(self.size), "seed": torch.tensor(self.seed)}
        return sizes if not self._rows else {**sizes, "rows": self.rows, **{n: self.label(n) for n in _LABELS}}

    @classmethod
    def load(cls, state: dict[str, Tensor]) -> Sample:
        out = cls(int(state["size"]), int(state["seed"]))
        return out._take(state["rows"], {n: state[n] for n in _LABELS}) if "rows" in state else out

    def _take(self, x: Tensor, labels: dict[str, Tensor]) -> Sample:
        inside = (labels["hash"] <= self._limit).nonzero().squeeze(1)
        if len(inside):
            self._ordered = False
            self._rows.append(x[inside.to(x.device, non_blocking=True)])  # a copy, also when every row is taken
            labels = {name: value[inside] for name, value in labels.items()}
            for name in _LABELS:
                self._labels[name].append(labels[name])
            if sum(map(len, self._rows)) > self.size + self.size // 4:
                self._compact()
        return self

    def _compact(self) -> None:
        """Sort by hash, keep the `size` smallest, and lower the limit above which rows are ignored."""
        if self._ordered or not self._rows:
            return
        joined = len(self._rows) > 1
        if joined:
            self._rows = [torch.cat(self._rows)]
            self._labels = {name: [torch.cat(parts)] for name, parts in self._labels.items()}
        hashes = self._labels["hash"][0]
        if joined or len(hashes) > self.size or not bool((hashes[1:] >= hashes[:-1]).all()):
            order = hashes.argsort(stable=True)[: self.size]
            rows = self._rows.pop()
            self._rows = [rows[order.to(rows.device, non_blocking=True)]]
            self._labels = {name: [parts[0][order]] for name, parts in self._labels.items()}
            if len(order) == self.size:
                self._limit = int(self._labels["hash"][0][-1])
        self._ordered = True
