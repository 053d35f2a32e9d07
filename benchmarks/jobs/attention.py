"""Reading attention beside whole matrices; recorded by attention_reading.py."""

from __future__ import annotations

from bench import Bench


def run(bench: Bench) -> None:
    few = ["--layers", "2", "--context", "128", "--contexts", "2"] if bench.scale < 1 else []
    bench.script("attention_reading.py", "--device", bench.device, *few)
