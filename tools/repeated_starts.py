"""Start a small monitored training in several processes again and again: does one hang, fail or lose its table?

    python tools/repeated_starts.py --count 200    # processes are forks of this one, which has all imports
    python tools/repeated_starts.py --count 20 --ranks 4 --torchrun
    python tools/repeated_starts.py --ranks 3 --kind pipeline    # each process has some blocks, sent on by hand

Each process ends as a script does, through the whole end of the interpreter. As under torchrun, one that fails has the
others ended. Every table must be that of the first start. A start that hangs says where each process stands.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas  # noqa: F401  # what every start would import
import scipy.linalg  # noqa: F401
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from anisoscope import Monitor
from anisoscope.results.query import Table

STEPS, MEASURED = 4, (0, 2)
WORDS, WIDTH = 50, 16
GOOD = "good"


def replicas(out: Path) -> None:
    """What each process does; it does not leave the process group, as many scripts do not."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    words: dict[str, Any] = {"modules": ["0"], "metrics": "average_cosine", "when": list(MEASURED), "name": "m"}
    with Monitor(model, out=out, **words) as monitor:
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            with monitor.step(step):
                model(torch.randn(32, 8, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


class Stage(nn.Module):
    """One block of a small language model, with the embedding in the first process and the head in the last."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.embedding = nn.Embedding(WORDS, WIDTH) if rank == 0 else None
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)])
        self.head = nn.Linear(WIDTH, WORDS) if rank == ranks - 1 else None

    def forward(self, x: Tensor | None = None, input_ids: Any = None, labels: Any = None) -> Any:
        x = self.embedding(input_ids) if self.embedding is not None else x
        for layer in self.layers:
            x = layer(x)
        if self.head is None:
            return x
        scores = self.head(x)
        return cross_entropy(scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), scores


def pipeline(out: Path) -> None:
    """A pipeline by hand: activations are sent on, and gradients back."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = Stage(rank, ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    words: dict[str, Any] = {"stage": (rank, ranks), "metrics": "standard", "when": list(MEASURED), "rank": 4}
    with Monitor(model, out=out, name="m", **words) as monitor:
        for step in range(STEPS):
            with monitor.step(step):
                for batch in range(2):
                    generator = torch.Generator().manual_seed(10 * step + batch)
                    _pass(model, torch.randint(0, WORDS, (12, 10), generator=generator), rank, ranks)
            optimizer.step()
            optimizer.zero_grad()


def _pass(model: Stage, ids: Tensor, rank: int, ranks: int) -> None:
    x = None
    if rank > 0:
        x = torch.zeros(*ids.shape, WIDTH)
        dist.recv(x, rank - 1)
        x.requires_grad_()
    y = model(x, input_ids=ids, labels=ids)
    if rank < ranks - 1:
        dist.send(y.detach(), rank + 1)
        gradient = torch.zeros_like(y)
        dist.recv(gradient, rank + 1)
        y.backward(gradient)
    else:
        (y[0] / 2).backward()
    if x is not None and x.grad is not None:
        dist.send(x.grad, rank - 1)


KINDS: dict[str, Callable[[Path], None]] = {"replicas": replicas, "pipeline": pipeline}


def training(kind: str, out: Path, limit: float) -> None:
    """One process; it says where it stands shortly before it is taken to hang."""
    faulthandler.dump_traceback_later(0.8 * limit)
    KINDS[kind](out)
    faulthandler.cancel_dump_traceback_later()


def started(ranks: int, out: Path, *, kind: str, limit: float, torchrun: bool) -> str:
    """How one start ended, in words."""
    children = _by_torchrun(ranks, out, kind, limit) if torchrun else _by_forks(ranks, out, kind, limit)
    until, codes = time.monotonic() + limit, dict[int, int]()
    while children.keys() - codes.keys() and time.monotonic() < until:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child in children:
            codes[child] = os.waitstatus_to_exitcode(status)
            for other in children.keys() - codes.keys() if codes[child] else ():
                os.kill(other, signal.SIGTERM)
        else:
            time.sleep(0.005)
    hanging = children.keys() - codes.keys()
    for child in hanging:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if hanging:
        return f"hangs: rank {', '.join(children[child] for child in hanging)}"
    failed = [f"rank {children[child]} ended with {code}" for child, code in codes.items() if code]
    return "; ".join(failed) or GOOD


def _by_torchrun(ranks: int, out: Path, kind: str, limit: float) -> dict[int, str]:
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__]
    line += ["--kind", kind, "--limit", str(limit), "--worker", str(out)]
    return {subprocess.Popen(line).pid: "of all"}


def _by_forks(ranks: int, out: Path, kind: str, limit: float) -> dict[int, str]:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    children = {}
    for rank in range(ranks):
        child = os.fork()
        if not child:
            place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "MASTER_PORT": port}
            os.environ |= {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
            training(kind, out, limit)
            sys.exit()
        children[child] = str(rank)
    return children


def _difference(found: Path, expected: Path) -> str:
    """How the table of a start differs from that of the first, in words; "" if it does not."""
    if not (found / "table.parquet").is_file():
        return "no table"
    ours, theirs = (Table.read(path / "table.parquet").records() for path in (found, expected))
    values = [[(row["step"], row["metric"], row["value"], row["n"]) for row in rows] for rows in (ours, theirs)]
    return "" if values[0] == values[1] and {row["step"] for row in ours} == set(MEASURED) else "another table"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="how many starts")
    parser.add_argument("--ranks", type=int, default=2, help="processes of each")
    parser.add_argument("--kind", choices=KINDS, default="replicas", help="of a training")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which one hangs")
    parser.add_argument("--torchrun", action="store_true", help="by torchrun, which imports everything every time")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        training(options.kind, options.worker, options.limit)
        return 0
    ends: Counter[str] = Counter()
    gc.freeze()  # what is imported is not looked through at the end of every fork
    folder = Path(tempfile.mkdtemp(prefix="anisoscope-starts-"))  # not a context, which the forks would leave, too
    for number in range(options.count):
        out = folder / str(number)
        end = started(options.ranks, out, kind=options.kind, limit=options.limit, torchrun=options.torchrun)
        wrong = _difference(out, folder / "0")
        said = " and ".join(filter(None, [end if end != GOOD or not wrong else "", wrong]))
        ends[said] += 1
        if said != GOOD or not (number + 1) % 20:
            print(f"start {number + 1} of {options.count}: {said}", file=sys.stderr, flush=True)
        if number:
            shutil.rmtree(out, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    for end, count in ends.most_common():
        print(f"{count} of {options.count} starts of {options.ranks} processes: {end}")
    return int(set(ends) != {GOOD})


if __name__ == "__main__":
    sys.exit(main())
