"""Bodies that clients or proxies have compressed."""

import gzip
import json
import random
import zlib
from collections.abc import Iterator

import httpx
import pytest

from tests.server.fake_llm import MODEL, FakeLLM
from tests.server.hosted import hosted
from tests.server.http_answers import CHAT
from tllm_spec.server.body_encoding import MAX_RATIO, PIECE, BodyDecoder
from tllm_spec.server.options import ServerOptions

BODY = json.dumps({"model": MODEL, "messages": CHAT}).encode()
PATH = "/v1/chat/completions"


def send(url: str, content: bytes | Iterator[bytes], encoding: str = "gzip") -> httpx.Response:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    return httpx.post(f"{url}{PATH}", content=content, headers=headers)


def test_a_body_may_be_compressed_by_gzip(url: str, llm: FakeLLM) -> None:
    packed = gzip.compress(BODY)
    in_two = gzip.compress(BODY[:9]) + gzip.compress(BODY[9:])
    slowly = (packed[at : at + 1] for at in range(len(packed)))
    for content, encoding in ((packed, "gzip"), (in_two, "x-gzip"), (slowly, "GZIP")):
        assert send(url, content, encoding).status_code == 200
    assert send(url, BODY, "identity").status_code == 200
    assert llm.prompts[0] == llm.prompts[1] == llm.prompts[2] == llm.prompts[3]


@pytest.mark.parametrize(
    ("content", "encoding", "status", "reason"),
    [
        (BODY, "br", 415, "Content-Encoding = 'br' is not served; gzip and identity are accepted"),
        (zlib.compress(BODY), "deflate", 415, "'deflate'"),
        (gzip.compress(gzip.compress(BODY)), "gzip, gzip", 415, "'gzip, gzip'"),
        (BODY, "gzip", 400, "the body is not gzip: "),
        (gzip.compress(BODY)[:-9], "gzip", 400, "the body is not a complete gzip file"),
        (gzip.compress(BODY) + b"{}", "gzip", 400, "the body is not gzip: "),
        (gzip.compress(b" " * (4 << 20)), "gzip", 413, "more than 100 times as large"),
    ],
    ids=["brotli", "deflate", "twice", "not gzip", "incomplete", "more", "much larger"],
)
def test_another_body_is_refused_with_the_reason(
    url: str, content: bytes, encoding: str, status: int, reason: str
) -> None:
    answer = send(url, content, encoding)
    assert answer.status_code == status and reason in answer.json()["error"]["message"]


@pytest.mark.parametrize("step", [1 << 30, 1000, 7])
@pytest.mark.parametrize("num_spaces", [0, 5 * PIECE])
def test_a_body_is_the_same_in_whatever_parts_it_arrives(num_spaces: int, step: int) -> None:
    body = b" " * num_spaces + bytes(random.Random(0).choices(b"abcdefgh", k=PIECE))
    packed = gzip.compress(body)
    assert len(gzip.compress(b" " * num_spaces)) * MAX_RATIO < num_spaces or not num_spaces
    decoder = BodyDecoder({b"content-encoding": b"gzip"})
    parts = [packed[at : at + step] for at in range(0, len(packed), step)]
    assert b"".join(piece for part in parts for piece in decoder.pieces(part)) == body
    decoder.check_end()


def test_the_limit_of_a_body_counts_what_is_unpacked(llm: FakeLLM) -> None:
    words = random.Random(0).choices(["some", "words", "of", "a", "text"], k=1 << 18)
    body = json.dumps({"model": MODEL, "prompt": " ".join(words)}).encode()
    packed = gzip.compress(body)
    assert len(packed) < 1 << 20 < len(body) < 64 * len(packed)
    with hosted(llm, ServerOptions(shutdown_timeout=5, max_body_bytes=1 << 20)) as url:
        answer = send(url, packed)
        assert answer.status_code == 413 and "at most 1048576 bytes" in answer.text
        assert send(url, gzip.compress(BODY)).status_code == 200
