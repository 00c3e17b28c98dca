"""Decodes request bodies: clients and proxies may send them compressed."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping

from tllm_spec.server.refusals import RequestRefused

PIECE = 1 << 20  # bytes
# JSON text of requests is compressed to a tenth; only repetitions go beyond this.
MAX_RATIO = 100
GZIP = 16 + zlib.MAX_WBITS  # zlib's code for gzip's format
NAMES = "gzip and identity are accepted"


class BodyDecoder:
    """Decodes one body. Raises RequestRefused for an encoding that is not served."""

    def __init__(self, headers: Mapping[bytes, bytes]) -> None:
        given = headers.get(b"content-encoding", b"identity").decode("latin-1").strip().lower()
        if given not in ("", "identity", "gzip", "x-gzip"):
            raise RequestRefused(415, f"Content-Encoding = {given[:100]!r} is not served; {NAMES}")
        self._inflater = zlib.decompressobj(GZIP) if "gzip" in given else None
        self._num_read = self._num_written = 0

    def pieces(self, chunk: bytes) -> Iterator[bytes]:
        """The chunk's text, at most `PIECE` bytes at a time of a compressed one. Raises
        RequestRefused for what is not gzip."""
        if self._inflater is None:
            yield chunk
            return
        self._num_read += len(chunk)
        piece = b""
        while chunk or (len(piece) == PIECE and not self._inflater.eof):  # it may not be all
            if self._inflater.eof:  # one more file in the same body
                self._inflater = zlib.decompressobj(GZIP)
            try:
                piece = self._inflater.decompress(chunk, PIECE)
            except zlib.error as error:
                raise RequestRefused(400, f"the body is not gzip: {error}") from error
            chunk = self._inflater.unconsumed_tail or self._inflater.unused_data
            self._num_written += len(piece)
            yield piece

    def check_end(self) -> None:
        """Raises RequestRefused if the body's file is not complete, and beyond `MAX_RATIO`: only
        at the end, because how much has been read before depends on the parts that it came in."""
        if self._inflater is not None and self._num_read and not self._inflater.eof:
            raise RequestRefused(400, "the body is not a complete gzip file")
        if self._num_written > PIECE + MAX_RATIO * self._num_read:
            raise RequestRefused(
                413, f"the body is more than {MAX_RATIO} times as large as its gzip file"
            )
