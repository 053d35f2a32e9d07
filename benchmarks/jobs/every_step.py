"""Measuring at every step of training; recorded by every_step.py."""

from __future__ import annotations

from bench import Bench

LARGE = ("--layers", "12", "--width", "768", "--context", "1024", "--batch", "16", "--vocabulary", "50257")


def run(bench: Bench) -> None:
    few = ("--layers", "2", "--width", "64", "--context", "32") if bench.scale < 1 else ()
    bench.script("every_step.py", "--device", bench.device, *(LARGE if bench.cuda else ()), *few)
