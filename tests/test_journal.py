"""The journal: what is written comes back; what is torn or strange is reported and not fatal."""

from __future__ import annotations

import dataclasses
import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest

from drawbar.errors import InputError
from drawbar.journal import (
    EVENTS,
    Cache,
    Event,
    Host,
    InputSample,
    JournalWriter,
    RunEnd,
    RunStart,
    Step,
    Witness,
    parse_line,
    read_journal,
    read_run,
)


def step(number: int = 0) -> Step:
    return Step(
        step=number,
        warmup=False,
        start_t=1.0,
        end_t=2.0,
        data_wait_s=0.1,
        copy_s=0.1,
        compute_s=0.7,
        optimizer_s=0.1,
        samples=8,
        loss=6.9,
        tags=["gc"],
    )


def test_events_come_back_equal_and_in_order(tmp_path: Path) -> None:
    events = [step(0), Witness(when="after", source="gateway", target="http://a", count_bytes=7), step(1)]
    writer = JournalWriter(tmp_path / "deep" / "rank-00000.jsonl")
    for event in events:
        writer.write(event)
    writer.close()
    writer.write(step(9))  # dropped: the journal is closed
    journal = read_journal(tmp_path / "deep" / "rank-00000.jsonl")
    assert journal.events == events
    assert journal.problems == []


def write_many(writer: JournalWriter) -> None:
    for number in range(200):
        writer.write(step(number))


def test_threads_do_not_tear_each_others_lines(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.jsonl"
    writer = JournalWriter(path)
    threads = [threading.Thread(target=lambda: write_many(writer)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    journal = read_journal(path)
    assert len(journal.events) == 800
    assert journal.problems == []


def test_a_torn_last_line_is_reported_and_the_rest_read(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.jsonl"
    writer = JournalWriter(path)
    writer.write(step(0))
    writer.write(step(1))
    path.write_bytes(path.read_bytes()[:-20])
    journal = read_journal(path)
    assert [event.step for event in journal.of(Step)] == [0]
    assert journal.problems == ["rank-00000.jsonl:2: torn last line"]


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"[]",
        b'{"event":"nonsense"}',
        b'{"event":"run_end"}',
        b'{"step":1}',
        b"\xff\xfe",
        b'{"event":"run_end","t":1,"status":"ok","unix_s":"yesterday"}',
        b'{"event":"run_end","t":true,"status":"ok","unix_s":1}',
        b'{"event":[]}',
        b'{"event":null}',
        b'{"event":"run_end","status":"ok","unix_s":1}',
        b'{"event":"run_end","t":NaN,"status":"ok","unix_s":1}',
        b'{"event":"run_end","t":1,"status":"ok","unix_s":1e400}',
        b'{"event":"run_end","t":1,"status":null,"unix_s":1}',
        b"[" * 100_000,
        b'{"event":' + b"[" * 100_000,
        b'{"event":"run_end","t":1' + b"0" * 5000 + b',"status":"ok","unix_s":1}',
    ],
)
def test_strange_lines_are_reported_with_file_and_line(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "rank-00003.jsonl"
    path.write_bytes(b'{"event":"run_end","t":1.0,"status":"ok","unix_s":2.0}\n' + line + b"\n")
    journal = read_journal(path)
    assert len(journal.of(RunEnd)) == 1
    assert len(journal.problems) == 1
    assert journal.problems[0].startswith("rank-00003.jsonl:2: ")


ENVIRONMENT: dict[str, Any] = {"packages": {"torch": "2.9"}}
DEEP = json.loads("[" * 200 + "]" * 200)
START = RunStart(
    role="rank", rank=0, world_size=1, node="n", pid=1, unix_s=0, recipe_sha256="", environment=ENVIRONMENT
)
SAMPLE = InputSample(
    busy_s={"fetch": 1.5}, wait_in_s={"fetch": 0}, wait_out_s={}, queued={"fetch": 3}, queue_capacity={"fetch": 4}
)
HOST = Host(
    node="n",
    cpu_user_s=0,
    cpu_system_s=0,
    cpu_idle_s=0,
    cpu_iowait_s=0,
    cpu_steal_s=0,
    num_cpus=1,
    memory_used_bytes=0,
    memory_available_bytes=0,
    page_cache_bytes=0,
    disk_read_bytes=0,
    disk_write_bytes=0,
    nic_received_bytes={"eth0": 1},
    nic_sent_bytes={"eth0": 1},
    rank_rss_bytes={"0": 1},
    gpus=[{"busy": 0.5}],
)


@pytest.mark.parametrize(
    ("event", "key", "value"),
    [
        (step(), "samples", 10**30),
        (step(), "samples", 8.0),
        (step(), "warmup", 0),
        (step(), "end_t", math.nan),
        (step(), "end_t", -math.inf),
        (step(), "end_t", 10**400),
        (step(), "loss", "6.9"),
        (step(), "loss", 1e300),
        (step(), "tags", "gc"),
        (step(), "tags", [None]),
        (SAMPLE, "busy_s", {"fetch": "1"}),
        (SAMPLE, "wait_in_s", {"fetch": math.nan}),
        (SAMPLE, "queued", {"fetch": 0.5}),
        (START, "endpoint", None),
        (START, "environment", 5),
        (START, "environment", DEEP),
        (HOST, "rank_rss_bytes", []),
        (HOST, "rank_rss_bytes", {"0": "1"}),
        (HOST, "nic_sent_bytes", {"eth0": 2**63}),
        (HOST, "gpus", [5]),
        (HOST, "gpus", [{"busy": math.nan}]),
        (Cache(wanted="cold", method=""), "resident_fraction", "x"),
        (Cache(wanted="cold", method=""), "resident_fraction", math.nan),
    ],
)
def test_a_value_of_another_type_or_range_is_named(event: Event, key: str, value: Any) -> None:
    row = {"event": event.name, **dataclasses.asdict(event)}
    assert parse_line(json.dumps(row).encode()) == event
    with pytest.raises(ValueError, match=f"^{key}"):
        parse_line(json.dumps({**row, key: value}).encode())


def test_a_loss_may_be_missing_or_no_number() -> None:
    for loss in (None, math.nan, math.inf):
        row = {"event": "step", **dataclasses.asdict(step()), "loss": loss}
        event = parse_line(json.dumps(row).encode())
        assert isinstance(event, Step)
        assert repr(event.loss) == repr(loss)


def test_a_folder_in_a_journals_place_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "journal/rank-00003.jsonl").mkdir(parents=True)
    assert read_run(tmp_path).problems() == ["rank-00003.jsonl: cannot be read: Is a directory"]


def test_a_key_of_a_later_version_is_skipped() -> None:
    event = parse_line(b'{"event":"run_end","t":1.0,"status":"ok","unix_s":2.0,"mood":"good"}')
    assert event == RunEnd(t=1.0, status="ok", unix_s=2.0)


def test_another_schema_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.jsonl"
    row = {
        "event": "run_start",
        "t": 0.0,
        "schema": 99,
        "role": "rank",
        "rank": 0,
        "world_size": 1,
        "node": "n",
        "pid": 1,
        "unix_s": 0.0,
        "recipe_sha256": "",
        "environment": {},
    }
    path.write_text(json.dumps(row) + "\n")
    assert read_journal(path).problems == ["rank-00000.jsonl: journal schema 99, this Drawbar reads 1"]


def test_event_names_are_unique_and_plain() -> None:
    assert all(name == cls.name and name.isidentifier() for name, cls in EVENTS.items())


def test_no_run_directory_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no run directory"):
        read_run(tmp_path / "none")
