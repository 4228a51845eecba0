"""A folder of class folders of images, as any classification set: listed and labelled.

Labels follow from the sorted class folder names, 1..N, empty folders included, so that two splits of one set agree; or
from a list of names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from drawbar.dataset.labelled import LabelledItem, LabelledSource, is_image
from drawbar.errors import InputError

_LAYOUT_HINT = "expected one folder per class, such as SOURCE/n01440764/n01440764_10026.JPEG"


def scan_folder(
    folder: Path, classes: Path | None = None, listed: Callable[[int], None] = lambda images: None
) -> LabelledSource:
    """The images directly inside each class folder. `classes` is a file with a folder name per line, in label order.

    `listed` is told how many images were found so far. Raises InputError where there are none, or no folders, and for
    a folder that `classes` does not name.
    """
    names = class_folders(folder)
    texts: Mapping[str, str] = {}
    labels: Sequence[str] = names
    if classes is not None:
        texts = read_names(classes)
        labels = list(texts)
        unknown = sorted(set(names) - set(labels))
        if unknown:
            raise InputError(f"{folder} has the class folder {unknown[0]!r}, which {classes} does not name")
    items = class_items(folder, {name: label for label, name in enumerate(labels, start=1) if name in names}, listed)
    return LabelledSource(root=str(folder), labels=labels, items=items, texts=texts)


def read_names(path: Path) -> dict[str, str]:
    """A name per line, with a text after blanks or a tab where one is wanted; without, the name is its own text.

    In the file's order. Raises InputError for an unreadable file, an empty one, or a name that is there twice.
    """
    found: dict[str, str] = {}
    for number, line in numbered_lines(path):
        name, _, text = line.replace("\t", " ", 1).partition(" ")
        if name in found:
            raise InputError(f"{path}:{number}: {name!r} is there twice")
        found[name] = text.strip() or name
    if not found:
        raise InputError(f"{path} names no class")
    return found


def numbered_lines(path: Path) -> list[tuple[int, str]]:
    """Lines that are not empty, stripped, with their numbers. Raises InputError where it cannot be read as text."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is no text: {error.reason} at byte {error.start}") from None
    lines = ((number, line.strip()) for number, line in enumerate(text.splitlines(), start=1))
    return [(number, line) for number, line in lines if line]


def class_folders(folder: Path) -> list[str]:
    """Sorted names of the class folders."""
    entries = scan(folder)
    names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        found = "images but no class folders" if any(is_image(entry.name) for entry in entries) else "no class folders"
        raise InputError(f"{folder} holds {found}", hint=_LAYOUT_HINT)
    return names


def class_items(folder: Path, labels: Mapping[str, int], listed: Callable[[int], None]) -> list[LabelledItem]:
    """The images of these class folders, sorted by path."""
    items: list[LabelledItem] = []
    for name in sorted(labels):
        label = labels[name]
        found = [
            LabelledItem(f"{name}/{entry.name}", entry.stat().st_size, label)
            for entry in scan(folder / name)
            if is_image(entry.name) and entry.is_file()
        ]
        found.sort(key=lambda item: item.path)
        items += found
        listed(len(items))
    if not items:
        raise InputError(f"no images in the {len(labels)} folders of {folder}", hint=_LAYOUT_HINT)
    # Folder by folder is not yet by path: "a b/x" sorts before "a/x".
    items.sort(key=lambda item: item.path)
    return items


def scan(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        raise InputError(f"no source folder: {folder}", hint=_LAYOUT_HINT) from None
    except OSError as error:
        raise InputError(f"cannot list the source {folder}: {error.strerror}", hint=_LAYOUT_HINT) from None
