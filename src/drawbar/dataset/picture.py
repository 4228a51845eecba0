"""One made-up photograph as a JPEG file: what synthetic sets consist of.

A picture has what decides the cost of reading and decoding ImageNet (file size, pixels, 4:2:0 chroma, natural
statistics: power falling with frequency, occlusion edges, texture, grain), and a class that can be learnt but not
from its colour: the class is a pattern's family, orientation, pitch and proportion; colour, light, objects, contrast
and polarity are drawn without regard to it. Orientations stay within 0..90 degrees, so that mirrored pictures do not
look like those of another class.

Everything follows from (seed, index) and the class; float arithmetic is that of the installed numpy and OpenCV, so
equal bytes are promised for equal library versions and kinds of CPU only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Any

import cv2
import numpy as np
import simplejpeg
from numpy.typing import NDArray

Plane = NDArray[np.float32]
"""Grey levels 0..255 or factors, (height, width)."""
Bytes = NDArray[np.uint8]

MEAN_BYTES = 110_000
SD_BYTES = 50_000
"""ImageNet's training files average 110 kB; sizes are spread log-normally."""

FULL_SIZE = 500
"""Pixels of the long side of an average picture."""

_LOG_SD = math.sqrt(math.log1p((SD_BYTES / MEAN_BYTES) ** 2))
_LOG_MEAN = math.log(1.012 * MEAN_BYTES) - _LOG_SD**2 / 2  # the nearest quality falls short by 1 % on average
_GOLDEN = 0.6180339887498949
_PLASTIC = (0.7548776662466927, 0.5698402909980532)  # with these steps a sequence fills a square evenly
TILE = 64
_OBJECTS = 90
_SMALLEST_PITCH = 0.55
"""Of a pattern in a small picture, against the full size: periods of less than 8 pixels would be lost in the JPEG."""
_PITCH = (1.0, 1.0, 1.0, 1.0, 1.0, 1.6, 1.3, 1.6)
"""Relative period of each pattern family: those with more in a period get a longer one."""

_QUALITY = (70, 98)
_ENCODINGS = 3
_SIZE_TOLERANCE = 0.05
_SIZE_EXPONENT = -0.57
"""File size goes with about this power of the quantiser scale 200 - 2 * quality (measured on these pictures)."""


@dataclass(frozen=True)
class _Look:
    """How much of a picture is not its class."""

    objects: int
    shown: float
    """Share of the objects that bear the class pattern."""
    contrast: float
    """Of the pattern, relative."""
    detail: float
    """Texture and grain, relative to what the file size allows."""


_FULL = _Look(objects=_OBJECTS, shown=0.55, contrast=1.0, detail=1.0)
_PLAIN = _Look(objects=6, shown=0.9, contrast=1.4, detail=0.3)
"""Of pictures below the full size, which are for quick learning."""


@dataclass(frozen=True)
class Pattern:
    """What a class looks like."""

    family: int
    angle: float
    """Radians, 0..pi/2."""
    pitch: float
    """Pixels of one period."""
    proportion: float
    """Period across over period along."""


def class_pattern(label: int) -> Pattern:
    """The pattern of a class, numbered from 1. Neighbouring numbers differ in family; then the rest differs most."""
    step, family = divmod(label - 1, len(_PITCH))
    return Pattern(
        family=family,
        angle=math.pi / 2 * ((0.11 + 0.37 * family + step * _GOLDEN) % 1),
        pitch=15.0 * _PITCH[family] * 2 ** ((0.3 + step * _PLASTIC[0]) % 1),
        proportion=1.0 + 0.9 * ((0.2 + step * _PLASTIC[1]) % 1),
    )


def make_picture(seed: int, index: int, label: int, *, size: int = FULL_SIZE) -> bytes:
    """JPEG file number `index` of the set `seed`, showing class `label` (from 1).

    `size` is the long side of an average picture, in pixels; file sizes go with its square, the classes stay.
    """
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, index])))
    target = target_bytes(seed, index)
    scale = size / FULL_SIZE
    height, width = _shape(rng, target, scale)
    target *= scale**2
    detail = detail_for(rng, target * 8 / (height * width))
    return encode_near(_render(rng, class_pattern(label), height, width, detail, scale), target)


# Sizes


def target_bytes(seed: int, index: int) -> float:
    """File size to aim at in full size: a quantile of the distribution. Successive pictures fill 0..1 evenly."""
    quantile = (0.5 + seed * _PLASTIC[0] + index * _GOLDEN) % 1
    return math.exp(_LOG_MEAN + _LOG_SD * NormalDist().inv_cdf(min(max(quantile, 0.003), 0.997)))


def _shape(rng: np.random.Generator, target: float, scale: float) -> tuple[int, int]:
    """Height and width: mostly 500 pixels long at 4:3, larger for larger files, one in four upright."""
    long_side = 500 * (target / MEAN_BYTES) ** 0.35 * rng.uniform(0.88, 1.12)
    if 400 < long_side < 600 and rng.random() < 0.6:
        long_side = 500
    kind = rng.random()
    ratio = 4 / 3 if kind < 0.6 else 1.5 if kind < 0.8 else rng.uniform(1.0, 1.7)
    short_side = round(long_side / ratio * scale)
    long_side = round(long_side * scale)
    return (long_side, short_side) if rng.random() < 0.25 else (short_side, long_side)


def detail_for(rng: np.random.Generator, bits_per_pixel: float) -> float:
    """Strength of texture and grain: more where more bits have to go, so that the quality stays near the usual."""
    return float((bits_per_pixel / 4.7) ** 1.1 * rng.lognormal(0.0, 0.2))


# Drawing


def _render(rng: np.random.Generator, pattern: Pattern, height: int, width: int, detail: float, scale: float) -> Bytes:
    """RGB, (height, width, 3)."""
    look = _FULL if scale >= 1 else _PLAIN
    objects = leaves(rng, height, width, look.objects)
    light, tone, rough, shown = _object_tables(rng, look)
    detail *= look.detail
    base = smooth(look_up(objects, light))
    cloud = make_cloud(rng, height, width)
    veil = slow(rng, height, width)
    pattern_gain = smooth(look_up(objects, shown)) * (1.0 + 0.25 * np.tanh(veil))
    luma = base * (1.0 + 0.12 * veil)
    luma += pattern_gain * _pattern_field(rng, pattern, height, width, max(scale, _SMALLEST_PITCH))
    luma += (look_up(objects, rough) * detail) * cloud
    blue = chroma(rng, objects, tone[0], cloud, height, width)
    red = chroma(rng, objects, tone[1], cloud, height, width)
    return to_rgb(luma, red, blue)


def to_rgb(luma: Plane, red: Bytes, blue: Bytes) -> Bytes:
    """One array of three planes of one size."""
    # Not by simplejpeg's encode_jpeg_yuv_planes: 1.9.0 reads beyond planes of odd height, other bytes each time.
    return np.asarray(cv2.cvtColor(cv2.merge((levels(luma), red, blue)), cv2.COLOR_YCrCb2RGB), np.uint8)


def leaves(rng: np.random.Generator, height: int, width: int, count: int) -> Bytes:
    """Which object is seen at each pixel, 0 the background: shapes of many sizes, each hiding those before it.

    Such "dead leaves" have the edge and scale statistics of natural scenes (Lee, Mumford and Huang, 2001).
    """
    scene: Bytes = np.zeros((height, width), np.uint8)
    largest = 0.32 * min(height, width)
    radii = np.sort(5.0 * (largest / 5.0) ** rng.random(count) ** 1.5)[::-1]  # small ones last, on top
    centres = (rng.random((count, 2)) * (width, height)).astype(int)
    shapes = rng.random((count, 3))
    for number in range(count):
        centre = (int(centres[number, 0]), int(centres[number, 1]))
        kind, squash, turn = shapes[number]
        axes = (int(radii[number]) + 1, int(radii[number] * (0.35 + 0.65 * squash)) + 1)
        if kind < 0.6:
            cv2.ellipse(scene, centre, axes, 360 * turn, 0, 360, number + 1, -1)
        else:
            corners = cv2.ellipse2Poly(centre, axes, int(360 * turn), 0, 360, int(60 + 150 * (kind - 0.6)))
            cv2.fillConvexPoly(scene, np.asarray(corners), number + 1)
    return scene


def _object_tables(rng: np.random.Generator, look: _Look) -> tuple[Plane, tuple[Plane, Plane], Plane, Plane]:
    """Per object: brightness, both chroma levels, roughness, and how strongly the class pattern shows on it."""

    def table(values: Any) -> Plane:
        out: Plane = np.zeros(256, np.float32)
        out[: look.objects + 1] = values
        return out

    count = look.objects + 1
    mood = rng.normal((118, 128, 128), (26, 7, 7))  # the picture's own mean colour
    light = table(np.clip(rng.normal(mood[0], 38, count), 18, 238))
    tone = (table(rng.normal(mood[1], 9, count)), table(rng.normal(mood[2], 9, count)))
    rough = table(18.0 * rng.lognormal(-0.2, 0.7, count))
    visible = rng.random(count) < look.shown
    visible[0] = True
    contrast = rng.choice((-1.0, 1.0)) * rng.uniform(17, 34)
    return light, tone, rough, table(look.contrast * contrast * visible * rng.uniform(0.7, 1.2, count))


def make_cloud(rng: np.random.Generator, height: int, width: int) -> Plane:
    """Noise with about equal power in each octave, mean 0, as in natural textures; the finest octave is grain."""
    field = _normal(rng, max(height >> 5, 2), max(width >> 5, 2))
    for shift in (4, 3, 2, 1):
        rows, columns = max(height >> shift, 2), max(width >> shift, 2)
        field = resize(field, rows, columns)
        field += 0.8 * _normal(rng, rows, columns)
    field = resize(field, height, width)
    grain: Plane = np.frombuffer(rng.bytes(height * width), np.uint8).reshape(height, width).astype(np.float32)
    field += (grain - 127.5) * 0.007
    return field


def _pattern_field(rng: np.random.Generator, pattern: Pattern, height: int, width: int, scale: float) -> Plane:
    """The class pattern over the whole picture, mean 0 and deviation 1, bent and with some play in all it has."""
    angle = pattern.angle + float(rng.normal(0, 0.06))
    along = 1 / (pattern.pitch * min(scale, 1.0) * float(rng.uniform(0.88, 1.13)))
    across = along / (pattern.proportion * float(rng.uniform(0.94, 1.06)))
    cos, sin = math.cos(angle), math.sin(angle)
    phase_u, phase_v = map(float, rng.uniform(0, 1, 2))
    x: Plane = np.arange(width, dtype=np.float32)[None, :]
    y: Plane = np.arange(height, dtype=np.float32)[:, None]
    u = 0.22 * slow(rng, height, width) + (x * (along * cos) + (y * (along * sin) + phase_u))
    v = 0.22 * slow(rng, height, width) + (y * (across * cos) - (x * (across * sin) - phase_v))
    # Wrapped here: OpenCV's own border wrapping takes ten times as long.
    u -= np.floor(u)
    v -= np.floor(v)
    u *= TILE
    v *= TILE
    return np.asarray(cv2.remap(tile(pattern.family), u, v, cv2.INTER_LINEAR), np.float32)


@cache
def tile(family: int) -> Plane:
    """One period of a pattern family, mean 0, deviation 1; (TILE + 1, TILE + 1), the first row and column again."""
    v, u = np.meshgrid(*[np.arange(TILE) * (2 * np.pi / TILE)] * 2, indexing="ij")
    saw = np.abs(v / np.pi - 1)
    radius = np.hypot(u - np.pi, v - np.pi)
    row_shift = np.pi * (v > np.pi)
    fields = {
        0: lambda: np.sin(u),  # stripes
        1: lambda: np.tanh(3 * np.sin(u) * np.sin(v)),  # checks
        2: lambda: np.tanh(3 * (np.cos(u) + np.cos(v) - 0.8)),  # dots
        3: lambda: np.sin(u + 4 * saw),  # zigzag
        4: lambda: np.cos(u) + np.cos(v) + np.cos(u - v),  # honeycomb
        5: lambda: np.maximum(np.cos(2 * v) ** 8, np.cos((u + row_shift) / 2) ** 16),  # bricks
        6: lambda: np.cos(2.2 * radius) * (radius < np.pi),  # rings
        7: lambda: np.where((u < np.pi) == (v < np.pi), np.sin(4 * u), np.sin(4 * v)),  # basket weave
    }
    field = fields[family]()
    return np.pad((field - field.mean()) / field.std(), (0, 1), mode="wrap").astype(np.float32)


def chroma(rng: np.random.Generator, objects: Bytes, table: Plane, cloud: Plane, height: int, width: int) -> Bytes:
    """A chroma plane, drawn at half size: the objects' tones, drifting slowly, with a little of the texture."""
    rows, columns = (height + 1) // 2, (width + 1) // 2
    plane = resize(look_up(objects, table), rows, columns)
    plane += 4.0 * slow(rng, rows, columns)
    plane += float(rng.normal(0, 1.5)) * resize(cloud, rows, columns)
    return np.asarray(cv2.resize(levels(plane), (width, height), interpolation=cv2.INTER_LINEAR), np.uint8)


def _normal(rng: np.random.Generator, *shape: int) -> Plane:
    return rng.standard_normal(shape, dtype=np.float32)


def slow(rng: np.random.Generator, height: int, width: int) -> Plane:
    """A field that changes a few times across the picture, deviation about 0.7; cubic only at an eighth of the size."""
    small = resize(_normal(rng, 4, 5), height // 8 + 1, width // 8 + 1, cv2.INTER_CUBIC)
    return resize(small, height, width)


def resize(plane: Plane, height: int, width: int, how: int = cv2.INTER_LINEAR) -> Plane:
    return np.asarray(cv2.resize(plane, (width, height), interpolation=how), np.float32)


def look_up(objects: Bytes, table: Plane) -> Plane:
    """The table's value for the object at each pixel."""
    return np.asarray(cv2.LUT(objects, table), np.float32)


def smooth(plane: Plane) -> Plane:
    """Softens the objects' stepped outlines over about one pixel, as a lens does."""
    return np.asarray(cv2.GaussianBlur(plane, (3, 3), 0.7), np.float32)


def levels(plane: Plane) -> Bytes:
    return np.ascontiguousarray(np.clip(plane, 0, 255).astype(np.uint8))


# Encoding


def encode_near(pixels: Bytes, target: float) -> bytes:
    """The JPEG nearest to `target` bytes among a few qualities, each chosen from the size before."""
    quality = 94
    tried: dict[int, bytes] = {}
    while len(tried) < _ENCODINGS and quality not in tried:
        tried[quality] = simplejpeg.encode_jpeg(pixels, quality=quality, colorspace="RGB", colorsubsampling="420")
        ratio = target / len(tried[quality])
        if abs(ratio - 1) < _SIZE_TOLERANCE:
            break
        scale = (200 - 2 * quality) * ratio ** (1 / _SIZE_EXPONENT)
        quality = min(max(round((200 - scale) / 2), _QUALITY[0]), _QUALITY[1])
    return min(tried.values(), key=lambda data: abs(len(data) - target))
