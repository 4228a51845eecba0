"""The members of COCO's JSON objects, checked: whole numbers, boxes, areas, names; and what is said of wrong ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from drawbar.dataset.coco_json import Element
from drawbar.errors import DataError

_MAX_FLOAT32 = 3.4028234663852886e38


def object_fields(value: Any) -> tuple[list[float], int, float]:
    """Box (x, y, width, height in pixels), crowd flag and area of an annotation that the index took."""
    box = _numbers(value.get("bbox"), "bbox")
    return box, crowd_flag(value), _area(value, box)


def crowd_flag(value: dict[str, Any]) -> int:
    crowd = value.get("iscrowd", 0)
    return int(crowd) if isinstance(crowd, int) else -1


def _area(value: dict[str, Any], box: Sequence[float]) -> float:
    """The box's where the set has none, as sets of boxes alone do."""
    if "area" not in value:
        return box[2] * box[3]
    area = _numbers([value["area"]], "area", 1)[0]
    if not 0 <= area <= _MAX_FLOAT32:
        raise DataError(f"area is {shown(area)}; records hold 32 bits from 0 on")
    return area


def whole(value: Any, key: str, least: int = -(1 << 63), most: int = (1 << 63) - 1) -> int:
    number = value.get(key) if isinstance(value, dict) else None
    if type(number) is not int or not least <= number <= most:
        raise DataError(f"{key} is {shown(number)}; expected a whole number" + (f" from {least}" if least > 0 else ""))
    return number


def _numbers(value: Any, key: str, count: int = 4) -> list[float]:
    if isinstance(value, list) and len(value) == count:
        try:
            numbers = [float(number) for number in value if type(number) in (int, float)]
        except OverflowError:
            numbers = []
        if len(numbers) == count and all(map(math.isfinite, numbers)):
            return numbers
    raise DataError(f"{key} is {shown(value)}; expected {count} numbers" if count > 1 else f"{key} is {shown(value)}")


def safe_name(name: Any) -> str:
    """A path below the images folder, whoever wrote the file."""
    if not name or "\0" in text(name, "file_name"):
        raise DataError(f"file_name is {shown(name)}")
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise DataError(f"file_name {shown(name)} leads out of the images folder")
    return str(path)


def text(value: Any, key: str) -> str:
    """Raises DataError for what is no text, or cannot be written as UTF-8: half of a surrogate pair."""
    if not isinstance(value, str):
        raise DataError(f"{key} is {shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise DataError(f"{key} is {shown(value)}; half of a surrogate pair is no text") from None
    return value


def shown(value: Any) -> str:
    if value is None:
        return "missing"
    return repr(value)[:40]


class Fault(NamedTuple):
    """Something in the file that is wrong, for which an image, an annotation, a category or a caption is left out."""

    what: str
    """`image`, `annotation`, `category` or `caption`."""
    which: str
    """Its id, or where it stands."""
    reason: str
    kind: str
    """The reason without what is special to this one, to count by."""
    path: str = ""
    """Of an image."""

    def __str__(self) -> str:
        return f"{self.what} {self.which}: {self.reason}"


def fault_in(element: Element, what: str, error: DataError, kind: str = "") -> Fault:
    """`kind` is by the wrong key where it is not given."""
    try:
        value = element.text()
    except DataError:
        value = element.value
    value = value if isinstance(value, dict) else {}
    known = value.get("id")
    which = f"{known}" if type(known) is int and abs(known) < 1 << 80 else f"at byte offset {element.start}"
    name = value.get("file_name")
    path = name.encode(errors="backslashreplace").decode() if isinstance(name, str) else f"image {which}"
    key = error.message.partition(" ")[0]
    if key == "byte":  # offset of what is no text
        kind = "no UTF-8 text"
    return Fault(what, which, error.message, kind or f"bad {key}", path[:500] if what == "image" else "")
