"""A bounded sample of rows (those with the smallest hashes) that is the same for any batching, order or sharding."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from anisoscope.numerics.hashing import fold_of, row_hash

_LABELS = ("hash", "context", "position", "token", "group", "first")


def row_labels(
    context: Tensor,
    position: Tensor | None = None,
    token: Tensor | None = None,
    group: Tensor | None = None,
    first: Tensor | None = None,
    *,
    seed: int,
) -> Tensor:
    """The labels of rows [n, 6], on the host; the first is the hash by which rows are chosen."""
    given = ((position, 0), (token, -1), (group, 0), (first, 0))
    labels = [torch.full_like(context, missing) if label is None else label for label, missing in given]
    columns = (row_hash(context, labels[0], seed=seed), context, *labels)
    return torch.stack([column.to("cpu", torch.int64) for column in columns], 1)


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
    _labels: list[Tensor] = field(default_factory=list)  # [n, 6] int64 on the host, for each tensor of rows
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
        lasting: bool = False,
    ) -> Sample:
        """Add rows; those of a tensor that is `lasting` are kept without a copy where all of them are taken."""
        labels = row_labels(context, position, token, group, first, seed=self.seed)
        return self.take(x, labels, lasting=lasting)

    def merge(self, other: Sample) -> Sample:
        out = Sample(self.size, self.seed)
        for part in (self, other):
            if len(part):
                out.take(part.rows, part._labels[0])
        return out

    @property
    def rows(self) -> Tensor:
        self._compact()
        return self._rows[0] if self._rows else torch.empty(0, 0)

    def label(self, name: str) -> Tensor:
        self._compact()
        return self._labels[0][:, _LABELS.index(name)] if self._rows else torch.empty(0, dtype=torch.int64)

    @property
    def fold(self) -> Tensor:
        return fold_of(self.label("context"))

    def __len__(self) -> int:
        return len(self.rows)

    def as_given(self) -> Sample:
        """The sample in the order in which its rows came, for what does not depend on it: they need not be copied.

        >>> Sample(3).update(torch.eye(3), context=torch.arange(3), lasting=True).as_given().label("context").tolist()
        [0, 1, 2]
        """
        whole = len(self._rows) == 1 and len(self._rows[0]) <= self.size
        return self._of(self._rows[0], self._labels[0]) if whole else self

    def select(self, mask: Tensor) -> Sample:
        """The sample of the rows where the mask holds."""
        index, rows = mask.nonzero().squeeze(1), self.rows
        if not len(index):
            return Sample(self.size, self.seed)
        return self._of(rows[index.to(rows.device, non_blocking=True)], self._labels[0][index])

    def part(self, start: int, stop: int) -> Sample:
        """The sample of rows start…stop−1; they share their memory with this one.

        >>> Sample(4).update(torch.eye(4), context=torch.arange(4)).part(1, 3).rows.shape
        torch.Size([2, 4])
        """
        return self._of(self.rows[start:stop], self._labels[0][start:stop])

    def one_per_context(self) -> Sample:
        """The row with the smallest hash of each context."""
        contexts = self.label("context")
        _, inverse = torch.unique(contexts, return_inverse=True)
        first = torch.full((int(inverse.max()) + 1 if len(inverse) else 0,), len(contexts), dtype=torch.int64)
        first.scatter_reduce_(0, inverse, torch.arange(len(contexts)), reduce="amin")
        return self.select(torch.zeros(len(contexts), dtype=torch.bool).index_fill_(0, first, True))

    def relabel(self, name: str, numbers: Tensor) -> Sample:
        """The same rows with one label mapped: i becomes numbers[i]."""
        if not len(self):
            return self
        labels, column = self._labels[0].clone(), _LABELS.index(name)
        labels[:, column] = numbers[labels[:, column]]
        return self._of(self.rows, labels)

    def head(self, index: int) -> Sample:
        return self._of(self.rows[:, index].contiguous(), self._labels[0]) if len(self) else self

    def state(self) -> dict[str, Tensor]:
        sizes = {"size": torch.tensor(self.size), "seed": torch.tensor(self.seed)}
        if not len(self):
            return sizes
        return {**sizes, "rows": self.rows, **{name: self.label(name).contiguous() for name in _LABELS}}

    @classmethod
    def load(cls, state: dict[str, Tensor]) -> Sample:
        out = cls(int(state["size"]), int(state["seed"]))
        return out.take(state["rows"], torch.stack([state[n] for n in _LABELS], 1)) if "rows" in state else out

    def _of(self, rows: Tensor, labels: Tensor) -> Sample:
        """A sample of rows that are sorted by hash."""
        return Sample(self.size, self.seed, [rows], [labels], _ordered=True)

    def take(self, x: Tensor, labels: Tensor, *, lasting: bool = False) -> Sample:
        """Add rows with their `row_labels`, which sites of the same rows share."""
        inside = (labels[:, 0] <= self._limit).nonzero().squeeze(1)
        if len(inside):
            self._ordered = False
            whole = lasting and len(inside) == len(x)
            self._rows.append(x if whole else x[inside.to(x.device, non_blocking=True)])  # else a copy, even of all
            self._labels.append(labels[inside])
            if sum(map(len, self._rows)) > self.size + self.size // 4:
                self._compact()
        return self

    def _compact(self) -> None:
        """Sort by hash, keep the `size` smallest, and lower the limit above which rows are ignored."""
        if self._ordered or not self._rows:
            return
        if len(self._rows) > 1:
            self._rows, self._labels = [torch.cat(self._rows)], [torch.cat(self._labels)]
        hashes = self._labels[0][:, 0]
        if len(hashes) > self.size or not bool((hashes[1:] >= hashes[:-1]).all()):
            order = hashes.argsort(stable=True)[: self.size]
            rows, labels = self._rows.pop(), self._labels.pop()
            self._rows, self._labels = [rows[order.to(rows.device, non_blocking=True)]], [labels[order]]
        if len(self._rows[0]) == self.size:
            self._limit = int(self._labels[0][-1, 0])
        self._ordered = True
