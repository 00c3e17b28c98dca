"""A front process' memory stays bounded whatever clients send."""

import json
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.server.served_process import MODEL, ServedProcess, complete

MIB = 1 << 20
LIMIT = 32 * MIB
AT_ONCE = 6

Body = Callable[[], bytes]


def memory(pid: int, name: str) -> int:
    """Bytes of VmRSS (now) or VmHWM (the most so far)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"no {name}")


def keys() -> bytes:
    return (
        b'{"model": "zoo:llama", '
        + b", ".join(b'"k%d": {}' % i for i in range(MIB // 6 - 9))
        + b"}"
    )


def token_ids() -> bytes:
    return b'{"model": "zoo:llama", "prompt": [' + b"123456789," * (MIB // 2 - 100) + b"1]}"


def long_text() -> bytes:
    return json.dumps({"model": MODEL, "prompt": "a b" * (9 * MIB)}).encode()


def wide_text() -> bytes:
    """One character makes Python store all of them with four bytes each."""
    return json.dumps({"model": MODEL, "prompt": "a b" * (2 * MIB) + "\\ud83d\\ude00"}).encode()


def too_wide_text() -> bytes:
    return json.dumps({"model": MODEL, "prompt": "a b" * (9 * MIB) + "😀"}).encode()


def long_chat() -> bytes:
    message = {"role": "user", "content": "a b" * (9 * MIB)}
    return json.dumps({"model": MODEL, "messages": [message]}).encode()


def many_messages() -> bytes:
    messages = [{"rol": "user"}] * (MIB // 10)
    return json.dumps({"model": MODEL, "messages": messages}).encode()


def deep() -> bytes:
    return b"[" * (MIB // 2 - 1)


def too_large() -> bytes:
    return b" " * (LIMIT + MIB)


@pytest.mark.slow
def test_hostile_bodies_take_at_most_half_as_much_again_as_an_idle_front(tmp_path: Path) -> None:
    with ServedProcess(tmp_path) as served:
        url = served.url
        (front,) = served.pids("front_process")
        assert complete(url) == 200
        idle = memory(front, "VmRSS")
        statuses: set[int] = set()
        lengths: set[int] = set()
        peaks: dict[str, int] = {}

        def attack(path: str, body: bytes) -> None:
            headers = {"Content-Type": "application/json"}
            try:
                answer = httpx.post(f"{url}{path}", content=body, headers=headers, timeout=120)
            except httpx.TransportError:
                return  # cut off while it was sent
            statuses.add(answer.status_code)
            lengths.add(len(answer.content))

        texts = (long_text, wide_text, too_wide_text)
        for make in (keys, token_ids, *texts, long_chat, many_messages, deep, too_large):
            is_chat = make in (long_chat, many_messages)
            path = "/v1/chat/completions" if is_chat else "/v1/completions"
            body = make()
            threads = [threading.Thread(target=attack, args=(path, body)) for _ in range(AT_ONCE)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            peaks[make.__name__] = memory(front, "VmHWM") // MIB
        assert statuses <= {400, 413, 503} and max(lengths) < 20_000
        assert complete(url) == 200
        assert memory(front, "VmHWM") <= 1.5 * idle + LIMIT, (idle // MIB, peaks)
        assert served.pids("front_process") == [front]
