"""Authenticate a job's cards by a shared secret token.

A proof is an HMAC-SHA256 of a message under the token, which itself is never sent. Nothing is encrypted.
"""

from __future__ import annotations

import hmac
import os
from pathlib import Path

from qsync.errors import FormatError, shortened

TOKEN_VARIABLE, FILE_VARIABLE = "QSYNC_TOKEN", "QSYNC_TOKEN_FILE"
_LEAST_CHARACTERS = 16  # proofs are public: a short token could be guessed from them


class JobToken:
    """Creates and checks proofs of the token. Without a token no proof is needed."""

    def __init__(self, text: str = "") -> None:
        self._key = text.encode()

    def __bool__(self) -> bool:
        return bool(self._key)

    def __repr__(self) -> str:
        return f"JobToken({'...' if self else ''})"

    def proof(self, purpose: str, *parts: bytes) -> str:
        """Return the proof of a message's parts for one purpose; empty without a token."""
        if not self:
            return ""
        made = hmac.new(self._key, digestmod="sha256")
        for part in (purpose.encode(), *parts):
            made.update(len(part).to_bytes(8, "big"))
            made.update(part)
        return made.hexdigest()

    def proves(self, proof: object, purpose: str, *parts: bytes) -> bool:
        """Return whether a proof was made with this token, or without one if there is none."""
        own = self.proof(purpose, *parts)
        return isinstance(proof, str) and hmac.compare_digest(proof.encode(), own.encode())


def token_of_environment() -> JobToken:
    """Return the token in QSYNC_TOKEN, or in the file that QSYNC_TOKEN_FILE names.

    Raises FormatError for an empty or short token.
    """
    text, file = os.environ.get(TOKEN_VARIABLE), os.environ.get(FILE_VARIABLE)
    if text is None and file is None:
        return JobToken()
    if text is not None and file is not None:
        raise FormatError(f"{TOKEN_VARIABLE} and {FILE_VARIABLE} are both set; unset one of them")
    where = TOKEN_VARIABLE if file is None else f"the file {shortened(file)} of {FILE_VARIABLE}"
    if file is not None:
        try:
            text = Path(file).read_text()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is no text"
            raise FormatError(f"{where} cannot be read ({why}); give a readable token file") from error
    assert text is not None
    token = text.strip()
    if len(token) < _LEAST_CHARACTERS:
        raise FormatError(
            f"the token in {where} has {len(token)} characters; give at least {_LEAST_CHARACTERS}, e.g. "
            "from `openssl rand -hex 32`"
        )
    return JobToken(token)
