"""Bad values of every option of every command, made from the declarations, so that a new option is tried as well."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

GPT = "gpt2:n_layer=1,n_embd=16,n_head=2,vocab_size=300"
# a command that would go well and soon; into {file} where it would not be soon, which is refused after the options
BASES = {
    "profile": "profile --random-init {gpt} --tokens 128 --context 16 --metrics drift --out {out}",
    "sweep": "sweep {s}/series --tokens 64 --context 16 --metrics drift --out {out}",
    "tangent": "tangent --random-init {gpt} --tokens 128 --context 16 --preset light --draws 19 --out {file}",
    "show": "show {s}/run",
    "compare": "compare {s}/run {s}/run",
    "report": "report {s}/run",
    "claims": "claims {s}/run",
    "card": "card {s}/run",
    "push": "push {s}/run {out}",
    "selftest": "selftest",
    "data enwik8": "data enwik8 {s}/plain.txt --out {out}",
    "train": "train --out {file}",
    "serve": "serve {s}/plain.txt",
}
# commands that end soon, to write under any name
SMALL = {
    "tangent": "tangent --random-init {gpt} --tokens 128 --context 16 --preset light --draws 19",
    "train": "train --steps 2 --layers 1 --width 8 --heads 2 --context 8 --limit 0.1 --monitor none",
}
VALUES = ("-1", "nan", "9" * 30, "zz☃")
# options whose value may be any text, or whose value above is a good one
_FREE = {"--name", "--out", "--claims"}
_LEGAL = {
    ("--seed", "0"), ("--attention-rows", "0"), ("--layers", "0"), ("--split", "0"), ("--weight-decay", "0"),
    ("--weight-decay", "1e3"), ("--dropout", "0"), ("--seeds", "0"), ("--beta", "0"), ("--shrinkage", "0"),
    ("--penalties", "0"), ("--penalties", "1e3"), ("--biases", "0"), ("--biases", "1e3"), ("--seconds", "1e3"),
    ("--limit", "1e3"), ("--lr", "1e3"), ("--checkpoints", "0"), ("--when", "0"), ("--limit", "inf"),
}  # fmt: skip


@dataclass(frozen=True)
class OptionCase:
    """One command line; {…} stand for places."""

    line: tuple[str, ...]
    legal: bool

    @property
    def id(self) -> str:
        return " ".join(word if len(word) < 40 else f"{word[:9]}…" for word in self.line)


def commands() -> Iterator[tuple[str, Any]]:
    """Every command by its words, as the parser knows it."""
    import typer

    from anisoscope.cli import app

    for name, one in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        if inner := getattr(one, "commands", None):
            yield from ((f"{name} {verb}", act) for verb, act in inner.items())
        else:
            yield name, one


def option_cases() -> Iterator[OptionCase]:
    for name, act in commands():
        base = BASES.get(name, f"{name} --out {{file}}").split()
        for option in act.params:
            flag = option.opts[0]
            if not flag.startswith("--") or option.is_flag:
                continue
            at = base.index(flag) if flag in base else len(base)
            rest = base[:at] + base[at + 2 :]
            if flag == "--out" and "{file}" in base:
                if name not in SMALL:  # the names that follow are good ones, and a study would take minutes
                    continue
                rest = SMALL[name].split()
            for value in VALUES:
                yield OptionCase((*rest, flag, value), flag in _FREE or (flag, value) in _LEGAL)
