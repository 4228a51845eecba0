"""One made-up scene of a coco-like set: several things of named categories, partly hiding each other, and its objects.

What a category is shows in outline and texture alone; colour, light and size are drawn without regard to it. The
layout comes first and is cheap: it decides everything that annotations say. Drawing the picture is a second step.

Everything follows from the key (a list of integers); see `picture` for what that promises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import cv2
import numpy as np
from numpy.typing import NDArray

from drawbar.dataset import picture
from drawbar.dataset.picture import Bytes, Plane

FULL_SIZE = 640
"""Pixels of a scene's long side, by default."""
MEAN_BYTES = 163_000
"""COCO's training files average 163 kB, at 640 x 480."""

COUNTS = (12, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3)
"""Of 100 scenes, how many have 1, 2, ... 12 objects. 5.2 on average."""
SIZES = ((0.41, 12.0, 32.0), (0.34, 32.0, 96.0), (0.25, 96.0, 250.0))
"""Share of the objects, and the range of the square root of their area: COCO's small, medium and large."""
CROWD_SHARE = 0.06
"""Scenes with a crowd region besides, which is 1 % of the annotations, as in COCO."""

_LEAST_VISIBLE = 0.45
"""No object is hidden further than this by later ones."""
_LEAST_SIDE = (12.0, 16.0)
"""Of an object, in pixels: in a full-size scene, and in smaller ones, where the ranges shrink with the scene."""
_CROWD_MEMBERS = (12, 24)
_TRIES = 20
_LEAVES = 40
_SHIFT = 4  # fillPoly's fixed point: 1/16 pixel

Outline = NDArray[np.float64]
"""Corners, (n, 2)."""


@dataclass(frozen=True)
class Category:
    category_id: int
    name: str
    outline: Callable[[], Outline]
    """Around (0, 0), within a circle of radius 1 or little more."""
    family: int
    """Of its texture; see `picture.tile`."""
    share: float
    """Of the objects."""


@dataclass
class Thing:
    """One drawn shape."""

    category: Category
    corners: Outline
    angle: float
    pitch: float
    """Pixels of one period of the texture."""


@dataclass
class Placed:
    """An object of a scene, or a crowd of things that count as one."""

    category: Category
    things: list[Thing] = field(default_factory=list)
    crowd: bool = False


@dataclass
class Layout:
    height: int
    width: int
    objects: list[Placed]
    """The later ones in front."""
    ids: Bytes
    """Which object is seen at each pixel, numbered from 1; 0: none. (height, width)"""


# Categories


def _disc() -> Outline:
    turn = np.linspace(0, 2 * np.pi, 40, endpoint=False)
    return np.stack([np.cos(turn), np.sin(turn)], 1)


def _square() -> Outline:
    return np.array([[-0.8, -0.8], [0.8, -0.8], [0.8, 0.8], [-0.8, 0.8]])


def _triangle() -> Outline:
    return np.array([[0, -1.0], [0.95, 0.7], [-0.95, 0.7]])


def _star() -> Outline:
    turn = np.arange(10) * (np.pi / 5) - np.pi / 2
    radius = np.where(np.arange(10) % 2, 0.42, 1.08)
    return np.stack([radius * np.cos(turn), radius * np.sin(turn)], 1)


def _cross() -> Outline:
    a, b = 0.34, 1.0
    quarter = [
        (-a, -b),
        (a, -b),
        (a, -a),
        (b, -a),
        (b, a),
        (a, a),
        (a, b),
        (-a, b),
        (-a, a),
        (-b, a),
        (-b, -a),
        (-a, -a),
    ]
    return np.array(quarter)


def _arrow() -> Outline:
    return np.array([[-1.0, -0.3], [0.1, -0.3], [0.1, -0.8], [1.0, 0], [0.1, 0.8], [0.1, 0.3], [-1.0, 0.3]])


def _crescent() -> Outline:
    """A disc without a smaller one beside its centre."""
    outer, inner = np.linspace(1.016, 2 * np.pi - 1.016, 36), np.linspace(2 * np.pi - 1.538, 1.538, 28)
    back = np.stack([np.cos(outer), np.sin(outer)], 1)
    front = np.stack([0.85 * np.cos(inner) + 0.5, 0.85 * np.sin(inner)], 1)
    moon: Outline = np.concatenate([back, front[1:-1]])
    return moon


def _heart() -> Outline:
    t = np.linspace(0, 2 * np.pi, 36, endpoint=False)
    x = np.sin(t) ** 3
    y = -(13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t)) / 16
    return np.stack([x, y], 1)


def _half() -> Outline:
    turn = np.linspace(np.pi, 2 * np.pi, 24)
    return np.stack([np.cos(turn), np.sin(turn) + 0.4], 1)


def _kite() -> Outline:
    return np.array([[0, -1.15], [0.5, -0.2], [0, 1.15], [-0.5, -0.2]])


CATEGORIES = (
    Category(1, "ringed disc", _disc, 6, 0.18),
    Category(2, "brick square", _square, 5, 0.14),
    Category(3, "striped triangle", _triangle, 0, 0.12),
    Category(5, "dotted star", _star, 2, 0.11),
    Category(7, "checked cross", _cross, 1, 0.10),
    Category(11, "zigzag arrow", _arrow, 3, 0.09),
    Category(18, "honeycomb crescent", _crescent, 4, 0.08),
    Category(27, "woven heart", _heart, 7, 0.07),
    Category(44, "checked half-disc", _half, 1, 0.06),
    Category(90, "striped kite", _kite, 0, 0.05),
)
"""Ids have gaps, as COCO's have. Two categories may share a texture, never an outline."""


@cache
def _unit(category: Category) -> tuple[Outline, float]:
    """The outline and the root of its area."""
    corners = category.outline()
    return corners, math.sqrt(cv2.contourArea(corners.astype(np.float32)))


# Layout


def make_layout(key: Sequence[int], size: int = FULL_SIZE) -> Layout:
    """`size` is the long side, in pixels, from 96 on."""
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([*key, 0])))
    height, width = _shape(rng, size)
    count = int(rng.choice(len(COUNTS), p=np.array(COUNTS) / sum(COUNTS))) + 1
    shares = [category.share for category in CATEGORIES]
    categories = [CATEGORIES[number] for number in rng.choice(len(CATEGORIES), count, p=shares)]
    sides = sorted(
        (_side(rng, size) for _ in range(count)), reverse=True
    )  # what is small is not hidden by what is large
    board = _Board(height, width)
    crowd_at = int(rng.integers(0, count)) if rng.random() < CROWD_SHARE else -1
    for number, (category, side) in enumerate(zip(categories, sides, strict=True)):
        if number == crowd_at:
            _place(rng, board, partial(_crowd, rng, board, size))
        _place(rng, board, partial(_single, rng, board, category, side))
    return Layout(height, width, board.objects, board.ids)


def _shape(rng: np.random.Generator, size: int) -> tuple[int, int]:
    """Height and width: 4:3 and 3:2 mostly, one in four upright."""
    kind = rng.random()
    ratio = 4 / 3 if kind < 0.55 else 1.5 if kind < 0.85 else rng.uniform(1.0, 1.78)
    short_side = round(size / ratio)
    return (size, short_side) if rng.random() < 0.25 else (short_side, size)


def _side(rng: np.random.Generator, size: int) -> float:
    """Root of an object's area, in pixels."""
    _, low, high = SIZES[int(rng.choice(len(SIZES), p=[share for share, _, _ in SIZES]))]
    scale = size / FULL_SIZE
    # What lies in front takes away about a tenth.
    side = 1.05 * scale * low * math.exp(math.log(high / low) * rng.random())
    return max(side, _LEAST_SIDE[0] if scale >= 1 else _LEAST_SIDE[1])


class _Board:
    """The scene while it is being laid out."""

    def __init__(self, height: int, width: int) -> None:
        self.height, self.width = height, width
        self.ids: Bytes = np.zeros((height, width), np.uint8)
        self.objects: list[Placed] = []
        self._whole: list[int] = [1]
        self._visible: list[int] = [1]

    def put(self, placed: Placed, force: bool = False) -> bool:
        """In front of all that is there, unless it would hide too much of something."""
        mask, top, left = _mask(placed, self.height, self.width)
        behind = self.ids[top : top + mask.shape[0], left : left + mask.shape[1]]
        hidden = np.bincount(behind[mask], minlength=len(self._visible))
        left_over = [visible - lost for visible, lost in zip(self._visible, hidden.tolist(), strict=True)]
        enough = (seen >= _LEAST_VISIBLE * whole for seen, whole in zip(left_over[1:], self._whole[1:], strict=True))
        if not force and not all(enough):
            return False
        self._visible = left_over
        self.objects.append(placed)
        behind[mask] = len(self.objects)
        pixels = int(np.count_nonzero(mask))
        self._whole.append(pixels)
        self._visible.append(pixels)
        return True

    def near(self, rng: np.random.Generator) -> tuple[float, float]:
        """Somewhere; one time in three beside or before a thing that is there."""
        if self.objects and rng.random() < 0.35:
            corners = self.objects[int(rng.integers(len(self.objects)))].things[0].corners
            reach = np.ptp(corners, 0)
            x, y = corners.mean(0) + reach * rng.uniform(-0.7, 0.7, 2)
            return float(x), float(y)
        return float(rng.uniform(0, self.width)), float(rng.uniform(0, self.height))


def _place(rng: np.random.Generator, board: _Board, draw: Callable[[float], Placed]) -> None:
    """Tries places, then smaller sizes too; what fits nowhere goes anywhere."""
    scale = 1.0
    for number in range(1, 6 * _TRIES):
        if board.put(draw(scale)):
            return
        if number % _TRIES == 0:
            scale *= 0.75
    board.put(draw(scale), force=True)


def _single(rng: np.random.Generator, board: _Board, category: Category, side: float, scale: float) -> Placed:
    return Placed(category, [_thing(rng, board, category, side * scale, board.near(rng))])


def _crowd(rng: np.random.Generator, board: _Board, size: int, scale: float) -> Placed:
    """Many small things of one category in a group."""
    category = CATEGORIES[int(rng.integers(len(CATEGORIES)))]
    side = max(float(rng.uniform(16, 30)) * scale * size / FULL_SIZE, 9.0)
    middle = np.array(board.near(rng))
    spread = side * np.array([rng.uniform(2.0, 3.5), rng.uniform(1.0, 1.8)])
    members = int(rng.integers(*_CROWD_MEMBERS))
    places = middle + rng.normal(0, 1, (members, 2)).clip(-1.6, 1.6) * spread
    things = [_thing(rng, board, category, side, (float(x), float(y))) for x, y in places]
    return Placed(category, things, crowd=True)


def _thing(
    rng: np.random.Generator, board: _Board, category: Category, side: float, centre: tuple[float, float]
) -> Thing:
    """Turned and stretched a little, and moved inside the scene."""
    corners, unit_side = _unit(category)
    stretch = math.exp(float(rng.normal(0, 0.12)))
    angle = float(rng.normal(0, 0.22))
    cos, sin = math.cos(angle), math.sin(angle)
    turned = (corners * (stretch, 1 / stretch)) @ np.array([[cos, sin], [-sin, cos]]) * (side / unit_side)
    limit = np.array([board.width, board.height]) - 3.0
    turned *= min(1.0, float((limit / np.ptp(turned, 0)).min()))
    low, high = 1.0 - turned.min(0), limit + 1.0 - turned.max(0)
    pitch = min(max(side / 4.0, 5.0), 26.0) * float(rng.uniform(0.88, 1.13))
    return Thing(category, turned + np.clip(centre, low, high), angle, pitch)


def _mask(placed: Placed, height: int, width: int) -> tuple[NDArray[np.bool_], int, int]:
    """Pixels of an object as if nothing hid it, in the smallest box, and that box's first row and column."""
    every = np.concatenate([thing.corners for thing in placed.things])
    left, top = np.floor(every.min(0)).astype(int)
    right, bottom = np.ceil(every.max(0)).astype(int) + 1
    left, top, right, bottom = max(left, 0), max(top, 0), min(right, width), min(bottom, height)
    mask = np.zeros((bottom - top, right - left), np.uint8)
    for thing in placed.things:
        _fill(mask, thing, left, top, 1)
    return mask.astype(bool), int(top), int(left)


def _fill(mask: Bytes, thing: Thing, left: int, top: int, value: int) -> None:
    # In fixed point pixel centres are whole numbers.
    corners = np.round((thing.corners - (left + 0.5, top + 0.5)) * (1 << _SHIFT)).astype(np.int32)
    cv2.fillPoly(mask, [corners], value, shift=_SHIFT)


# Drawing


def draw(key: Sequence[int], layout: Layout, target_bytes: float) -> bytes:
    """The scene as a JPEG file (4:2:0) of about this size."""
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([*key, 1])))
    height, width = layout.height, layout.width
    detail = picture.detail_for(rng, target_bytes * 8 / (height * width))
    count = len(layout.objects)
    leaves = picture.leaves(rng, height, width, _LEAVES)
    shown: Bytes = np.where(layout.ids > 0, layout.ids + np.uint8(_LEAVES), leaves).astype(np.uint8)
    light = _table(rng.normal(118, 20, _LEAVES + 1), rng.normal(122, 34, count))
    rough = _table(15.0 * rng.lognormal(-0.2, 0.6, _LEAVES + 1), np.full(count, 4.0))
    tones = [_table(rng.normal(128, 9, _LEAVES + 1), rng.normal(128, 16, count)) for _ in range(2)]
    cloud = picture.make_cloud(rng, height, width)
    luma = picture.look_up(shown, light)
    luma += _textures(rng, layout)
    luma = picture.smooth(luma)
    luma *= 1.0 + 0.1 * picture.slow(rng, height, width)
    luma += (picture.look_up(shown, rough) * detail) * cloud
    blue, red = (picture.chroma(rng, shown, tone, cloud, height, width) for tone in tones)
    return picture.encode_near(picture.to_rgb(luma, red, blue), target_bytes)


def _table(background: NDArray[np.float64], objects: NDArray[np.float64]) -> Plane:
    """By number in the map of what is shown."""
    table: Plane = np.zeros(256, np.float32)
    values = np.concatenate([background, objects])
    table[: len(values)] = np.clip(values, 0, 235)
    return table


def _textures(rng: np.random.Generator, layout: Layout) -> Plane:
    """What the objects' textures add to the brightness."""
    added: Plane = np.zeros((layout.height, layout.width), np.float32)
    for number, placed in enumerate(layout.objects, start=1):
        contrast = float(rng.choice((-1.0, 1.0))) * float(rng.uniform(30, 48))
        for thing in placed.things:
            mask, top, left = _mask(Placed(placed.category, [thing]), layout.height, layout.width)
            part = (slice(top, top + mask.shape[0]), slice(left, left + mask.shape[1]))
            mask = mask & (layout.ids[part] == number)
            shade = float(rng.normal(0, 18)) if placed.crowd else 0.0
            added[part][mask] = (contrast * _texture(rng, thing, *mask.shape) + shade)[mask]
    return added


def _texture(rng: np.random.Generator, thing: Thing, height: int, width: int) -> Plane:
    period = thing.pitch * (1.5 if thing.category.family >= 4 else 1.0)
    angle = thing.angle + 0.5
    cos, sin = math.cos(angle) / period, math.sin(angle) / period
    phase = rng.uniform(0, 1, 2)
    x: Plane = np.arange(width, dtype=np.float32)[None, :]
    y: Plane = np.arange(height, dtype=np.float32)[:, None]
    u = x * np.float32(cos) + (y * np.float32(sin) + np.float32(phase[0]))
    v = y * np.float32(cos) - (x * np.float32(sin) - np.float32(phase[1]))
    u = (u - np.floor(u)) * picture.TILE
    v = (v - np.floor(v)) * picture.TILE
    return np.asarray(cv2.remap(picture.tile(thing.category.family), u, v, cv2.INTER_LINEAR), np.float32)
