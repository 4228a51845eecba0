"""A folder of class folders of images, as any classification set: listed and labelled.

Labels follow from the sorted class folder names, 1..N, empty folders included, so that two splits of one set agree; or
from a list of names. Which files are images of the set, and which only lie there, is decided here too: every file in a
class folder is one, but hidden ones and those of a few suffixes that no image has; what else is passed over is counted.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from drawbar.dataset.items import Note, no_note
from drawbar.dataset.labelled import (
    DANGLING_LINK,
    LINK_LOOP,
    NO_REGULAR_FILE,
    LabelledItem,
    LabelledSource,
    is_image,
    is_image_outside,
)
from drawbar.errors import InputError
from drawbar.plural import plural

_BROKEN_LINKS = {errno.ENOENT: DANGLING_LINK, errno.ENOTDIR: DANGLING_LINK, errno.ELOOP: LINK_LOOP}
_BLANKS_HINT = 'a name with blanks is quoted, "polar bear", or has a tab between it and its text'
MARKER_NAME = "drawbar-synthetic.json"
"""Lies in a synthetic set from the beginning of its making, and says how many images it is to have."""

_LAYOUT_HINT = "expected one folder per class, such as SOURCE/n01440764/n01440764_10026.JPEG"

IgnoredKind = Literal["loose_files", "sub_folders", "other_folders", "not_readable"]
_KINDS: dict[IgnoredKind, tuple[str, str]] = {
    "loose_files": ("file outside of class folders", "files outside of class folders"),
    "sub_folders": ("folder within a class folder", "folders within class folders"),
    "other_folders": ("folder that is no class", "folders that are no class"),
    "not_readable": ("link to nothing or special file", "links to nothing or special files"),
}


class Ignored:
    """What lies in a source and is not packed: of each kind how many, and the first by name."""

    def __init__(self) -> None:
        self._found: dict[IgnoredKind, tuple[int, str]] = {}

    def add(self, kind: IgnoredKind, path: str) -> None:
        count, example = self._found.get(kind, (0, path))
        self._found[kind] = (count + 1, min(example, path))

    def notes(self) -> dict[str, Any]:
        """For the manifest; empty where nothing was ignored."""
        found = {
            kind: {"count": self._found[kind][0], "example": self._found[kind][1]}
            for kind in _KINDS
            if kind in self._found
        }
        return {"ignored": found} if found else {}

    def text(self) -> str:
        """Empty where nothing was ignored."""
        return ignored_text(self.notes())


def ignored_text(notes: Mapping[str, Any]) -> str:
    """What the notes of a source say of it, such as `ignored 19 files outside of class folders, such as a.jpg`."""
    parts = []
    for kind, found in notes.get("ignored", {}).items():
        count = found["count"]
        parts.append(f"{plural(count, *_KINDS[kind])}{': ' if count == 1 else ', such as '}{found['example']}")
    return "ignored " + "; ".join(parts) if parts else ""


def scan_folder(
    folder: Path,
    classes: Path | None = None,
    listed: Callable[[int], None] = lambda images: None,
    note: Note = no_note,
) -> LabelledSource:
    """The images directly inside each class folder. `classes` is a file with a folder name per line, in label order;
    see `read_names`.

    `listed` is told how many images were found so far; `note` of what lies there and is ignored, and of classes without
    images. Raises InputError where there are no images, or no folders, for a folder that `classes` does not name, and
    for an unfinished synthetic set.
    """
    ignored = Ignored()
    names = _class_folders(folder, ignored)
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
    label_of = {name: label for label, name in enumerate(labels, start=1) if name in names}
    items = _class_items(folder, label_of, listed, ignored)
    check_whole(folder, len(items))
    note_ignored(ignored, note)
    note_empty(labels, (item.label for item in items), note)
    return LabelledSource(root=str(folder), labels=labels, items=items, texts=texts, notes=ignored.notes())


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
    refuse_url(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is no text: {error.reason} at byte {error.start}") from None
    lines = ((number, line.strip()) for number, line in enumerate(text.splitlines(), start=1))
    return [(number, line) for number, line in lines if line]


def _class_folders(folder: Path, ignored: Ignored) -> list[str]:
    """Sorted names of the class folders."""
    entries = [entry for entry in scan(folder) if not entry.name.startswith(".")]
    names = sorted(entry.name for entry in entries if is_folder(entry))
    if not names:
        found = (
            "images but no class folders"
            if any(is_image_outside(entry.name) for entry in entries)
            else "no class folders"
        )
        raise InputError(f"{folder} holds {found}", hint=_LAYOUT_HINT)
    for entry in entries:
        kind = kind_of(entry)
        if kind != "folder" and is_image(entry.name):
            ignored.add("loose_files" if kind == "file" else "not_readable", entry.name)
    return names


def _class_items(
    folder: Path, labels: Mapping[str, int], listed: Callable[[int], None], ignored: Ignored
) -> list[LabelledItem]:
    """The images of these class folders, sorted by path."""
    items: list[LabelledItem] = []
    for name in sorted(labels):
        items += sorted(images_of_class(folder, name, labels[name], ignored), key=lambda item: item.path)
        listed(len(items))
    if not items:
        text = ignored.text()
        raise InputError(
            f"no images in {plural(len(labels), 'class folder')} of {folder}" + f"; {text}" * bool(text),
            hint=_LAYOUT_HINT,
        )
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


def images_of_class(folder: Path, name: str, label: int, ignored: Ignored) -> Iterator[LabelledItem]:
    """The images of the class folder `name` in `folder`, in no order."""
    for entry in scan(folder / name):
        if not is_image(entry.name):
            continue
        path = f"{name}/{entry.name}"
        item = listed_file(entry, path, label)
        if item is None:
            ignored.add("sub_folders", path)
        else:
            yield item


def note_ignored(ignored: Ignored, note: Note) -> None:
    if text := ignored.text():
        note(f"{text} (every file directly in a class folder is packed, hidden ones and texts excepted)")


def note_empty(labels: Sequence[str], used: Iterable[int], note: Note) -> None:
    """A class without images has a number all the same: whoever wanted fewer classes must be told."""
    there = set(used)
    empty = [label for label in range(1, len(labels) + 1) if label not in there]
    if empty:
        verb, which = ("has", "") if len(empty) == 1 else ("have", "such as ")
        note(
            f"{len(empty)} of {plural(len(labels), 'class', 'classes')} {verb} no image: {which}{labels[empty[0] - 1]} "
            f"(label {empty[0]}); the labels and the number of classes count them"
        )


def check_whole(folder: Path, num_images: int) -> None:
    """Raises InputError where `folder` is a synthetic set with fewer images than it is to have."""
    try:
        marker = json.loads((folder / MARKER_NAME).read_bytes())
    except (OSError, ValueError):
        return
    wanted = marker.get("num_images") if isinstance(marker, dict) else None
    if isinstance(wanted, int) and num_images < wanted:
        raise InputError(
            f"{folder} is a synthetic set whose making did not end: it has {num_images} of {plural(wanted, 'image')}",
            hint="give its `drawbar data make` command again, and it makes what is missing; to pack what is there, "
            f"delete {MARKER_NAME}",
        )


def scan(folder: Path) -> list[os.DirEntry[str]]:
    refuse_url(folder)
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        raise InputError(f"no source folder: {folder}", hint=_LAYOUT_HINT) from None
    except OSError as error:
        raise InputError(f"cannot list the source {folder}: {error.strerror}", hint=_LAYOUT_HINT) from None


def kind_of(entry: os.DirEntry[str]) -> Literal["file", "folder", "other"]:
    """Links count as what they lead to."""
    try:
        if entry.is_file():
            return "file"
        if entry.is_dir():
            return "folder"
    except OSError:  # a link in a circle, or into a folder that is closed
        pass
    return "other"


def refuse_url(path: Path) -> None:
    """Raises InputError for an address such as s3://bucket/set: what is packed lies in local files."""
    found = re.match(r"([a-z][a-z0-9+.-]+):/+", str(path))
    if found and not path.exists():
        raise InputError(
            f"{found[1]}://{str(path)[found.end() :]} is an address, and sources are local folders and files",
            hint="copy it to a disk first; only the destination may be s3://bucket/prefix",
        )
