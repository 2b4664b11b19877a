"""A file of weights from its publisher's address, kept where torch.hub keeps such files.

What breaks off is gone on with at the next call; a file gets its name only when all of it is there and its checksum,
where one is published, is right. So what bears the name is whole, also after a power cut, or with several processes.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from contextlib import suppress
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import IO, Any
from urllib.error import HTTPError
from urllib.parse import unquote, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

import torch

from vitdet.errors import UserError
from vitdet.weights.files import FORMATS

_MOST_BYTES = 8 * 2**30  # no published detector or classifier has half of that
_CHUNK = 2**20
_PATIENCE = 20  # seconds without a byte


def download(address: str, *, folder: Path | None = None, sha256: str | None = None) -> Path:
    """The local copy of a file, fetched where there is none.

    Args:
        address: an ``https://`` address whose last part is the name of a weights file. (``http://127.0.0.1`` will do.)
        folder: where the copy lies; ``checkpoints`` in ``torch.hub.get_dir()`` where not given.
        sha256: the checksum in hexadecimal digits, or its first ones, as publishers have them in their files' names.

    Raises:
        UserError: another kind of address, no way to it, an answer that is not the file, more than 8 GiB, a transfer
            that broke off, or a wrong checksum.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import WeakFileLock

    _check_address(address)
    folder = Path(torch.hub.get_dir()) / "checkpoints" if folder is None else folder
    target = folder / _file_name(address)
    if target.is_file():
        told = _origin(target).read_text() if _origin(target).is_file() else address
        if told != address:
            raise UserError(f"{target} came from {told}, not from {address}; delete it, or fetch the other one by hand")
        if not _fits(target, sha256):
            raise UserError(f"{target} has not the published checksum {sha256}; delete it, and it is fetched again")
        return target
    if constants.HF_HUB_OFFLINE:
        raise UserError(f"HF_HUB_OFFLINE is set and {target} is not there; {_by_hand(address, target)}")
    folder.mkdir(parents=True, exist_ok=True)
    lock = target.with_name(f"{target.name}.lock")
    with WeakFileLock(lock):
        if not target.is_file():  # another process may have fetched it meanwhile
            _fetch(address, target, sha256)
        with suppress(OSError):  # whoever waits for it finds the file
            lock.unlink()
    return target


def _check_address(address: str) -> None:
    try:
        parts = urlsplit(address)
    except ValueError as error:
        raise UserError(f"{address} is no address ({error}); check it") from error
    if parts.scheme != "https" and (parts.scheme, parts.hostname) != ("http", "127.0.0.1"):
        raise UserError(f"{address} is no https:// address; weights are fetched from no other, so fetch it by hand")


def _file_name(address: str) -> str:
    name = unquote(urlsplit(address).path.rpartition("/")[2])
    if not re.fullmatch(r"\w[\w.+-]*", name) or not name.endswith(FORMATS):
        raise UserError(f"{address} does not end in the name of a weights file ({', '.join(FORMATS)}); check it")
    return name


def _by_hand(address: str, target: Path) -> str:
    return f"fetch {address} by hand, and put it at {target}"


def _fits(path: Path, sha256: str | None) -> bool:
    if sha256 is None:
        return True
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest().startswith(sha256.lower())


def _fetch(address: str, target: Path, sha256: str | None) -> None:
    """Fill ``target.part`` from where it ends, and rename it when it is whole and right."""
    part = target.with_name(f"{target.name}.part")
    response, done = _open(address, part, target)
    with response:
        total = done + (response.length or 0)
        if response.length is None:
            raise UserError(f"{address} does not say how many bytes it has; {_by_hand(address, target)}")
        if total > _MOST_BYTES:
            raise UserError(f"{address} has {total:,} bytes, and no weights have more than {_MOST_BYTES:,}; check it")
        print(f"fetching {address} ({total / 1e6:,.0f} MB) to {target.parent}", file=sys.stderr, flush=True)
        _mark(part).write_text(response.headers.get("ETag") or "")
        with part.open("ab" if done else "wb") as file:
            arrived = _copy(response, file, done=done, total=total)
            file.flush()
            os.fsync(file.fileno())
    if arrived < total:
        raise UserError(f"{address} broke off after {arrived:,} of {total:,} bytes; do the same again to go on there")
    _mark(part).unlink(missing_ok=True)
    if not _fits(part, sha256):
        part.unlink()
        raise UserError(
            f"what came from {address} has not the published checksum {sha256} and was deleted; try again later, or "
            "do not trust it"
        )
    _origin(target).write_text(address)
    part.replace(target)


def _origin(target: Path) -> Path:
    """The file that tells the address of another: different files have the same last part of it."""
    return target.with_name(f"{target.name}.address")


def _mark(part: Path) -> Path:
    """The file with the server's mark (ETag) of the version that a part is of."""
    return part.with_name(f"{part.name}.etag")


def _open(address: str, part: Path, target: Path) -> tuple[HTTPResponse, int]:
    """The server's answer, and after how many bytes of the file it goes on; 0 is the whole file."""
    there = part.stat().st_size if part.is_file() else 0
    mark = _mark(part).read_text() if there and _mark(part).is_file() else ""
    for start in dict.fromkeys((there, 0)):
        headers = {"User-Agent": "vitdet"}
        if start:
            headers["Range"] = f"bytes={start}-"
            if mark and not mark.startswith("W/"):  # else a newer file's end could come to an older one's beginning
                headers["If-Range"] = mark
        try:
            response = build_opener(_Redirects).open(Request(address, headers=headers), timeout=_PATIENCE)
        except HTTPError as error:
            error.close()
            if start and error.code == 416:  # what is there is no beginning of this file
                continue
            raise UserError(f"{address} answers with HTTP status {error.code}; {_by_hand(address, target)}") from error
        except (OSError, HTTPException) as error:
            why = getattr(error, "reason", None) or error
            raise UserError(f"{address} cannot be reached ({why}); {_by_hand(address, target)}") from error
        if response.status == 200:
            return response, 0
        if start and (response.headers.get("Content-Range") or "").startswith(f"bytes {start}-"):
            return response, start
        response.close()
    raise UserError(f"{address} answers with something else than the file; {_by_hand(address, target)}")


class _Redirects(HTTPRedirectHandler):
    """Follows only to addresses that would also be accepted at first."""

    def redirect_request(self, req: Request, fp: IO[bytes], *rest: Any) -> Request | None:
        try:
            _check_address(rest[-1])
        except UserError:
            fp.close()
            raise
        return super().redirect_request(req, fp, *rest)


def _copy(response: HTTPResponse, file: IO[bytes], *, done: int, total: int) -> int:
    """Write what comes; the number of bytes that the file then has. On a terminal a bar shows how far it is."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
    with bar:
        task = bar.add_task("", total=total, completed=done)
        while done < total:
            try:
                chunk = response.read1(min(_CHUNK, total - done))  # what is there: none of it gets lost
            except (OSError, HTTPException):
                break
            if not chunk:
                break
            file.write(chunk)
            done += len(chunk)
            bar.update(task, completed=done)
    return done
