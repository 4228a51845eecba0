"""What a user can get wrong: one clear line, the right exit code, nothing left behind."""

from __future__ import annotations

import gzip
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from drawbar.config import Storage
from drawbar.dataset.manifest import Manifest
from drawbar.storage import embedded
from drawbar.storage.environment import Credentials
from drawbar.storage.stores import open_place
from tests.drawbar_process import Finished, drawbar, processes_of, result_of
from tests.small_recipe import write_recipe
from tests.small_set import example, image, offsets, write_set

NO_STORE = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "NO_PROXY": "127.0.0.1"}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    write_set(tmp_path / "set")
    return write_recipe(
        tmp_path,
        tmp_path / "set",
        storage={"connect_timeout_s": 2, "retries": 1},
        train={"warmup_steps": 0, "steps": 30},
        launch={"stall_timeout_s": 30},
    )


def run(recipe: Path, *settings: str, out: Path | None = None, env: dict[str, str] | None = None) -> Finished:
    out = out or recipe.parent / "run"
    words = [word for setting in settings for word in ("--set", setting)]
    finished = drawbar("run", recipe, "--out", out, *words, env=env, cwd=recipe.parent)
    assert processes_of(out) == []
    return finished


def s3_settings(store: embedded.EmbeddedStore, url: str) -> tuple[list[str], dict[str, str]]:
    """Recipe settings and environment that reach the embedded store as if it were a foreign one."""
    endpoints = ", ".join(f'"{endpoint}"' for endpoint in store.endpoints)
    env = {"AWS_ACCESS_KEY_ID": store.access_key_id, "AWS_SECRET_ACCESS_KEY": store.secret_access_key}
    return [f"data.url={url}", f"storage.endpoints=[{endpoints}]"], env


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# Refused before anything starts


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("model.name=resnet51", "did you mean 'resnet50'?"),
        ("train.bacth_size=4", "unknown recipe key train.bacth_size; did you mean batch_size?"),
        ("train.steps=-3", "train.steps is -3"),
        ("launch.ranks=0", "launch.ranks is 0"),
        ("train.batch_size=100", "batch larger than the set: 2 ranks x 100 need 200 records a step, the set has 96"),
        ("data.url=/no/such/folder", "no such folder: /no/such/folder"),
    ],
)
def test_a_wrong_recipe_is_exit_code_2(recipe: Path, setting: str, words: str) -> None:
    finished = run(recipe, setting)
    assert finished.code == 2
    assert words in finished.error_line
    assert not (recipe.parent / "run").exists()


def test_an_endpoint_that_nobody_answers(recipe: Path) -> None:
    address = f"http://127.0.0.1:{free_port()}"
    finished = run(recipe, "data.url=s3://bucket/train", f'storage.endpoints=["{address}"]', env=NO_STORE)
    assert finished.code == 3
    assert f"endpoint does not answer: s3://bucket/train at {address}" in finished.error_line


def test_no_credentials(recipe: Path) -> None:
    env = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
    finished = run(recipe, "data.url=s3://bucket/train", 'storage.endpoints=["http://127.0.0.1:1"]', env=env)
    assert finished.code == 3
    assert "AWS_ACCESS_KEY_ID is not set" in finished.error_line


def test_no_embedded_store(recipe: Path) -> None:
    finished = run(recipe, "data.url=s3://bucket/train", f"storage.embedded_dir={recipe.parent / 'none'}")
    assert finished.code == 3
    assert "no embedded store is running" in finished.error_line
    assert "hint: drawbar s3 up" in finished.stderr


def test_a_wrong_key(recipe: Path, embedded_store: embedded.EmbeddedStore) -> None:
    embedded.ensure_bucket(embedded_store, "bad-input")
    settings, env = s3_settings(embedded_store, "s3://bad-input/train")
    finished = run(recipe, *settings, env={**env, "AWS_SECRET_ACCESS_KEY": "wrong"})
    assert finished.code == 3
    assert f"access refused: s3://bad-input/train at {embedded_store.endpoints[0]}" in finished.error_line


def test_a_missing_bucket(recipe: Path, embedded_store: embedded.EmbeddedStore) -> None:
    settings, env = s3_settings(embedded_store, "s3://no-such-bucket/train")
    finished = run(recipe, *settings, env=env)
    assert finished.code == 2
    assert "no such bucket" in finished.error_line
    assert "s3://no-such-bucket/train" in finished.error_line


def test_a_missing_prefix(recipe: Path, embedded_store: embedded.EmbeddedStore) -> None:
    embedded.ensure_bucket(embedded_store, "bad-input")
    settings, env = s3_settings(embedded_store, "s3://bad-input/no-such-prefix")
    finished = run(recipe, *settings, env=env)
    assert finished.code == 2
    assert "no shards in" in finished.error_line
    assert "no-such-prefix" in finished.error_line


def test_an_empty_folder(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    finished = run(recipe, f"data.url={tmp_path / 'empty'}")
    assert finished.code == 2
    assert "no shards in" in finished.error_line


def test_fewer_classes_than_the_set_has(recipe: Path) -> None:
    finished = run(recipe, "data.num_classes=5")
    assert finished.code == 2
    assert finished.error_line == "error: the set has 10 classes, data.num_classes is 5"
    assert "hint: --set data.num_classes=10" in finished.stderr


def test_records_for_detection_are_refused_by_a_classifier(recipe: Path, tmp_path: Path) -> None:
    path = tmp_path / "set" / "manifest.json"
    path.write_text(replace(Manifest.loads(path.read_text()), record_schema="coco").dumps())
    finished = run(recipe)
    assert finished.code == 2
    assert "holds records for object detection; model" in finished.error_line


def test_a_folder_of_images_is_no_set(recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    (folder / "cats").mkdir(parents=True)
    (folder / "cats" / "1.jpg").write_bytes(image(1))
    (folder / "README").write_text("Pictures of cats")
    (folder / "cover.JPG").write_bytes(image(2))
    for finished in (
        run(recipe, f"data.url={folder}"),
        drawbar("data", "check", folder),
        drawbar("data", "stat", folder),
    ):
        assert finished.code == 2
        assert f"no shards in {folder}: only README, cover.JPG" in finished.error_line
        assert "`drawbar data pack` makes shards of images" in finished.stderr


def test_an_unknown_key_that_a_section_has(recipe: Path) -> None:
    assert "did you mean train.steps?" in run(recipe, "steps=3").error_line


def test_files_do_not_go_to_an_object_store(tmp_path: Path) -> None:
    for kind in ("imagenet-like", "coco-like"):
        finished = drawbar("data", "make", kind, "s3://set/train", "--images", "3")
        assert finished.code == 2
        assert finished.error_line == "error: s3://set/train is no folder for image files"
        assert "--shards N" in finished.stderr


def test_more_ranks_than_compressed_shards(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "set" / "manifest.json").unlink()
    shard = tmp_path / "set" / "train-00001-of-00004"
    shard.write_bytes(gzip.compress(shard.read_bytes()))
    finished = run(recipe, "launch.ranks=5")
    assert finished.code == 2
    assert "more ranks than shards: 5 ranks, 4 shards" in finished.error_line


def test_a_shard_shorter_than_its_manifest_says(recipe: Path, tmp_path: Path) -> None:
    shard = tmp_path / "set" / "train-00001-of-00004"
    shard.write_bytes(shard.read_bytes()[:-10])
    finished = run(recipe)
    assert finished.code == 4
    assert "train-00001-of-00004" in finished.error_line
    assert "truncated" in finished.error_line


def test_an_output_folder_that_holds_something(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    finished = run(recipe)
    assert finished.code == 2
    assert "output folder is not empty" in finished.error_line
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["notes.txt"]


def test_an_output_folder_that_is_a_file(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    finished = run(recipe)
    assert finished.code == 2
    assert "output folder is a file" in finished.error_line


def test_an_output_folder_that_cannot_be_written(recipe: Path) -> None:
    # Root may write everywhere but into a kernel file system.
    finished = run(recipe, out=Path("/proc/drawbar/run"))
    assert finished.code == 2
    assert "cannot write output folder /proc/drawbar/run" in finished.error_line


def test_usage_errors_are_exit_code_2(tmp_path: Path) -> None:
    assert drawbar("run").code == 2
    assert drawbar("no-such-command").code == 2
    assert drawbar("s3", "up", "--endpoints", "0", "--dir", tmp_path / "s3").code == 2
    assert drawbar("data", "make", "imagenet-like", tmp_path / "x", "--images", "-5").code == 2
    finished = drawbar("report", tmp_path / "none")
    assert finished.code == 2
    assert "no run directory" in finished.error_line


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        finished = drawbar("s3", "up", "--endpoints", "1", "--port", str(port), "--dir", tmp_path / "s3")
    assert finished.code == 3
    assert f"port {port} is taken" in finished.error_line
    assert "no store in" in drawbar("s3", "status", "--dir", tmp_path / "s3").stdout


def test_what_cannot_be_packed(tmp_path: Path) -> None:
    finished = drawbar("data", "pack", "folder", tmp_path / "none", tmp_path / "out")
    assert finished.code == 2
    assert str(tmp_path / "none") in finished.error_line
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat" / "a.JPEG").write_bytes(image(1))
    assert drawbar("data", "pack", "folder", tmp_path / "flat", tmp_path / "out").code == 2
    assert drawbar("data", "pack", "folder", tmp_path / "flat", "gs://bucket/x").code == 2


# Found while running: the run fails, the journal and result say why


def bad_record(tmp_path: Path, payload: bytes) -> str:
    path = write_set(tmp_path / "bad", payloads={7: payload})[0]
    return f"train-00000-of-00004 at byte {offsets(path)[7]}"


@pytest.mark.run
def test_a_record_with_a_wrong_crc_ends_the_run_with_shard_and_offset(recipe: Path, tmp_path: Path) -> None:
    shard = tmp_path / "set" / "train-00002-of-00004"
    offset = offsets(shard)[3]
    data = bytearray(shard.read_bytes())
    data[offset + 50] ^= 0xFF
    shard.write_bytes(data)
    finished = run(recipe)
    assert finished.code == 4
    assert "train-00002-of-00004" in finished.error_line
    assert f"{offset}" in finished.error_line
    assert "CRC" in finished.error_line
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.run
def test_a_file_that_is_no_tfrecord_ends_the_run(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "set" / "manifest.json").unlink()
    for path in (tmp_path / "set").iterdir():
        path.write_bytes(os.urandom(100_000))
    finished = run(recipe)
    assert finished.code == 4
    assert "TFRecord" in finished.error_line


@pytest.mark.run
def test_a_truncated_last_record_ends_the_run(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "set" / "manifest.json").unlink()
    for path in (tmp_path / "set").iterdir():
        path.write_bytes(path.read_bytes()[:-100])
    finished = run(recipe)
    assert finished.code == 4
    assert "truncated" in finished.error_line


@pytest.mark.run
@pytest.mark.parametrize(
    ("label", "encoded", "words"),
    [(1, b"no image at all", "cannot decode image"), (11, image(7), "label 11 is out of range 1..10")],
    ids=["no image", "label"],
)
def test_a_bad_record_ends_the_run_with_its_place(
    recipe: Path, tmp_path: Path, label: int, encoded: bytes, words: str
) -> None:
    where = bad_record(tmp_path, example(7, label, encoded))
    finished = run(recipe, f"data.url={tmp_path / 'bad'}")
    assert finished.code == 4
    assert f"{where}: {words}" in finished.error_line
    told = result_of(tmp_path / "run")["input"]["bad_records"]
    assert [f"{row['shard']} at byte {row['offset']}" for row in told] == [where] * (label <= 10)


@pytest.mark.run
def test_with_skip_the_run_ends_well_and_says_how_many_records_were_bad(recipe: Path, tmp_path: Path) -> None:
    encoded = image(30)
    truncated = example(30, 1, encoded[: len(encoded) // 2])
    paths = write_set(tmp_path / "bad", payloads={7: example(7, 1, b"no image at all"), 30: truncated})
    finished = run(recipe, f"data.url={tmp_path / 'bad'}", "input.on_bad=skip")
    assert finished.code == 0, finished.stderr
    result = result_of(tmp_path / "run")
    first, second = f"{paths[0].name} at byte {offsets(paths[0])[7]}", f"{paths[1].name} at byte {offsets(paths[1])[6]}"
    assert [f"{row['shard']} at byte {row['offset']}" for row in result["input"]["bad_records"]] == [first, second]
    # 240 of the 96 records: two whole epochs and half of a third.
    counts = result["input"]
    assert counts["trained_images"] == 240
    assert 4 <= counts["replaced_images"] <= 6
    assert counts["bad_images"] >= counts["replaced_images"]
    assert counts["received_bytes"] == counts["trained_bytes"] + counts["discarded_bytes"]
    assert [rank["steps"] for rank in result["ranks"]] == [30, 30]
    (reason,) = (reason for reason in result["validity"]["reasons"] if reason["rule"] == "bad images")
    assert reason["severity"] == "qualified"
    assert f"stand in for {counts['replaced_images']} of 240 trained images (" in reason["actual"]
    assert first in reason["actual"]
    said = " ".join(finished.stdout.split())
    assert "Bad records: " in said
    assert f"{second}: cannot decode image: truncated JPEG" in said
    assert second in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.run
def test_damage_in_the_object_store_is_found_like_damage_in_a_file(
    recipe: Path, tmp_path: Path, embedded_store: embedded.EmbeddedStore
) -> None:
    import obstore

    embedded.ensure_bucket(embedded_store, "bad-input")
    settings, env = s3_settings(embedded_store, "s3://bad-input/damaged")
    credentials = Credentials(access_key_id=env["AWS_ACCESS_KEY_ID"], secret_access_key=env["AWS_SECRET_ACCESS_KEY"])
    place = open_place("s3://bad-input/damaged", embedded_store.endpoints[1], credentials, Storage())
    for path in (tmp_path / "set").iterdir():
        data = bytearray(path.read_bytes())
        if path.name == "train-00003-of-00004":
            data[offsets(path)[10] + 40] ^= 1
        obstore.put(place.store, f"damaged/{path.name}", bytes(data))
    finished = run(recipe, *settings, "train.steps=200", env=env)
    assert finished.code == 4
    assert "train-00003-of-00004" in finished.error_line
