"""Names of cached pages that processes agree on: a hash of a page's tokens, of all tokens before
them and of the salt."""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

NO_BLOCK = 0  # before the first page of the requests without a salt


def salt_hash(salt: str) -> str:
    """What stands for a salt outside the engine, in hexadecimal digits."""
    return blake2b(salt.encode(), digest_size=8).hexdigest()


def first_parent(salt: str | None) -> int:
    """What the first page of the requests with this salt follows, in place of a page."""
    return NO_BLOCK if salt is None else int(salt_hash(salt), 16)


def block_hash(parent: int, tokens: Sequence[int]) -> int:
    """64 bits for the page with these tokens after the page with the hash `parent`."""
    data = array("Q", (parent, *tokens)).tobytes()
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def block_hashes(tokens: Sequence[int], page_size: int, salt: str | None) -> list[int]:
    """Hashes the full pages that a request with these tokens can find in a cache: the last token
    is computed in any case."""
    hashes, parent = [], first_parent(salt)
    for start in range(0, len(tokens) - page_size, page_size):
        parent = block_hash(parent, tokens[start : start + page_size])
        hashes.append(parent)
    return hashes
