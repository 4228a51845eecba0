"""Sets that Drawbar did not write: without a manifest, compressed, several in one folder, fewer shards than ranks."""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import obstore
import pytest
from hypothesis import given
from hypothesis import strategies as st
from obstore.store import LocalStore

from drawbar.config import Storage
from drawbar.dataset.compressed import Decompressor, Inflation
from drawbar.dataset.index import ShardIndex, cache_path, find_or_scan, scan
from drawbar.dataset.listing import list_shards, split_pattern
from drawbar.dataset.tfrecord import FramingError, compression_of, frame
from drawbar.errors import DataError, InputError
from drawbar.journal import Cache, InputTotals, read_run
from drawbar.storage import embedded
from drawbar.storage.environment import Credentials
from drawbar.storage.stores import open_place
from tests.drawbar_process import drawbar, result_of
from tests.small_loader import loader_over, take
from tests.small_recipe import write_recipe
from tests.small_set import offsets, write_set

Compress = Callable[[bytes], bytes]


def raw_deflate_at_level(level: int) -> Compress:
    return lambda data: zlib.compress(data, level)


def compress_set(paths: list[Path], kinds: list[Compress | None]) -> None:
    for path, compress in zip(paths, kinds, strict=True):
        if compress is not None:
            path.write_bytes(compress(path.read_bytes()))


# Compression by content


@pytest.mark.parametrize("level", range(10))
def test_compression_is_told_by_content_at_every_level(level: int) -> None:
    data = frame(b"some record" * 50)
    assert compression_of(data) == ""
    assert compression_of(gzip.compress(data, level)) == "gzip"
    assert compression_of(zlib.compress(data, level)) == "zlib"


@given(st.binary(max_size=64))
def test_a_record_is_never_taken_for_compressed_nor_is_a_short_file(payload: bytes) -> None:
    assert compression_of(frame(payload)) == ""
    compression_of(payload)


@pytest.mark.parametrize("magic", [b"\x1f\x8b\x08\x00", b"\x78\x9c\x00\x00", b"\x78\x01\x00\x00"])
def test_a_record_whose_length_looks_like_a_magic_number_is_still_a_record(magic: bytes) -> None:
    length = int.from_bytes(magic, "little")
    assert compression_of(frame(bytes(length))[:12]) == ""


@given(
    data=st.binary(max_size=5000),
    cuts=st.lists(st.integers(0, 6000), max_size=8),
    kind=st.sampled_from(["gzip", "zlib"]),
    joined=st.booleans(),
)
def test_any_cutting_into_bodies_gives_the_same_bytes(data: bytes, cuts: list[int], kind: str, joined: bool) -> None:
    if kind == "gzip":
        packed = gzip.compress(data) + gzip.compress(data) if joined else gzip.compress(data)
        expected = data + data if joined else data
        packed += bytes(7)
    else:
        packed, expected = zlib.compress(data), data
    inflation = Inflation()
    stream = Decompressor("s", kind, inflation)  # type: ignore[arg-type]
    edges = [0, *sorted(min(cut, len(packed)) for cut in cuts), len(packed)]
    bodies = [packed[a:b] for a, b in pairwise(edges)]
    assert b"".join(piece for body in bodies for piece in stream.feed(body)) == expected
    stream.finish()
    assert (inflation.fed_bytes, inflation.consumed_bytes, inflation.produced_bytes) == (
        len(packed),
        len(packed),
        len(expected),
    )


def test_decompression_of_a_bomb_is_bounded() -> None:
    bomb = gzip.compress(bytes(200_000_000))
    pieces = (len(piece) for piece in Decompressor("s", "gzip").feed(bomb))
    seen = [next(pieces) for _ in range(50)]
    assert max(seen) <= 1 << 20


@pytest.mark.parametrize("compress", [gzip.compress, zlib.compress])
def test_a_cut_stream_says_so(compress: Compress) -> None:
    stream = Decompressor("train-1", compression_of(compress(b"a" * 1000)))
    list(stream.feed(compress(b"a" * 1000)[:-3]))
    with pytest.raises(FramingError, match=r"train-1: the (gzip|zlib) stream is truncated"):
        stream.finish()


# The loader


def test_compressed_shards_give_the_same_records_as_plain_ones(tmp_path: Path) -> None:
    write_set(tmp_path / "plain", manifest=False)
    packed = write_set(tmp_path / "packed", manifest=False)
    compress_set(packed, [gzip.compress, zlib.compress, None, raw_deflate_at_level(0)])
    batches = []
    for name in ("plain", "packed"):
        with loader_over(tmp_path / name) as loader:
            batches.append(take(loader, 14))
    for plain, other in zip(*batches, strict=True):
        assert plain[2] == other[2]
        assert (plain[0] == other[0]).all()
        assert (plain[1] == other[1]).all()


def test_ranks_share_compressed_shards_whole_and_miss_none(tmp_path: Path) -> None:
    paths = write_set(tmp_path, manifest=False)
    compress_set(paths, [gzip.compress] * 4)
    seen: Counter[tuple[int, int, int]] = Counter()
    for rank in range(2):
        with loader_over(tmp_path, rank=rank, world_size=2) as loader:
            seen.update(record for _, _, ids in take(loader, 18) for record in ids)
    assert set(seen.values()) == {1}
    assert len([record for record in seen if record[0] < 2]) == 2 * 96


@pytest.mark.parametrize("level", [0, 9])
@pytest.mark.parametrize("num_batches", [1, 3, 11])
def test_every_byte_of_compressed_shards_is_accounted_for(tmp_path: Path, level: int, num_batches: int) -> None:
    """Received compressed bytes + what decompressing added = trained record bytes + discarded ones, to the byte."""
    paths = write_set(tmp_path, manifest=False)
    compress_set(paths, [raw_deflate_at_level(level), gzip.compress, None, raw_deflate_at_level(level)])
    with loader_over(tmp_path, read_ahead=3, request_bytes=4096) as loader:
        batches = [loader.next_batch(timeout_s=30) for _ in range(1)]
        trained_bytes = batches[0].framed_bytes
        loader.recycle(batches[0])
        for _ in range(num_batches - 1):
            batch = loader.next_batch(timeout_s=30)
            trained_bytes += batch.framed_bytes
            loader.recycle(batch)
        totals = loader.close()
    assert totals.trained_bytes == trained_bytes
    assert totals.received_bytes + totals.inflated_bytes == totals.trained_bytes + totals.discarded_bytes
    assert totals.discarded_bytes > 0
    assert totals.planned_bytes == totals.received_bytes


def test_a_damaged_compressed_shard_ends_the_run_with_its_name(tmp_path: Path) -> None:
    paths = write_set(tmp_path, manifest=False)
    compress_set(paths, [gzip.compress] * 4)
    data = bytearray(paths[2].read_bytes())
    data[-6] ^= 1
    paths[2].write_bytes(data)
    with loader_over(tmp_path) as loader, pytest.raises(DataError, match="train-00002-of-00004: the gzip stream is"):
        take(loader, 60)


# Several sets in one folder


def test_a_pattern_picks_one_of_two_sets_and_without_it_both_are_refused(tmp_path: Path) -> None:
    for path in write_set(tmp_path, manifest=False)[:3]:
        (tmp_path / path.name.replace("train", "validation").replace("00004", "00003")).write_bytes(path.read_bytes())
    store = LocalStore(tmp_path)
    with pytest.raises(InputError, match=r"2 sets in /: train-\*-of-00004 \(4 shards\), validation-") as caught:
        list_shards(store, "")
    assert "/train-*-of-00004" in str(caught.value.hint)
    assert len(list_shards(store, "", pattern="train-*").shards) == 4
    assert [shard.name for shard in list_shards(store, "", pattern="val*").shards][2] == "validation-00002-of-00003"
    with pytest.raises(InputError, match=r"no shards test-\* in"):
        list_shards(store, "", pattern="test-*")


def test_a_pattern_that_takes_all_of_a_manifest_keeps_it(tmp_path: Path) -> None:
    write_set(tmp_path)
    store = LocalStore(tmp_path)
    assert list_shards(store, "", pattern="train-*").manifest is not None
    part = list_shards(store, "", pattern="train-00001*")
    assert (part.manifest, len(part.shards)) == (None, 1)


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("s3://b/p", ("s3://b/p", "")),
        ("s3://b/p/train-*", ("s3://b/p", "train-*")),
        ("/data/*.tfrecord", ("/data", "*.tfrecord")),
        ("train-*", (".", "train-*")),
        ("/a[1]/b", ("/a[1]/b", "")),
    ],
)
def test_split_pattern(url: str, parts: tuple[str, str]) -> None:
    assert split_pattern(url) == parts


def test_missing_numbers_of_a_foreign_set_are_known(tmp_path: Path) -> None:
    paths = write_set(tmp_path, num_shards=12, records_per_shard=1, manifest=False)
    for number in (0, 7, 11):
        paths[number].unlink()
    listing = list_shards(LocalStore(tmp_path), "")
    assert listing.missing == tuple(paths[number].name for number in (0, 7, 11))


# The index


@pytest.mark.parametrize("window_bytes", [1, 64, 1000, 1 << 20])
def test_a_scan_finds_every_record_and_reads_little_of_files(tmp_path: Path, window_bytes: int) -> None:
    paths = write_set(tmp_path, manifest=False)
    listing = list_shards(LocalStore(tmp_path), "")
    index = scan(listing.shards, read_from(tmp_path), window_bytes=window_bytes, threads=2)
    assert index is not None
    for path in paths:
        starts = offsets(path)
        sizes = index.record_bytes[path.name]
        assert [sum(sizes[:i]) for i in range(len(sizes))] == starts
    if window_bytes <= 64:
        assert index.read_bytes <= 96 * 64
    indexed = index.apply(listing)
    assert [shard.num_records for shard in indexed.shards] == [24] * 4
    assert indexed.sha256 != listing.sha256


def read_from(folder: Path) -> Callable[[str, int, int], bytes]:
    return lambda key, start, end: (folder / key).read_bytes()[start:end]


def test_the_index_is_kept_and_a_changed_set_is_scanned_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "set"
    paths = write_set(folder, manifest=False)

    def indexed() -> ShardIndex:
        listing = list_shards(LocalStore(folder), "")
        index = find_or_scan(str(folder), listing, read_from(folder), window_bytes=64, threads=1)
        assert index is not None
        assert cache_path(str(folder), listing).is_file()
        return index

    first, second = indexed(), indexed()
    assert first.read_bytes > 0
    assert second.read_bytes == 0
    assert first.record_bytes == second.record_bytes
    paths[0].write_bytes(frame(b"other") + paths[0].read_bytes())
    assert len(indexed().record_bytes[paths[0].name]) == 25
    for kept in (tmp_path / "cache" / "drawbar" / "index").iterdir():
        kept.write_text("{broken")
    assert indexed().read_bytes > 0


def test_a_compressed_set_has_no_index_and_a_damaged_one_says_where(tmp_path: Path) -> None:
    paths = write_set(tmp_path, manifest=False)
    start = offsets(paths[3])[5]
    data = bytearray(paths[3].read_bytes())
    data[start] ^= 1
    paths[3].write_bytes(data)
    shards = list_shards(LocalStore(tmp_path), "").shards
    with pytest.raises(DataError, match=f"train-00003-of-00004: byte offset {start}: wrong CRC"):
        scan(shards, read_from(tmp_path), window_bytes=64, threads=1)
    compress_set(paths[:1], [gzip.compress])
    shards = list_shards(LocalStore(tmp_path), "").shards
    assert scan(shards[:3], read_from(tmp_path), window_bytes=64, threads=1) is None


# Whole commands, against the embedded store


@pytest.fixture(scope="module")
def foreign(embedded_store: embedded.EmbeddedStore, tmp_path_factory: pytest.TempPathFactory) -> embedded.EmbeddedStore:
    """Bucket `foreign`: `mixed` has 6 shards, most of them compressed; `single` one plain shard."""
    embedded.ensure_bucket(embedded_store, "foreign")
    folder = tmp_path_factory.mktemp("foreign")
    paths = write_set(folder / "mixed", num_shards=6, records_per_shard=40, manifest=False)
    compress_set(paths, [gzip.compress, zlib.compress, None, gzip.compress, gzip.compress, raw_deflate_at_level(9)])
    write_set(folder / "single", num_shards=1, records_per_shard=160, manifest=False)
    credentials = Credentials(
        access_key_id=embedded_store.access_key_id, secret_access_key=embedded_store.secret_access_key
    )
    store = open_place("s3://foreign", embedded_store.endpoints[0], credentials, Storage()).store
    for path in folder.glob("*/*"):
        obstore.put(store, f"{path.parent.name}/{path.name}", path.read_bytes())
    return embedded_store


def recipe_for(folder: Path, url: str, store_dir: Path, ranks: int) -> Path:
    return write_recipe(
        folder,
        url,
        storage={"embedded_dir": str(store_dir), "request_bytes": 16384},
        input={"shuffle_buffer": 16},
        train={"steps": 12},
        launch={"ranks": ranks},
    )


@pytest.mark.run
def test_check_and_stat_read_compressed_shards_from_s3(foreign: embedded.EmbeddedStore) -> None:
    at = ("--store-dir", str(foreign.directory), "--json")
    checked = drawbar("data", "check", "s3://foreign/mixed", "--decode", *at)
    assert checked.code == 0, checked.stderr
    row = json.loads(checked.stdout)
    assert (row["records"], row["decoded"], row["compressed_shards"], row["faults"]) == (240, 240, 5, [])
    stat = json.loads(drawbar("data", "stat", "s3://foreign/mixed/train-*", *at).stdout)
    assert stat["compression"] == {"gzip": 3, "zlib": 2, "none": 1}
    assert (stat["images"], len(stat["classes"])) == (240, 10)
    refused = drawbar("data", "check", "s3://foreign/nothing", *at)
    assert (refused.code, "no shards in" in refused.error_line) == (2, True)


@pytest.mark.run
def test_a_run_over_compressed_shards_accounts_for_every_byte(foreign: embedded.EmbeddedStore, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    finished = drawbar("run", recipe_for(tmp_path, "s3://foreign/mixed", foreign.directory, 3), "--out", run_dir)
    assert finished.code == 0, finished.stderr
    totals = [rank.first(InputTotals) for rank in read_run(run_dir).ranks]
    for total in totals:
        assert total is not None
        assert total.trained_images == 13 * 4
        assert total.received_bytes + total.inflated_bytes == total.trained_bytes + total.discarded_bytes
    result = result_of(run_dir)
    assert result["input"]["inflated_bytes"] == sum(total.inflated_bytes for total in totals if total) != 0
    assert [reason for reason in result["validity"]["reasons"] if "received" in reason["rule"]] == []
    assert "MB added by decompressing" in " ".join(finished.stdout.split())


@pytest.mark.run
@pytest.mark.timeout(240)  # two runs
def test_ranks_share_the_only_shard_of_a_foreign_set_by_an_index_made_before_the_cold_start(
    foreign: embedded.EmbeddedStore, tmp_path: Path
) -> None:
    recipe = recipe_for(tmp_path, "s3://foreign/single", foreign.directory, 2)
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    finished = drawbar("run", recipe, "--out", tmp_path / "run", env=env)
    assert finished.code == 0, finished.stderr
    journal = read_run(tmp_path / "run")
    cache = journal.launcher.first(Cache) if journal.launcher else None
    assert cache is not None
    assert "the launcher read" in cache.note
    reads = [
        {(request.offset, request.wanted_bytes) for request in rank.events if request.name == "request"}  # type: ignore[attr-defined]
        for rank in journal.ranks
    ]
    assert reads[0]
    assert reads[0].isdisjoint(reads[1])
    # What the scan had brought into the page cache was flushed again before the ranks came.
    assert cache.resident_fraction is None or cache.resident_fraction <= 0.01
    # The second run needs no scan: nothing was read before it.
    again = drawbar("run", recipe, "--out", tmp_path / "again", env=env)
    assert again.code == 0, again.stderr
    second = read_run(tmp_path / "again").launcher
    assert second is not None
    assert "the launcher read" not in second.first(Cache).note  # type: ignore[union-attr]


@pytest.mark.run
def test_compressed_shards_cannot_be_shared_by_more_ranks(tmp_path: Path) -> None:
    paths = write_set(tmp_path / "set", num_shards=2, manifest=False)
    compress_set(paths, [gzip.compress, None])
    recipe = recipe_for(tmp_path, str(tmp_path / "set"), tmp_path, 3)
    finished = drawbar("run", recipe, "--out", tmp_path / "run", env={"XDG_CACHE_HOME": str(tmp_path / "cache")})
    assert finished.code == 2
    assert "more ranks than shards: 3 ranks, 2 shards" in finished.error_line
    assert "compressed shards cannot be shared" in finished.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.run
def test_a_run_over_one_of_two_sets_in_a_local_folder(tmp_path: Path) -> None:
    for path in write_set(tmp_path / "set", manifest=False)[:3]:
        (path.parent / path.name.replace("train", "validation").replace("00004", "00003")).write_bytes(b"no shard")
    run_dir = tmp_path / "run"
    finished = drawbar("run", recipe_for(tmp_path, f"{tmp_path}/set/train-*", tmp_path, 2), "--out", run_dir)
    assert finished.code == 0, finished.stderr
    assert result_of(run_dir)["samples"] == 2 * 12 * 4
