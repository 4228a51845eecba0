"""Reads rank journals while they are being written."""

from __future__ import annotations

from pathlib import Path

from drawbar.journal import Event, parse_line


class JournalTail:
    """New whole lines of every rank journal since the last call. The final reading is `read_run`'s, not this."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "journal"
        self._read_bytes: dict[Path, int] = {}

    def sees(self, rank: int) -> bool:
        """Whether that rank's journal is in this file system."""
        return self._folder / f"rank-{rank:05d}.jsonl" in self._read_bytes

    def new_events(self) -> list[tuple[int, Event]]:
        """(rank, event) pairs, in order within a rank."""
        events: list[tuple[int, Event]] = []
        for path in sorted(self._folder.glob("rank-*.jsonl")):
            number = path.stem.removeprefix("rank-")
            if not number.isdecimal() or not path.is_file():
                continue  # not a rank's; the judgement names it
            rank = int(number)
            with path.open("rb") as file:
                file.seek(self._read_bytes.get(path, 0))
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read_bytes[path] = self._read_bytes.get(path, 0) + len(whole)
            for line in whole.splitlines():
                try:
                    events.append((rank, parse_line(line)))
                except ValueError:
                    # Counted and reported by read_run at the end.
                    continue
        return events
