"""ImageNet's layouts, labels and boxes: the same images give the same shards however they lie."""

from __future__ import annotations

import io
import os
import random
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import pytest
import scipy.io  # type: ignore[import-untyped]

from drawbar.dataset.archive import TarReader
from drawbar.dataset.boxes import read_boxes
from drawbar.dataset.destination import FolderDestination
from drawbar.dataset.example import Box, decode_example, parse_image_example
from drawbar.dataset.imagenet import ImageNetFiles, scan_imagenet
from drawbar.dataset.manifest import Manifest
from drawbar.dataset.pack import pack
from drawbar.dataset.shard_writer import PackSettings
from drawbar.dataset.tfrecord import RecordSplitter
from drawbar.errors import DataError, InputError
from tests.drawbar_process import drawbar
from tests.image_files import jpeg

SYNSETS = ["n01440764", "n01443537", "n02119789", "n02120079", "n15075141"]
DEVKIT_IDS = {1: "n02119789", 2: "n15075141", 3: "n01440764", 4: "n02120079", 5: "n01443537"}
"""In an order of its own, as the devkit's."""

TarFormat = int


def image_names() -> list[str]:
    return [f"{SYNSETS[number % 5]}/{SYNSETS[number % 5]}_{number}.JPEG" for number in range(23)]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    for number, name in enumerate(image_names()):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(jpeg(number, 24 + number, 64))
    (folder / "n01440764" / "notes.txt").write_text("no image")
    (folder / "LOC_synset_mapping.txt").write_text("no class")
    return folder


def tar_of(path: Path, files: dict[str, bytes], kind: TarFormat = tarfile.GNU_FORMAT) -> Path:
    with tarfile.open(path, "w", format=kind) as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def tar_bytes(files: dict[str, bytes], kind: TarFormat = tarfile.GNU_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=kind) as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def train_tar(path: Path, images: Path, kind: TarFormat = tarfile.GNU_FORMAT) -> Path:
    """A tar of the classes' tars, in no order."""
    inner = {}
    for synset in random.Random(1).sample(SYNSETS, 5):
        files = {file.name: file.read_bytes() for file in sorted((images / synset).iterdir())}
        inner[f"{synset}.tar"] = tar_bytes(files, kind)
    return tar_of(path, inner, kind)


def packed(source: Path, dest: Path, workers: int = 1, **files: Any) -> Manifest:
    settings = PackSettings(3, on_bad="fail")
    return pack(scan_imagenet(source, ImageNetFiles(**files)), FolderDestination(dest), settings, workers=workers)


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def examples(folder: Path) -> dict[str, dict[str, Any]]:
    found = {}
    for path in sorted(folder.glob("train-*")):
        splitter = RecordSplitter(path.name)
        for record in splitter.feed(path.read_bytes()):
            example = decode_example(record.payload)
            found[example["image/filename"][0].decode()] = example  # type: ignore[union-attr]
        splitter.finish()
    return found


# Layouts


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_layout_gives_the_same_shards(images: Path, tmp_path: Path, kind: TarFormat) -> None:
    outer = train_tar(tmp_path / "ILSVRC2012_img_train.tar", images, kind)
    inner = tmp_path / "inner"
    inner.mkdir()
    with tarfile.open(outer) as tar:
        for member in tar.getmembers():  # extractall has a filter from 3.11.4 on, and wants one from 3.14 on
            (inner / member.name).write_bytes(cast(IO[bytes], tar.extractfile(member)).read())
    foldered = tar_of(
        tmp_path / "foldered.tar",
        {f"./ILSVRC/train/{name}": (images / name).read_bytes() for name in image_names()},
        kind,
    )
    manifest = packed(images, tmp_path / "a")
    assert manifest.labels == tuple(SYNSETS)
    assert manifest.class_counts == (5, 5, 5, 4, 4)
    for number, source in enumerate((outer, inner, foldered)):
        assert packed(source, tmp_path / f"b{number}", workers=2 if number == 0 else 1) == manifest
        assert shards(tmp_path / f"b{number}") == shards(tmp_path / "a")
    for name, example in examples(tmp_path / "a").items():
        synset = name.partition("_")[0]
        assert example["image/class/label"] == [1 + SYNSETS.index(synset)]
        assert example["image/class/synset"] == [synset.encode()]
        assert example["image/encoded"] == [(images / synset / name).read_bytes()]
    assert len(examples(tmp_path / "a")) == 23


def test_unusable_sources(images: Path, tmp_path: Path) -> None:
    empty, other, mixed = tmp_path / "empty", tmp_path / "other", tmp_path / "mixed"
    for folder in (empty, other / "train", other / "val", mixed / "n01440764"):
        folder.mkdir(parents=True)
    (mixed / "n01440764" / "a.JPEG").write_bytes(jpeg())
    (mixed / "b.JPEG").write_bytes(jpeg())
    packed_tar = tmp_path / "train.tar.gz"
    with tarfile.open(packed_tar, "w:gz") as tar:
        tar.add(images / "n01440764", "n01440764")
    twice = tar_of(tmp_path / "twice.tar", {"x/n01440764/a.JPEG": b"1", "y/n01440764/a.JPEG": b"2"})
    none = tar_of(tmp_path / "none.tar", {"README": b"1"})
    for source, message in (
        (tmp_path / "missing", "cannot read the source .*missing: No such file"),
        (empty, "is no layout of ImageNet: it holds nothing"),
        (other, "is no layout of ImageNet: it holds train, val"),
        (mixed, "holds b.JPEG outside of class folders, but other images in some"),
        (packed_tar, "train.tar.gz is no tar archive"),
        (images / "n01440764" / "notes.txt", "notes.txt is no tar archive"),
        (twice, "holds n01440764/a.JPEG twice"),
        (none, "no images in .*none.tar"),
    ):
        with pytest.raises(InputError, match=message) as caught:
            scan_imagenet(source, ImageNetFiles())
        assert caught.value.hint or source in (mixed, twice)


# Archives


def members(data: bytes, folder: Path) -> dict[str, bytes]:
    path = folder / "x.tar"
    path.write_bytes(data)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return {
            member.name: os.pread(descriptor, member.size_bytes, member.offset)
            for member in TarReader(descriptor).members()
        }
    finally:
        os.close(descriptor)


LONG = {
    "a/" * 120 + "long.JPEG": b"1" * 700,
    "short.JPEG": b"",
    "ü/" * 60 + "é.JPEG": b"2" * 512,
    "p" * 90 + "/" + "n" * 95: b"3" * 513,
}


@pytest.mark.parametrize("kind", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_are_read_as_python_reads_them(tmp_path: Path, kind: TarFormat) -> None:
    data = tar_bytes(LONG, kind)
    assert members(data, tmp_path) == LONG
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert tar.getnames() == list(LONG)


def test_folders_pipes_and_headers_of_all_are_stepped_over(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "all"}) as tar:
        for name, kind in (("d" * 200, tarfile.DIRTYPE), ("pipe", tarfile.FIFOTYPE)):
            member = tarfile.TarInfo(name)
            member.type = kind
            tar.addfile(member)
        member = tarfile.TarInfo("real")
        member.size = 3
        tar.addfile(member, io.BytesIO(b"abc"))
    assert members(buffer.getvalue(), tmp_path) == {"real": b"abc"}


def test_gnu_sizes_beyond_octal(tmp_path: Path) -> None:
    data = bytearray(tar_bytes({"a": b"xyz"}))
    data[124:136] = b"\x80" + (3).to_bytes(11, "big")
    data[148:156] = b"%06o\0 " % (sum(data[:148]) + 8 * 32 + sum(data[156:512]))
    assert members(bytes(data), tmp_path) == {"a": b"xyz"}


@pytest.mark.parametrize("kind", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_truncated_archives_are_never_taken_for_short_ones(tmp_path: Path, kind: TarFormat) -> None:
    data = tar_bytes(LONG, kind)
    end = len(data.rstrip(b"\0")) // 512 * 512 + 512
    assert members(data[: end + 1024], tmp_path) == LONG
    for length in range(0, end + 1024, 128):
        with pytest.raises(DataError, match=r"^truncated tar"):
            members(data[:length], tmp_path)


def linked_tar(kind: TarFormat, links: dict[str, str], link_kind: bytes = tarfile.LNKTYPE) -> bytes:
    """LONG, and links by name to targets."""
    buffer = io.BytesIO(tar_bytes(LONG, kind))
    with tarfile.open(fileobj=buffer, mode="a", format=kind) as tar:
        for name, target in links.items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = link_kind, target
            tar.addfile(member)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_hard_links_have_their_targets_content(tmp_path: Path, kind: TarFormat) -> None:
    first, *_, last = LONG
    links = {"one": first, "two": last, "h" * 150: "one"}
    found = members(linked_tar(kind, links), tmp_path)
    assert found == LONG | {"one": LONG[first], "two": LONG[last], "h" * 150: LONG[first]}
    with pytest.raises(DataError, match="a is a hard link to b, which the tar does not hold before it"):
        members(linked_tar(kind, {"a": "b", "b": first}), tmp_path)


def test_links_of_a_class_tar(images: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(images, tree)
    name = image_names()[0]
    os.link(tree / name, tree / Path(name).with_name("again.JPEG"))
    path = tmp_path / "x.tar"
    subprocess.run(["tar", "cf", path, "-C", tree, "."], check=True, timeout=30)
    found = scan_imagenet(path, ImageNetFiles())
    assert len(found.items()) == 24
    assert [found.read(item) == (tree / name).read_bytes() for item in found.items()].count(True) == 2
    (tree / Path(name).with_name("sym.JPEG")).symlink_to("again.JPEG")
    subprocess.run(["tar", "cf", path, "-C", tree, "."], check=True, timeout=30)
    with pytest.raises(InputError, match=r"x.tar: .*sym.JPEG is a symbolic link to again.JPEG; tar --dereference"):
        scan_imagenet(path, ImageNetFiles())


def test_a_hole_is_no_end(images: Path, tmp_path: Path) -> None:
    """Blocks of zeros at a member's header, as in a file that was set up at its full size and not filled."""
    data = tar_bytes(LONG)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        places = [member.offset for member in tar]
    for place in places:
        for size in (512, 1024, 700):
            zeroed = data[:place] + bytes(size) + data[place + size :]
            with pytest.raises(DataError, match=rf"damaged tar: .*zeros.* at byte {place}"):
                members(zeroed, tmp_path)
    with pytest.raises(DataError, match=rf"more at byte {len(data)}: a file with a hole, or several archives in one"):
        members(data + data, tmp_path)
    whole = train_tar(tmp_path / "whole.tar", images).read_bytes()
    with tarfile.open(tmp_path / "whole.tar") as tar:
        member = tar.getmembers()[2]
    holed = tmp_path / "holed.tar"
    inside = member.offset_data + 512 * 8
    inside = whole.rindex(b"ustar", 0, inside) - 257
    holed.write_bytes(whole[:inside] + bytes(4096) + whole[inside + 4096 :])
    with pytest.raises(
        InputError, match=rf"holed.tar: {member.name}: damaged tar: zeros at byte {inside}, .* but more"
    ):
        scan_imagenet(holed, ImageNetFiles())
    holed.write_bytes(whole[: member.offset] + bytes(len(whole) - member.offset))
    with pytest.raises(InputError, match=r"holed.tar: damaged tar: zeros from byte \d+ on, \d+ bytes before its end"):
        scan_imagenet(holed, ImageNetFiles())


def test_padding_is_an_end(tmp_path: Path) -> None:
    end = len(tar_bytes(LONG).rstrip(b"\0")) // 512 * 512 + 512 + 1024
    data = tar_bytes(LONG)[:end]
    for record in (512, 10240, 20480, 1 << 20, 4 << 20):  # tar's --blocking-factor
        assert members(data + bytes(-end % record), tmp_path) == LONG
    for more in (12_000, 3_000_000, 40_000_000):
        with pytest.raises(DataError, match="more than tar fills up with: perhaps not downloaded whole"):
            members(data + bytes(more), tmp_path)


def pax(line: bytes) -> bytes:
    """An extended header of these bytes."""
    header = bytearray(512)
    header[:1], header[124:136], header[156:157] = b"x", b"%011o\0" % len(line), b"x"
    header[257:265], header[148:156] = b"ustar\x0000", b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + line + bytes(-len(line) % 512)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"12 size=abc\n", r"damaged tar: size b'abc' in the extended header"),
        (b"11 size=-5\n", r"damaged tar: size b'-5' in the extended header"),
        (b"5016 size=" + b"9" * 5005 + b"\n", r"damaged tar: size b'9{40}' in the extended header"),
        (b"9" * 5000 + b" size=1\n", "damaged tar: extended header at byte 512"),
        (b"22 GNU.sparse.major=1\n", "sparse file in the tar at byte 512: not supported"),
    ],
)
def test_extended_headers_that_are_wrong(tmp_path: Path, line: bytes, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        members(pax(line) + tar_bytes(LONG), tmp_path)


def test_an_extended_header_without_its_member(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a member's extended header, and zeros behind it, at byte 1024"):
        members(pax(b"10 path=a\n") + bytes(10240), tmp_path)


def test_negative_sizes_are_refused(tmp_path: Path) -> None:
    data = bytearray(tar_bytes({"a": b"xyz"}))
    data[124:136] = b"-0000001000\0"
    data[148:156] = b"%06o\0 " % (sum(data[:148]) + 8 * 32 + sum(data[156:512]))
    with pytest.raises(DataError, match="damaged tar: no header at byte 0"):
        members(bytes(data), tmp_path)


def test_damaged_archives_are_refused(tmp_path: Path) -> None:
    data = bytearray(tar_bytes({"a": b"x" * 600, "b": b"y"}))
    data[512 + 1024 + 5] ^= 1
    with pytest.raises(DataError, match="damaged tar: no header at byte 1536"):
        members(bytes(data), tmp_path)


def test_a_truncated_training_tar_is_named(images: Path, tmp_path: Path) -> None:
    whole = train_tar(tmp_path / "whole.tar", images).read_bytes().rstrip(b"\0")
    cut = tmp_path / "cut.tar"
    for share in (0.3, 0.6, 0.95):
        cut.write_bytes(whole[: int(len(whole) * share) // 512 * 512])
        with pytest.raises(InputError, match=r"cut.tar: (n\d{8}.tar: )?truncated tar") as caught:
            scan_imagenet(cut, ImageNetFiles())
        assert caught.value.hint
    inner = {"n01440764.tar": tar_bytes({"n01440764_1.JPEG": jpeg()})[:-9000]}
    tar_of(cut, inner)
    with pytest.raises(InputError, match=r"cut.tar: n01440764.tar: truncated tar"):
        scan_imagenet(cut, ImageNetFiles())


# Labels of the flat validation set

VALIDATION = [SYNSETS[number] for number in (2, 4, 0, 0, 3, 1, 2)]


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    folder = tmp_path / "val"
    folder.mkdir()
    for number in range(len(VALIDATION)):
        (folder / f"ILSVRC2012_val_{number + 1:08d}.JPEG").write_bytes(jpeg(number))
    return folder


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    return write(tmp_path / "ids.txt", *(f"{number} {synset}" for number, synset in DEVKIT_IDS.items()))


@pytest.fixture
def truth(tmp_path: Path) -> Path:
    number_of = {synset: number for number, synset in DEVKIT_IDS.items()}
    return write(tmp_path / "ILSVRC2012_validation_ground_truth.txt", *(str(number_of[s]) for s in VALIDATION))


def check_validation(folder: Path) -> None:
    found = examples(folder)
    assert len(found) == len(VALIDATION)
    for number, synset in enumerate(VALIDATION):
        example = found[f"ILSVRC2012_val_{number + 1:08d}.JPEG"]
        assert example["image/class/synset"] == [synset.encode()]
        assert example["image/class/label"] == [1 + SYNSETS.index(synset)]


def test_devkit_ids_are_mapped_and_not_taken_for_sorted(flat: Path, truth: Path, ids: Path, tmp_path: Path) -> None:
    files: dict[str, Any] = {"labels": truth, "class_ids": ids, "synsets": write(tmp_path / "synsets.txt", *SYNSETS)}
    manifest = packed(flat, tmp_path / "out", **files)
    assert manifest.labels == tuple(SYNSETS)
    check_validation(tmp_path / "out")
    first = examples(tmp_path / "out")["ILSVRC2012_val_00000001.JPEG"]
    assert first["image/class/label"] == [3]  # the devkit's 1
    archive = tar_of(tmp_path / "val.tar", {path.name: path.read_bytes() for path in flat.iterdir()})
    assert packed(archive, tmp_path / "out2", **files) == manifest
    assert shards(tmp_path / "out2") == shards(tmp_path / "out")


def test_numbers_without_a_mapping_are_refused(flat: Path, truth: Path, tmp_path: Path) -> None:
    synsets = write(tmp_path / "synsets.txt", *SYNSETS)
    with pytest.raises(InputError, match=r"ground_truth.txt holds numbers, such as 1: nothing says what") as caught:
        scan_imagenet(flat, ImageNetFiles(labels=truth, synsets=synsets))
    assert caught.value.hint is not None
    assert "meta.mat" in caught.value.hint
    with pytest.raises(InputError, match="their labels are needed"):
        scan_imagenet(flat, ImageNetFiles(synsets=synsets))


def test_the_hint_makes_the_mapping(flat: Path, truth: Path, tmp_path: Path) -> None:
    """The devkit's meta.mat, in small: inner nodes of the hierarchy have ids too, and children."""
    kind = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("gloss", "O"), ("num_children", "O")]
    rows = [(number, synset, "w", "g", 0) for number, synset in DEVKIT_IDS.items()] + [(6, "n00001740", "w", "g", 3)]
    scipy.io.savemat(tmp_path / "meta.mat", {"synsets": np.array([rows], dtype=kind).reshape(-1, 1)})
    with pytest.raises(InputError) as caught:
        scan_imagenet(flat, ImageNetFiles(labels=truth))
    assert caught.value.hint is not None
    code = caught.value.hint.partition('python -c "')[2].rpartition('"')[0]
    printed = io.StringIO()
    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        exec(code, {"print": lambda *words: printed.write(" ".join(map(str, words)) + "\n")})
    finally:
        os.chdir(before)
    assert printed.getvalue().splitlines() == [f"{number} {synset}" for number, synset in DEVKIT_IDS.items()]


@pytest.mark.parametrize(
    "line",
    [
        lambda number, synset: synset,
        lambda number, synset: f"ILSVRC2012_val_{number:08d}.JPEG {synset}",
        lambda number, synset: f"val/ILSVRC2012_val_{number:08d}.JPEG,{synset}",
        lambda number, synset: f"ILSVRC2012_val_{number:08d},{synset} 85 1 499 272 5 6 7 8",
    ],
)
def test_synsets_by_image(flat: Path, tmp_path: Path, line: Callable[[int, str], str]) -> None:
    lines = [line(number, synset) for number, synset in enumerate(VALIDATION, start=1)]
    if " 85 " in lines[0]:
        lines = ["ImageId,PredictionString", *reversed(lines)]
    files: dict[str, Any] = {
        "labels": write(tmp_path / "labels.txt", *lines),
        "synsets": write(tmp_path / "synsets.txt", *reversed(SYNSETS)),
    }
    packed(flat, tmp_path / "out", **files)
    check_validation(tmp_path / "out")


def test_wrong_label_files(flat: Path, truth: Path, ids: Path, images: Path, tmp_path: Path) -> None:
    synsets = write(tmp_path / "synsets.txt", *SYNSETS)
    good = ImageNetFiles(labels=truth, class_ids=ids, synsets=synsets)
    many = [f"n{number:08d}" for number in range(1000)]

    def lines(*text: str) -> Path:
        return write(tmp_path / f"{random.random()}.txt", *text)

    by_name = [f"ILSVRC2012_val_{n + 1:08d}.JPEG {synset}" for n, synset in enumerate(VALIDATION)]
    cases = [
        (replace(good, labels=lines("1", "2")), "has 2 labels for 7 images"),
        (replace(good, labels=lines("0", *"123412")), "val_00000001.JPEG has the id 0, which .*ids.txt does not have"),
        (replace(good, labels=lines(*"123419", "2")), "has the id 9, which"),
        (replace(good, labels=lines("²", *"123412")), "has the label '²'; expected a synset or a number"),
        (replace(good, labels=lines("9" * 5000, *"123412")), "has the label '9999"),
        (replace(good, class_ids=lines("² n01440764")), "1: '² n01440764' is not `ID SYNSET`"),
        (replace(good, labels=lines("tench", *"123412")), "has the label 'tench'; expected a synset or a number"),
        (replace(good, labels=lines(*["n09999999"] * 7)), "has the class n09999999, which is not among the 5 known"),
        (replace(good, labels=lines(*by_name[:-2])), r"has no label for ILSVRC2012_val_00000006.JPEG and 1 more"),
        (replace(good, labels=lines(*by_name, by_name[0])), "is there twice"),
        (replace(good, labels=lines(*by_name, "ILSVRC2012_val_9")), "names no label"),
        (replace(good, labels=None), "their labels are needed"),
        (
            replace(good, labels=lines(*VALIDATION), class_ids=None, synsets=None),
            "which classes there are is not known: .* names 5 synsets, ILSVRC2012 has 1000",
        ),
        (replace(good, synsets=None), "which classes there are is not known: .*ids.txt names 5 synsets"),
        (
            replace(good, class_ids=lines(*(f"{n} {SYNSETS[n - 1]}" for n in (3, 1, 5, 2, 4)))),
            "numbers the synsets in sorted order, which the devkit does not",
        ),
        (replace(good, class_ids=lines("2 n01443537", "1 n01440764")), "numbers the synsets in sorted order"),
        (replace(good, class_ids=lines(*SYNSETS)), "1: 'n01440764' is not `ID SYNSET`"),
        (replace(good, class_ids=lines("1 n01440764", "1 n01443537")), "2: 1 or n01443537 is there twice"),
        (replace(good, class_ids=lines("1 n01440764", "2 n01440764")), "2: 2 or n01440764 is there twice"),
        (replace(good, class_ids=lines("1 n01440764", "3 n01443537")), "has 2 ids up to 3; expected 1 to 1000"),
        (
            replace(good, class_ids=lines(*(f"{n} {s}" for n, s in enumerate([*many, "n99999999"], start=1)))),
            "has 1,001 ids up to 1001; expected 1 to 1000",
        ),
        (
            replace(good, class_ids=lines(*(f"{n} {s}" for n, s in enumerate(many, start=1)))),
            "numbers the synsets in sorted order, which the devkit does not: its 1 is n02119789",
        ),
        (replace(good, synsets=lines("cat", "dog")), "names 'cat', which is no synset"),
        (replace(good, synsets=lines(*many, "n99999999")), "names 1001 synsets, ILSVRC2012 has 1000"),
    ]
    for files, message in cases:
        with pytest.raises(InputError, match=message):
            scan_imagenet(flat, files)
    assert len(scan_imagenet(flat, good).items()) == 7
    with pytest.raises(InputError, match=r"--labels is for flat images; .* has class folders"):
        scan_imagenet(images, good)
    with pytest.raises(InputError, match=r"has the class n15075141, which .* does not name"):
        scan_imagenet(images, ImageNetFiles(synsets=lines(*SYNSETS[:-1])))
    assert scan_imagenet(images, ImageNetFiles(synsets=synsets)).labels == tuple(SYNSETS)


def test_labels_count_all_classes_also_those_without_images(images: Path, tmp_path: Path) -> None:
    more = ["n00000001", *SYNSETS, "n99999999"]
    synsets = write(tmp_path / "synsets.txt", *(f"{synset} the {synset}" for synset in reversed(more)))
    words = write(tmp_path / "words.txt", "n01440764\ttench, Tinca tinca", "n00001740\tentity")
    manifest = packed(images, tmp_path / "out", synsets=synsets, words=words)
    assert manifest.labels == tuple(more)
    assert manifest.class_counts == (0, 5, 5, 5, 4, 4, 0)
    found = examples(tmp_path / "out")
    assert found["n01440764_0.JPEG"]["image/class/label"] == [2]
    assert found["n01440764_0.JPEG"]["image/class/text"] == [b"tench, Tinca tinca"]
    assert found["n01443537_1.JPEG"]["image/class/text"] == [b"the n01443537"]


# Lists that name all 1,000 classes


THOUSAND = [f"n{number:08d}" for number in range(7, 3007, 3)]


@pytest.fixture(scope="module")
def thousand(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A flat validation tar of an image per class, and the synset of each in order of the names."""
    folder = tmp_path_factory.mktemp("thousand")
    image = jpeg(3, 16, 16)
    files = {f"ILSVRC2012_val_{number:08d}.JPEG": image for number in range(1, 1001)}
    return tar_of(folder / "ILSVRC2012_img_val.tar", files), random.Random(2).sample(THOUSAND, 1000)


def test_a_list_of_all_classes_needs_no_other(thousand: tuple[Path, list[str]], tmp_path: Path) -> None:
    """The command of docs/data.md."""
    tar, synsets = thousand
    labels = write(tmp_path / "val_synsets.txt", *synsets)
    out = tmp_path / "out"
    done = drawbar("data", "pack", "imagenet", tar, out, "--split", "validation", "--labels", labels, "--workers", "1")
    assert done.code == 0, done.stderr
    assert done.stdout.startswith("1,000 records in 128 shards")
    assert "warning" not in done.stderr
    assert Manifest.loads((out / "manifest.json").read_bytes()).labels == tuple(THOUSAND)
    source = scan_imagenet(tar, ImageNetFiles(labels=labels))
    assert [source.labels[source.item_labels(item)[0] - 1] for item in source.items()] == synsets
    write(labels, *synsets[:-1], synsets[0])
    with pytest.raises(InputError, match=r"val_synsets.txt names 999 synsets, ILSVRC2012 has 1000") as caught:
        scan_imagenet(tar, ImageNetFiles(labels=labels))
    assert "--synsets" in str(caught.value.hint)


def test_class_ids_of_all_classes_need_no_list(thousand: tuple[Path, list[str]], tmp_path: Path) -> None:
    tar, synsets = thousand
    ids = random.Random(3).sample(THOUSAND, 1000)
    number_of = {synset: number for number, synset in enumerate(ids, start=1)}
    truth = write(tmp_path / "truth.txt", *(str(number_of[synset]) for synset in synsets))
    class_ids = write(tmp_path / "ids.txt", *(f"{number_of[synset]} {synset}" for synset in THOUSAND))
    source = scan_imagenet(tar, ImageNetFiles(labels=truth, class_ids=class_ids))
    assert source.labels == tuple(THOUSAND)
    assert [source.labels[source.item_labels(item)[0] - 1] for item in source.items()] == synsets
    in_order = random.Random(4).sample([f"{n} {s}" for n, s in enumerate(THOUSAND, start=1)], 1000)
    with pytest.raises(InputError, match="numbers the synsets in sorted order"):
        scan_imagenet(tar, ImageNetFiles(labels=truth, class_ids=write(class_ids, *in_order)))


# What is only said


def notes_of(source: Path, **files: Any) -> list[str]:
    notes: list[str] = []
    scan_imagenet(source, ImageNetFiles(**files), note=notes.append)
    return notes


def test_classes_that_are_not_there_are_said(images: Path, tmp_path: Path) -> None:
    (note,) = notes_of(images)
    assert note.startswith("5 classes, where ILSVRC2012 has 1000")
    more = write(tmp_path / "synsets.txt", *SYNSETS, "n01500000")
    (note,) = notes_of(images, synsets=more)
    assert note.startswith("1 of 6 classes has no image: n01500000 (label 3)")


def test_boxes_of_other_images_are_said(images: Path, tmp_path: Path) -> None:
    synsets = write(tmp_path / "synsets.txt", *SYNSETS)

    def said(*lines: str) -> list[str]:
        return notes_of(images, synsets=synsets, boxes=write(tmp_path / "boxes.csv", *lines))

    here, there, where = "n01440764_0.JPEG,0,0,1,1", "val_1.JPEG,0,0,1,1", "val_2.JPEG,0,0,1,1"
    assert said(here, there) == []
    assert "has boxes for 3 images, of which only 1 is in this set" in said(here, there, where)[0]
    assert "has boxes for 2 images, of which none is in this set" in said(there, where)[0]


def test_what_is_ignored_in_folders_and_tars(tmp_path: Path) -> None:
    source, synsets = tmp_path / "source", write(tmp_path / "synsets.txt", "n01440764")
    for name in ("n01440764/sub", "n0144", "n01440764"):
        (source / name).mkdir(parents=True, exist_ok=True)
    for name in ("n01440764/a", "n01440764/sub/b.JPEG", "LICENSE"):
        (source / name).write_bytes(jpeg())
    (source / "n02119789.tar").symlink_to(tmp_path / "nothing")
    listed = scan_imagenet(source, ImageNetFiles(synsets=synsets))
    assert [item.path for item in listed.items()] == ["n01440764/a"]
    assert listed.notes()["ignored"] == {
        "loose_files": {"count": 1, "example": "LICENSE"},
        "sub_folders": {"count": 1, "example": "n01440764/sub"},
        "other_folders": {"count": 1, "example": "n0144"},
        "not_readable": {"count": 1, "example": "n02119789.tar"},
    }
    inner = tar_bytes({"a": jpeg(), "b.txt": b"no image"})
    tar = tar_of(tmp_path / "train.tar", {"n01440764.tar": inner, "README": b"no image", "sums.md": b"no image"})
    listed = scan_imagenet(tar, ImageNetFiles(synsets=synsets))
    assert [item.path for item in listed.items()] == ["n01440764/a"]
    assert listed.notes()["ignored"] == {"loose_files": {"count": 1, "example": "README"}}


def test_addresses_are_no_sources(images: Path) -> None:
    url = Path("s3://a/b")
    for source, files in (
        (url, ImageNetFiles()),
        (images, ImageNetFiles(boxes=url)),
        (images, ImageNetFiles(synsets=url)),
    ):
        with pytest.raises(InputError, match=r"^s3://a/b is an address, and sources are local"):
            scan_imagenet(source, files)


# Boxes


def annotation(width: int, height: int, *boxes: tuple[float, float, float, float]) -> str:
    sides = ("xmin", "ymin", "xmax", "ymax")
    objects = "".join(
        "<object><name>n01440764</name><bndbox>"
        + "".join(f"<{side}>{value}</{side}>" for side, value in zip(sides, box, strict=True))
        + "</bndbox></object>"
        for box in boxes
    )
    size = f"<size><width>{width}</width><height>{height}</height><depth>3</depth></size>"
    return f"<annotation><filename>%s</filename>{size}{objects}</annotation>"


ANNOTATIONS = {
    "n01440764/n01440764_0.xml": annotation(500, 400, (50, 100, 250, 300)),
    "n01440764/n01440764_5.xml": annotation(200, 100, (0, 0, 200, 100), (150, 90, 50, 10)),  # second reversed
    "n01443537/n01443537_1.xml": annotation(100, 100, (-10, 20, 120, 80)),  # reaches out
    "n01443537/n01443537_6.xml": annotation(100, 100, (30, 20, 30, 80), (110, 10, 130, 20), (1, 1, 2, 2)),  # two empty
    "n01443537/n01443537_11.xml": annotation(0, 0, (1, 1, 2, 2)),
    "n02119789/n02119789_2.xml": annotation(100, 100),
    "n99999999/n99999999_1.xml": annotation(100, 100, (10, 10, 20, 20)),  # no such image
}
EXPECTED = {
    "n01440764_0.JPEG": [(0.1, 0.25, 0.5, 0.75)],
    "n01440764_5.JPEG": [(0.0, 0.0, 1.0, 1.0), (0.25, 0.1, 0.75, 0.9)],
    "n01443537_1.JPEG": [(0.0, 0.2, 1.0, 0.8)],
    "n01443537_6.JPEG": [(0.01, 0.01, 0.02, 0.02)],
}


def write_annotations(folder: Path) -> Path:
    for name, text in ANNOTATIONS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "readme.txt").write_text("no annotation")
    return folder


def check_boxes(folder: Path) -> None:
    for path in folder.glob("train-*"):
        for record in RecordSplitter(path.name).feed(path.read_bytes()):
            image = parse_image_example(record.payload)
            expected = EXPECTED.get(image.filename, [])
            assert image.boxes == [pytest.approx(Box(*box), abs=1e-6) for box in expected]
            labels = decode_example(record.payload)["image/object/bbox/label"]
            assert labels == [image.label] * len(expected)


def test_boxes_from_every_form(images: Path, tmp_path: Path) -> None:
    tree = write_annotations(tmp_path / "Annotation")
    plain, zipped = tmp_path / "boxes.tar", tmp_path / "boxes.tar.gz"
    for path, mode in ((plain, "w"), (zipped, "w:gz")):
        with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
            tar.add(tree, "Annotation")
    table = tmp_path / "boxes.csv"
    table.write_text(
        "file,xmin,ymin,xmax,ymax,width,height\n"
        "n01440764_0.JPEG,50,100,250,300,500,400\n\n"
        "n01440764_5.JPEG,0,0,200,100,200,100\nn01440764_5.JPEG,150,90,50,10,200,100\n"
        "n01443537/n01443537_1.JPEG,-10,20,120,80,100,100\n"
        "n01443537_6,30,20,30,80,100,100\nn01443537_6,110,10,130,20,100,100\nn01443537_6,1,1,2,2,100,100\n"
        "n01443537_11,1,1,2,2,0,0\nn99999999_1,10,10,20,20,100,100\n"
    )
    first = packed(images, tmp_path / "out", boxes=tree)
    check_boxes(tmp_path / "out")
    assert first.notes == {
        "boxes_read": 9,
        "boxes_swapped": 1,
        "boxes_clamped": 1,
        "boxes_dropped": 3,
        "images_with_boxes": 4,
    }
    for number, path in enumerate((plain, zipped, table)):
        assert packed(images, tmp_path / f"out{number}", boxes=path) == first
        assert shards(tmp_path / f"out{number}") == shards(tmp_path / "out")


def test_relative_boxes(images: Path, tmp_path: Path) -> None:
    """As TensorFlow's `process_bounding_boxes.py` writes them."""
    table = write(
        tmp_path / "boxes.csv",
        "n01440764_0.JPEG,0.1000,0.2500,0.5000,0.7500",
        "n01440764_5.JPEG,0.0000,0.0000,1.0000,1.0000",
        "n01440764_5.JPEG,0.7500,0.9000,0.2500,0.1000",
        "n01443537_1.JPEG,-0.1,0.2,1.2,0.8",
        "n01443537_6.JPEG,0.01,0.01,0.02,0.02",
        "n01443537_6.JPEG,nan,0.01,0.02,0.02",
    )
    manifest = packed(images, tmp_path / "out", boxes=table)
    check_boxes(tmp_path / "out")
    assert manifest.notes["boxes_dropped"] == 1
    assert manifest.notes["boxes_clamped"] == 1


def test_boxes_decide_which_set_it_is(images: Path, tmp_path: Path) -> None:
    table = write(tmp_path / "boxes.csv", "n01440764_0.JPEG,0.1,0.25,0.5,0.75")
    packed(images, tmp_path / "out", boxes=table)
    write(table, "n01440764_0.JPEG,0.1,0.25,0.5,0.76")
    with pytest.raises(InputError, match="holds another set"):
        packed(images, tmp_path / "out", boxes=table)


def test_wrong_boxes(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    bad_xml = tree / "n1_1.xml"
    cut = tmp_path / "cut.tar.gz"
    with tarfile.open(cut, "w:gz") as tar:
        for number in range(50):
            member = tarfile.TarInfo(f"{number}.xml")
            data = annotation(100, 100, (1, 1, 2, 2 + number)).encode()
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    whole = cut.read_bytes()
    for length in range(100, len(whole) - 1, 61):
        cut.write_bytes(whole[:length])
        try:
            outcome: int | str = read_boxes(cut).read
        except InputError as error:
            outcome = error.message
        # 50 where it is cut behind the archive's end mark.
        assert outcome == 50 or "cannot read the boxes" in str(outcome)
    for path, message in (
        (tmp_path / "missing", "cannot read the boxes .*missing: No such file"),
        (tree, "no boxes in"),
        (write(tmp_path / "a.csv", "a.JPEG,0,0,1"), "line 1: 4 columns; expected file,xmin"),
        (write(tmp_path / "b.csv", "a,0,0,1,1", "b.JPEG,10,20,300,400"), "line 2: 400 is no relative coordinate"),
        (write(tmp_path / "c.csv", "a,0,0,1,1", "b,0,0,1,x"), "line 2: could not convert"),
    ):
        with pytest.raises(InputError, match=message):
            read_boxes(path)
    for text, message in (
        ("<annotation>", "n1_1.xml is no annotation"),
        ("<annotation><size><width>1</width></size></annotation>", "could not convert"),
        (annotation(10, 10, (1, 1, 2, 2)).replace("<ymax>2</ymax>", ""), "could not convert"),
    ):
        bad_xml.write_text(text)
        with pytest.raises(InputError, match=message):
            read_boxes(tree)


# The command


def test_the_command(images: Path, tmp_path: Path) -> None:
    boxes = write_annotations(tmp_path / "Annotation")
    tar = train_tar(tmp_path / "train.tar", images)
    out = tmp_path / "out"
    done = drawbar("data", "pack", "imagenet", tar, out, "--boxes", boxes, "--shards", "4", "--workers", "2")
    assert done.code == 0, done.stderr
    assert done.stdout.startswith("23 records in 4 shards")
    check_boxes(out)
    refused = drawbar("data", "pack", "imagenet", tar, tmp_path / "out2")
    assert refused.code == 2
    assert refused.error_line == "error: 1,024 shards for 23 images; expected at most one shard per image"
    assert not (tmp_path / "out2").exists()
    refused = drawbar("data", "pack", "imagenet", tar, tmp_path / "out2", "--split", "val")
    assert refused.error_line.startswith("error: 128 shards for 23 images")
    assert "; 9 boxes read: 1 swapped, 1 clamped, 3 dropped; 4 images have boxes" in done.stdout
