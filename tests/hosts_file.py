"""Reads through a name that stops resolving: run in a mount namespace of its own, whose /etc/hosts is a file of ours.

unshare --mount python -m tests.hosts_file HOSTS PORT ENDPOINT KEY_FILE
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from drawbar.config import Storage
from drawbar.journal import EndpointChange, Request
from drawbar.storage.environment import Credentials
from drawbar.storage.reader import CountedReader
from drawbar.storage.stores import open_place

NAME = "store.drawbar.test"


def main(hosts: Path, port: str, other: str, keys: Path) -> None:
    hosts.write_text(f"127.0.0.1 localhost {NAME}\n")
    subprocess.run(["mount", "--bind", hosts, "/etc/hosts"], check=True)
    key_id, secret = keys.read_text().split()
    credentials = Credentials(access_key_id=key_id, secret_access_key=secret)
    settings = Storage(policy="round-robin", timeout_s=5.0, connect_timeout_s=5.0)
    requests: list[Request] = []
    changes: list[EndpointChange] = []
    places = [open_place("s3://faults/x", url, credentials, settings) for url in (f"http://{NAME}:{port}", other)]
    reader = CountedReader(places, settings, requests.append, changes.append)

    def read(count: int) -> None:
        for _ in range(count):
            assert len(reader.get("x/object", 0, 1000)) == 1000

    def wait_for(change: str) -> None:
        end_t = time.monotonic() + 40
        while change not in [event.change for event in changes]:
            assert time.monotonic() < end_t, changes
            read(2)
            time.sleep(0.05)

    read(6)
    assert not changes
    # The proxy behind the name answers each connection once, so that the next request must resolve it again.
    hosts.write_text("127.0.0.1 localhost\n")
    wait_for("set_aside")
    hosts.write_text(f"127.0.0.1 localhost {NAME}\n")
    wait_for("returned")
    read(6)
    print(
        json.dumps(
            {
                "changes": [event.change for event in changes],
                "why": changes[0].why,
                "errors": [
                    request.error.splitlines()[0] for request in requests if request.error and request.kind == "data"
                ],
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4]))
