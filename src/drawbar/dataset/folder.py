"""A folder of class folders of images, as any classification set: listed and labelled.

Labels follow from the sorted class folder names, 1..N, empty folders included, so that two splits of one set agree; or
from a list of names.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from drawbar.dataset.labelled import DANGLING_LINK, LINK_LOOP, NO_REGULAR_FILE, LabelledItem, LabelledSource, is_image
from drawbar.errors import InputError

_BROKEN_LINKS = {errno.ENOENT: DANGLING_LINK, errno.ENOTDIR: DANGLING_LINK, errno.ELOOP: LINK_LOOP}
_BLANKS_HINT = 'a name with blanks is quoted, "polar bear", or has a tab between it and its text'
_LAYOUT_HINT = "expected one folder per class, such as SOURCE/n01440764/n01440764_10026.JPEG"


def scan_folder(
    folder: Path, classes: Path | None = None, listed: Callable[[int], None] = lambda images: None
) -> LabelledSource:
    """The images directly inside each class folder. `classes` is a file with a folder name per line, in label order;
    see `read_names`.

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
            raise InputError(
                f"{folder} has the class folder {unknown[0]!r}, which {classes} does not name",
                hint=_BLANKS_HINT if " " in unknown[0] else None,
            )
    items = class_items(folder, {name: label for label, name in enumerate(labels, start=1) if name in names}, listed)
    return LabelledSource(root=str(folder), labels=labels, items=items, texts=texts)


def read_names(path: Path) -> dict[str, str]:
    """A name per line, with a text after blanks or a tab where one is wanted; without, the name is its own text.

    A name with blanks in it is quoted, `"polar bear"`, or a tab is between it and its text. In the file's order. Raises
    InputError for an unreadable file, an empty one, an open quote, or a name that is there twice.
    """
    found: dict[str, str] = {}
    for number, line in numbered_lines(path):
        if line.startswith('"'):
            name, closed, text = line[1:].partition('"')
            if not (name and closed):
                raise InputError(f"{path}:{number}: {line[:60]!r} has no closing quote")
        else:
            name, _, text = line.partition("\t" if "\t" in line else " ")
            name = name.rstrip()
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
    names = sorted(entry.name for entry in entries if not entry.name.startswith(".") and is_folder(entry))
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
            item
            for entry in scan(folder / name)
            if is_image(entry.name) and (item := listed_file(entry, f"{name}/{entry.name}", label))
        ]
        found.sort(key=lambda item: item.path)
        items += found
        listed(len(items))
    if not items:
        raise InputError(f"no images in the {len(labels)} folders of {folder}", hint=_LAYOUT_HINT)
    # Folder by folder is not yet by path: "a b/x" sorts before "a/x".
    items.sort(key=lambda item: item.path)
    return items


def listed_file(entry: os.DirEntry[str], path: str, label: int) -> LabelledItem | None:
    """The image that `entry` is meant to be, readable or not; None for a folder.

    Links count as what they lead to. Raises InputError where that is not to be found out.
    """
    try:
        status = entry.stat()
    except OSError as error:
        broken = _BROKEN_LINKS.get(error.errno or 0) if entry.is_symlink() else None
        if broken is None:
            raise InputError(f"{entry.path} cannot be listed: {error.strerror}") from None
        return LabelledItem(path, 0, label, archive=broken)
    if stat.S_ISREG(status.st_mode):
        return LabelledItem(path, status.st_size, label)
    if stat.S_ISDIR(status.st_mode):
        return None
    return LabelledItem(path, 0, label, archive=NO_REGULAR_FILE)  # reading a pipe would never end


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Raises InputError for a link to nothing that may be meant as a class: the labels behind it would be others."""
    try:
        if entry.is_dir():
            return True
        broken = entry.is_symlink() and not os.path.exists(entry.path)
    except OSError:
        broken = True
    if broken and not os.path.splitext(entry.name)[1]:
        raise InputError(
            f"{entry.path} is a link to nothing, and may be meant as a class folder",
            hint="mend it, or remove it if it is no class",
        )
    return False


def scan(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        raise InputError(f"no source folder: {folder}", hint=_LAYOUT_HINT) from None
    except OSError as error:
        raise InputError(f"cannot list the source {folder}: {error.strerror}", hint=_LAYOUT_HINT) from None
