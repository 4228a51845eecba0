"""What lies where an image should and is no file to read: a bad file like others, never opened, never lost."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from drawbar.dataset.destination import FolderDestination
from drawbar.dataset.folder import scan_folder
from drawbar.dataset.imagenet import ImageNetFiles, scan_imagenet
from drawbar.dataset.items import Source
from drawbar.dataset.jpeg import MAX_FILE_BYTES
from drawbar.dataset.manifest import Manifest
from drawbar.dataset.pack import pack
from drawbar.dataset.shard_writer import OnBad, PackSettings
from drawbar.errors import InputError
from drawbar.pack_commands import PackOptions, pack_coco, pack_folder, pack_imagenet
from tests.image_files import jpeg

FIRST, SECOND = "n01440764", "n01443537"
SCANS: dict[str, Callable[[Path], Source]] = {
    "folder": scan_folder,
    "imagenet": lambda source: scan_imagenet(source, ImageNetFiles()),
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for synset in (FIRST, SECOND):
        (tmp_path / "source" / synset).mkdir(parents=True)
        for number in range(2):
            (tmp_path / "source" / synset / f"{synset}_{number}.JPEG").write_bytes(jpeg(number))
    return tmp_path / "source"


def packed(listed: Source, dest: Path, on_bad: OnBad) -> Manifest:
    return pack(listed, FolderDestination(dest), PackSettings(1, on_bad=on_bad), workers=1)


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        before = Path.cwd()
        os.chdir(path.parent)  # the address has 108 bytes at most
        server.bind(path.name)
        os.chdir(before)


ODD: dict[str, tuple[Callable[[Path], None], str]] = {
    "dangling": (lambda path: path.symlink_to("../.git/annex/objects/x.JPEG"), "dangling link"),
    "through a file": (lambda path: path.symlink_to(f"{FIRST}_0.JPEG/x"), "dangling link"),
    "loop": (lambda path: path.symlink_to(path.name), "link in a circle"),
    "pipe": (os.mkfifo, "no regular file"),
    "linked device": (lambda path: path.symlink_to("/dev/zero"), "no regular file"),
    "socket": (bind, "no regular file"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", SCANS)
@pytest.mark.parametrize("odd", ODD)
def test_what_is_no_file_is_a_bad_one(source: Path, tmp_path: Path, odd: str, kind: str) -> None:
    make, reason = ODD[odd]
    make(source / FIRST / "odd.JPEG")
    listed = SCANS[kind](source)
    for on_bad in ("skip", "fix"):
        manifest = packed(listed, tmp_path / on_bad, on_bad)
        assert [(bad.path, bad.reason, bad.action) for bad in manifest.bad] == [
            (f"{FIRST}/odd.JPEG", reason, "skipped")
        ]
        assert manifest.class_counts == (2, 2)
    with pytest.raises(InputError, match=f"{FIRST}/odd.JPEG is no trainable JPEG: {reason}"):
        packed(listed, tmp_path / "fail", "fail")


def test_flat_images_too(source: Path, tmp_path: Path) -> None:
    for path in (source / FIRST).iterdir():
        path.rename(source / path.name)
    for synset in (FIRST, SECOND):
        shutil.rmtree(source / synset)
    (source / "odd.JPEG").symlink_to("nowhere")
    labels, synsets = tmp_path / "labels", tmp_path / "synsets"
    labels.write_text(f"{FIRST}\n{FIRST}\n{SECOND}\n")
    synsets.write_text(f"{FIRST}\n{SECOND}\n")
    manifest = packed(
        scan_imagenet(source, ImageNetFiles(labels=labels, synsets=synsets)), tmp_path / "out", on_bad="skip"
    )
    assert [(bad.path, bad.reason) for bad in manifest.bad] == [("odd.JPEG", "dangling link")]
    assert manifest.class_counts == (2, 0)


def test_good_links_are_followed(source: Path, tmp_path: Path) -> None:
    (source / SECOND).rename(tmp_path / "elsewhere")
    (source / SECOND).symlink_to(tmp_path / "elsewhere")
    (source / FIRST / "linked.JPEG").symlink_to(f"{FIRST}_0.JPEG")
    (source / FIRST / "folder.JPEG").mkdir()
    for kind, scan in SCANS.items():
        manifest = packed(scan(source), tmp_path / kind, "fail")
        assert (manifest.class_counts, manifest.bad) == ((3, 2), ())


@pytest.mark.parametrize("kind", SCANS)
@pytest.mark.parametrize("target", ["nowhere", "n01440000"])
def test_a_class_folder_that_leads_nowhere_would_shift_the_labels(source: Path, kind: str, target: str) -> None:
    (source / "n01440000").symlink_to(target)
    with pytest.raises(InputError, match="n01440000 is a link to nothing") as caught:
        SCANS[kind](source)
    assert caught.value.hint


@pytest.mark.timeout(20)
def test_a_pipe_is_no_archive(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / f"{FIRST}.tar")
    with pytest.raises(InputError, match=f"cannot read the source .*{FIRST}.tar: Illegal seek"):
        scan_imagenet(tmp_path / f"{FIRST}.tar", ImageNetFiles())
    with pytest.raises(InputError, match=f"is no layout of ImageNet: it holds {FIRST}.tar"):
        scan_imagenet(tmp_path, ImageNetFiles())


def test_a_link_that_is_no_class_is_not(source: Path) -> None:
    (source / "README.txt").symlink_to("nowhere")
    (source / "loop.JPEG").symlink_to("loop.JPEG")
    assert len(scan_folder(source).items()) == 4


def test_absurdly_large_files_are_never_read(source: Path, tmp_path: Path) -> None:
    path = source / FIRST / "large.JPEG"
    path.write_bytes(jpeg())
    os.truncate(path, MAX_FILE_BYTES)
    os.truncate(source / SECOND / f"{SECOND}_1.JPEG", MAX_FILE_BYTES + 1)
    reason = f"absurd size: {MAX_FILE_BYTES + 1} bytes, more than {MAX_FILE_BYTES}"
    listed = scan_folder(source)
    read = []
    original = listed.read
    listed.read = lambda item: read.append(item.path) or original(item)  # type: ignore[method-assign, func-returns-value]
    manifest = packed(listed, tmp_path / "out", "fix")
    assert [(bad.path, bad.reason, bad.action) for bad in manifest.bad] == [
        (f"{SECOND}/{SECOND}_1.JPEG", reason, "skipped")
    ]
    assert manifest.num_records == 4
    assert len(read) == 4
    assert f"{SECOND}/{SECOND}_1.JPEG" not in read


# A destination within the source


@pytest.mark.parametrize("name", ["shards", "", f"{FIRST}/deep/er", f"../source/{FIRST}/..", "linked/shards"])
def test_shards_do_not_go_into_their_source(source: Path, tmp_path: Path, name: str) -> None:
    if name.startswith("linked"):
        (tmp_path / "linked").symlink_to(source)
        dest, there = tmp_path / name, source
    else:
        dest, there = source / name, source
    linked = tmp_path / "source2"
    linked.symlink_to(source)
    before = sorted(source.rglob("*"))
    options = PackOptions(shards=1, quiet=True)
    for of in (there, linked):
        with pytest.raises(InputError) as by_folder:
            pack_folder(of, str(dest), None, options)
        with pytest.raises(InputError) as by_imagenet:
            pack_imagenet(of, f"file://{dest}", ImageNetFiles(), options)
        for caught in (by_folder, by_imagenet):
            assert str(dest) in caught.value.message
            assert f"lies in the source {of}" in caught.value.message
    assert sorted(source.rglob("*")) == before


def test_a_link_in_the_source_to_the_destination_is_found(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (source / "n99999999").symlink_to(tmp_path / "out")
    with pytest.raises(InputError, match="lies in the source"):
        pack_folder(source, str(source / "n99999999"), None, PackOptions(shards=1, quiet=True))


def test_coco_shards_do_not_go_into_the_images(tmp_path: Path) -> None:
    (tmp_path / "coco" / "train2017").mkdir(parents=True)
    (tmp_path / "coco" / "annotations").mkdir()
    (tmp_path / "coco" / "annotations" / "instances_train2017.json").write_text("{}")
    for name in ("shards", "train2017"):
        with pytest.raises(InputError, match="lies in the source"):
            pack_coco(
                [str(tmp_path / "coco"), str(tmp_path / "coco" / name)],
                annotations=None,
                images=None,
                captions=None,
                masks=True,
                options=PackOptions(shards=1, quiet=True),
            )


def test_beside_and_above_the_source_is_fine(source: Path, tmp_path: Path) -> None:
    for dest in (tmp_path / "source-shards", tmp_path):
        pack_folder(source, str(dest), None, PackOptions(shards=1, quiet=True))
        assert (dest / "manifest.json").exists()
