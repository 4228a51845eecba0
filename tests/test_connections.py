"""The real store over TLS, by virtual-host addressing, with a profile's keys; other clouds' protocols by stand-ins."""

from __future__ import annotations

import http.server
import json
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote

import obstore
import pytest

from drawbar.config import Storage
from drawbar.dataset.listing import list_shards
from drawbar.errors import EnvironmentUnfit
from drawbar.journal import Request
from drawbar.launch.listing import list_place
from drawbar.storage import embedded
from drawbar.storage.environment import Credentials
from drawbar.storage.reader import CountedReader
from drawbar.storage.seaweed import _weed
from drawbar.storage.stores import Place, open_place
from tests.fault_proxy import FaultProxy
from tests.small_set import write_set

BODY = bytes(range(256)) * 40


@pytest.fixture(scope="module")
def credentials(embedded_store: embedded.EmbeddedStore) -> Credentials:
    embedded.ensure_bucket(embedded_store, "connections")
    found = Credentials(access_key_id=embedded_store.access_key_id, secret_access_key=embedded_store.secret_access_key)
    place = open_place("s3://connections/x", embedded_store.endpoints[0], found, Storage())
    obstore.put(place.store, "x/train-0", BODY)
    return found


def read(place: Place, settings: Storage | None = None) -> bytes:
    requests: list[Request] = []
    body = CountedReader(place, settings or Storage(), requests.append).get("x/train-0", 0, len(BODY))
    assert [request.got_bytes for request in requests] == [len(BODY)]
    return body


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate authority (ca.pem) and a server's certificate (store.pem, store.key) by it."""
    folder = tmp_path_factory.mktemp("ca")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=60)

    openssl("req", "-x509", *key, "-days", "2", "-subj", "/CN=test CA", "-keyout", "ca.key", "-out", "ca.pem")
    openssl("req", *key, "-subj", "/CN=store", "-keyout", "store.key", "-out", "store.csr")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    openssl(
        *("x509", "-req", "-in", "store.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"),
        *("-days", "2", "-extfile", "names", "-out", "store.pem"),
    )
    return folder


def test_https_with_an_own_authority(
    embedded_store: embedded.EmbeddedStore, credentials: Credentials, authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultProxy(embedded_store.endpoints[0], tls=(authority / "store.pem", authority / "store.key")) as proxy:
        assert proxy.endpoint.startswith("https://")

        def opened() -> Place:
            return open_place("s3://connections/x", proxy.endpoint, credentials, Storage())

        with pytest.raises(EnvironmentUnfit, match="certificate is not trusted: s3://connections/x at https://127"):
            list_place(opened(), "s3://connections/x")
        for name in ("S3_CA_FILE", "AWS_CA_BUNDLE"):
            with monkeypatch.context() as patch:
                patch.setenv(name, str(authority / "ca.pem"))
                assert read(opened()) == BODY
        monkeypatch.setenv("S3_VERIFY_SSL", "0")
        assert read(opened()) == BODY
        assert proxy.requests == 3


def test_a_token_of_other_keys_in_the_environment_is_not_sent(
    embedded_store: embedded.EmbeddedStore, credentials: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "stale")
    assert read(open_place("s3://connections/x", embedded_store.endpoints[0], credentials, Storage())) == BODY


def test_keys_of_a_profile_open_the_store(
    embedded_store: embedded.EmbeddedStore, credentials: Credentials, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text(
        f"[lab]\naws_access_key_id = {credentials.access_key_id}\n"
        f"aws_secret_access_key = {credentials.secret_access_key}\n"
    )
    found = Credentials.from_environment(
        {"AWS_PROFILE": "lab", "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "keys"), "HOME": str(tmp_path)}
    )
    assert read(open_place("s3://connections/x", embedded_store.endpoints[0], found, Storage())) == BODY


@contextmanager
def virtual_host_gateway(store: embedded.EmbeddedStore) -> Iterator[str]:
    """One more gateway of the store, for `http://BUCKET.store.test`."""
    ports = json.loads((store.directory / "store.json").read_text())["processes"][0]["ports"]
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        port, grpc = first.getsockname()[1], second.getsockname()[1]
    process = subprocess.Popen(
        [
            *(_weed(), "s3", "-ip.bind=127.0.0.1", f"-port={port}", f"-port.grpc={grpc}", "-iam=false"),
            *(f"-config={store.directory}/s3.json", "-domainName=store.test", "-port.lance=0", "-port.iceberg=0"),
            f"-filer=127.0.0.1:{ports['filer.port']}.{ports['filer.port.grpc']}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        end_t = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert time.monotonic() < end_t
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(20)


def test_virtual_host_addressing(
    embedded_store: embedded.EmbeddedStore, credentials: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is one that no resolver knows: an HTTP proxy stands in for DNS."""
    paths: list[str] = []
    with virtual_host_gateway(embedded_store) as gateway, FaultProxy(gateway) as proxy:
        proxy.rule = lambda number, path: paths.append(path)
        monkeypatch.setenv("HTTP_PROXY", proxy.endpoint)
        settings = Storage(addressing="virtual")
        place = open_place("s3://connections/x", "http://store.test", credentials, settings)
        assert place.endpoint == "http://store.test"
        assert read(place, settings) == BODY
        assert [shard.name for shard in list_shards(place.store, place.prefix).shards] == ["train-0"]
    assert paths[0] == "/x/train-0"


class _Blobs(http.server.BaseHTTPRequestHandler):
    """Just enough of Google's XML interface and Azure's blob interface: listing one folder, ranged GETs."""

    protocol_version = "HTTP/1.1"
    folder: Path

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        names = sorted(each.name for each in self.folder.iterdir())
        if "comp=list" in query or "list-type" in query:
            self._send(200, self._listing(names, azure="comp=list" in query), {})
            return
        data = (self.folder / unquote(path).rpartition("/")[2]).read_bytes()
        asked = self.headers.get("Range") or self.headers.get("x-ms-range")
        if not asked:
            self._send(200, data, {})
            return
        first, last = asked.removeprefix("bytes=").split("-")
        part = data[int(first) : int(last) + 1]
        self._send(206, part, {"Content-Range": f"bytes {first}-{last}/{len(data)}"})

    def _listing(self, names: list[str], *, azure: bool) -> bytes:
        rows = []
        for name in names:
            size = (self.folder / name).stat().st_size
            if azure:
                rows.append(
                    f"<Blob><Name>train/{name}</Name><Properties><Last-Modified>Mon, 30 Nov 2026 20:00:00 GMT"
                    f"</Last-Modified><Etag>0x1</Etag><Content-Length>{size}</Content-Length><Content-Type>a/b"
                    "</Content-Type></Properties></Blob>"
                )
            else:
                rows.append(
                    f"<Contents><Key>train/{name}</Key><Size>{size}</Size><ETag>&quot;0x1&quot;</ETag>"
                    "<LastModified>2026-11-30T20:00:00.000Z</LastModified></Contents>"
                )
        if azure:
            return f"<EnumerationResults><Blobs>{''.join(rows)}</Blobs><NextMarker/></EnumerationResults>".encode()
        return f"<ListBucketResult>{''.join(rows)}</ListBucketResult>".encode()

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        more = {"ETag": '"0x1"', "Last-Modified": "Mon, 30 Nov 2026 20:00:00 GMT", "Content-Length": str(len(body))}
        for name, value in (more | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_google_and_azure_are_read_like_s3(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = write_set(tmp_path / "set", num_shards=2, records_per_shard=4)
    handler = type("Blobs", (_Blobs,), {"folder": tmp_path / "set"})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    account = {"gcs_base_url": address, "disable_oauth": True, "client_email": "", "private_key": ""}
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps({**account, "private_key_id": ""}))
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"{address}/account")
    try:
        place = open_place(f"{scheme}://bucket/train", None, None, Storage())
        assert place.endpoint == scheme
        requests: list[Request] = []
        reader = CountedReader(place, Storage(), requests.append)
        listing = list_place(place, "", lambda key, size: reader.get(key, 0, size, kind="metadata"))
        assert [shard.num_records for shard in listing.shards] == [4, 4]
        for shard, path in zip(listing.shards, paths, strict=True):
            assert reader.get(shard.key, 5, shard.size_bytes, e_tag=shard.e_tag) == path.read_bytes()[5:]
        assert {request.endpoint for request in requests} == {scheme}
        assert not any(request.error for request in requests)
    finally:
        server.shutdown()
        server.server_close()
