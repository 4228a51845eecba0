"""Packing that is stopped in every way goes on with what is missing, and ends with the same bytes."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import obstore
import psutil
import pytest
from botocore.config import Config
from obstore.store import LocalStore, S3Store

from drawbar.dataset import parts
from drawbar.dataset.check import check_set
from drawbar.dataset.destination import Destination, FolderDestination, StoreDestination
from drawbar.dataset.folder import scan_folder
from drawbar.dataset.items import Item
from drawbar.dataset.labelled import LabelledSource
from drawbar.dataset.listing import list_shards
from drawbar.dataset.manifest import MANIFEST_NAME, Manifest
from drawbar.dataset.pack import pack, pack_share
from drawbar.dataset.shard_writer import OnBad, PackSettings
from drawbar.dataset.walk import Origin
from drawbar.errors import DrawbarError, EnvironmentUnfit, InputError, RunFailed
from drawbar.storage import embedded
from drawbar.world import World
from tests.drawbar_process import Finished, drawbar
from tests.image_files import jpeg
from tests.image_folder import contents, make_images
from tests.tcp_proxy import Proxy


def share(rank: int, world_size: int) -> World:
    return World(rank=rank, world_size=world_size, local_rank=0, local_world_size=1, node="host")


ALONE = share(0, 1)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("images"), 60)


def settings(num_shards: int = 6, on_bad: OnBad = "fail", seed: int = 1) -> PackSettings:
    return PackSettings(num_shards, seed=seed, on_bad=on_bad)


@pytest.fixture(scope="module")
def reference(images: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("reference")
    pack(scan_folder(images), FolderDestination(folder), settings())
    return contents(folder)


class Interrupting(LabelledSource):
    """Fails at the n-th image."""

    left: int

    def read(self, item: Item) -> bytes:
        self.left -= 1
        if self.left < 0:
            raise InputError("stopped here")
        return super().read(item)


def stop_after(images: Path, dest: Destination, num_images: int, how: PackSettings | None = None) -> None:
    source = scan_folder(images)
    source.__class__ = Interrupting
    source.left = num_images  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="stopped here"):
        pack(source, dest, how or settings(), workers=1)


# One process


@pytest.mark.parametrize("damage", ["zeros", "flip", "counts", "nesting"])
def test_finished_shards_are_not_trusted_by_their_size(
    images: Path, reference: dict[str, bytes], tmp_path: Path, damage: str
) -> None:
    """After a power failure a file may have its size and not its bytes; and whoever edits entries is not believed."""
    dest = FolderDestination(tmp_path)
    stop_after(images, dest, 45)
    shard, entry = tmp_path / "train-00001-of-00006", tmp_path / "_parts" / "train-00001-of-00006.json"
    data = bytearray(shard.read_bytes())
    if damage == "zeros":
        shard.write_bytes(bytes(len(data)))
    elif damage == "flip":
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
    elif damage == "counts":
        tree = json.loads(entry.read_bytes())
        tree["label_counts"][0][1] += 1
        entry.write_text(json.dumps(tree))
    else:
        entry.write_text("[" * 100_000)
    pack(scan_folder(images), dest, settings())
    assert contents(tmp_path) == reference


def test_shards_of_a_packing_that_has_not_ended_are_no_set(images: Path, tmp_path: Path) -> None:
    dest = FolderDestination(tmp_path)
    stop_after(images, dest, 45)
    with pytest.raises(InputError, match="is not finished") as caught:
        list_shards(LocalStore(tmp_path), "")
    assert "give its `drawbar data pack` command again" in str(caught.value.hint)
    with pytest.raises(InputError, match="is not finished"):
        check_set(Origin(url=str(tmp_path)), workers=1, on_fault=print)
    pack(scan_folder(images), dest, settings())
    assert len(list_shards(LocalStore(tmp_path), "").shards) == 6


def test_going_on_packs_only_what_is_missing(images: Path, reference: dict[str, bytes], tmp_path: Path) -> None:
    dest = FolderDestination(tmp_path)
    stop_after(images, dest, 45)
    there = {path.name: path.stat() for path in tmp_path.glob("train-*")}
    assert len(there) == 4
    assert sorted(path.name for path in (tmp_path / "_parts").iterdir()) == [
        "set.json",
        *(f"train-0000{number}-of-00006.json" for number in range(4)),
    ]
    assert not (tmp_path / MANIFEST_NAME).exists()
    steps: list[tuple[str, int, int]] = []
    pack(scan_folder(images), dest, settings(), progress=lambda *step: steps.append(step))
    assert contents(tmp_path) == reference
    assert not (tmp_path / "_parts").exists()
    for name, status in there.items():
        assert (tmp_path / name).stat().st_ino == status.st_ino
    assert steps[0] == ("packing images", 40, 60)
    assert steps[-1] == ("packing images", 60, 60)


def test_every_point_where_it_can_stop(images: Path, reference: dict[str, bytes], tmp_path: Path) -> None:
    for num_images in range(0, 60, 7):
        dest = FolderDestination(tmp_path / str(num_images))
        stop_after(images, dest, num_images)
        pack(scan_folder(images), dest, settings(), workers=1)
        assert contents(dest.folder) == reference


def test_what_a_killed_packer_leaves(images: Path, reference: dict[str, bytes], tmp_path: Path) -> None:
    dest = FolderDestination(tmp_path)
    stop_after(images, dest, 45)
    left = tmp_path / "_parts"
    (left / "train-00004-of-00006.0123abcd.tmp").write_bytes(b"half a shard")
    (left / "train-00005-of-00006.json.0123abcd.tmp").write_bytes(b"half an entry")
    (tmp_path / "train-00005-of-00006").write_bytes(b"renamed, but its entry was not written; not even right")
    (left / "train-00000-of-00006.json").write_text("{damaged")
    entry = json.loads((left / "train-00001-of-00006.json").read_text())
    entry["set_sha256"] = "of another set"
    (left / "train-00001-of-00006.json").write_text(json.dumps(entry))
    (tmp_path / "train-00002-of-00006").write_bytes(b"another size")
    (tmp_path / "train-00003-of-00006").unlink()
    pack(scan_folder(images), dest, settings())
    assert contents(tmp_path) == reference


def test_killed_between_manifest_and_cleaning(images: Path, reference: dict[str, bytes], tmp_path: Path) -> None:
    dest = FolderDestination(tmp_path)
    stop_after(images, dest, 45)
    saved = contents(tmp_path / "_parts")
    pack(scan_folder(images), dest, settings())
    for name, data in saved.items():
        dest.put(f"_parts/{name}", data)
    assert pack(scan_folder(images), dest, settings()).num_records == 60
    assert contents(tmp_path) == reference


def test_another_set_does_not_go_on_here(images: Path, tmp_path: Path) -> None:
    dest = FolderDestination(tmp_path / "out")
    stop_after(images, dest, 45)
    before = contents(dest.folder)
    other = tmp_path / "other"
    shutil.copytree(images, other)
    (other / "n01" / "new.JPEG").write_bytes(jpeg(7))
    message = (
        "holds an unfinished packing of another source or other settings: split train, shards 6, seed 1, images 60"
    )
    for source, changed in ((images, settings(7)), (images, settings(seed=2)), (other, settings())):
        with pytest.raises(InputError, match=message) as caught:
            pack(scan_folder(source), dest, changed)
        assert caught.value.hint is not None
        assert "--overwrite" in caught.value.hint
        assert contents(dest.folder) == before
    manifest = pack(scan_folder(other), dest, settings(7), overwrite=True)
    assert (manifest.num_records, len(manifest.shards)) == (61, 7)
    assert sorted(contents(dest.folder)) == sorted([MANIFEST_NAME, *(shard.name for shard in manifest.shards)])


def test_a_damaged_claim_is_nobodys(images: Path, reference: dict[str, bytes], tmp_path: Path) -> None:
    dest = FolderDestination(tmp_path)
    stop_after(images, dest, 45)
    for text in ("{", "[]", "5"):
        (tmp_path / "_parts" / "set.json").write_text(text)
        with pytest.raises(InputError, match="holds an unfinished packing of another source or other settings: unread"):
            pack(scan_folder(images), dest, settings())
    pack(scan_folder(images), dest, settings(), overwrite=True)
    assert contents(tmp_path) == reference


def test_overwriting_goes_on_with_its_own_unfinished_set(
    images: Path, reference: dict[str, bytes], tmp_path: Path
) -> None:
    dest = FolderDestination(tmp_path)
    stop_after(images, dest, 45)
    inode = (tmp_path / "train-00000-of-00006").stat().st_ino
    pack(scan_folder(images), dest, settings(), overwrite=True)
    assert (tmp_path / "train-00000-of-00006").stat().st_ino == inode
    assert contents(tmp_path) == reference


def test_a_bad_file_can_be_skipped_by_the_next_try(images: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(images, source)
    (source / "n02" / "59.JPEG").write_bytes(b"bad")
    dest = FolderDestination(tmp_path / "out")
    for policy in ("fail", "fail"):
        with pytest.raises(InputError, match=r"n02/59.JPEG is no trainable JPEG"):
            pack(scan_folder(source), dest, settings(on_bad=policy), workers=1)
    there = {path.name: path.stat().st_ino for path in dest.folder.glob("train-*")}
    assert there
    manifest = pack(scan_folder(source), dest, settings(on_bad="skip"))
    assert manifest.num_records == 59
    for name, inode in there.items():
        assert (dest.folder / name).stat().st_ino == inode
    fresh = FolderDestination(tmp_path / "fresh")
    assert pack(scan_folder(source), fresh, settings(on_bad="skip")) == manifest
    assert contents(dest.folder) == contents(fresh.folder)


def test_shards_packed_under_another_policy_are_packed_anew(images: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(images, source)
    for number in range(20):
        (source / "n02" / f"png{number}.JPEG").write_bytes(b"\x89PNG\r\n\x1a\n")
    dest, fresh = FolderDestination(tmp_path / "out"), FolderDestination(tmp_path / "fresh")
    stop_after(source, dest, 55, settings(on_bad="skip"))
    manifest = pack(scan_folder(source), dest, settings(on_bad="fix"))
    assert pack(scan_folder(source), fresh, settings(on_bad="fix")) == manifest
    assert contents(dest.folder) == contents(fresh.folder)


# Killed


def start(source: Path, dest: str | Path, *options: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """The packer in a process group of its own."""
    words = [sys.executable, "-m", "drawbar", "data", "pack", "folder", str(source), str(dest), *options]
    return subprocess.Popen(
        words,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def kill_at(process: subprocess.Popen[str], dest: Destination, delay_s: float) -> bool:
    """SIGKILL to the whole group, `delay_s` after the packing claimed its place. False where it had ended by then."""
    wait_for_claim(process, dest)
    time.sleep(delay_s)
    ended = process.poll() is not None
    if not ended:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
    return not ended


def wait_for_claim(process: subprocess.Popen[str], dest: Destination) -> None:
    end_t = time.monotonic() + 60
    while parts.claimed(dest) is None and process.poll() is None and time.monotonic() < end_t:
        time.sleep(0.005)


def time_of(process: subprocess.Popen[str], dest: Destination) -> float:
    """Seconds from its first trace at the destination to its end: within them a kill finds something half done."""
    wait_for_claim(process, dest)
    begin_t = time.monotonic()
    end(process)
    return time.monotonic() - begin_t


def end(process: subprocess.Popen[str]) -> None:
    stdout, stderr = process.communicate(timeout=100)
    assert process.returncode == 0, stderr
    assert "records in" in stdout


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough that packing takes a while: 45 MB in 1,500 files."""
    return make_images(tmp_path_factory.mktemp("many"), 1500, 28_000)


@pytest.fixture(scope="module")
def many_packed(many: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("packed")
    pack(scan_folder(many), FolderDestination(folder), PackSettings(24, on_bad="fix"), workers=1)
    return contents(folder)


def kill_and_go_on(many: Path, folder: Path, packed: dict[str, bytes], times: int, seed: int) -> int:
    rng = random.Random(seed)
    takes_s = {}
    for workers in ("1", "2", "3"):
        dest = FolderDestination(folder / f"whole-{workers}")
        takes_s[workers] = time_of(start(many, dest.folder, "--shards", "24", "--workers", workers), dest)
        assert contents(dest.folder) == packed
        shutil.rmtree(dest.folder)
    killed = 0
    for number in range(times):
        dest = FolderDestination(folder / str(number))
        workers = rng.choice(tuple(takes_s))
        process = start(many, dest.folder, "--shards", "24", "--workers", workers)
        killed += kill_at(process, dest, rng.uniform(0.0, 0.9 * takes_s[workers]))
        for name, data in contents(dest.folder).items():
            if not name.startswith("_parts/"):
                assert data == packed[name]  # nothing half-written under a final name
        end(start(many, dest.folder, "--shards", "24", "--workers", "2"))
        assert contents(dest.folder) == packed
        shutil.rmtree(dest.folder)
    return killed


@pytest.mark.run
def test_killed_at_random_moments(many: Path, many_packed: dict[str, bytes], tmp_path: Path) -> None:
    assert kill_and_go_on(many, tmp_path, many_packed, 4, seed=11) > 0


@pytest.mark.long
@pytest.mark.timeout(600)
def test_killed_at_20_random_moments(many: Path, many_packed: dict[str, bytes], tmp_path: Path) -> None:
    assert kill_and_go_on(many, tmp_path, many_packed, 20, seed=12) > 9


def workers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The worker processes, once there are two."""
    end_t = time.monotonic() + 60
    while time.monotonic() < end_t and process.poll() is None:
        found = [
            child
            for child in psutil.Process(process.pid).children()
            if "spawn_main" in " ".join(child.cmdline()) and child.status() != psutil.STATUS_ZOMBIE
        ]
        if len(found) == 2:
            return found
        time.sleep(0.005)
    raise AssertionError("no two workers")


@pytest.mark.run
def test_workers_end_with_their_parent(many: Path, many_packed: dict[str, bytes], tmp_path: Path) -> None:
    dest = FolderDestination(tmp_path)
    process = start(many, tmp_path, "--shards", "24", "--workers", "2")
    workers = workers_of(process)
    process.kill()
    process.communicate(timeout=30)
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert alive == []
    end(start(many, tmp_path, "--shards", "24", "--workers", "2"))
    assert contents(dest.folder) == many_packed


@pytest.mark.run
def test_a_killed_worker_is_told(many: Path, many_packed: dict[str, bytes], tmp_path: Path) -> None:
    process = start(many, tmp_path, "--shards", "24", "--workers", "2")
    worker, other = workers_of(process)
    worker.kill()
    done = Finished(*communicate(process))
    assert done.code == 4
    assert done.error_line == "error: a worker process was killed"
    assert not is_alive(other)
    assert list((tmp_path / "_parts").glob("*.tmp")) == []
    end(start(many, tmp_path, "--shards", "24", "--workers", "2"))
    assert contents(tmp_path) == many_packed


@pytest.mark.run
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(many: Path, many_packed: dict[str, bytes], tmp_path: Path, number: signal.Signals) -> None:
    process = start(many, tmp_path, "--shards", "3", "--workers", "2")
    workers = workers_of(process)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    done = Finished(*communicate(process))
    assert done.code == 130
    assert done.error_line == f"error: interrupted by {number.name}"
    assert [worker for worker in workers if is_alive(worker)] == []
    assert list(tmp_path.rglob("*.tmp")) == []


def is_alive(process: psutil.Process) -> bool:
    return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)


def communicate(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    stdout, stderr = process.communicate(timeout=60)
    return process.returncode, stdout, stderr


# Full and lost destinations


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = os.geteuid() == 0 and (
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True).returncode == 0
    )
    if not mounted:
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk(small_disk: Path, tmp_path: Path, workers: int) -> None:
    source = make_images(tmp_path / "images", 60, 20_000)
    dest = FolderDestination(small_disk / "out")
    with pytest.raises(EnvironmentUnfit, match=r"cannot write to .*out: No space left on device") as caught:
        pack(scan_folder(source), dest, settings(), workers=workers)
    assert caught.value.hint is not None
    assert "finished shards are kept" in caught.value.hint
    fresh = FolderDestination(tmp_path / "fresh")
    pack(scan_folder(source), fresh, settings())
    expected = contents(fresh.folder)
    for name, data in contents(dest.folder).items():
        assert name.startswith("_parts/") or data == expected[name]
    assert list((dest.folder / "_parts").glob("*.tmp")) == []
    subprocess.run(["mount", "-o", "remount,size=8m", small_disk], check=True)
    pack(scan_folder(source), dest, settings(), workers=workers)
    assert contents(dest.folder) == expected


def store_at(store: embedded.EmbeddedStore, bucket: str, endpoint: str | None = None) -> S3Store:
    embedded.ensure_bucket(store, bucket)
    return S3Store(
        bucket,
        endpoint=endpoint or store.endpoints[0],
        access_key_id=store.access_key_id,
        secret_access_key=store.secret_access_key,
        region="us-east-1",
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
    )


def client_at(store: embedded.EmbeddedStore) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=store.endpoints[0],
        aws_access_key_id=store.access_key_id,
        aws_secret_access_key=store.secret_access_key,
        region_name="us-east-1",
        config=Config(s3={"addressing_style": "path"}),
    )


def objects(store: S3Store, prefix: str) -> dict[str, bytes]:
    keys = [item["path"] for page in obstore.list(store, prefix) for item in page if not item["path"].endswith("/")]
    return {key.removeprefix(f"{prefix}/"): bytes(obstore.get(store, key).bytes()) for key in keys}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of it are beyond 8 MiB, so that they are uploaded in parts: 54 MB."""
    return make_images(tmp_path_factory.mktemp("large"), 180, 300_000)


@pytest.fixture(scope="module")
def large_packed(large: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("packed")
    pack(scan_folder(large), FolderDestination(folder), settings(4, "fix"))
    return contents(folder)


@pytest.mark.parametrize("cut_after_bytes", [300, 3_000_000, 20_000_000])
@pytest.mark.run
def test_an_endpoint_lost_in_the_middle(
    large: Path,
    large_packed: dict[str, bytes],
    embedded_store: embedded.EmbeddedStore,
    cut_after_bytes: int,
) -> None:
    prefix = f"cut/{cut_after_bytes}"
    direct = store_at(embedded_store, "pack-lost")
    with Proxy(embedded_store.endpoints[0], cut_after_bytes) as proxy:
        lost = StoreDestination(store_at(embedded_store, "pack-lost", proxy.endpoint), prefix, "s3://pack-lost")
        with pytest.raises(DrawbarError) as caught:
            pack(scan_folder(large), lost, settings(4, "fix"), workers=2)
        assert proxy.was_cut
    assert isinstance(caught.value, EnvironmentUnfit)
    assert caught.value.message == "endpoint does not answer: s3://pack-lost"
    assert caught.value.hint is not None
    assert "finished shards are kept" in caught.value.hint
    for name, data in objects(direct, prefix).items():
        assert name.startswith("_parts/") or data == large_packed[name]
    assert MANIFEST_NAME not in objects(direct, prefix)
    pack(scan_folder(large), StoreDestination(direct, prefix), settings(4, "fix"), workers=1)
    assert objects(direct, prefix) == large_packed
    assert client_at(embedded_store).list_multipart_uploads(Bucket="pack-lost", Prefix=prefix).get("Uploads", []) == []


def weed_shell(store: embedded.EmbeddedStore, *commands: str) -> str:
    # Asked anew: an earlier test may have restarted the store.
    server_pid = embedded.find(store.directory).server_pid
    words = psutil.Process(server_pid).cmdline()

    def port(name: str) -> str:
        return str(next(word.partition("=")[2] for word in words if word.startswith(f"-{name}=")))

    masters, filer = (f"127.0.0.1:{port(f'{role}.port')}.{port(f'{role}.port.grpc')}" for role in ("master", "filer"))
    done = subprocess.run(
        [words[0], "shell", f"-master={masters}", f"-filer={filer}"],
        input="\n".join(["lock", *commands, "unlock", ""]),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


@pytest.mark.run
def test_a_reached_bucket_quota(
    large: Path, large_packed: dict[str, bytes], embedded_store: embedded.EmbeddedStore
) -> None:
    store = store_at(embedded_store, "pack-quota")
    dest = StoreDestination(store, "set", "s3://pack-quota/set")
    stop_after(large, dest, 100, settings(4, "fix"))
    assert len(dest.sizes()) == 2
    end_t = time.monotonic() + 60
    quota = "s3.bucket.quota -name=pack-quota"
    # The store learns from its volumes every few seconds how full a bucket is.
    while "read only" not in weed_shell(embedded_store, f"{quota} -op=set -sizeMB=5", "s3.bucket.quota.enforce -apply"):
        assert time.monotonic() < end_t
        time.sleep(1)
    end_t = time.monotonic() + 60
    while time.monotonic() < end_t:
        try:
            obstore.put(store, "try", b"x")
            time.sleep(0.5)
        except obstore.exceptions.BaseError:
            break
    with pytest.raises(RunFailed, match=r"write failed: s3://pack-quota/set: 500 Internal Server Error") as caught:
        pack(scan_folder(large), dest, settings(4, "fix"), workers=1)
    assert caught.value.hint is not None
    assert "quota" in caught.value.hint
    assert sorted(dest.sizes()) == ["train-00000-of-00004", "train-00001-of-00004"]
    weed_shell(embedded_store, f"{quota} -op=remove", "s3.bucket.quota.enforce -apply")
    end_t = time.monotonic() + 60
    while time.monotonic() < end_t:
        try:
            obstore.put(store, "try", b"x")
            break
        except obstore.exceptions.BaseError:
            time.sleep(0.5)
    pack(scan_folder(large), dest, settings(4, "fix"), workers=1)
    assert objects(store, "set") == large_packed


# Uploads


def test_orphaned_uploads_are_removed_and_others_kept(
    images: Path, reference: dict[str, bytes], embedded_store: embedded.EmbeddedStore
) -> None:
    store = store_at(embedded_store, "pack-orphans")
    client = client_at(embedded_store)
    dest = StoreDestination(store, "set/train")
    stop_after(images, dest, 45)
    orphans = ["set/train/train-00004-of-00006", "set/train/train-00005-of-00006"]
    others = ["set/train/train-00000-of-00006", "set/train/theirs", "set/trainer/train-00004-of-00006"]
    for key in orphans + others:
        upload = client.create_multipart_upload(Bucket="pack-orphans", Key=key)["UploadId"]
        client.upload_part(Bucket="pack-orphans", Key=key, UploadId=upload, PartNumber=1, Body=b"half")
    notes: list[str] = []
    pack(scan_folder(images), dest, settings(), note=notes.append)
    assert notes == []
    left = client.list_multipart_uploads(Bucket="pack-orphans")["Uploads"]
    assert sorted(upload["Key"] for upload in left) == sorted(others)
    assert objects(store, "set/train") == reference


def test_without_boto3_uploads_are_named_as_not_looked_for(
    images: Path,
    reference: dict[str, bytes],
    embedded_store: embedded.EmbeddedStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dest = StoreDestination(store_at(embedded_store, "pack-no-boto"), "set")
    stop_after(images, dest, 45)
    monkeypatch.setitem(sys.modules, "boto3", None)
    notes: list[str] = []
    pack(scan_folder(images), dest, settings(), note=notes.append)
    (note,) = notes
    assert "boto3 is not installed" in note
    assert objects(store_at(embedded_store, "pack-no-boto"), "set") == reference


def kill_uploads(
    large: Path, packed: dict[str, bytes], store: embedded.EmbeddedStore, bucket: str, times: int, seed: int
) -> int:
    rng = random.Random(seed)
    direct = store_at(store, bucket)
    env = {"AWS_ACCESS_KEY_ID": store.access_key_id, "AWS_SECRET_ACCESS_KEY": store.secret_access_key}
    options = ("--shards", "4", "--workers", "2", "--endpoint", store.endpoints[0], "--store-dir", str(store.directory))
    whole = StoreDestination(direct, "set/whole")
    takes_s = time_of(start(large, f"s3://{bucket}/set/whole", *options, env=env), whole)
    killed = 0
    for number in range(times):
        dest = StoreDestination(direct, f"set/{number}")
        where = f"s3://{bucket}/set/{number}"
        process = start(large, where, *options, env=env)
        killed += kill_at(process, dest, rng.uniform(0.0, 0.9 * takes_s))
        for name, data in objects(direct, dest.prefix).items():
            assert name.startswith("_parts/") or data == packed[name]
        end(start(large, where, *options, env=env))
        assert objects(direct, dest.prefix) == packed
        uploads = client_at(store).list_multipart_uploads(Bucket=bucket, Prefix=f"{dest.prefix}/")
        assert uploads.get("Uploads", []) == []
    return killed


@pytest.mark.run
def test_uploads_killed_at_random_moments(
    large: Path, large_packed: dict[str, bytes], embedded_store: embedded.EmbeddedStore
) -> None:
    assert kill_uploads(large, large_packed, embedded_store, "pack-killed", 4, seed=21) > 0


@pytest.mark.long
@pytest.mark.timeout(900)
def test_uploads_killed_at_20_random_moments(
    large: Path, large_packed: dict[str, bytes], embedded_store: embedded.EmbeddedStore
) -> None:
    assert kill_uploads(large, large_packed, embedded_store, "pack-killed-20", 20, seed=22) > 9


# Ranks


@pytest.mark.parametrize("size", [2, 3, 8])
def test_ranks_share_the_shards(images: Path, reference: dict[str, bytes], tmp_path: Path, size: int) -> None:
    dest = FolderDestination(tmp_path)
    for rank in reversed(range(size)):
        manifest = pack_share(scan_folder(images), dest, settings(), share(rank, size), workers=1)
        assert (manifest is None) == (rank > 0)
        if rank:
            assert {name for name in contents(tmp_path) if name.startswith("train")} == {
                f"train-0000{shard}-of-00006" for shard in range(6) if shard % size >= rank
            }
    assert contents(tmp_path) == reference
    again = pack_share(scan_folder(images), dest, settings(), share(1, size))
    assert again is None
    assert pack_share(scan_folder(images), dest, settings(), share(0, size)) == Manifest.loads(reference[MANIFEST_NAME])


@dataclass(frozen=True)
class Overtaken(FolderDestination):
    """Another process packs the whole set just before the n-th time that something is read here."""

    images: Path = Path()
    reads: list[int] = field(default_factory=list)
    overtaken_at: int = 0

    def _read(self) -> None:
        self.reads.append(1)
        if len(self.reads) == self.overtaken_at:
            pack(scan_folder(self.images), FolderDestination(self.folder), settings(), workers=1)

    def sizes(self, folder: str = "") -> dict[str, int]:
        self._read()
        return super().sizes(folder)

    def get(self, name: str) -> bytes:
        self._read()
        return super().get(name)


@pytest.mark.parametrize("launched", [share(1, 2), share(7, 8)])
def test_the_other_ranks_end_while_this_one_looks(
    images: Path, reference: dict[str, bytes], tmp_path: Path, launched: World
) -> None:
    """Rank 1 has its shards from an earlier try; rank 7 of 8 has none of the 6."""
    for number in range(1, 12):
        folder = tmp_path / str(number)
        if launched.rank == 1:
            pack_share(scan_folder(images), FolderDestination(folder), settings(), launched, workers=1)
        dest = Overtaken(folder, images=images, overtaken_at=number)
        assert pack_share(scan_folder(images), dest, settings(), launched, workers=1) is None
        if len(dest.reads) < number:
            break
        assert contents(folder) == reference
    assert number > 1
    assert len(dest.reads) < 11  # every read was tried


def test_rank_0_waits_only_so_long(images: Path, reference: dict[str, bytes], tmp_path: Path) -> None:
    dest = FolderDestination(tmp_path)
    steps: list[tuple[str, int, int]] = []
    with pytest.raises(RunFailed, match="4 shards of other ranks did not come, train-00001-of-00006 first") as caught:
        pack_share(
            scan_folder(images),
            dest,
            settings(),
            share(0, 3),
            workers=1,
            progress=lambda *step: steps.append(step),
            wait_s=0.3,
        )
    assert steps[-1] == ("waiting for other ranks, shards", 2, 6)
    assert caught.value.hint
    assert pack(scan_folder(images), dest, settings()).num_records == 60
    assert contents(tmp_path) == reference


def test_ranks_do_not_overwrite(images: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--overwrite with 2 ranks"):
        pack_share(scan_folder(images), FolderDestination(tmp_path), settings(), share(0, 2), overwrite=True)


def test_the_command_line(images: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "n01").mkdir(parents=True)
    (source / "n01" / "a.jpg").write_bytes(jpeg())
    (source / "n01" / "b.jpg").write_bytes(b"\x89PNG\r\n\x1a\n")
    out = tmp_path / "out"
    done = drawbar("data", "pack", "folder", source, out, "--shards", "1", "--json")
    assert done.code == 0, done.stderr
    row = json.loads(done.stdout)
    assert (row["records"], row["shards"], row["bad"], row["fixed"]) == (1, 1, 1, 0)
    again = drawbar("data", "pack", "folder", source, out, "--shards", "1", "--on-bad", "fail")
    assert again.code == 2
    assert "packed with --on-bad fix, with 1 bad file: n01/b.jpg" in again.error_line
    inside = drawbar("data", "pack", "folder", source, source / "out", "--shards", "1")
    assert inside.code == 2
    assert inside.error_line == f"error: the destination {source / 'out'} lies in the source {source}"
    assert not (source / "out").exists()
