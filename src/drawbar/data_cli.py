"""The commands of `drawbar data`: what they take. What they do and print is in `pack_commands` and `check_commands`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

data_app = typer.Typer(help="Make, pack, check and describe data sets.", no_args_is_help=True, rich_markup_mode=None)
pack_app = typer.Typer(
    short_help="Images to TFRecord shards and a manifest.",
    help="Images to TFRecord shards and a manifest, in a folder or an object store.\n\n"
    "A packing that was stopped goes on when its command is given again. Started by torchrun, mpirun or srun, each "
    "rank packs its share of the shards (srun -K: a rank that dies ends the others, as with the other two).",
    no_args_is_help=True,
    rich_markup_mode=None,
)
make_app = typer.Typer(help="Synthetic sets of real JPEG files.", no_args_is_help=True, rich_markup_mode=None)
data_app.add_typer(make_app, name="make")
data_app.add_typer(pack_app, name="pack")

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout instead of text.")]
PackDest = Annotated[str, typer.Argument(help="A folder, or s3://bucket/prefix.")]
NumShards = Annotated[int, typer.Option(min=1, max=99999, help="Number of shards.")]
Split = Annotated[str, typer.Option(help="The shards' name prefix: train, validation.")]
ShuffleSeed = Annotated[int, typer.Option(min=0, help="Of the shuffle.")]
OnBadOption = Annotated[
    Literal["fix", "skip", "fail"],
    typer.Option("--on-bad", help="Files that are no good JPEG: fix (re-encode as RGB JPEG), skip or fail."),
]
Workers = Annotated[int, typer.Option(min=0, help="Worker processes; 0: one per core.")]
Overwrite = Annotated[bool, typer.Option(help="Replace a set that is there.")]
Endpoint = Annotated[str | None, typer.Option(help="S3 address.  [default: the embedded store, else AWS_ENDPOINT_URL]")]
SetUrl = Annotated[str, typer.Argument(help="A folder or s3://bucket/prefix; may end in names, such as /train-*.")]
MakeDest = Annotated[str, typer.Argument(help="Folder; with --shards also s3://bucket/prefix.")]
NumImages = Annotated[int, typer.Option(min=1, help="Number of images.")]
MakeSize = Annotated[
    int | None, typer.Option(help="Long side of an average image in pixels.  [default: 500; of scenes 640]")
]
MakeSeed = Annotated[int, typer.Option(min=0, help="Same seed, same bytes.")]
StraightToShards = Annotated[
    int | None, typer.Option("--shards", help="Write this many shards instead of files.  [default: files]")
]
PackStoreDir = Annotated[Path | None, typer.Option("--store-dir", help="Folder of the embedded store.")]


@make_app.command(
    "imagenet-like",
    short_help="JPEG files or shards of ImageNet's shape.",
    epilog="Example: drawbar data make imagenet-like images --images 2048 --classes 1000",
)
def make_imagenet_like(
    dest: MakeDest,
    images: NumImages = 2048,
    classes: Annotated[int, typer.Option(min=1, max=1000, help="Number of classes.")] = 1000,
    size: MakeSize = None,
    seed: MakeSeed = 1,
    workers: Workers = 0,
    shards: StraightToShards = None,
    split: Split = "train",
    endpoint: Endpoint = None,
    store_dir: PackStoreDir = None,
    json_out: JsonFlag = False,
) -> None:
    """Real JPEG files of ImageNet's shape: about 110 kB, around 500 x 375, learnable classes."""
    from drawbar.pack_commands import PackOptions, make, make_shards, refuse_files_in_store

    if shards is None:
        refuse_files_in_store(dest)
        make(Path(dest), images=images, classes=classes, seed=seed, workers=workers, size=size, json_out=json_out)
        return
    options = PackOptions(
        shards=shards,
        split=split,
        seed=seed,
        workers=workers,
        endpoint=endpoint,
        store_dir=store_dir,
        json_out=json_out,
    )
    make_shards(dest, images=images, classes=classes, size=size, options=options)


@make_app.command(
    "coco-like",
    short_help="Scenes with boxes and masks, in COCO's format.",
    epilog="Example: drawbar data make coco-like coco --images 1000",
)
def make_coco_like(
    dest: MakeDest,
    images: NumImages = 1000,
    size: MakeSize = None,
    seed: MakeSeed = 1,
    workers: Workers = 0,
    shards: StraightToShards = None,
    split: Split = "train",
    endpoint: Endpoint = None,
    store_dir: PackStoreDir = None,
    json_out: JsonFlag = False,
) -> None:
    """Scenes of several objects with boxes and masks, and their COCO annotation file."""
    from drawbar.pack_commands import PackOptions, make_coco, make_coco_shards, refuse_files_in_store

    if shards is None:
        refuse_files_in_store(dest)
        make_coco(Path(dest), images=images, split=split, seed=seed, workers=workers, size=size, json_out=json_out)
        return
    options = PackOptions(
        shards=shards,
        split=split,
        seed=seed,
        workers=workers,
        endpoint=endpoint,
        store_dir=store_dir,
        json_out=json_out,
    )
    make_coco_shards(dest, images=images, size=size, options=options)


@pack_app.command(
    "folder",
    short_help="Pack any class folders.",
    epilog="Example: drawbar data pack folder images s3://imagenet-like/train --shards 16",
)
def pack_folder(
    source: Annotated[Path, typer.Argument(help="Folder of class sub-folders of images.")],
    dest: PackDest,
    shards: NumShards = 16,
    classes: Annotated[
        Path | None,
        typer.Option(
            help="File with a class folder per line, in label order; one with blanks is quoted, or ends with a tab "
            "before its text.  [default: sorted names]"
        ),
    ] = None,
    split: Split = "train",
    seed: ShuffleSeed = 1,
    on_bad: OnBadOption = "fix",
    workers: Workers = 0,
    overwrite: Overwrite = False,
    endpoint: Endpoint = None,
    store_dir: PackStoreDir = None,
    json_out: JsonFlag = False,
) -> None:
    """Any set of class folders, with the ImageNet record schema; label 1 is the first class."""
    from drawbar.pack_commands import PackOptions
    from drawbar.pack_commands import pack_folder as pack

    options = PackOptions(
        shards=shards,
        split=split,
        seed=seed,
        on_bad=on_bad,
        workers=workers,
        overwrite=overwrite,
        endpoint=endpoint,
        store_dir=store_dir,
        json_out=json_out,
    )
    pack(source, dest, classes, options)


@pack_app.command(
    "imagenet",
    short_help="Pack ILSVRC2012 from the layouts people have.",
    epilog="Example: drawbar data pack imagenet ILSVRC2012_img_train.tar s3://imagenet/train --boxes bbox.csv",
)
def pack_imagenet(
    source: Annotated[
        Path,
        typer.Argument(
            help="Class folders; ILSVRC2012_img_train.tar or a folder of its tars; flat validation folder or tar."
        ),
    ],
    dest: PackDest,
    shards: Annotated[
        int | None, typer.Option(help="Number of shards.  [default: 1024, for the split validation 128]")
    ] = None,
    split: Split = "train",
    labels: Annotated[
        Path | None,
        typer.Option(help="Labels of flat images: a synset or devkit id per line, or `IMAGE LABEL` lines."),
    ] = None,
    class_ids: Annotated[
        Path | None, typer.Option("--class-ids", help="What ids in --labels mean: lines of `ID SYNSET`.")
    ] = None,
    synsets: Annotated[
        Path | None, typer.Option(help="The classes, `n01440764 tench, Tinca tinca` a line.  [default: the folders]")
    ] = None,
    words: Annotated[Path | None, typer.Option(help="Class texts, in such lines, of more than these classes.")] = None,
    boxes: Annotated[
        Path | None, typer.Option(help="Annotation XML folder, its tar, or CSV: file,xmin,ymin,xmax,ymax (relative).")
    ] = None,
    seed: ShuffleSeed = 1,
    on_bad: OnBadOption = "fix",
    workers: Workers = 0,
    overwrite: Overwrite = False,
    endpoint: Endpoint = None,
    store_dir: PackStoreDir = None,
    json_out: JsonFlag = False,
) -> None:
    """ILSVRC2012 in the layouts people have, with all 15 keys, labels 1..1000 and bounding boxes."""
    from drawbar.dataset.imagenet_labels import ImageNetFiles
    from drawbar.pack_commands import PackOptions
    from drawbar.pack_commands import pack_imagenet as pack

    options = PackOptions(
        shards=(128 if split.startswith("val") else 1024) if shards is None else shards,
        split=split,
        seed=seed,
        on_bad=on_bad,
        workers=workers,
        overwrite=overwrite,
        endpoint=endpoint,
        store_dir=store_dir,
        json_out=json_out,
    )
    files = ImageNetFiles(labels=labels, class_ids=class_ids, synsets=synsets, words=words, boxes=boxes)
    pack(source, dest, files, options)


@pack_app.command(
    "coco",
    short_help="Pack COCO 2017, or any set in its format.",
    epilog="Example: drawbar data pack coco coco2017 s3://coco/train",
)
def pack_coco(
    places: Annotated[
        list[str],
        typer.Argument(
            metavar="[SOURCE] DEST",
            help="COCO's folder (annotations/ beside train2017/ or train2017.zip) or an annotation file, not needed "
            "with --annotations; and a folder, or s3://bucket/prefix.",
        ),
    ],
    shards: NumShards = 32,
    split: Split = "train",
    annotations: Annotated[
        Path | None, typer.Option(help="Annotation file.  [default: SRC/annotations/instances_SPLIT*.json]")
    ] = None,
    images: Annotated[
        Path | None, typer.Option(help="Folder or zip of the images.  [default: named as the annotations]")
    ] = None,
    captions: Annotated[Path | None, typer.Option(help="Captions file.  [default: the one beside, if any]")] = None,
    masks: Annotated[bool, typer.Option(help="Store a PNG mask per object.")] = True,
    seed: ShuffleSeed = 1,
    on_bad: OnBadOption = "fix",
    workers: Workers = 0,
    overwrite: Overwrite = False,
    endpoint: Endpoint = None,
    store_dir: PackStoreDir = None,
    json_out: JsonFlag = False,
) -> None:
    """COCO 2017, or any set in its format, with the TF object-detection record schema."""
    from drawbar.pack_commands import PackOptions
    from drawbar.pack_commands import pack_coco as pack

    options = PackOptions(
        shards=shards,
        split=split,
        seed=seed,
        on_bad=on_bad,
        workers=workers,
        overwrite=overwrite,
        endpoint=endpoint,
        store_dir=store_dir,
        json_out=json_out,
    )
    pack(places, annotations=annotations, images=images, captions=captions, masks=masks, options=options)


@data_app.command(
    short_help="Read a whole set and list every fault.",
    epilog="Example: drawbar data check s3://imagenet/train --sample 0.01",
)
def check(
    url: SetUrl,
    decode: Annotated[bool, typer.Option("--decode", help="Decode every image and mask.")] = False,
    sample: Annotated[
        float | None, typer.Option(min=0, max=1, help="Decode this share of the images, the same ones every time.")
    ] = None,
    schema: Annotated[
        Literal["auto", "imagenet", "coco", "none"],
        typer.Option(help="Keys to expect: auto, imagenet, coco; none checks the framing only."),
    ] = "auto",
    workers: Workers = 0,
    endpoint: Endpoint = None,
    store_dir: PackStoreDir = None,
    json_out: JsonFlag = False,
) -> None:
    """Read a whole set and list every fault: framing, CRCs, keys, labels, boxes, images, manifest; exit code 4."""
    from drawbar.check_commands import check as check_set

    check_set(
        url,
        decode=decode,
        sample=sample,
        schema=schema,
        workers=workers,
        endpoint=endpoint,
        store_dir=store_dir,
        json_out=json_out,
    )


@data_app.command(short_help="Describe any TFRecord set.", epilog="Example: drawbar data stat '/data/imagenet/train-*'")
def stat(
    url: SetUrl,
    workers: Workers = 0,
    endpoint: Endpoint = None,
    store_dir: PackStoreDir = None,
    json_out: JsonFlag = False,
) -> None:
    """Describe any TFRecord set: sizes, dimensions, kinds of image, classes, boxes, keys."""
    from drawbar.check_commands import stat as stat_set

    stat_set(url, workers=workers, endpoint=endpoint, store_dir=store_dir, json_out=json_out)
