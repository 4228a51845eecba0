"""The seen part of an object as COCO's polygons: a few corners, good to about a pixel."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from drawbar.dataset.coco_mask import Mask

_TOLERANCE = 0.75
"""Pixels between an outline and its polygon, at most."""
_SMALLEST_PIECE = 6
"""Pixels; smaller pieces of an object that is seen in several are left out."""
_SMALLEST_HOLE = 16
"""Pixels; smaller holes are filled."""

_Corners = NDArray[np.float64]


def polygons(mask: Mask, left: int, top: int) -> list[list[float]]:
    """Outlines of a mask that is a part of an image from this column and row on: x, y, x, y, ... each.

    A hole becomes part of its outline by a cut from one to the other and back, which covers no pixel.
    """
    # A contour runs through pixel centres, within the edge that COCO's polygons mean; in twice the size it is a quarter
    # of a pixel within, and still around the centres.
    doubled = np.pad(np.repeat(np.repeat(mask, 2, 0), 2, 1), 1)
    found, tree = cv2.findContours(doubled, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_NONE)
    parents = np.asarray(tree).reshape(-1, 4)[:, 3].tolist() if len(found) else []
    outer = [number for number, parent in enumerate(parents) if parent < 0]
    if not outer:
        return []
    # A single small object keeps its largest piece, whatever its size.
    largest = max(outer, key=lambda number: _area(found[number]))
    pieces = []
    for number in outer:
        if number != largest and _area(found[number]) < _SMALLEST_PIECE:
            continue
        corners = _simplified(found[number])
        holes = [other for other, parent in enumerate(parents) if parent == number]
        for hole in holes:
            if _area(found[hole]) >= _SMALLEST_HOLE:
                corners = _joined(corners, _simplified(found[hole]))
        if len(corners) >= 3:
            place = (corners - 0.5) / 2 + (left, top)  # -1 for the padding, +0.5 for the centre
            pieces.append([round(float(value), 2) for value in place.ravel()])
    return pieces


def _area(contour: Any) -> float:
    """Pixels, in the undoubled size."""
    return float(cv2.contourArea(contour)) / 4


def _simplified(contour: Any) -> _Corners:
    corners = cv2.approxPolyDP(contour, 2 * _TOLERANCE, True)
    if len(corners) < 3:  # thin as a line: its bounding box
        x, y, width, height = cv2.boundingRect(contour)
        return np.array([[x, y], [x + width, y], [x + width, y + height], [x, y + height]], np.float64) - 0.25
    return np.asarray(corners.reshape(-1, 2), np.float64)


def _joined(outline: _Corners, hole: _Corners) -> _Corners:
    """One outline through both, cut where they are nearest."""
    distance = np.square(outline[:, None] - hole[None]).sum(2)
    at, start = np.unravel_index(int(distance.argmin()), distance.shape)
    around = np.concatenate([hole[start:], hole[: start + 1]])
    return np.concatenate([outline[: at + 1], around, outline[at:]])
