"""What `drawbar data make` and `drawbar data pack` do and print."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from drawbar.config import Storage
from drawbar.dataset.destination import Destination, FolderDestination, StoreDestination
from drawbar.dataset.folder import scan_folder
from drawbar.dataset.imagenet import ImageNetFiles, scan_imagenet
from drawbar.dataset.items import Note, Progress, Source, no_note
from drawbar.dataset.manifest import Manifest, RecordSchema
from drawbar.dataset.pack import pack_share
from drawbar.dataset.shard_writer import OnBad, PackSettings
from drawbar.errors import InputError
from drawbar.plural import plural
from drawbar.storage import embedded
from drawbar.storage.address import find_address
from drawbar.storage.stores import open_place
from drawbar.storage.urls import parse_url
from drawbar.terminal import Terminal
from drawbar.world import World


@dataclass(frozen=True, kw_only=True)
class PackOptions:
    """What all `drawbar data pack` commands take."""

    shards: int
    split: str = "train"
    seed: int = 1
    on_bad: str = "fix"
    workers: int = 0
    overwrite: bool = False
    endpoint: str | None = None
    store_dir: Path | None = None
    json_out: bool = False
    quiet: bool = False


class StageProgress:
    """Stage, rate and time left, on the terminal's status line."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._stage, self._start_t, self._start_done = "", 0.0, 0

    def __call__(self, stage: str, done: int, total: int) -> None:
        now_t = time.monotonic()
        if stage != self._stage:
            # What was there before this stage began (a packing that goes on) is not of its speed.
            self._stage, self._start_t, self._start_done = stage, now_t, done
        passed_s = now_t - self._start_t
        text = f"{stage}: {done} of {total}" if total else f"{stage}: {done} so far"
        rate = (done - self._start_done) / passed_s if passed_s > 0.5 else 0.0
        if rate > 0:
            text += f", {rate:.0f}/s" + (f", {(total - done) / rate:.0f} s left" if total else "")
        self._terminal.status(text)


def make(
    dest: Path,
    *,
    images: int,
    classes: int,
    seed: int,
    workers: int,
    size: int | None = None,
    json_out: bool = False,
    quiet: bool = False,
) -> None:
    # The generators' imports are not needed by any other command.
    from drawbar.dataset import picture
    from drawbar.dataset.synthetic import make_imagenet_like

    terminal = Terminal(quiet_stdout=json_out or quiet)
    with _written(dest, terminal):
        stats = make_imagenet_like(
            dest,
            num_images=images,
            num_classes=classes,
            seed=seed,
            size=picture.FULL_SIZE if size is None else size,
            workers=workers,
            progress=StageProgress(terminal),
        )
    row = {
        "dest": str(dest),
        "images": images,
        "classes": classes,
        "seed": seed,
        "mean_bytes": stats.mean_bytes,
        "total_bytes": stats.total_bytes,
    }
    used = "" if images >= classes else f"{images} of "
    text = f"{plural(images, 'image')} in {used}{plural(classes, 'class', 'classes')}, "
    text += f"{stats.mean_bytes / 1e3:.1f} kB on average, in {dest}"
    _report(terminal, row, json_out, text)


def refuse_files_in_store(dest: str) -> None:
    """Raises InputError: single files go to a folder, an object store gets shards."""
    if "://" in dest and not dest.startswith("file://"):
        raise InputError(
            f"{dest} is no folder for image files", hint="--shards N writes shards, to an object store too"
        )


def make_coco(
    dest: Path, *, images: int, split: str, seed: int, workers: int, size: int | None = None, json_out: bool = False
) -> None:
    from drawbar.dataset import coco_scene
    from drawbar.dataset.coco_like import make_coco_like

    terminal = Terminal(quiet_stdout=json_out)
    with _written(dest, terminal):
        stats = make_coco_like(
            dest,
            num_images=images,
            seed=seed,
            split=split,
            image_size=coco_scene.FULL_SIZE if size is None else size,
            workers=workers,
            progress=StageProgress(terminal),
        )
    row = {
        "dest": str(dest),
        "annotations": str(stats.annotations),
        "images": images,
        "split": split,
        "seed": seed,
        "total_bytes": stats.total_bytes,
    }
    text = f"{plural(images, 'image')}, {stats.total_bytes / 1e6:.1f} MB, in {dest}; annotations: {stats.annotations}"
    _report(terminal, row, json_out, text)


@contextmanager
def _written(dest: Path, terminal: Terminal) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot write {dest}: {error.strerror or error}") from None
    finally:
        terminal.close()


def make_shards(dest: str, *, images: int, classes: int, size: int | None, options: PackOptions) -> None:
    """The records of `make` without the files: straight to shards."""
    from drawbar.dataset import picture
    from drawbar.dataset.synthetic import ImagenetLikeSet, SyntheticSource

    wanted = ImagenetLikeSet(images, classes, options.seed, picture.FULL_SIZE if size is None else size)
    pack_source(lambda progress, note: SyntheticSource(wanted), dest, "imagenet", options)


def make_coco_shards(dest: str, *, images: int, size: int | None, options: PackOptions) -> None:
    """The records of `make_coco` without the files: straight to shards."""
    from drawbar.dataset import coco_scene
    from drawbar.dataset.coco_like import CocoLikeSet, SyntheticCocoSource

    wanted = CocoLikeSet(images, options.seed, options.split, coco_scene.FULL_SIZE if size is None else size)
    pack_source(lambda progress, note: SyntheticCocoSource(wanted), dest, "coco", options)


def pack_coco(
    places: Sequence[str],
    *,
    annotations: Path | None,
    images: Path | None,
    captions: Path | None,
    masks: bool,
    options: PackOptions,
) -> None:
    from drawbar.dataset.coco import find_layout, open_coco

    *sources, dest = places
    if len(sources) > 1 or not (sources or annotations):
        raise InputError(
            f"`drawbar data pack coco` got {len(places)} places: expected SOURCE and DEST",
            hint="or DEST alone with --annotations FILE",
        )
    source = Path(sources[0]) if sources else cast(Path, annotations)
    layout = find_layout(source, options.split, annotations=annotations, images=images, captions=captions)

    def listed(progress: Progress, note: Note) -> Source:
        def of_bytes(done: int, total: int) -> None:
            progress("reading annotations, MB", done // 1_000_000, total // 1_000_000)

        return open_coco(layout, masks=masks, on_bad=cast(OnBad, options.on_bad), progress=of_bytes)

    refuse_inside(dest, source, layout.images)
    pack_source(listed, dest, "coco", options)


def pack_folder(source: Path, dest: str, classes: Path | None, options: PackOptions) -> None:
    def listed(progress: Progress, note: Note) -> Source:
        return scan_folder(source, classes, lambda count: progress("listing images", count, 0), note)

    refuse_inside(dest, source)
    pack_source(listed, dest, "imagenet", options)


def pack_imagenet(source: Path, dest: str, files: ImageNetFiles, options: PackOptions) -> None:
    def listed(progress: Progress, note: Note) -> Source:
        return scan_imagenet(source, files, lambda stage, count: progress(stage, count, 0), note)

    refuse_inside(dest, source)
    pack_source(listed, dest, "imagenet", options)


def refuse_inside(dest: str, *sources: Path) -> None:
    """Raises InputError where the shards would go into a folder that is packed: the next listing would take the folder
    of the shards for a class, and number those behind it anew."""
    try:
        where = parse_url(dest)
    except ValueError:
        return  # which `destination` explains
    if where.on_s3:
        return
    folder = where.folder.absolute()
    above = {folder.resolve(), *folder.resolve().parents}
    above |= {parent.resolve() for parent in folder.parents}  # and those by whose links it is reached
    for source in sources:
        if source.is_dir() and source.resolve() in above:
            raise InputError(
                f"the destination {dest} lies in the source {source}", hint="choose a folder beside the source"
            )


def pack_source(
    listed: Callable[[Progress, Note], Source],
    dest: str,
    schema: RecordSchema,
    options: PackOptions,
) -> None:
    """Packs what `listed` returns, this rank's share of it where a launcher started several; prints what came out."""
    launched = World.detect()
    settings = PackSettings(
        num_shards=options.shards,
        split=options.split,
        seed=options.seed,
        on_bad=cast(OnBad, options.on_bad),
        schema=schema,
    )
    target = destination(dest, options.endpoint, options.store_dir)
    terminal = Terminal(quiet_stdout=options.json_out or options.quiet or launched.rank > 0)
    # Of several ranks one shows how far it is; what goes wrong, all say.
    progress: Progress = StageProgress(terminal) if launched.rank == 0 else (lambda stage, done, total: None)
    warnings: list[str] = []

    def note(text: str) -> None:
        warnings.append(text)
        print(f"warning: {text}", file=sys.stderr)

    try:
        manifest = pack_share(
            # What the source has to say is the same for every rank.
            listed(progress, note if launched.rank == 0 else no_note),
            target,
            settings,
            launched,
            workers=options.workers,
            overwrite=options.overwrite,
            progress=progress,
            note=note,
        )
    finally:
        terminal.close()
    if manifest is None:
        terminal.line(f"rank {launched.rank} of {launched.world_size}: its shards are done")
    else:
        row = _packed_row(dest, manifest) | {"warnings": warnings}
        _report(terminal, row, options.json_out, _packed_text(dest, manifest))


def _packed_row(dest: str, manifest: Manifest) -> dict[str, Any]:
    return {
        "dest": dest,
        "records": manifest.num_records,
        "shards": len(manifest.shards),
        "bytes": manifest.size_bytes,
        "classes": manifest.num_classes,
        "bad": len(manifest.bad_paths("skipped")),
        "fixed": len(manifest.bad_paths("fixed")),
        "kept": len(manifest.bad_paths("kept")),
        "notes": dict(manifest.notes),
    }


def _packed_text(dest: str, manifest: Manifest) -> str:
    text = f"{plural(manifest.num_records, 'record')} in {plural(len(manifest.shards), 'shard')}, "
    text += f"{manifest.size_bytes / 1e6:.1f} MB, {plural(manifest.num_classes, 'class', 'classes')}, in {dest}"
    notes = manifest.notes
    if "boxes_read" in notes:
        text += f"; {plural(notes['boxes_read'], 'box', 'boxes')} read: "
        text += ", ".join(f"{notes.get(f'boxes_{what}', 0)} {what}" for what in ("swapped", "clamped", "dropped"))
        text += f"; {plural(notes['images_with_boxes'], 'image has', 'images have')} boxes"
    fixed, skipped, kept = (len(manifest.bad_paths(action)) for action in ("fixed", "skipped", "kept"))
    if fixed or skipped or kept:
        text += f"; bad files: {fixed} re-encoded, {skipped} left out"
        text += f", {kept} kept though Exif-rotated" * bool(kept) + " (see manifest.json)"
    return text


def destination(dest: str, endpoint: str | None, store_dir: Path | None) -> Destination:
    """The folder or S3 place to write to. Buckets of the embedded store are made as needed.

    Without `endpoint` it is the embedded store's first where one is running, else AWS_ENDPOINT_URL or S3_ENDPOINT.
    """
    try:
        where = parse_url(dest)
    except ValueError as error:
        raise InputError(f"cannot write to {error}") from None
    if where.scheme in ("gs", "az"):
        raise InputError(
            f"cannot write to {dest}", hint="a folder, or s3://bucket/prefix; gs:// and az:// are read only"
        )
    if where.is_folder:
        return FolderDestination(where.folder)
    if not where.path:
        raise InputError(f"{dest} names no prefix", hint=f"s3://{where.bucket}/train, for example")
    address = find_address(endpoint, store_dir)
    if address.store is not None:
        embedded.ensure_bucket(address.store, where.bucket)
    place = open_place(dest, address.endpoint, address.credentials, Storage())
    return StoreDestination(place.store, place.prefix, f"{dest} at {place.endpoint}")


def _report(terminal: Terminal, row: dict[str, Any], json_out: bool, text: str) -> None:
    if json_out:
        json.dump(row, sys.stdout, indent=2)
        print()
    else:
        terminal.line(text)
