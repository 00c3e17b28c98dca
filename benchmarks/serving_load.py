"""Streamed clients of `tllm-serve` next to the same streams through `LLM` in one process.

    python -m benchmarks.serving_load [--clients 1,64,256] [--configs plain,eagle3] [--frontends 1]
    python -m benchmarks.serving_load --shape zoo --device cpu   # shows that it runs, in a minute

An 8B Llama's shape in bf16 with random weights; prompts of 512 random token ids, 256 tokens out,
greedy, synthetic acceptance. Clients are raw sockets in processes of their own. A load is warmed up
once; each figure is over one wave of requests."""

import asyncio
import json
import multiprocessing
import selectors
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.h200_parts.llm import Stream, all_streams, serving_details
from benchmarks.harness.engine import release
from benchmarks.harness.models import LLAMA_8B, Models, open_models
from benchmarks.harness.report import Options, Row, Subject, main, table
from benchmarks.harness.served import served
from tllm_spec import LLM

MAX_CLIENT_PROCESSES = 8
DRAFT_LEN = 3
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@dataclass(frozen=True)
class Load:
    """Lengths are tokens."""

    prompt_len: int
    output_len: int
    vocab_size: int

    def prompts(self, number: int, seed: int) -> list[list[int]]:
        random = Random(seed)
        return [random.choices(range(self.vocab_size), k=self.prompt_len) for _ in range(number)]


LOADS = {"llama-8b": Load(512, 256, LLAMA_8B["vocab_size"]), "zoo": Load(16, 24, 1000)}


def llm_options(models: Models, config: str, load: Load, largest: int) -> dict[str, Any]:
    """The arguments of `LLM`, as YAML can write them."""
    sizes = sorted(
        {size for size in (1, 2, 4, 8, 16, 32, 64, 128, 192, largest) if size <= largest}
    )
    options: dict[str, Any] = {
        **models.options,
        "max_batch_size": largest,
        "max_seq_len": load.prompt_len + load.output_len + 1,
        "cuda_graph_config": {"batch_sizes": sizes},
    }
    if config == "eagle3":
        spec = models.eagle3(DRAFT_LEN)
        rates = list(spec["synthetic_acceptance_rates"])
        options["speculative_config"] = spec | {"synthetic_acceptance_rates": rates}
    return options


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A word for each token: random weights have no tokenizer."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"Ġw{i}": i for i in range(vocab_size)}, unk_token="Ġw0"))
    words.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


def read_served(
    address: tuple[str, int], prompts: list[list[int]], max_tokens: int
) -> list[Stream]:
    """Sends all prompts at once, from several processes."""
    bodies = [
        json.dumps(
            {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "stream": True}
            | {"ignore_eos": True, "temperature": 0, "seed": index}
        ).encode()
        for index, prompt in enumerate(prompts)
    ]
    number = min(MAX_CLIENT_PROCESSES, len(bodies))
    context = multiprocessing.get_context("fork")
    with context.Pool(number) as pool:
        parts = [(address, bodies[first::number]) for first in range(number)]
        return [stream for part in pool.starmap(_read_streams, parts) for stream in part]


def _read_streams(address: tuple[str, int], bodies: Sequence[bytes]) -> list[Stream]:
    selector = selectors.DefaultSelector()
    streams: list[Stream] = []
    tails: dict[Any, bytes] = {}
    for body in bodies:
        connection = socket.create_connection(address)
        streams.append(Stream(time.monotonic()))
        connection.sendall(f"{HEAD}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        selector.register(connection, selectors.EVENT_READ, streams[-1])
        tails[connection] = b""
    while selector.get_map():
        for key, _ in selector.select():
            connection: Any = key.fileobj
            data = connection.recv(1 << 16)
            if b"data: {" in data:
                key.data.arrivals.append(time.monotonic())
            tails[connection] = (tails[connection] + data)[-64:]
            if b"[DONE]" in tails[connection]:
                selector.unregister(connection)
                connection.close()
            elif not data:
                raise RuntimeError(f"a stream ended early: {tails[connection]!r}")
    return streams


def in_process(llm: LLM, prompts: list[list[int]], max_tokens: int) -> list[Stream]:
    return asyncio.run(all_streams(llm, prompts, max_tokens, len(prompts)))


def figures(streams: Sequence[Stream], output_len: int) -> dict[str, float]:
    start = min(stream.sent for stream in streams)
    end = max(stream.arrivals[-1] for stream in streams)
    return {"tok/s": len(streams) * output_len / (end - start), **serving_details(streams)}


def measure(
    models: Models, config: str, load: Load, clients: Sequence[int], frontends: int
) -> list[dict[str, Any]]:
    options = llm_options(models, config, load, max(clients))
    rows: list[dict[str, Any]] = []
    with served(models.target, options, frontends) as server:
        address = server.host, server.port
        read_served(address, load.prompts(max(clients), 1), load.output_len)
        for number in clients:
            streams = read_served(address, load.prompts(number, 2 + number), load.output_len)
            found = figures(streams, load.output_len)
            rows.append({"config": config, "clients": number, "served": found})
    # The engine that was served has left the device.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        results = pool.apply(measure_in_process, (models.target, options, load, tuple(clients)))
    for row, found in zip(rows, results, strict=True):
        row["in process"] = found
    return rows


def measure_in_process(
    model: str, options: dict[str, Any], load: Load, clients: Sequence[int]
) -> list[dict[str, float]]:
    with LLM(model, **options) as llm:
        in_process(llm, load.prompts(max(clients), 1), load.output_len)
        found = [
            figures(
                in_process(llm, load.prompts(number, 2 + number), load.output_len), load.output_len
            )
            for number in clients
        ]
    release()
    return found


def rows_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    titles = (
        "config", "clients", "tok/s in process", "served", "ratio", "p99 gap ms in process",
        "served", "ratio", "first token p50 ms in process", "served",
    )  # fmt: skip
    lines = []
    for row in rows:
        sides, gap, first = (row["in process"], row["served"]), "p99 of it", "first token ms"
        rate_in, rate_out, gap_in, gap_out = (side[key] for key in ("tok/s", gap) for side in sides)
        rates = f"{rate_in:,.0f}", f"{rate_out:,.0f}", f"{rate_out / rate_in:.3f}"
        gaps = f"{gap_in:.1f}", f"{gap_out:.1f}", f"{gap_out / gap_in:.3f}"
        firsts = (f"{side[first]:.1f}" for side in sides)
        lines.append([row["config"], str(row["clients"]), *rates, *gaps, *firsts])
    return table(titles, lines)


def load(options: Options) -> Iterator[Row]:
    clients, own = options.numbers("clients"), LOADS[options.shape]
    with open_models(options.shape, options.device) as models:
        if models.is_8b:
            write_tokenizer(Path(models.target), own.vocab_size)
        for config in options.more.configs.split(","):
            yield from measure(models, config, own, clients, options.more.frontends)


SUBJECTS = (Subject("load", "Streamed clients, 512 in / 256 out", load, rows_table),)

if __name__ == "__main__":
    own = {"clients": "1,64,256", "configs": "plain,eagle3", "frontends": 1}
    sys.exit(main(SUBJECTS, __doc__, **own))
