"""Seals on what a client keeps and sends back: reasoning is taken as the model's own only if it is unaltered."""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import os
import secrets
from pathlib import Path

log = logging.getLogger(__name__)

KEY_BYTES = 32
MAC_BYTES = hashlib.sha256().digest_size


class Seal:
    """Authenticates texts by HMAC-SHA256 (RFC 2104). Texts are not secret: whoever holds a sealed text can read it."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def signature(self, text: str) -> str:
        """A text's signature, in base64."""
        return base64.b64encode(self._mac(text)).decode()

    def signed(self, text: str, signature: str) -> bool:
        """Whether ``signature`` is the text's own."""
        return hmac.compare_digest(self.signature(text).encode(), signature.encode(errors="surrogatepass"))

    def seal(self, text: str) -> str:
        """The text with its signature, in base64: one opaque word."""
        return base64.b64encode(self._mac(text) + text.encode(errors="surrogatepass")).decode()

    def opened(self, sealed: str) -> str:
        """The text of ``seal``. Raises ValueError if it has been altered, or sealed with another key."""
        text = unverified(sealed)
        if not hmac.compare_digest(self.seal(text).encode(), sealed.encode(errors="surrogatepass")):
            raise ValueError("it has been altered, or another server's key sealed it; see server.agents.key")
        return text

    def _mac(self, text: str) -> bytes:
        return hmac.digest(self._key, text.encode(errors="surrogatepass"), hashlib.sha256)


def unverified(sealed: str) -> str:
    """What claims to be the text of ``Seal.seal``, whoever has sealed it. Raises ValueError if it is none at all, or
    not UTF-8: no text of a model has lone surrogates, and JSON cannot hold them."""
    try:
        return base64.b64decode(sealed, validate=True)[MAC_BYTES:].decode()
    except ValueError:
        raise ValueError("it is not a sealed text of this server") from None


def state_folder() -> Path:
    """Where infer keeps what outlives a process, as XDG's base directories have it. Raises RuntimeError if the user has
    no home."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "infer"


def make_seal(key: str | None, folder: Path | None = None) -> Seal:
    """The seal of ``key``. Without one, the key is a random one that is kept in ``folder``, readable by its owner
    alone, so that conversations go on after a restart."""
    if key is not None:
        return Seal(hashlib.sha256(key.encode()).digest())
    path = "~/.local/state/infer/agents.key"
    try:
        found = (folder or state_folder()) / "agents.key"
        path = str(found)
        return Seal(_kept(found))
    except (OSError, RuntimeError) as error:  # a RuntimeError, if there is no home
        log.warning("after a restart, reasoning that clients send back is refused: %s cannot be kept (%s)", path, error)
        return Seal(secrets.token_bytes(KEY_BYTES))


def _kept(path: Path) -> bytes:
    """The key in the file, which is made if there is none. Of several processes that start at once, one makes it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists():
        draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    key = path.read_bytes()
    if len(key) != KEY_BYTES:
        raise OSError(f"it holds {len(key)} bytes, not {KEY_BYTES}; delete it")
    return key
