"""What other programs make of TFRecord files, and files that they write. Runs in their environment, without Drawbar.

    python tests/peers.py tensorflow-read FOLDER      every record of every shard, as TensorFlow reads it
    python tests/peers.py dali-read FOLDER            as NVIDIA DALI's CPU reader does, with index files made here
    python tests/peers.py tensorflow-write FOLDER IMAGES    sets written by TFRecordWriter and by protobuf

Each prints one JSON object a record, in order of shards and records.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

Row = dict[str, Any]
BOX_KEYS = [f"image/object/bbox/{side}" for side in ("xmin", "ymin", "xmax", "ymax")]


def shards_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if "-of-" in path.name)


def shown(values: list[Any]) -> list[Any]:
    """Bytes by length and hash, as JSON has none."""
    return [f"{len(v)}:{hashlib.sha256(v).hexdigest()}" if isinstance(v, bytes) else v for v in values]


# Reading


def tensorflow_read(folder: Path) -> Iterator[Row]:
    """Twice: every feature by the protobuf message, and image, label and boxes by the op that input pipelines use."""
    tf = import_module("tensorflow")
    wanted = {
        "image/encoded": tf.io.FixedLenFeature([], tf.string),
        "image/format": tf.io.FixedLenFeature([], tf.string),
        "image/class/label": tf.io.FixedLenFeature([], tf.int64, -1),
        "image/object/class/label": tf.io.VarLenFeature(tf.int64),
        "image/object/bbox/label": tf.io.VarLenFeature(tf.int64),
        **{key: tf.io.VarLenFeature(tf.float32) for key in BOX_KEYS},
    }
    for path in shards_of(folder):
        for raw in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
            message = tf.train.Example.FromString(raw)
            features = {}
            for key, feature in message.features.feature.items():
                kind = feature.WhichOneof("kind")
                features[key] = shown(list(getattr(feature, kind).value)) if kind else []
            parsed = tf.io.parse_single_example(raw, wanted)
            image = tf.io.decode_image(parsed["image/encoded"], channels=3)
            yield {
                "shard": path.name,
                "features": features,
                "encoded": shown([parsed["image/encoded"].numpy()])[0],
                "label": int(parsed["image/class/label"]),
                "object_labels": parsed["image/object/class/label"].values.numpy().tolist(),
                "boxes": [parsed[key].values.numpy().tolist() for key in BOX_KEYS],
                "decoded": list(image.shape),
            }


def dali_read(folder: Path) -> Iterator[Row]:
    dali, fn = import_module("nvidia.dali"), import_module("nvidia.dali.fn")
    tfrecord = import_module("nvidia.dali.tfrecord")
    batch_size = 8
    for path in shards_of(folder):
        with tempfile.NamedTemporaryFile("w", suffix=".idx") as index:
            count = write_dali_index(path, index)
            pipe = dali.Pipeline(batch_size=batch_size, num_threads=2, device_id=None)
            with pipe:
                read = fn.readers.tfrecord(
                    path=str(path),
                    index_path=index.name,
                    features={
                        "image/encoded": tfrecord.FixedLenFeature((), tfrecord.string, ""),
                        "image/class/label": tfrecord.FixedLenFeature([1], tfrecord.int64, -1),
                        "image/object/class/label": tfrecord.VarLenFeature(tfrecord.int64, -1),
                        **{key: tfrecord.VarLenFeature(tfrecord.float32, 0.0) for key in BOX_KEYS},
                    },
                )
                pipe.set_outputs(*read.values())
                names = list(read)
            pipe.build()
            rows = 0
            while rows < count:
                outputs = dict(zip(names, pipe.run(), strict=True))
                # A key that a record does not have comes as a scalar of no meaning.
                for i in range(min(batch_size, count - rows)):
                    yield {
                        "shard": path.name,
                        "encoded": shown([outputs["image/encoded"].at(i).tobytes()])[0],
                        "labels": as_list(outputs["image/class/label"].at(i)),
                        "object_labels": as_list(outputs["image/object/class/label"].at(i)),
                        "boxes": [as_list(outputs[key].at(i)) for key in BOX_KEYS],
                    }
                    rows += 1


def as_list(values: Any) -> list[Any]:
    return list(values.tolist()) if values.ndim else []


def write_dali_index(path: Path, index: Any) -> int:
    """As DALI's own `tfrecord2idx`: offset and size of each record. The number of records."""
    count = position = 0
    with path.open("rb") as file:
        while header := file.read(8):
            size = 16 + struct.unpack("<Q", header)[0]
            index.write(f"{position} {size}\n")
            position += size
            file.seek(position)
            count += 1
    index.flush()
    return count


# Writing


def tensorflow_write(folder: Path, images: Path) -> Iterator[Row]:
    """Sets `plain`, `gzip`, `zlib` by TFRecordWriter, and `protobuf` with lists that are not packed."""
    tf = import_module("tensorflow")
    paths = sorted(images.rglob("*.JPEG"))
    examples = [example_of(tf, number, path) for number, path in enumerate(paths)]
    for kind in ("plain", "gzip", "zlib", "protobuf"):
        options = tf.io.TFRecordOptions(compression_type={"gzip": "GZIP", "zlib": "ZLIB"}.get(kind, ""))
        (folder / kind).mkdir(parents=True)
        for shard in range(2):
            name = folder / kind / f"train-{shard:05d}-of-00002"
            with tf.io.TFRecordWriter(str(name), options) as writer:
                for number in range(shard, len(paths), 2):
                    example, row = examples[number]
                    writer.write(unpacked(example) if kind == "protobuf" else example.SerializeToString())
                    yield {"set": kind, "shard": name.name, **row}


def example_of(tf: Any, number: int, path: Path) -> tuple[Any, Row]:
    def ints(*values: int) -> Any:
        return tf.train.Feature(int64_list=tf.train.Int64List(value=values))

    def floats(*values: float) -> Any:
        return tf.train.Feature(float_list=tf.train.FloatList(value=values))

    def texts(*values: bytes) -> Any:
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))

    encoded = path.read_bytes()
    height, width, channels = tf.io.decode_jpeg(encoded, channels=3).shape
    count = number % 4
    boxes = [[0.125 * i for i in range(count)]] * 2 + [[0.125 * i + 0.25 for i in range(count)]] * 2
    label = 1 + number % 7
    features = {
        "image/encoded": texts(encoded),
        "image/class/label": ints(label),
        "image/height": ints(height),
        "image/width": ints(width),
        "image/channels": ints(channels),
        "image/colorspace": texts(b"RGB"),
        "image/format": texts(b"JPEG"),
        "image/filename": texts(path.name.encode()),
        "image/class/synset": texts(path.parent.name.encode()),
        "image/object/bbox/label": ints(*[label] * count),
        **{key: floats(*side) for key, side in zip(BOX_KEYS, boxes, strict=True)},
    }
    example = tf.train.Example(features=tf.train.Features(feature=features))
    return example, {"encoded": shown([encoded])[0], "label": label, "boxes": boxes}


def unpacked(example: Any) -> bytes:
    """The same message from a definition whose number lists are not packed, its entries in reverse order."""
    global _unpacked_class  # noqa: PLW0603
    if _unpacked_class is None:
        _unpacked_class = unpacked_example_class()
    message = _unpacked_class()
    for key in sorted(example.features.feature, reverse=True):
        entry = message.features.feature.add()
        entry.key = key
        entry.value.MergeFromString(example.features.feature[key].SerializeToString())
    raw: bytes = message.SerializeToString()
    assert b"\x1a\x02\x08" in raw  # an Int64List with one varint, not a packed list of one
    return raw


_unpacked_class: Any = None


def unpacked_example_class() -> Any:
    pb, pool = import_module("google.protobuf.descriptor_pb2"), import_module("google.protobuf.descriptor_pool")
    factory = import_module("google.protobuf.message_factory")
    file = pb.FileDescriptorProto(name="unpacked.proto", package="unpacked", syntax="proto3")
    field = pb.FieldDescriptorProto

    def message(name: str, *fields: tuple[str, int, Any, Any, str]) -> None:
        made = file.message_type.add(name=name)
        for field_name, number, label, kind, type_name in fields:
            added = made.field.add(name=field_name, number=number, label=label, type=kind)
            if type_name:
                added.type_name = f".unpacked.{type_name}"
            elif label == field.LABEL_REPEATED and kind != field.TYPE_BYTES:
                added.options.packed = False

    one, many = field.LABEL_OPTIONAL, field.LABEL_REPEATED
    message("BytesList", ("value", 1, many, field.TYPE_BYTES, ""))
    message("FloatList", ("value", 1, many, field.TYPE_FLOAT, ""))
    message("Int64List", ("value", 1, many, field.TYPE_INT64, ""))
    message(
        "Feature",
        ("bytes_list", 1, one, field.TYPE_MESSAGE, "BytesList"),
        ("float_list", 2, one, field.TYPE_MESSAGE, "FloatList"),
        ("int64_list", 3, one, field.TYPE_MESSAGE, "Int64List"),
    )
    # On the wire a map is a repeated entry; so written, its order is ours.
    message("Entry", ("key", 1, one, field.TYPE_STRING, ""), ("value", 2, one, field.TYPE_MESSAGE, "Feature"))
    message("Features", ("feature", 1, many, field.TYPE_MESSAGE, "Entry"))
    message("Example", ("features", 1, one, field.TYPE_MESSAGE, "Features"))
    descriptors = pool.DescriptorPool()
    descriptors.Add(file)
    return factory.GetMessageClass(descriptors.FindMessageTypeByName("unpacked.Example"))


def main() -> None:
    command, folder, *rest = sys.argv[1:]
    if command == "tensorflow-write":
        rows = tensorflow_write(Path(folder), Path(rest[0]))
    else:
        rows = {"tensorflow-read": tensorflow_read, "dali-read": dali_read}[command](Path(folder))
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
