"""ILSVRC2012 (ImageNet-1k) in the layouts that people have it in, listed and labelled 1..1000 in sorted synset order.

Training: class folders; `ILSVRC2012_img_train.tar` with its inner tars; a folder of these. Validation: class folders,
or the flat folder or tar of 50,000 images with a list of labels. The same images give the same paths, and so the same
shards, from every layout.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from operator import attrgetter
from pathlib import Path

from drawbar.dataset.archive import Member, TarReader, looks_like_tar
from drawbar.dataset.boxes import Boxes, read_boxes
from drawbar.dataset.folder import (
    Ignored,
    check_whole,
    images_of_class,
    is_folder,
    kind_of,
    listed_file,
    note_empty,
    note_ignored,
    refuse_url,
    scan,
)
from drawbar.dataset.imagenet_labels import (
    NUM_CLASSES,
    SYNSET,
    ImageNetFiles,
    labels_of_folders,
    labels_of_images,
    texts_of_classes,
)
from drawbar.dataset.items import Note, no_note
from drawbar.dataset.labelled import LabelledItem, LabelledSource, is_image, is_image_outside
from drawbar.errors import DataError, InputError
from drawbar.plural import plural

__all__ = ["ImageNetFiles", "scan_imagenet"]

_FLAT = -1
_REPORT_EVERY = 1000  # images
_LAYOUT_HINT = (
    "expected class folders such as n01440764, ILSVRC2012_img_train.tar, a folder of its inner tars, "
    "or the flat validation folder or tar"
)
Listed = Callable[[str, int], None]


def scan_imagenet(
    source: Path, files: ImageNetFiles, listed: Listed = lambda stage, count: None, note: Note = no_note
) -> LabelledSource:
    """Lists `source` in whichever layout it has. `listed` is told of a stage and how many it has found so far; `note`
    of what lies there and is ignored, of classes that are not there, and of boxes that belong to no image.

    Raises InputError for no known layout, a damaged archive, an unfinished synthetic set, and labels that are missing,
    ambiguous or wrong.
    """
    refuse_url(source)
    layout = _Layout(source)
    items: list[LabelledItem] = []
    for item in layout.items():
        items.append(item)
        if len(items) % _REPORT_EVERY == 0:
            listed("listing images", len(items))
    if not items:
        text = layout.ignored.text()
        raise InputError(f"no images in {source}" + f"; {text}" * bool(text), hint=_LAYOUT_HINT)
    check_whole(source, len(items))
    items.sort(key=attrgetter("path"))
    for item, later in pairwise(items):
        if item.path == later.path:
            raise InputError(f"{source} holds {item.path} twice")
    flat = [item.path for item in items if item.label == _FLAT]
    if len(flat) not in (0, len(items)):
        raise InputError(f"{source} holds {flat[0]} outside of class folders, but other images in some")
    if flat:
        labels, synsets = labels_of_images(source, flat, files)
    else:
        labels, synsets = labels_of_folders(source, layout.synsets, files), []
    label_of = {synset: label for label, synset in enumerate(labels, start=1)}
    boxes = read_boxes(files.boxes, lambda count: listed("reading boxes", count)) if files.boxes else Boxes()
    for index, item in enumerate(items):  # in place, as a second list of a million would not be small
        synset = synsets[index] if flat else layout.synsets[item.label]
        found = boxes.take(synset, item.path)
        items[index] = LabelledItem(item.path, item.size_bytes, label_of[synset], found, item.archive, item.offset)
    notes = layout.ignored.notes()
    if files.boxes:
        with_boxes = sum(1 for item in items if item.boxes)
        notes |= boxes.notes() | {"images_with_boxes": with_boxes}
        _note_boxes(files.boxes, len(boxes.of_image), with_boxes, note)
    note_ignored(layout.ignored, note)
    if files.synsets is None and len(labels) != NUM_CLASSES:
        note(
            f"{plural(len(labels), 'class', 'classes')}, where ILSVRC2012 has {NUM_CLASSES}: labels count those that "
            "are there (--synsets FILE with a line per class numbers all)"
        )
    note_empty(labels, (item.label for item in items), note)
    return LabelledSource(
        root=str(source),
        labels=labels,
        items=items,
        texts=texts_of_classes(files),
        archives=layout.archives,
        notes=notes,
    )


def _note_boxes(path: Path, named: int, found: int, note: Note) -> None:
    """Boxes of another split, or with names of their own, would be left out without a word."""
    if 2 * found < named:
        where = "none is" if not found else f"only {plural(found, 'is', 'are')}"
        note(
            f"{path} has boxes for {plural(named, 'image')}, of which {where} in this set: boxes go by the image's "
            "file name without folder and suffix"
        )


class _Layout:
    """What is where. Its items have for a label the number of their synset here, as the classes are not known yet."""

    def __init__(self, source: Path) -> None:
        self.archives: list[str] = []
        self.synsets: list[str] = []
        self.ignored = Ignored()
        self._source = source

    def items(self) -> Iterator[LabelledItem]:
        source = self._source
        if not source.is_dir():
            yield from self._of_tar(source)
            return
        entries = {entry.name: entry for entry in scan(source) if not entry.name.startswith(".")}
        kinds = {name: kind_of(entry) for name, entry in entries.items()}
        synsets = sorted(name for name, entry in entries.items() if SYNSET.fullmatch(name) and is_folder(entry))
        tars = sorted(name for name, kind in kinds.items() if kind == "file" and _synset_of_tar(name))
        images = (listed_file(entry, name, _FLAT) for name, entry in entries.items() if is_image_outside(name))
        flat = [item for item in images if item]
        for name in kinds.keys() - {*synsets, *tars, *(item.path for item in flat)}:
            if kinds[name] == "folder":
                self.ignored.add("other_folders", name)
            elif is_image(name):
                self.ignored.add("loose_files" if kinds[name] == "file" else "not_readable", name)
        for synset in synsets:
            yield from images_of_class(source, synset, self._label(synset), self.ignored)
        for name in tars:
            yield from self._of_tar(source / name, _synset_of_tar(name))
        yield from flat
        if not (synsets or tars or flat):
            there = ", ".join(sorted(entries)[:3]) or "nothing"
            raise InputError(f"{source} is no layout of ImageNet: it holds {there}", hint=_LAYOUT_HINT)

    def _label(self, synset: str) -> int:
        if not self.synsets or self.synsets[-1] != synset:
            self.synsets.append(synset)
        return len(self.synsets) - 1

    def _of_tar(self, path: Path, synset: str = "") -> Iterator[LabelledItem]:
        """Images of class `synset` (empty: flat, or in class folders), and those in inner tars."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would be waited for, to no end
        except OSError as error:
            raise InputError(f"cannot read the source {path}: {error.strerror}", hint=_LAYOUT_HINT) from None
        try:
            if not looks_like_tar(descriptor):
                raise InputError(
                    f"{path} is no tar archive", hint="unpack it first, if it is compressed: images gain nothing by it"
                )
            self.archives.append(str(path))
            yield from self._members(descriptor, path, synset)
        except OSError as error:
            raise InputError(f"cannot read the source {path}: {error.strerror}") from None
        finally:
            os.close(descriptor)

    def _members(self, descriptor: int, path: Path, synset: str) -> Iterator[LabelledItem]:
        inner = ""
        try:
            for member in TarReader(descriptor).members():
                folder, _, name = member.name.rpartition("/")
                of_tar = _synset_of_tar(name)
                if of_tar:
                    inner = f"{name}: "
                    end = member.offset + member.size_bytes
                    for image in TarReader(descriptor, member.offset, end).members():
                        yield from self._image(image, of_tar)
                    inner = ""
                else:
                    of_folder = folder.rpartition("/")[2]
                    yield from self._image(member, synset or (of_folder if SYNSET.fullmatch(of_folder) else ""))
        except DataError as error:
            raise InputError(
                f"{path}: {inner}{error.message}", hint="copy it again, and compare its checksum"
            ) from None

    def _image(self, member: Member, synset: str) -> Iterator[LabelledItem]:
        name = member.name.rpartition("/")[2]
        if is_image(name) if synset else is_image_outside(name):
            if member.symlink:
                raise DataError(
                    f"{member.name} is a symbolic link to {member.symlink}; tar --dereference makes a file of it"
                )
            path, label = (f"{synset}/{name}", self._label(synset)) if synset else (name, _FLAT)
            yield LabelledItem(path, member.size_bytes, label, b"", len(self.archives) - 1, member.offset)
        elif is_image(name):
            self.ignored.add("loose_files", member.name)


def _synset_of_tar(name: str) -> str:
    """`n01440764` of `n01440764.tar`; empty for any other name."""
    return name[:-4] if name.endswith(".tar") and SYNSET.fullmatch(name[:-4]) else ""
