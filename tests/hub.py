"""A hub on this machine, which serves a folder of checkpoints by the paths of the Hugging Face hub's API."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0" * 40


class Hub:
    """``folder`` holds org/name/FILE."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url
        self.sent: Counter[str] = Counter()
        """How many bytes of each file have been sent."""
        self.tokens: set[str | None] = set()
        """What requests have shown."""

    def answer(self, path: str, range: str | None) -> tuple[int, dict[str, str], bytes]:
        """The status, the headers and the whole body."""
        path = path.partition("?")[0]
        if (found := re.match(r"(?:/api/models)?/([^/]+/[^/]+)", path)) and not (self.folder / found[1]).is_dir():
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/\w+)?", path):
            return 200, {}, json.dumps({"id": found[1], "sha": COMMIT, "siblings": []}).encode()
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/\w+", path):
            files = sorted(each for each in (self.folder / found[1]).rglob("*") if each.is_file())
            names = [file.relative_to(self.folder / found[1]).as_posix() for file in files]
            listed = [
                {"type": "file", "path": name, "size": file.stat().st_size, "oid": COMMIT}
                for name, file in zip(names, files, strict=True)
            ]
            return 200, {}, json.dumps(listed).encode()
        found = re.fullmatch(r"/([^/]+/[^/]+)/resolve/\w+/(.+)", path)
        if found is None or not (self.folder / found[1] / found[2]).is_file():
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        whole = (self.folder / found[1] / found[2]).read_bytes()
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(whole).hexdigest()}"', "Accept-Ranges": "bytes"}
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", range or ""):
            part = whole[int(asked[1]) : int(asked[2]) + 1 if asked[2] else None]
            headers["Content-Range"] = f"bytes {asked[1]}-{int(asked[1]) + len(part) - 1}/{len(whole)}"
            return 206, headers, part
        return 200, headers, whole


@contextmanager
def serving(folder: Path) -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hub.tokens.add(self.headers["Authorization"])
            status, headers, body = hub.answer(self.path, self.headers["Range"])
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)
                hub.sent[self.path.partition("?")[0].rpartition("/")[2]] += len(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub = Hub(folder, f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
