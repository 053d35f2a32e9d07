"""Synthetic media with known classes, made with numpy alone: speech-like clips and pictures of textured shapes."""

from __future__ import annotations

import numpy as np

SHAPES = ("disc", "square", "triangle", "ring", "cross", "diamond", "bars", "checks", "heart", "crescent")
# Mean frequencies (Hz) of the first three formants, one row each: one vowel per class of clip.
FORMANTS = np.array(
    [
        [270.0, 390.0, 530.0, 660.0, 730.0, 570.0, 440.0, 300.0, 640.0, 490.0],
        [2290.0, 1990.0, 1840.0, 1720.0, 1090.0, 840.0, 1020.0, 870.0, 1190.0, 1350.0],
        [3010.0, 2550.0, 2480.0, 2410.0, 2440.0, 2410.0, 2240.0, 2240.0, 2390.0, 1690.0],
    ]
)
CLASSES = len(SHAPES)
CLIP_STREAM, PICTURE_STREAM = 1, 2


def make_clip(index: int, *, seconds: float = 2.0, rate: int = 16_000, seed: int = 0) -> tuple[np.ndarray, int]:
    """Return (samples float32 [T] within ±1, class): syllables of vowel number `index` mod 10 in a random voice.

    A voiced pulse train whose harmonics are weighted by three formant resonances, in syllables with a
    rising and falling pitch, a burst of noise before each and a short pause after it.

    >>> samples, label = make_clip(13, seconds=0.5)
    >>> samples.shape, str(samples.dtype), label
    ((8000,), 'float32', 3)
    """
    random = np.random.default_rng((seed, CLIP_STREAM, index))
    label = index % CLASSES
    samples = np.zeros(max(round(seconds * rate), 1))
    pitch, tract = random.uniform(85.0, 240.0), random.uniform(0.92, 1.12)
    start = 0
    while start < samples.size:
        length = round(random.uniform(0.12, 0.3) * rate)
        sound = _syllable(random, length=length, rate=rate, pitch=pitch, formants=tract * FORMANTS[:, label])
        end = min(start + length, samples.size)
        samples[start:end] = sound[: end - start]
        start = end + round(random.uniform(0.02, 0.1) * rate)
    samples += 0.003 * random.standard_normal(samples.size)  # background noise
    return (0.7 * samples / max(float(np.abs(samples).max()), 1e-9)).astype(np.float32), label


def _syllable(random: np.random.Generator, *, length: int, rate: int, pitch: float, formants: np.ndarray) -> np.ndarray:
    """Return one syllable: a noise burst, then harmonics of a gliding pitch under the formants' resonances."""
    place = np.linspace(0.0, 1.0, length, endpoint=False)
    glide = pitch * (1.0 + random.uniform(-0.15, 0.15) * (place - 0.5)) * random.uniform(0.9, 1.1)
    phase = 2 * np.pi * np.cumsum(glide) / rate
    harmonics = np.arange(1, max(int(min(4000.0, 0.45 * rate) // pitch), 1) + 1)
    widths = np.array([90.0, 120.0, 180.0])
    gains = (1.0 / (1.0 + ((harmonics[:, None] * pitch - formants) / widths) ** 2)).sum(1) / np.sqrt(harmonics)
    turn, power, voiced = np.exp(1j * phase), np.ones(length, dtype=complex), np.zeros(length)
    for gain in gains:  # sin of the k-th harmonic is the imaginary part of the k-th power
        power *= turn
        voiced += gain * power.imag
    voiced *= np.sin(np.pi * place) ** 0.5
    burst = random.standard_normal(length) * np.exp(-place / 0.06) * random.uniform(0.1, 0.5)
    return voiced + burst


def make_picture(index: int, *, size: int = 64, seed: int = 0) -> tuple[np.ndarray, int]:
    """Return (pixels uint8 [size, size, 3], class): textured shape number `index` mod 10 on a textured ground.

    >>> pixels, label = make_picture(4, size=32)
    >>> pixels.shape, str(pixels.dtype), SHAPES[label]
    ((32, 32, 3), 'uint8', 'cross')
    """
    random = np.random.default_rng((seed, PICTURE_STREAM, index))
    label = index % CLASSES
    inside = _shape(random, name=SHAPES[label], size=size)
    ground, figure = _texture(random, size=size), _texture(random, size=size)
    # Figure and ground differ in brightness, so that the shape can be seen whatever their colours are.
    dark, bright = random.permutation([0.35, 1.0])
    pixels = np.where(inside[:, :, None], bright * figure, dark * ground)
    pixels = pixels + 0.03 * random.standard_normal(pixels.shape)
    return np.clip(255 * pixels, 0, 255).astype(np.uint8), label


def _texture(random: np.random.Generator, *, size: int) -> np.ndarray:
    """Return [size, size, 3] in 0…1: two colours mixed by a few plane waves, a gradient and blotches."""
    y, x = np.mgrid[0:size, 0:size] / max(size, 1)
    mix = random.uniform(-1, 1) * x + random.uniform(-1, 1) * y
    for _ in range(3):
        angle, turns = random.uniform(0, np.pi), random.uniform(1, 9)
        mix = mix + 0.5 * np.sin(2 * np.pi * turns * (np.cos(angle) * x + np.sin(angle) * y) + random.uniform(0, 6.3))
    blotches = random.standard_normal((-(-size // 4), -(-size // 4))).repeat(4, 0).repeat(4, 1)[:size, :size]
    share = 1.0 / (1.0 + np.exp(-(mix + 0.4 * blotches)))[:, :, None]
    first, second = random.uniform(0.2, 1.0, (2, 3))
    return share * first + (1.0 - share) * second


def _shape(random: np.random.Generator, *, name: str, size: int) -> np.ndarray:
    """Return bool [size, size]: the named shape at a random place, size and angle."""
    y, x = (np.mgrid[0:size, 0:size] + 0.5) / size * 2 - 1
    angle, scale = random.uniform(-0.35, 0.35), random.uniform(0.5, 0.8)
    x, y = x - random.uniform(-0.15, 0.15), y - random.uniform(-0.15, 0.15)
    x, y = (np.cos(angle) * x + np.sin(angle) * y) / scale, (np.cos(angle) * y - np.sin(angle) * x) / scale
    radius, square = np.hypot(x, y), (np.abs(x) < 0.9) & (np.abs(y) < 0.9)
    shapes = {
        "disc": radius < 0.95,
        "square": square,
        "triangle": (y < 0.8) & (y > 1.9 * np.abs(x) - 0.9),
        "ring": (radius < 1.0) & (radius > 0.55),
        "cross": square & ((np.abs(x) < 0.3) | (np.abs(y) < 0.3)),
        "diamond": np.abs(x) + np.abs(y) < 1.0,
        "bars": square & (np.floor((x + 1) * 2.5) % 2 == 0),
        "checks": square & ((np.floor((x + 1) * 2) + np.floor((y + 1) * 2)) % 2 == 0),
        "heart": (x**2 + y**2 - 0.6) ** 3 + x**2 * y**3 < 0,
        "crescent": (radius < 1.0) & (np.hypot(x - 0.45, y) > 0.75),
    }
    return shapes[name]
