"""Files from an address, against servers on this machine: one that can go on in the middle, and one that cannot."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from vitdet.errors import UserError
from vitdet.weights import download as module
from vitdet.weights.download import download
from vitdet.weights.hub import locate

constants = pytest.importorskip("huggingface_hub.constants")
CONTENT = bytes(torch.randint(256, (300_000,), generator=torch.Generator().manual_seed(0)).tolist())
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Files(BaseHTTPRequestHandler):
    """Answers ``/model.pth`` in the ways that :class:`Server` is told to."""

    server: Server

    def do_GET(self) -> None:
        told = self.server
        told.asked.append((self.path, self.headers.get("Range")))
        if self.path in told.redirects:
            self.send_response(302)
            self.send_header("Location", told.redirects[self.path])
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if not self.path.startswith("/model.pth"):
            self.send_error(404)
            return
        start = self.start()
        if start is None:
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        if start:
            first = start + told.shift
            self.send_header("Content-Range", f"bytes {first}-{len(CONTENT) - 1}/{len(CONTENT)}")
        if told.claimed != -1:
            self.send_header("Content-Length", str(told.claimed or len(told.content) - start))
        if told.etag:
            self.send_header("ETag", told.etag)
        self.end_headers()
        self.wfile.write(told.content[start:][: told.most])

    def start(self) -> int | None:
        """Where to begin; None where there is nothing from there on."""
        wanted = self.headers.get("Range")
        newer = self.headers.get("If-Range") not in (None, self.server.etag)
        if wanted is None or newer or not self.server.ranges:
            return 0
        start = int(wanted.removeprefix("bytes=").rstrip("-"))
        return start if start < len(self.server.content) else None

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""


class Server(ThreadingHTTPServer):
    """What the handler is to do.

    Attributes:
        content: of the file. most: bytes that are sent before the connection ends. ranges: understands the header.
            etag: the mark of the version. claimed: as Content-Length, -1 for no such header. shift: a fault of its
            answers to ranges.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Files)
        self.content, self.most, self.ranges, self.etag = CONTENT, len(CONTENT), True, '"v1"'
        self.claimed, self.shift = 0, 0
        self.redirects: dict[str, str] = {}
        self.asked: list[tuple[str, str | None]] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/model.pth"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def fails(*arguments: Any, **options: Any) -> str:
    with pytest.raises(UserError) as error:
        download(*arguments, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def break_off(server: Server, folder: Path, after: int) -> None:
    """The first part of the file lies there, as when the network went away."""
    server.most = after
    sentence = fails(server.address, folder=folder)
    assert sentence == (
        f"{server.address} broke off after {after:,} of 300,000 bytes; do the same again to go on there"
    )
    assert "model.pth" not in names(folder)
    assert (folder / "model.pth.part").read_bytes() == CONTENT[:after]
    server.most = len(CONTENT)
    server.asked.clear()


def test_a_file_is_fetched_once(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = download(server.address, folder=tmp_path / "new", sha256=SHA256[:8])
    assert path == tmp_path / "new" / "model.pth"
    assert path.read_bytes() == CONTENT
    assert names(path.parent) == ["model.pth", "model.pth.address"]
    assert capsys.readouterr() == ("", f"fetching {server.address} (0 MB) to {path.parent}\n")
    assert download(server.address, folder=tmp_path / "new", sha256=SHA256) == path
    assert len(server.asked) == 1


def test_another_file_of_the_same_name_is_not_taken_for_it(server: Server, tmp_path: Path) -> None:
    download(server.address, folder=tmp_path)
    other = f"{server.address}?of=another"
    told = f"{tmp_path / 'model.pth'} came from {server.address}, not from {other}; delete it, or fetch the other one"
    assert fails(other, folder=tmp_path) == f"{told} by hand"
    (tmp_path / "model.pth.address").unlink()  # put there by hand
    assert download(other, folder=tmp_path) == tmp_path / "model.pth"


def test_a_malformed_address(tmp_path: Path) -> None:
    assert fails("https://[x/y.pth", folder=tmp_path).startswith("https://[x/y.pth is no address (")


def test_the_folder_is_that_of_torch_hub(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "_hub_dir", None)
    expected = tmp_path / "hub" / "checkpoints" / "model.pth"
    assert locate(server.address, sha256=SHA256[:8]) == expected
    assert expected.read_bytes() == CONTENT


def test_going_on_where_it_broke_off(server: Server, tmp_path: Path) -> None:
    break_off(server, tmp_path, 123_456)
    server.most = 200_000 - 123_456
    assert "broke off after 200,000 of 300,000 bytes" in fails(server.address, folder=tmp_path)
    server.most = len(CONTENT)
    path = download(server.address, folder=tmp_path, sha256=SHA256)
    assert server.asked == [("/model.pth", "bytes=123456-"), ("/model.pth", "bytes=200000-")]
    assert path.read_bytes() == CONTENT
    assert names(tmp_path) == ["model.pth", "model.pth.address"]


@pytest.mark.parametrize("change", [{"ranges": False}, {"shift": 1}], ids=["no ranges", "another range than asked for"])
def test_a_server_that_cannot_go_on(server: Server, tmp_path: Path, change: dict[str, Any]) -> None:
    """Then all of it is fetched anew, and nothing of it is in the file twice."""
    break_off(server, tmp_path, 123_456)
    vars(server).update(change)
    assert download(server.address, folder=tmp_path).read_bytes() == CONTENT
    assert names(tmp_path) == ["model.pth", "model.pth.address"]


def test_a_newer_file_is_not_joined_to_an_older_one(server: Server, tmp_path: Path) -> None:
    break_off(server, tmp_path, 123_456)
    server.content, server.etag = CONTENT[::-1], '"v2"'
    assert download(server.address, folder=tmp_path).read_bytes() == CONTENT[::-1]


def test_a_part_longer_than_the_file(server: Server, tmp_path: Path) -> None:
    (tmp_path / "model.pth.part").write_bytes(bytes(400_000))
    assert download(server.address, folder=tmp_path).read_bytes() == CONTENT
    assert server.asked == [("/model.pth", "bytes=400000-"), ("/model.pth", None)]


def test_a_wrong_checksum(server: Server, tmp_path: Path) -> None:
    """Neither what arrives gets its name, nor is what was there before used."""
    sentence = fails(server.address, folder=tmp_path, sha256="0123abcd")
    assert sentence.startswith(f"what came from {server.address} has not the published checksum 0123abcd and was del")
    assert [name for name in names(tmp_path) if not name.endswith(".lock")] == []
    (tmp_path / "model.pth").write_bytes(CONTENT[:-1])
    sentence = fails(server.address, folder=tmp_path, sha256=SHA256[:8])
    path = tmp_path / "model.pth"
    assert sentence == f"{path} has not the published checksum {SHA256[:8]}; delete it, and it is fetched again"
    assert path.exists()
    assert len(server.asked) == 1


def test_several_processes_at_once(server: Server, tmp_path: Path) -> None:
    """As those of a distributed run: one fetches, the others wait for it."""
    with ThreadPoolExecutor(6) as pool:
        paths = list(pool.map(lambda _: download(server.address, folder=tmp_path), range(6)))
    assert set(paths) == {tmp_path / "model.pth"}
    assert paths[0].read_bytes() == CONTENT
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"claimed": 9 * 2**30}, " has 9,663,676,416 bytes, and no weights have more than 8,589,934,592; check it"),
        ({"claimed": -1}, " does not say how many bytes it has; fetch "),
        ({"redirects": {"/model.pth": "/other.pth"}}, " answers with HTTP status 404; fetch "),
        ({"redirects": {"/model.pth": "http://example.com/model.pth"}},
         "http://example.com/model.pth is no https:// address; weights are fetched from no other"),
        ({"redirects": {"/model.pth": "file:///etc/passwd"}}, " answers with HTTP status 302; fetch "),
    ],
)  # fmt: skip
def test_wrong_answers(server: Server, tmp_path: Path, change: dict[str, Any], expected: str) -> None:
    vars(server).update(change)
    assert expected in fails(server.address, folder=tmp_path)
    assert not (tmp_path / "model.pth").exists()


def test_more_than_was_announced(server: Server, tmp_path: Path) -> None:
    """The rest is not even read: what a server says is the most that a disk can be filled with."""
    server.claimed = 1000
    assert download(server.address, folder=tmp_path).read_bytes() == CONTENT[:1000]


def test_a_redirect_is_followed(server: Server, tmp_path: Path) -> None:
    server.redirects = {"/latest/weights.pth": server.address + "?signed=1"}
    path = download(f"http://127.0.0.1:{server.server_port}/latest/weights.pth", folder=tmp_path)
    assert path == tmp_path / "weights.pth"
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("http://example.com/model.pth", "http://example.com/model.pth is no https:// address"),
        ("http://127.0.0.1.example.com/model.pth", " is no https:// address"),
        ("ftp://example.com/model.pth", " is no https:// address"),
        ("https://example.com/", " does not end in the name of a weights file (.safetensors, .pth, "),
        ("https://example.com/model.zip", " does not end in the name of a weights file"),
        ("https://example.com/..%2Fmodel.pth", " does not end in the name of a weights file"),
        ("https://example.com/a?file=model.pth", " does not end in the name of a weights file"),
    ],
)
def test_other_addresses(address: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert expected in fails(address, folder=tmp_path)
    assert names(tmp_path) == []


def test_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    address = "http://127.0.0.1:9/detr-r50-e632da11.pth"  # where nobody listens
    sentence = fails(address, folder=tmp_path)
    assert sentence.startswith(f"{address} cannot be reached (")
    assert sentence.endswith(f"; fetch {address} by hand, and put it at {tmp_path / 'detr-r50-e632da11.pth'}")
    (tmp_path / "detr-r50-e632da11.pth").write_bytes(CONTENT)  # as it says
    assert download(address, folder=tmp_path, sha256=SHA256[:8]).read_bytes() == CONTENT


def test_the_users_wish_to_be_offline(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    sentence = fails(server.address, folder=tmp_path)
    path = tmp_path / "model.pth"
    assert sentence == (
        f"HF_HUB_OFFLINE is set and {path} is not there; fetch {server.address} by hand, and put it at {path}"
    )
    assert server.asked == []
    assert names(tmp_path) == []


def test_a_silent_server(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not waited for without end, and what it sent before is kept."""
    monkeypatch.setattr(module, "_PATIENCE", 0.2)
    waiting = threading.Event()
    answer = Files.do_GET

    def slow(handler: Files) -> None:
        answer(handler)
        handler.wfile.flush()
        waiting.wait(5)

    server.most = 1000
    monkeypatch.setattr(Files, "do_GET", slow)
    assert "broke off after 1,000 of 300,000 bytes" in fails(server.address, folder=tmp_path)
    waiting.set()
    assert (tmp_path / "model.pth.part").read_bytes() == CONTENT[:1000]
