"""What a measured training step costs; the figures are recorded by monitor_overhead.py."""

from __future__ import annotations

from bench import Bench


def run(bench: Bench) -> None:
    few = ["--repeats", "1", "--layers", "2", "--width", "64", "--context", "32"] if bench.scale < 1 else []
    large = ["--layers", "12", "--width", "512", "--context", "256", "--batch", "64", "--steps", "4000"]
    bench.script("monitor_overhead.py", "--device", bench.device, *(large if bench.cuda else []), *few)
