"""Colours by role. A drawing names roles; a theme says what they are, so that one figure serves light and dark.

In the report the roles travel as tokens (`@s1/0.2`, `@seq:0.4`, `@heat`) that the page resolves from its style sheet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

# Okabe and Ito's hues, darkened or lightened until thin lines keep contrast on paper and on slate.
LIGHT = ("#0b6aa8", "#c8500a", "#00805c", "#9c4a86", "#a37400", "#3b8fc4", "#6b6660", "#7a3b12")
SEQUENCE = ("#dd9a2b", "#c9572f", "#9b3163", "#5a3286", "#1f2f6b")
HEAT = ("#f3efe4", "#c3d6d0", "#78adb3", "#34768f", "#173a5e")
DASHES = ("solid", "dot", "dashdot", "longdash")


class Palette(Protocol):
    """What a drawing asks for."""

    def series(self, i: int, alpha: float = 1.0) -> str: ...

    def sequence(self, t: float) -> str: ...

    def role(self, name: str) -> str: ...

    def heat(self) -> Any: ...


class Tokens:
    """Roles for the report page, resolved there."""

    def series(self, i: int, alpha: float = 1.0) -> str:
        name = f"@s{i % len(LIGHT) + 1}"
        return name if alpha == 1 else f"{name}/{alpha:g}"

    def sequence(self, t: float) -> str:
        return f"@seq:{t:.3f}"

    def role(self, name: str) -> str:
        return f"@{name}"

    def heat(self) -> Any:
        return "@heat"


class Paper:
    """Real colours that read on white, and on dark notebooks too: text and rules are a middle grey."""

    _roles = {"ink": "#77726b", "rule": "rgba(128,128,128,0.22)", "paper": "#ffffff", "accent": "#0b6aa8"}  # noqa: RUF012

    def series(self, i: int, alpha: float = 1.0) -> str:
        return with_alpha(LIGHT[i % len(LIGHT)], alpha)

    def sequence(self, t: float) -> str:
        return blend(SEQUENCE, t)

    def role(self, name: str) -> str:
        return self._roles[name]

    def heat(self) -> Any:
        return [[i / (len(HEAT) - 1), colour] for i, colour in enumerate(HEAT)]


def with_alpha(colour: str, alpha: float) -> str:
    """A hex colour with transparency.

    >>> with_alpha("#0b6aa8", 0.2)
    'rgba(11,106,168,0.2)'
    """
    if alpha == 1:
        return colour
    red, green, blue = _channels(colour)
    return f"rgba({red},{green},{blue},{alpha:g})"


def blend(stops: Sequence[str], t: float) -> str:
    """The colour at t in [0, 1] of evenly spaced stops.

    >>> blend(("#000000", "#ffffff"), 0.5)
    '#808080'
    """
    place = min(max(t, 0.0), 1.0) * (len(stops) - 1)
    left = min(int(place), len(stops) - 2)
    pairs = zip(_channels(stops[left]), _channels(stops[left + 1]), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (place - left)):02x}" for a, b in pairs)


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
