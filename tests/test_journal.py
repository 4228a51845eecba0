"""The journal: what is written comes back; what is torn or strange is reported and not fatal."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from drawbar.errors import InputError
from drawbar.journal import EVENTS, JournalWriter, RunEnd, Step, Witness, parse_line, read_journal, read_run


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
    ],
)
def test_strange_lines_are_reported_with_file_and_line(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "rank-00003.jsonl"
    path.write_bytes(b'{"event":"run_end","t":1.0,"status":"ok","unix_s":2.0}\n' + line + b"\n")
    journal = read_journal(path)
    assert len(journal.of(RunEnd)) == 1
    assert len(journal.problems) == 1
    assert journal.problems[0].startswith("rank-00003.jsonl:2: ")


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
