"""A class folder of images to pack, and what packing it left behind."""

from __future__ import annotations

import random
from pathlib import Path

from tests.image_files import jpeg


def make_images(folder: Path, count: int, padding: int = 0) -> Path:
    """Different images; `padding` bytes behind each make them larger at no cost of encoding."""
    base = jpeg(1)
    for number in range(count):
        path = folder / f"n0{number % 3}" / f"{number}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base + number.to_bytes(4, "big") + random.Random(number).randbytes(padding))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
