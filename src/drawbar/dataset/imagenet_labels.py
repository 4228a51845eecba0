"""Labels of ILSVRC2012: which class each image has, and the classes' numbers, 1..1000 in sorted synset order.

The devkit's ground truth numbers the classes in an order of its own (its class 1 is n02119789, the first synset in
sorted order is n01440764), so numbers are taken only with the file that says which synset each of them means.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from drawbar.dataset.folder import numbered_lines, read_names
from drawbar.errors import InputError
from drawbar.plural import plural

NUM_CLASSES = 1000
SYNSET = re.compile(r"n[0-9]{8}")
_NUMBER = re.compile(r"[0-9]{1,9}")  # isdigit() takes "²" too, which int() does not

_IDS_HINT = (
    "the devkit's ids are not in sorted synset order: --class-ids FILE gives lines of `ID SYNSET`. Make it with "
    "python -c \"import scipy.io; [print(s['ILSVRC2012_ID'], s['WNID']) for s in scipy.io.loadmat('meta.mat', "
    "squeeze_me=True)['synsets'] if s['num_children'] == 0]\""
)


@dataclass(frozen=True, kw_only=True)
class ImageNetFiles:
    """What belongs to the images."""

    labels: Path | None = None
    """For flat images: a synset or devkit id per line, in order of the sorted image names; or `IMAGE LABEL` lines."""
    class_ids: Path | None = None
    """Lines of `ID SYNSET`, in any order; needed for a list of ids."""
    synsets: Path | None = None
    """The classes, a line each, perhaps with a text: `n01440764 tench, Tinca tinca`. Any order; labels go by sorted.
    For flat images needed unless `labels` or `class_ids` name 1,000."""
    words: Path | None = None
    """Texts only, in lines as of `synsets`; may name more than the set has."""
    boxes: Path | None = None
    """See `boxes.read_boxes`."""


def labels_of_folders(source: Path, there: Iterable[str], files: ImageNetFiles) -> list[str]:
    """The classes in label order, for images that lie in the class folders `there`."""
    if files.labels is not None:
        raise InputError(f"--labels is for flat images; {source} has class folders, which say the labels")
    if files.synsets is None:
        return sorted(set(there))
    labels = _synset_list(files.synsets)
    unknown = sorted(set(there) - set(labels))
    if unknown:
        raise InputError(f"{source} has the class {unknown[0]}, which {files.synsets} does not name")
    return labels


def labels_of_images(source: Path, names: Sequence[str], files: ImageNetFiles) -> tuple[list[str], list[str]]:
    """The classes in label order, and the synset of each of these flat images (sorted names)."""
    if files.labels is None:
        raise InputError(
            f"{source} holds images without class folders: their labels are needed",
            hint="--labels FILE: a synset or devkit id per line, in order of the sorted image names",
        )
    values = _listed_labels(files.labels, names)
    ids = _class_ids(files.class_ids) if files.class_ids else None
    numbers = [value for value in values if _NUMBER.fullmatch(value)]
    if numbers and ids is None:
        raise InputError(
            f"{files.labels} holds numbers, such as {numbers[0]}: nothing says what they mean", hint=_IDS_HINT
        )
    synset_of = []
    for name, value in zip(names, values, strict=True):
        if _NUMBER.fullmatch(value) and ids is not None:
            if int(value) not in ids:
                raise InputError(
                    f"{files.labels}: {name} has the id {value}, which {files.class_ids} does not have", hint=_IDS_HINT
                )
            synset_of.append(ids[int(value)])
        elif SYNSET.fullmatch(value):
            synset_of.append(value)
        else:
            raise InputError(f"{files.labels}: {name} has the label {value!r}; expected a synset or a number")
    if files.synsets is not None:
        labels = _synset_list(files.synsets)
    else:
        labels = _all_synsets(files, synset_of, ids)
    unknown = sorted(set(synset_of) - set(labels))
    if unknown:
        raise InputError(
            f"{files.labels} has the class {unknown[0]}, which is not among the {plural(len(labels), 'known one')}"
        )
    return labels, synset_of


def _all_synsets(files: ImageNetFiles, of_images: Sequence[str], ids: dict[int, str] | None) -> list[str]:
    """Sorted, by a file that names as many as ILSVRC2012 has; of fewer, numbers of their own would be wrong ones."""
    by_file = {files.class_ids: set(ids.values())} if ids else {}
    by_file[files.labels] = set(of_images)
    for synsets in by_file.values():
        if len(synsets) == NUM_CLASSES:
            return sorted(synsets)
    path, synsets = next(iter(by_file.items()))
    raise InputError(
        f"which classes there are is not known: {path} names {plural(len(synsets), 'synset')}, ILSVRC2012 has "
        f"{NUM_CLASSES}, and labels are numbered by all",
        hint="--synsets FILE with a line per class",
    )


def _listed_labels(path: Path, names: Sequence[str]) -> list[str]:
    """The label of every image, as it stands in the list: a line per image in sorted order, or with the image's name.

    Lines with names may go on behind the label, as those of Kaggle's `LOC_val_solution.csv` do; a header is skipped.
    """
    rows = [re.split(r"[,\s]+", line) for _, line in numbered_lines(path)]
    if rows and rows[0][0] == "ImageId":
        del rows[0]
    if all(len(row) == 1 for row in rows):
        if len(rows) != len(names):
            raise InputError(f"{path} has {plural(len(rows), 'label')} for {plural(len(names), 'image')}")
        return [row[0] for row in rows]
    values: dict[str, str] = {}
    for row in rows:
        stem = os.path.splitext(row[0].rpartition("/")[2])[0]
        if len(row) < 2 or stem in values:
            raise InputError(
                f"{path}: {' '.join(row[:2])!r} " + ("names no label" if len(row) < 2 else "is there twice")
            )
        values[stem] = row[1]
    missing = [name for name in names if os.path.splitext(name)[0] not in values]
    if missing:
        raise InputError(
            f"{path} has no label for {missing[0]}" + (f" and {len(missing) - 1} more" * (len(missing) > 1))
        )
    return [values[os.path.splitext(name)[0]] for name in names]


def _class_ids(path: Path) -> dict[int, str]:
    """Synset by devkit id."""
    ids: dict[int, str] = {}
    for number, line in numbered_lines(path):
        words = re.split(r"[,\s]+", line)
        if len(words) < 2 or not _NUMBER.fullmatch(words[0]) or not SYNSET.fullmatch(words[1]):
            raise InputError(f"{path}:{number}: {line[:60]!r} is not `ID SYNSET`", hint=_IDS_HINT)
        if int(words[0]) in ids or words[1] in ids.values():
            raise InputError(f"{path}:{number}: {words[0]} or {words[1]} is there twice", hint=_IDS_HINT)
        ids[int(words[0])] = words[1]
    if sorted(ids) != list(range(1, len(ids) + 1)) or len(ids) > NUM_CLASSES:
        raise InputError(
            f"{path} has {plural(len(ids), 'id')} up to {max(ids, default=0)}; expected 1 to {NUM_CLASSES} without "
            "gaps, the classes without children only",
            hint=_IDS_HINT,
        )
    # The devkit's first two are not in sorted order either, so this holds for any part of it from 1 on.
    in_order = [ids[number] for number in sorted(ids)]
    if len(ids) > 1 and in_order == sorted(in_order):
        raise InputError(
            f"{path} numbers the synsets in sorted order, which the devkit does not: its 1 is n02119789", hint=_IDS_HINT
        )
    return ids


def _synset_list(path: Path) -> list[str]:
    synsets = sorted(read_names(path))
    wrong = [name for name in synsets if not SYNSET.fullmatch(name)]
    if wrong:
        raise InputError(f"{path} names {wrong[0]!r}, which is no synset such as n01440764")
    if len(synsets) > NUM_CLASSES:
        raise InputError(
            f"{path} names {len(synsets)} synsets, ILSVRC2012 has {NUM_CLASSES}: labels would count them all",
            hint="give a list of texts for more than the set's classes as --words",
        )
    return synsets


def texts_of_classes(files: ImageNetFiles) -> dict[str, str]:
    """Readable names by synset, as far as the files give them."""
    texts = read_names(files.synsets) if files.synsets else {}
    return texts | (read_names(files.words) if files.words else {})
