"""Sources: local files and folders, and repositories of a server on this machine that answers as the Hub does."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file

from vitdet.errors import UserError
from vitdet.weights.files import read_state
from vitdet.weights.hub import fetch, locate, weights_file

constants = pytest.importorskip("huggingface_hub.constants")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
WEIGHTS = save({"head.weight": torch.arange(6.0).reshape(2, 3)})
FILES = {
    "owner/whole": {"config.json": b'{"a": 1}', "preprocessor_config.json": b"{}", "model.safetensors": WEIGHTS},
    "owner/timm.in1k": {"config.json": b"{}", "model.safetensors": WEIGHTS, "README.md": b"not wanted"},
    "owner/old": {"config.json": b"{}", "pytorch_model.bin": b"pickle"},
    "owner/none": {"config.json": b"{}", "flax_model.msgpack": b""},
    "owner/many": {
        "model.safetensors.index.json": json.dumps(
            {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
        ).encode(),
        "model-00001-of-00002.safetensors": save({"a": torch.zeros(2)}),
        "model-00002-of-00002.safetensors": save({"b": torch.ones(3)}),
    },
    "owner/lost": {"model.safetensors.index.json": b'{"weight_map": {"a": "model-1.safetensors"}}'},
    "owner/evil": {"model.safetensors.index.json": b'{"weight_map": {"a": "../../other.safetensors"}}'},
}
REFUSED = {"owner/gated": (403, "GatedRepo"), "owner/busy": (418, "")}


class Hub(BaseHTTPRequestHandler):
    """The two calls by which a file is had: HEAD for its commit and ETag, GET for its content."""

    asked: list[tuple[str, str]] = []  # noqa: RUF012 - shared by the server's threads on purpose

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        self.asked.append((self.command, self.path))
        repo, _, rest = self.path.removeprefix("/").partition("/resolve/")
        revision, _, name = rest.partition("/")
        status, reason, content = 200, "", FILES.get(repo, {}).get(name, b"")
        if repo in REFUSED:
            status, reason = REFUSED[repo]
        elif repo not in FILES:
            status, reason = 404, "RepoNotFound"
        elif revision not in ("main", "v2", COMMIT):
            status, reason = 404, "RevisionNotFound"
        elif name not in FILES[repo]:
            status, reason = 404, "EntryNotFound"
        self.send_response(status)
        self.send_header("X-Repo-Commit", COMMIT)
        if reason:
            self.send_header("X-Error-Code", reason)
        self.send_header("ETag", f'"{repo.replace("/", "-")}-{name}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


@pytest.fixture
def online(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The library believes in a network, finds this server there, and has an empty cache."""
    monkeypatch.setenv("HF_ENDPOINT", server)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    Hub.asked.clear()
    return server


def test_a_repository_is_fetched(online: str) -> None:
    folder = locate("owner/whole")
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "preprocessor_config.json",
    ]
    assert torch.equal(read_state(weights_file(folder))["head.weight"], torch.arange(6.0).reshape(2, 3))
    assert (folder / "config.json").read_bytes() == b'{"a": 1}'
    assert folder.name == COMMIT
    # What follows the first file is of the same commit, whatever happens to the branch meanwhile.
    assert [path for _, path in Hub.asked if "/main/" in path and not path.endswith("/config.json")] == []


def test_only_what_is_needed_is_fetched(online: str) -> None:
    folder = locate("owner/timm.in1k@v2")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert any("/resolve/v2/config.json" in path for _, path in Hub.asked)


def test_the_cache_needs_no_network(online: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch("owner/whole")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    Hub.asked.clear()
    assert locate("owner/whole") == folder
    assert Hub.asked == []


def test_neither_network_nor_cache(online: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_ENDPOINT")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError) as error:
        locate("google/vit-base-patch16-224@v1")
    assert str(error.value) == (
        f"google/vit-base-patch16-224 is not in the cache and {constants.ENDPOINT} cannot be reached; fetch "
        f"config.json, preprocessor_config.json and model.safetensors from {constants.ENDPOINT}/google/"
        "vit-base-patch16-224/tree/v1 by hand, and pass the folder with them"
    )
    assert constants.ENDPOINT.startswith("https://")


def test_without_a_network_there_is_one_sentence(
    online: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """The library that fetches would add lines of its own, and try for half a minute."""
    start = time.monotonic()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(UserError, match=r"owner/other is not in the cache and http://127\.0\.0\.1:9 cannot be reached"):
        locate("owner/other")
    assert time.monotonic() - start < 10
    assert caplog.text == ""
    assert capfd.readouterr() == ("", "")


def test_several_files(online: str) -> None:
    path = weights_file(locate("owner/many"))
    assert path.name == "model.safetensors.index.json"
    assert {name: list(value.shape) for name, value in read_state(path).items()} == {"a": [2], "b": [3]}


def test_pickles_only_where_there_is_nothing_else(online: str) -> None:
    assert weights_file(locate("owner/old")).name == "pytorch_model.bin"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("owner/none", "owner/none has none of model.safetensors, "),
        ("owner/lost", "the index of owner/lost names model-1.safetensors, which it does not have; fetch config.json"),
        ("owner/evil", "names the file '../../other.safetensors', which is no .safetensors beside it; do not trust it"),
        ("owner/absent", "/absent@main: there is no such repository, or it is private; check the name, or log in"),
        ("owner/whole@v3", "refuses owner/whole@v3: there is no such revision; leave out what follows the @"),
        ("owner/gated", "refuses owner/gated@main: its owner wants you to ask for access on its page"),
        ("owner/a--b", "config.json of owner/a--b could not be fetched (HFValidationError); fetch config.json, "),
    ],
)
def test_what_a_repository_may_lack(online: str, source: str, expected: str) -> None:
    with pytest.raises(UserError) as error:
        locate(source)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("source", ["rtdetr_r18", "model.pth", "runs/best.safetensors", "a/b/c", "../x", "", "owner/"])
def test_what_is_nowhere(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        locate(source or "nothing")
    assert str(error.value).startswith(f"there is no {source or 'nothing'!r}; pass a file (.safetensors, .pth, ")


def test_what_is_here_is_not_looked_for_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "whole").mkdir(parents=True)
    assert locate("owner/whole") == Path("owner/whole")
    with pytest.raises(UserError, match=r"^owner/whole has no model\.safetensors, .*; pass a folder in Hugging Face's"):
        weights_file(Path("owner/whole"))
    save_file({"a": torch.zeros(1)}, tmp_path / "owner" / "whole" / "model.safetensors")
    assert weights_file(Path("owner/whole")) == Path("owner/whole/model.safetensors")
