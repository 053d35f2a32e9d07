"""Colours by role: a figure names roles as tokens, a theme says what they are, so that it serves light and dark.

    @s1 … @s8   colours of series        @seq:0.4   a place on the ramp of depth or time
    @ink, @soft, @rule, @paper, @accent  roles of the page       TOKEN/0.2   the same, transparent
The page resolves tokens from its style sheet, vector files and notebooks by `resolve`.
"""

from __future__ import annotations

from collections.abc import Sequence

# Okabe and Ito's hues, darkened or lightened until thin lines keep contrast on paper and on slate.
LIGHT = ("#0b6aa8", "#c8500a", "#00805c", "#9c4a86", "#a37400", "#3b8fc4", "#6b6660", "#7a3b12")
SEQUENCE = ("#dd9a2b", "#c9572f", "#9b3163", "#5a3286", "#1f2f6b")
HEAT = ("#f3efe4", "#c3d6d0", "#78adb3", "#34768f", "#173a5e")
ROLES = {"ink": "#1d1b18", "soft": "#625d55", "rule": "#ddd7ca", "paper": "#ffffff", "accent": "#0b6aa8"}
# In a notebook, whose background may be dark, text and rules are a middle grey.
NOTEBOOK = {"ink": "#77726b", "soft": "#77726b", "rule": "rgba(128,128,128,0.22)"}
DASHES = ("solid", "dot", "dashdot", "longdash")


def series(i: int, alpha: float = 1.0) -> str:
    """The token of the i-th series.

    >>> series(0), series(9, 0.2)
    ('@s1', '@s2/0.2')
    """
    return faded(f"@s{i % len(LIGHT) + 1}", alpha)


def sequence(t: float) -> str:
    """The token of a place on the ramp, t in [0, 1]."""
    return f"@seq:{t:.3f}"


def faded(token: str, alpha: float) -> str:
    """The same colour, transparent."""
    return token if alpha == 1 else f"{token.split('/')[0]}/{alpha:g}"


def resolve(token: str) -> tuple[str, float]:
    """The colour of a token on paper, and how opaque it is.

    >>> resolve("@s2/0.2"), resolve("#123456"), resolve("@seq:0.000")
    (('#c8500a', 0.2), ('#123456', 1.0), ('#dd9a2b', 1.0))
    """
    name, _, alpha = token.partition("/")
    opacity = float(alpha) if alpha else 1.0
    if name.startswith("@seq:"):
        return blend(SEQUENCE, float(name[5:])), opacity
    if name.startswith("@s") and name[2:].isdigit():
        return LIGHT[int(name[2:]) - 1], opacity
    return ROLES.get(name[1:], name), opacity


def notebook_colour(token: str) -> str:
    """A token as plotly's own notation in a notebook.

    >>> notebook_colour("@s1/0.2"), notebook_colour("@rule")
    ('rgba(11,106,168,0.2)', 'rgba(128,128,128,0.22)')
    """
    if not token.startswith("@"):
        return token
    if token[1:] in NOTEBOOK:
        return NOTEBOOK[token[1:]]
    colour, alpha = resolve(token)
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
