"""List the licences of everything that anisoscope depends on or ships, and fail on unknown or incompatible ones.

python tools/licences.py

Read from the metadata of installed distributions: all that pyproject.toml asks for, extras included, and what those ask
for. Shipped files of others lie in folders with a LICENSE file, or beside one that names them.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
# words of licences that a package under Apache-2.0 can depend on; MPL covers files, not what uses them
FINE = re.compile(
    r"\b(MIT|MIT-0|MIT-CMU|HPND|BSD|0BSD|BSD-[23]-Clause|3-Clause BSD|Apache|ISC|ISCL|PSF|PSF-2\.0|Python|Python-2\.0|"
    r"CNRI-Python|MPL|MPL-2\.0|Mozilla|Unlicense|CC0|CC0-1\.0|Zlib|Public Domain|BSL-1\.0|NCSA)\b", re.IGNORECASE
)  # fmt: skip
WRONG = re.compile(r"\b(A?GPL|GNU (Affero )?General Public|SSPL|Proprietary|NonCommercial|CC-BY-NC)", re.IGNORECASE)
# what metadata do not say, or say in a way that misleads; read by a person
KNOWN = {
    "docutils": "Public Domain, BSD",  # its GPL part is a file for Emacs, which is not installed
    "numpy": "BSD-3-Clause",  # its expression also names libraries inside the wheel, with a linking exception
    "scipy": "BSD-3-Clause",  # the same
    "certifi": "MPL-2.0",
}
TEXTS = {"MIT": "Permission is hereby granted, free of charge", "Apache-2.0": "Apache License",
         "BSD": "Redistribution and use in source and binary forms", "CC BY-SA": "Creative Commons"}  # fmt: skip
OURS = {".py", ".j2", ".css", ".js", ".md", ".typed"}  # endings of files that are written here
CHOSEN = ("nvidia-", "cuda-", "triton")  # parts of a CUDA build of torch, which its user chose and has agreed to
OUR_DATA = {"calibration.json"}  # data that is computed here


@dataclass(frozen=True)
class Licence:
    """One dependency or shipped file with its licence, and what is wrong with it, if anything."""

    name: str
    words: str
    problem: str = ""


def asked_for() -> Iterator[Requirement]:
    """What pyproject.toml asks for, all extras included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for line in [
        *project["dependencies"],
        *(each for extra in project["optional-dependencies"].values() for each in extra),
    ]:
        yield Requirement(line)


def installed(requirements: Iterable[Requirement]) -> dict[str, Distribution]:
    """The installed distributions that are asked for, and those that they ask for; others are left out."""
    found: dict[str, Distribution] = {}
    waiting = list(requirements)
    while waiting:
        wanted = waiting.pop()
        name = re.sub(r"[-_.]+", "-", wanted.name).lower()
        if name in found or name == "anisoscope" or name.startswith(CHOSEN):
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            continue
        needed = [Requirement(line) for line in found[name].requires or ()]
        waiting += [each for each in needed if _applies(each, wanted.extras)]
    return dict(sorted(found.items()))


def _applies(requirement: Requirement, extras: Iterable[str]) -> bool:
    return requirement.marker is None or any(requirement.marker.evaluate({"extra": e}) for e in ("", *extras))


def words_of(name: str, dist: Distribution) -> str:
    """What a distribution says of its licence: the expression, else classifiers, else the first line of the field."""
    about = dist.metadata
    if name in KNOWN:
        return KNOWN[name]
    classifiers = [
        each.split("::")[-1].strip() for each in about.get_all("Classifier") or () if each.startswith("License")
    ]
    field = (about.get("License") or "").strip().splitlines()
    return about.get("License-Expression") or ", ".join(classifiers) or (field[0][:80] if field else "")


def judge(name: str, words: str) -> Licence:
    """A licence with the reason why it cannot be taken, if there is one.

    >>> judge("a", "BSD-3-Clause").problem, judge("b", "").problem, judge("c", "MIT AND GPL-3.0-only").problem
    ('', 'unknown', 'incompatible')
    """
    if WRONG.search(words.replace("LGPL", "")):
        return Licence(name, words, "incompatible")
    known = all(FINE.search(part) for part in re.split(r"\s+AND\s+", words))
    return Licence(name, words, "" if known else "unknown")


def shipped(package: Path) -> Iterator[Licence]:
    """Files of others inside the package: each must have a licence text in its folder, and one that is known."""
    for path in sorted(each for each in package.rglob("*") if each.is_file() and "__pycache__" not in each.parts):
        written = path.suffix in OURS and ".min." not in path.name
        if path.name.startswith("LICENSE") or written or path.name in OUR_DATA:
            continue
        texts = [each.read_text(encoding="utf-8") for each in path.parent.glob("LICENSE*")]
        names = [kind for kind, sign in TEXTS.items() if any(sign in text for text in texts)]
        yield Licence(str(path.relative_to(package)), ", ".join(names), "" if names else "no known LICENSE beside it")


def everything() -> list[Licence]:
    dependencies = [judge(name, words_of(name, dist)) for name, dist in installed(asked_for()).items()]
    return [*dependencies, *shipped(ROOT / "src" / "anisoscope")]


if __name__ == "__main__":
    found = everything()
    for each in found:
        print(f"{each.name:<52} {each.words[:60]:<60} {each.problem}")
    sys.exit(any(each.problem for each in found))
