"""Send one card's training state to another that is behind, as safetensors and JSON, never pickle.

A thread serves the state from the start of the step; the receiver loads it at the end, so the others keep
training. With a job token, request and answer both prove that they have it; without one a card serves anyone
who reaches its port. Nothing is encrypted.
"""

from __future__ import annotations

import http.client
import json
import secrets
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from safetensors.torch import load, save

from qsync.checkpoints.state import Tensors, join, split
from qsync.elastic_training.job_token import JobToken
from qsync.errors import QSyncError

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy between cards
_NONCE, _PROOF = "X-QSync-Nonce", "X-QSync-Proof"
_JSON = "qsync"  # the safetensors metadata entry with everything but tensors


def encode(state: Any) -> bytes:
    """Encode a nested state as the bytes of a safetensors file.

    Tensors are copied. Raises FormatError for values other than JSON and tensors.
    """
    tensors: Tensors = {}
    text = json.dumps(split(state, "", tensors))
    # safetensors refuses tensors that share memory, such as tied weights.
    copies = {
        name: tensor.cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }
    return save(copies, {_JSON: text})


def decode(content: bytes) -> Any:
    """Decode the bytes of `encode` to a state, with tensors in CPU memory."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    return join(json.loads(header["__metadata__"][_JSON]), load(content))


class Server:
    """Serves named contents over HTTP from threads; a request waits until its content is available.

    Requests need a proof of the job's token, made for this server and used only once.
    """

    def __init__(self, host: str, timeout_s: float, token: JobToken | None = None) -> None:
        self.token = token or JobToken()
        self._nonces: set[str] = set()
        self._contents: dict[str, Callable[[], bytes] | bytes] = {}
        self._changed = threading.Condition()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name, nonce = self.path.strip("/"), self.headers.get(_NONCE, "")
                if not server._admits(name, nonce, self.headers.get(_PROOF, "")):
                    self.send_error(403)
                    return
                content = server._wait_for(name, timeout_s)
                self.send_response(200 if content is not None else 404)
                self.send_header("Content-Length", str(len(content or b"")))
                proof = server.token.proof("answer", nonce.encode(), name.encode(), content or b"")
                self.send_header(_PROOF, proof)
                self.end_headers()
                with suppress(ConnectionError):  # the requesting card is gone
                    self.wfile.write(content or b"")

            def log_message(self, *_: Any) -> None:
                """Log nothing."""

        self._http = ThreadingHTTPServer((host, 0), Handler)
        self._http.daemon_threads = True
        self.address = f"{host}:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, name="qsync-state", daemon=True).start()

    def _admits(self, name: str, nonce: str, proof: str) -> bool:
        """Return whether a request has a valid proof of the job's token; replayed requests have none."""
        parts = (nonce.encode(), self.address.encode(), name.encode())
        if not self.token.proves(proof, "request", *parts):
            return False
        with self._changed:
            is_new = nonce not in self._nonces
            if self.token:
                self._nonces.add(nonce)
        return is_new

    def _wait_for(self, name: str, timeout_s: float) -> bytes | None:
        with self._changed:
            self._changed.wait_for(lambda: name in self._contents, timeout_s)
            content = self._contents.get(name)
        return content() if callable(content) else content

    def offer(self, name: str, content: bytes | Callable[[], bytes], instead_of: str | None = None) -> None:
        """Serve a content (or a function's result) by name; drop names with the prefix `instead_of`."""
        with self._changed:
            if instead_of is not None:
                self.withdraw(instead_of)
            self._contents[name] = content
            self._changed.notify_all()

    def withdraw(self, *beginnings: str) -> None:
        """Stop serving names that begin with one of these prefixes."""
        with self._changed:
            for old in list(self._contents):
                if old.startswith(beginnings):
                    del self._contents[old]

    def close(self) -> None:
        """Stop the server."""
        self._http.shutdown()
        self._http.server_close()
        self.withdraw("")


def fetch(address: str, name: str, timeout_s: float, token: JobToken | None = None) -> bytes:
    """Fetch a content from another card's server.

    Raises QSyncError if that card lacks it, is gone, refuses this card, or cannot prove the token.
    """
    token, nonce = token or JobToken(), secrets.token_hex(16)
    proof = token.proof("request", nonce.encode(), address.encode(), name.encode())
    headers = {_NONCE: nonce, _PROOF: proof} if token else {}
    request = urllib.request.Request(f"http://{address}/{name}", headers=headers)
    try:
        with _DIRECT.open(request, timeout=timeout_s) as answer:
            content: bytes = answer.read()
            if not token.proves(
                answer.headers.get(_PROOF, ""), "answer", nonce.encode(), name.encode(), content
            ):
                raise OSError("its answer does not prove that it has the job's token")
            return content
    except (urllib.error.URLError, OSError, http.client.HTTPException) as error:
        raise QSyncError(
            f"the card at {address} did not send {name} ({error}); check that it runs, and "
            "that both have the same token"
        ) from error
