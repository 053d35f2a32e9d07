"""Start a small monitored training in several processes again and again: does one hang, fail or lose its table?

    python tools/repeated_starts.py --count 200    # processes are forks of this one, which has all imports
    python tools/repeated_starts.py --count 20 --ranks 4 --torchrun

Each process ends as a script does, through the whole end of the interpreter. As under torchrun, one that fails has the
others ended. Every table must be that of the first start.
"""

from __future__ import annotations

import argparse
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
from pathlib import Path

import pandas  # noqa: F401  # what every start would import
import scipy.linalg  # noqa: F401
import torch
import torch.distributed as dist
from torch import nn

from anisoscope import Monitor
from anisoscope.results.query import Table

STEPS, MEASURED = 4, (0, 2)
GOOD = "good"


def training(out: Path) -> None:
    """What each process does; it does not leave the process group, as many scripts do not."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    words = {"modules": ["0"], "metrics": "average_cosine", "when": list(MEASURED), "name": "m"}
    with Monitor(model, out=out, **words) as monitor:  # type: ignore[arg-type]
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            with monitor.step(step):
                model(torch.randn(32, 8, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def started(ranks: int, out: Path, *, limit: float, torchrun: bool) -> str:
    """How one start ended, in words."""
    children = _by_torchrun(ranks, out) if torchrun else _by_forks(ranks, out)
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


def _by_torchrun(ranks: int, out: Path) -> dict[int, str]:
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__]
    return {subprocess.Popen([*line, "--worker", str(out)]).pid: "of all"}


def _by_forks(ranks: int, out: Path) -> dict[int, str]:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    children = {}
    for rank in range(ranks):
        child = os.fork()
        if not child:
            place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "MASTER_PORT": port}
            os.environ |= {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
            training(out)
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
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which one hangs")
    parser.add_argument("--torchrun", action="store_true", help="by torchrun, which imports everything every time")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        training(options.worker)
        return 0
    ends: Counter[str] = Counter()
    gc.freeze()  # what is imported is not looked through at the end of every fork
    folder = Path(tempfile.mkdtemp(prefix="anisoscope-starts-"))  # not a context, which the forks would leave, too
    for number in range(options.count):
        out = folder / str(number)
        end = started(options.ranks, out, limit=options.limit, torchrun=options.torchrun)
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
