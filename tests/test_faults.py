"""The loader over the real store through proxies that spoil answers: every record once an epoch, or one clear line."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import obstore
import pytest

from drawbar.config import Input, Storage
from drawbar.dataset.listing import list_shards
from drawbar.errors import DataError, DrawbarError, EnvironmentUnfit, RunFailed
from drawbar.input.loader import Loader, ReadPlan
from drawbar.journal import EndpointChange, InputTotals, Request
from drawbar.storage import embedded
from drawbar.storage.environment import Credentials
from drawbar.storage.reader import CountedReader
from drawbar.storage.stores import Place, open_place
from tests.fault_proxy import Fault, FaultProxy, every
from tests.small_set import NUM_CLASSES, offsets, write_set

NUM_SHARDS, RECORDS_PER_SHARD = 6, 40
NUM_RECORDS = NUM_SHARDS * RECORDS_PER_SHARD
BATCH = 8
BATCHES_AN_EPOCH = NUM_RECORDS // BATCH


@dataclass(kw_only=True)
class Set:
    store: embedded.EmbeddedStore
    credentials: Credentials
    url: str
    place: Place
    ids: set[tuple[int, int]]
    """(shard, offset) of every record."""
    paths: list[Path]

    def put(self, shard: int, data: bytes) -> None:
        obstore.put(self.place.store, f"{self.place.prefix}/{self.paths[shard].name}", data)

    def restore(self) -> None:
        for shard, path in enumerate(self.paths):
            self.put(shard, path.read_bytes())


def upload(store: embedded.EmbeddedStore, folder: Path, url: str, compress: Callable[[bytes], bytes] | None) -> Set:
    embedded.ensure_bucket(store, "faults")
    paths = write_set(folder, num_shards=NUM_SHARDS, records_per_shard=RECORDS_PER_SHARD, manifest=compress is None)
    ids = {(shard, offset) for shard, path in enumerate(paths) for offset in offsets(path)}
    if compress is not None:
        for path in paths:
            path.write_bytes(compress(path.read_bytes()))
    credentials = Credentials(access_key_id=store.access_key_id, secret_access_key=store.secret_access_key)
    place = open_place(url, store.endpoints[0], credentials, Storage())
    for path in folder.iterdir():
        obstore.put(place.store, f"{place.prefix}/{path.name}", path.read_bytes())
    return Set(store=store, credentials=credentials, url=url, place=place, ids=ids, paths=paths)


@pytest.fixture(scope="module")
def packed(embedded_store: embedded.EmbeddedStore, tmp_path_factory: pytest.TempPathFactory) -> Set:
    return upload(embedded_store, tmp_path_factory.mktemp("faults"), "s3://faults/train", None)


COMPRESS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "zlib": zlib.compress}


@pytest.fixture(scope="module", params=COMPRESS)
def compressed(
    request: pytest.FixtureRequest, embedded_store: embedded.EmbeddedStore, tmp_path_factory: pytest.TempPathFactory
) -> Set:
    kind: str = request.param
    return upload(embedded_store, tmp_path_factory.mktemp(kind), f"s3://faults/{kind}", COMPRESS[kind])


@dataclass(kw_only=True)
class Reading:
    """A loader at work, and all that its journal would hold."""

    loader: Loader
    reader: CountedReader
    requests: list[Request] = field(default_factory=list)
    changes: list[EndpointChange] = field(default_factory=list)
    ids: list[tuple[int, int, int]] = field(default_factory=list)

    def take(self, num_batches: int, timeout_s: float = 60) -> None:
        for _ in range(num_batches):
            batch = self.loader.next_batch(timeout_s=timeout_s)
            self.ids += [(record.epoch, record.shard, record.offset) for record in batch.records]
            self.loader.recycle(batch)

    def take_until(self, met: Callable[[], bool], deadline_s: float = 40.0) -> None:
        """Whole epochs, at least one more than begun when `met` holds."""
        end_t = time.monotonic() + deadline_s
        while not met() or len(self.ids) % NUM_RECORDS:
            assert time.monotonic() < end_t, self.changes
            self.take(1)

    def change(self, kind: str) -> list[str]:
        return [change.endpoint for change in self.changes if change.change == kind]

    def errors(self) -> list[Request]:
        return [request for request in self.requests if request.error and request.kind == "data"]

    def check_every_record_came_once(self, packed: Set) -> None:
        counts = Counter(self.ids)
        assert len(self.ids) % NUM_RECORDS == 0
        assert set(counts) == {(epoch, *one) for epoch in range(len(self.ids) // NUM_RECORDS) for one in packed.ids}
        assert set(counts.values()) == {1}

    def check_bytes_add_up(self) -> InputTotals:
        totals = self.loader.close()
        data = [request for request in self.requests if request.kind == "data"]
        assert totals.received_bytes == sum(request.got_bytes for request in data)
        assert totals.received_bytes + totals.inflated_bytes == totals.trained_bytes + totals.discarded_bytes
        rereads = sum(request.got_bytes for request in data if request.reread)
        failed = sum(request.got_bytes for request in data if request.error)
        assert totals.planned_bytes == totals.received_bytes - rereads - failed
        return totals


@contextmanager
def reading(packed: Set, endpoints: list[str], **settings: Any) -> Iterator[Reading]:
    """Endpoints are listed without faults: those begin with the first shard."""
    defaults: dict[str, Any] = {"request_bytes": 8192, "read_ahead": 4, "timeout_s": 2.0, "connect_timeout_s": 2.0}
    storage = Storage(endpoints=endpoints, **(defaults | settings))
    requests: list[Request] = []
    changes: list[EndpointChange] = []
    places = [open_place(packed.url, endpoint, packed.credentials, storage) for endpoint in endpoints]
    reader = CountedReader(places, storage, requests.append, changes.append)
    shards = list_shards(packed.place.store, packed.place.prefix).shards
    input = Input(image_size=32, shuffle_buffer=0, lanes=1)
    loader = Loader(
        ReadPlan(shards=shards, rank=0, world_size=1, batch_size=BATCH),
        reader,
        num_classes=NUM_CLASSES,
        input=input,
        storage=storage,
        decode_threads=1,
    )
    try:
        yield Reading(loader=loader, reader=reader, requests=requests, changes=changes)
    finally:
        loader.close()


@contextmanager
def proxies(packed: Set, count: int) -> Iterator[list[FaultProxy]]:
    with ExitStack() as stack:
        yield [stack.enter_context(FaultProxy(packed.store.endpoints[i])) for i in range(count)]


# The run goes on


@pytest.mark.parametrize("policy", ["rank", "round-robin", "least-outstanding"])
def test_without_faults_every_policy_reads_every_record_once(packed: Set, policy: str) -> None:
    with proxies(packed, 3) as doors, reading(packed, [door.endpoint for door in doors], policy=policy) as run:
        run.take(2 * BATCHES_AN_EPOCH)
        run.check_every_record_came_once(packed)
        run.check_bytes_add_up()
        assert not run.errors()
        assert not run.changes
        asked = Counter(request.endpoint for request in run.requests)
        if policy == "rank":
            assert set(asked) == {doors[0].endpoint}
        else:
            assert len(asked) == 3
        if policy == "round-robin":
            assert max(asked.values()) - min(asked.values()) <= 1


@pytest.mark.parametrize("fault", ["busy", "cut", "short", "reset", "flip"])
@pytest.mark.parametrize("num_endpoints", [1, 2])
def test_one_spoiled_answer_in_nine_costs_no_record(packed: Set, fault: Fault, num_endpoints: int) -> None:
    with proxies(packed, num_endpoints) as doors:
        doors[0].rule = every(9, fault)
        # With one endpoint a body is read again from the one that spoiled it: a second time would end the run.
        doors[0].spare_rereads = fault == "flip" and num_endpoints == 1
        with reading(packed, [door.endpoint for door in doors]) as run:
            run.take(2 * BATCHES_AN_EPOCH)
            run.check_every_record_came_once(packed)
            run.check_bytes_add_up()
            spoiled = doors[0].faults[fault]
            assert spoiled >= 4
            if fault == "flip":
                assert not run.errors()
                # A flip in what is read ahead at the end is not looked at.
                assert spoiled - 4 <= len(run.change("corrupt")) <= spoiled
                assert set(run.change("corrupt")) == {doors[0].endpoint}
                again = [request.endpoint for request in run.requests if request.reread]
                # The last may be noticed while the loader is being closed, and is not read again then.
                assert len(run.change("corrupt")) - 1 <= len(again) <= len(run.change("corrupt"))
                assert set(again) == {doors[-1].endpoint}
            else:
                assert len(run.errors()) == spoiled
                assert {request.status for request in run.errors()} == ({503} if fault == "busy" else {0})
                assert sum(request.attempt > 0 for request in run.requests) >= spoiled - 4
            assert not run.change("set_aside")


@pytest.mark.parametrize("num_endpoints", [1, 2])
def test_a_spoiled_body_of_a_compressed_shard_costs_no_record(compressed: Set, num_endpoints: int) -> None:
    with proxies(compressed, num_endpoints) as doors:
        doors[0].rule = every(9, "flip")
        doors[0].spare_rereads = num_endpoints == 1
        with reading(compressed, [door.endpoint for door in doors], request_bytes=4096) as run:
            run.take(3 * BATCHES_AN_EPOCH)
            run.check_every_record_came_once(compressed)
            totals = run.check_bytes_add_up()
            assert not run.errors()
            spoiled = doors[0].faults["flip"]
            assert spoiled >= 4
            # A flip in what is read ahead at the end is not looked at.
            assert max(1, spoiled - 4) <= len(run.change("corrupt")) <= spoiled
            assert set(run.change("corrupt")) == {doors[0].endpoint}
            again = [request for request in run.requests if request.reread]
            assert len(again) >= len(run.change("corrupt")) - 1
            assert {request.endpoint for request in again} == {doors[-1].endpoint}
            assert totals.discarded_bytes >= sum(request.got_bytes for request in again)


@pytest.mark.parametrize("num_endpoints", [1, 2])
def test_a_compressed_shard_damaged_in_the_store_ends_the_run_after_one_reread(
    compressed: Set, num_endpoints: int
) -> None:
    data = bytearray(compressed.paths[2].read_bytes())
    data[len(data) // 2] ^= 4
    compressed.put(2, bytes(data))
    try:
        with reading(compressed, compressed.store.endpoints[:num_endpoints]) as run:
            assert "train-00002-of-00006" in ending(run, DataError)
            again = [(request.key, request.offset) for request in run.requests if request.reread]
            assert {key for key, _ in again} == {f"{compressed.place.prefix}/train-00002-of-00006"}
            assert len(again) == len(set(again))
            assert min(again)[1] == 0
            assert len(run.change("corrupt")) == 1
    finally:
        compressed.restore()


def test_endpoints_with_different_copies_of_a_compressed_shard_are_found_out(compressed: Set) -> None:
    """Only what was given out tells, where versions are not checked: one door leads to a set in another order."""
    with proxies(compressed, 2) as doors:
        doors[0].rule = every(9, "flip")
        with reading(compressed, [door.endpoint for door in doors], check_version=False) as run:
            plain = run.reader.reread

            def of_another_copy(key: str, start: int, end: int, *, e_tag: str = "") -> bytes:
                shard = int(key[-14:-9])
                return compressed.paths[(shard + 1) % NUM_SHARDS].read_bytes()[start:end]

            run.reader.reread = of_another_copy  # type: ignore[method-assign]
            message = ending(run, DataError)
            run.reader.reread = plain  # type: ignore[method-assign]
    assert "came different than before" in message


@pytest.mark.parametrize("policy", ["rank", "round-robin", "least-outstanding"])
def test_an_endpoint_killed_and_brought_back(packed: Set, policy: str) -> None:
    with proxies(packed, 2) as doors, reading(packed, [door.endpoint for door in doors], policy=policy) as run:
        run.take(5)
        doors[0].down()
        run.take_until(lambda: bool(run.change("set_aside")))
        before = len(run.requests)
        run.take(BATCHES_AN_EPOCH)
        assert {request.endpoint for request in run.requests[before:] if not request.error} == {doors[1].endpoint}
        doors[0].up()
        run.take_until(lambda: bool(run.change("returned")))
        before = len(run.requests)
        run.take(BATCHES_AN_EPOCH)
        run.check_every_record_came_once(packed)
        run.check_bytes_add_up()
        assert run.change("set_aside") == run.change("returned") == [doors[0].endpoint]
        back = Counter(request.endpoint for request in run.requests[before:] if request.kind == "data")
        assert back[doors[0].endpoint] > 0
        if policy == "rank":
            assert back[doors[0].endpoint] > back[doors[1].endpoint]
        assert any(request.kind == "probe" and not request.error for request in run.requests)


def test_an_only_endpoint_killed_and_brought_back(packed: Set) -> None:
    with proxies(packed, 1) as doors, reading(packed, [doors[0].endpoint]) as run:
        run.take(5)
        doors[0].down()
        threading.Timer(1.5, doors[0].up).start()
        run.take(2 * BATCHES_AN_EPOCH - 5)
        run.check_every_record_came_once(packed)
        run.check_bytes_add_up()
        assert run.errors()
        assert not run.changes


def test_an_endpoint_that_accepts_and_never_answers(packed: Set) -> None:
    with proxies(packed, 2) as doors:
        doors[0].rule = lambda number, path: "hang" if number > 6 else None
        with reading(packed, [door.endpoint for door in doors], timeout_s=1.0) as run:
            run.take(2 * BATCHES_AN_EPOCH)
            run.check_every_record_came_once(packed)
            run.check_bytes_add_up()
            assert run.change("set_aside") == [doors[0].endpoint]
            # Those under way together; afterwards only probes find it silent.
            assert 1 <= len(run.errors()) <= 4


def test_a_slow_endpoint_gets_fewer_requests_by_least_outstanding(packed: Set) -> None:
    with proxies(packed, 2) as doors:
        doors[0].rule = lambda number, path: "slow"
        endpoints = [door.endpoint for door in doors]
        with reading(packed, endpoints, policy="least-outstanding", request_bytes=65536) as run:
            run.take(4 * BATCHES_AN_EPOCH)
            run.check_every_record_came_once(packed)
            asked = Counter(request.endpoint for request in run.requests)
            assert 0 < asked[endpoints[0]] < asked[endpoints[1]]
            assert not run.errors()


def test_a_name_that_does_not_resolve_is_set_aside(packed: Set) -> None:
    endpoints = ["http://store.invalid:9020", packed.store.endpoints[1]]
    with reading(packed, endpoints, policy="round-robin") as run:
        run.take(BATCHES_AN_EPOCH)
        run.check_every_record_came_once(packed)
        assert run.change("set_aside") == [endpoints[0]]


def test_a_name_that_stops_resolving_and_comes_back(packed: Set, tmp_path: Path) -> None:
    obstore.put(packed.place.store, "x/object", bytes(1000))
    (tmp_path / "keys").write_text(f"{packed.credentials.access_key_id} {packed.credentials.secret_access_key}")
    with FaultProxy(packed.store.endpoints[0], keep_alive=False) as proxy:
        done = subprocess.run(
            [
                *("unshare", "--map-root-user", "--mount", sys.executable, "-m", "tests.hosts_file"),
                *(tmp_path / "hosts", str(proxy.port), packed.store.endpoints[1], tmp_path / "keys"),
            ],
            capture_output=True,
            text=True,
            timeout=90,
            cwd=Path(__file__).parent.parent,
        )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["changes"] == ["set_aside", "returned"]
    assert len(told["errors"]) == 1


def test_after_slow_down_the_rate_recovers_and_the_store_is_not_hammered(packed: Set) -> None:
    """A store that takes 25 requests in any second and answers all others with 503."""
    admitted: list[float] = []
    lock = threading.Lock()

    def rule(number: int, path: str) -> Fault | None:
        now_t = time.monotonic()
        with lock:
            if sum(now_t - t < 1 for t in admitted) >= 25:
                return "busy"
            admitted.append(now_t)
            return None

    with proxies(packed, 1) as doors:
        doors[0].rule = rule
        with reading(packed, [doors[0].endpoint], read_ahead=8) as run:
            run.take(BATCHES_AN_EPOCH)
            run.check_every_record_came_once(packed)
            refused = doors[0].faults["busy"]
            assert refused > 0
            assert refused < doors[0].requests / 2
            doors[0].rule = lambda number, path: None
            before = len(run.errors())
            run.take(4 * BATCHES_AN_EPOCH)
            run.check_every_record_came_once(packed)
            # What was refused before the rule changed may still be on its way.
            assert len(run.errors()) - before <= 8
            assert run.reader._pool._doors[0].limit > 1


# The run ends with one line


def ending(run: Reading, kind: type[DrawbarError], within_s: float = 30.0) -> str:
    began_t = time.monotonic()
    with pytest.raises(kind) as caught:
        run.take(20 * BATCHES_AN_EPOCH)
    assert time.monotonic() - began_t < within_s
    assert "\n" not in caught.value.message
    return caught.value.message


def test_expired_credentials_are_not_tried_again(packed: Set) -> None:
    with proxies(packed, 2) as doors:
        for door in doors:
            door.rule = lambda number, path: "expired" if number > 5 else None
        with reading(packed, [door.endpoint for door in doors]) as run:
            assert "credentials have expired: train/train-" in ending(run, EnvironmentUnfit)
            assert len(run.errors()) <= 4
            assert all(request.attempt == 0 for request in run.errors())


def test_an_only_endpoint_that_never_answers(packed: Set) -> None:
    with proxies(packed, 1) as doors:
        doors[0].rule = lambda number, path: "hang" if number > 5 else None
        with reading(packed, [doors[0].endpoint], timeout_s=0.5, retry_budget_s=2.0) as run:
            assert "accepted but did not answer in time" in ending(run, EnvironmentUnfit)


def test_all_endpoints_gone_for_longer_than_the_budget(packed: Set) -> None:
    with proxies(packed, 2) as doors, reading(packed, [d.endpoint for d in doors], retry_budget_s=2.0) as run:
        run.take(3)
        for door in doors:
            door.down()
        assert "no endpoint was well for 2 s: http://127.0.0.1:" in ending(run, EnvironmentUnfit)
        assert sorted(run.change("set_aside")) == sorted(door.endpoint for door in doors)


def test_more_failures_of_one_request_than_the_retries(packed: Set) -> None:
    with proxies(packed, 1) as doors:
        doors[0].rule = lambda number, path: "busy" if number > 5 else None
        with reading(packed, [doors[0].endpoint], retries=3) as run:
            assert "the store stayed too busy (503)" in ending(run, RunFailed)
            assert max(request.attempt for request in run.errors()) == 3


@pytest.mark.parametrize("num_endpoints", [1, 2])
def test_damage_that_comes_again_ends_the_run_after_one_reread(packed: Set, num_endpoints: int) -> None:
    offset = offsets(packed.paths[2])[7]
    data = bytearray(packed.paths[2].read_bytes())
    data[offset + 60] ^= 1
    packed.put(2, bytes(data))
    try:
        with reading(packed, packed.store.endpoints[:num_endpoints]) as run:
            message = ending(run, DataError)
            assert f"train-00002-of-00006: byte offset {offset}" in message
            assert sum(request.reread for request in run.requests) == 1
    finally:
        packed.restore()


def test_an_object_deleted_during_the_run(packed: Set) -> None:
    try:
        with reading(packed, packed.store.endpoints[:2]) as run:
            run.take(2)
            obstore.delete(packed.place.store, [f"train/{path.name}" for path in packed.paths])
            assert "no such object any more: train/train-" in ending(run, DataError)
    finally:
        packed.restore()


def test_an_object_replaced_during_the_run(packed: Set) -> None:
    """By one of the same size with sound records: nothing but its ETag tells."""
    try:
        with reading(packed, packed.store.endpoints[:2]) as run:
            run.take(2)
            for shard, path in enumerate(packed.paths):
                data = path.read_bytes()
                cut = offsets(path)[1]
                packed.put(shard, data[cut:] + data[:cut])
            assert "object was replaced during the run: train/train-" in ending(run, DataError)
    finally:
        packed.restore()


def test_closing_does_not_wait_for_the_retries(packed: Set) -> None:
    with proxies(packed, 1) as doors, reading(packed, [doors[0].endpoint]) as run:
        run.take(2)
        doors[0].down()
        # What was read ahead is taken too, or nothing more would be asked for.
        end_t = time.monotonic() + 40
        while not run.errors() and time.monotonic() < end_t:
            with suppress(RunFailed):
                run.take(1, timeout_s=0.2)
        assert run.errors()
        began_t = time.monotonic()
        run.loader.close()
        # Far less than storage.retry_budget_s.
        assert time.monotonic() - began_t < 30
