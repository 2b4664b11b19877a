"""A source of weights to files on this machine: a file, a folder, an address, or a repository of Hugging Face's.

From a repository only the weights and what describes them are fetched, into the cache that its library shares with
other programs; what is there is used without a network.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from vitdet.errors import UserError
from vitdet.weights.download import download
from vitdet.weights.files import FORMATS, INDEX, shard_names

DESCRIPTIONS = ("config.json", "preprocessor_config.json")
# In order of preference; a pickle only where its owner offers nothing better, and then through the restricted reader.
WEIGHTS = ("model.safetensors", INDEX, "pytorch_model.bin")

_HUB_ID = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[\w./-]+))?")


def locate(source: str | Path, *, sha256: str | None = None) -> Path:
    """The local file or folder of a source, fetched where it is an address or a Hub id.

    Args:
        source: a file, a folder, a file's ``https://`` address, or a Hub id such as ``"google/vit-base-patch16-224"``,
            with ``@revision`` for another than the newest one. What exists locally is never looked for elsewhere.
        sha256: of an address, see :func:`~vitdet.weights.download.download`.

    Raises:
        UserError: nothing of that name, no network and nothing in the cache, or a repository without weights.
    """
    path = Path(source)
    if path.exists():
        return path
    if str(source).startswith(("https://", "http://")):
        return download(str(source), sha256=sha256)
    match = _HUB_ID.fullmatch(str(source))
    if match is None or path.suffix in FORMATS:
        raise UserError(
            f"there is no {str(source)!r}; pass a file ({', '.join(FORMATS)}), a folder with a config.json, "
            "or a Hub id (owner/name)"
        )
    return fetch(match["repo"], match["revision"] or "main")


def weights_file(folder: Path) -> Path:
    """The weights in a folder of Hugging Face's layout: a file, or the index of several.

    Raises:
        UserError: there are none.
    """
    for name in WEIGHTS:
        if (folder / name).is_file():
            return folder / name
    raise UserError(f"{folder} has no {', '.join(WEIGHTS)}; pass a folder in Hugging Face's layout, or a file")


def fetch(repo: str, revision: str = "main") -> Path:
    """The folder, in the cache, with the files of a repository.

    Raises:
        UserError: see :func:`locate`.
    """
    fetched = _Repository(repo, revision)
    for name in DESCRIPTIONS:
        fetched.get(name)
    for name in WEIGHTS:
        path = fetched.get(name)
        if path is None:
            continue
        if name == INDEX:
            lost = [shard for shard in shard_names(path) if fetched.get(shard) is None]
            if lost:
                raise UserError(f"the index of {repo} names {lost[0]}, which it does not have; {fetched.by_hand()}")
        return path.parent
    if fetched.unreachable:
        raise UserError(f"{repo} is not in the cache and {fetched.endpoint} cannot be reached; {fetched.by_hand()}")
    raise UserError(f"{repo} has none of {', '.join(WEIGHTS)} at revision {revision!r}; name another repository")


class _Repository:
    """Files of one revision of a repository, one after another.

    Attributes:
        unreachable: a file is neither in the cache nor could the server be asked for it; it is not asked again, as
            each try waits for its time-out.
    """

    def __init__(self, repo: str, revision: str) -> None:
        from huggingface_hub import constants

        self.repo = repo
        self.revision = revision
        self.commit = revision  # after the first file its commit, so that all are of one
        self.endpoint = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
        # Asked once, for the library tries each file for half a minute, also where the cache has it.
        self.unreachable = not (constants.HF_HUB_OFFLINE or _answers(self.endpoint))

    def get(self, name: str) -> Path | None:
        """The local path of a file; None where the repository has none, or it cannot be had."""
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

        try:
            with _silence():  # its warnings stand before our sentence, and say less
                path = hf_hub_download(
                    self.repo, name, revision=self.commit, endpoint=self.endpoint, local_files_only=self.unreachable
                )
        except LocalEntryNotFoundError:
            self.unreachable = True
            return None
        except EntryNotFoundError:
            return None
        except HfHubHTTPError as error:
            raise UserError(f"{self.endpoint} refuses {self.repo}@{self.revision}: {_why(error)}") from error
        except (OSError, ValueError) as error:
            raise UserError(
                f"{name} of {self.repo} could not be fetched ({type(error).__name__}); {self.by_hand()}"
            ) from error
        self.commit = Path(path).parent.name
        return Path(path)

    def by_hand(self) -> str:
        """What to do without this program's help."""
        return (
            f"fetch {', '.join(DESCRIPTIONS)} and {WEIGHTS[0]} from {self.endpoint}/{self.repo}/tree/{self.revision} "
            "by hand, and pass the folder with them"
        )


def _answers(endpoint: str) -> bool:
    """Whether there is a way to a server; behind a proxy that is for the proxy to say."""
    address = urlsplit(endpoint)
    if getproxies().get(address.scheme):
        return True
    try:
        port = address.port or (443 if address.scheme == "https" else 80)
        socket.create_connection((address.hostname or "", port), timeout=5).close()
    except OSError:
        return False
    return True


@contextmanager
def _silence() -> Iterator[None]:
    """No log lines of huggingface_hub below errors; its progress bars stay."""
    from huggingface_hub.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _why(error: Exception) -> str:
    """The reason of a refusal, in few words."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, GatedRepoError):
        return "its owner wants you to ask for access on its page, and to log in with `hf auth login`"
    if isinstance(error, RepositoryNotFoundError):
        return "there is no such repository, or it is private; check the name, or log in with `hf auth login`"
    if isinstance(error, RevisionNotFoundError):
        return "there is no such revision; leave out what follows the @"
    return f"HTTP status {getattr(getattr(error, 'response', None), 'status_code', 'unknown')}; try again later"
