"""Points 2, 3 and 5 through `LLM`, as a user meets them: whole answers, first tokens, streams.

Each function without an underscore is one job of `h200.py`. Prompts are random token ids, and none
is sent twice."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

from benchmarks.h200_parts.figures import Figure
from benchmarks.h200_parts.setup import Report, Setup
from tllm_spec import LLM, SamplingParams
from tllm_spec.bench.report import percentiles
from tllm_spec.outputs import RequestOutput, SpeculativeStats

WARM_UP_TOKENS = 48  # a load's first requests have so many before its last prompts are read
Loads = Sequence[tuple[int, int]]


def plain(setup: Setup, report: Report) -> None:
    with closing(Client(setup)) as client:
        _measure(setup, report, client, "plain", "")


def eagle3(setup: Setup, report: Report) -> None:
    draft_len = setup.scale.draft_len
    name = f"EAGLE-3 K={draft_len}"
    with closing(Client(setup, speculative_config=setup.models.eagle3(draft_len))) as client:
        _measure(setup, report, client, name, f", {name}")


class Client:
    """An engine with graphs for the measured batch sizes, and the prompts that it is sent."""

    def __init__(self, setup: Setup, **options: Any) -> None:
        scale = setup.scale
        largest = scale.serving_batch if 5 in setup.points else scale.batch_sizes[-1]
        sizes = {*scale.batch_sizes, 16, 32, 128, 192, largest}
        self.llm = LLM(
            setup.models.target,
            skip_tokenizer_init=True,
            max_batch_size=largest,
            max_seq_len=2 * scale.prompt_len,
            cuda_graph_config={"batch_sizes": sorted(n for n in sizes if n <= largest)},
            **(setup.models.options | options),
        )
        self._random, self._ids = Random(0), range(self.llm.model_config.vocab_size)

    def close(self) -> None:
        self.llm.shutdown()

    def prompts(self, number: int, length: int) -> list[list[int]]:
        """The same in every run, others with every call."""
        return [self._random.choices(self._ids, k=length) for _ in range(number)]

    def batch_s(
        self, number: int, prompt_len: int, max_tokens: int, first_seed: int = 0
    ) -> tuple[float, list[RequestOutput]]:
        """Seconds of one `generate`."""
        prompts = self.prompts(number, prompt_len)
        sampling = _sampling(number, max_tokens, first_seed)
        start = time.perf_counter()
        outputs = self.llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert isinstance(outputs, list)
        check_complete(outputs, max_tokens)
        return seconds, outputs


def _sampling(number: int, max_tokens: int, first_seed: int = 0) -> list[SamplingParams]:
    """One seed each: it decides with the position which synthetic drafts are accepted."""
    seeds = range(first_seed, first_seed + number)
    return [SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=seed) for seed in seeds]


def check_complete(outputs: Sequence[RequestOutput], num_tokens: int) -> None:
    """Raises RuntimeError when a request did not get all its tokens."""
    for output in outputs:
        if output.error or output.outputs[0].length != num_tokens:
            found = output.outputs[0].length
            raise RuntimeError(f"an answer has {found} tokens, not {num_tokens}: {output.error}")


def _measure(setup: Setup, report: Report, client: Client, name: str, suffix: str) -> None:
    if setup.points & ({2} if suffix else {2, 3}):
        for batch_size in setup.scale.batch_sizes:
            _generate(setup, report, client, name, batch_size)
    if 3 in setup.points:
        _first_token(setup, report, client, suffix)
    if 5 in setup.points:
        _serve(setup, report, client, name, setup.scale.serving_loads)


def _generate(setup: Setup, report: Report, client: Client, name: str, batch_size: int) -> None:
    """A batch for a single token each, and for all of them. The difference is decoding: the time
    after the first token."""
    scale = setup.scale
    client.batch_s(batch_size, scale.prompt_len, 4)
    repeats = scale.single_repeats if batch_size == 1 else 1
    first_s = whole_s = 0.0
    stats = SpeculativeStats()
    for repeat in range(repeats):
        first_s += client.batch_s(batch_size, scale.prompt_len, 1)[0]
        seed = repeat * batch_size
        seconds, outputs = client.batch_s(batch_size, scale.prompt_len, scale.output_len, seed)
        whole_s += seconds
        found = [output.speculative_decoding or SpeculativeStats() for output in outputs]
        stats = sum(found, stats)
    number, batch = batch_size * repeats, f"batch {batch_size}"
    if 2 in setup.points:
        rate = number * scale.output_len / whole_s
        report(Figure(2, f"{name} end to end, {batch}", "tok/s", rate))
        details = {"requests": float(number)}
        if stats.rounds:
            details["tokens a round"] = stats.acceptance_length
        rate = number * (scale.output_len - 1) / (whole_s - first_s)
        report(Figure(2, f"{name} decoding, {batch}", "tok/s", rate, details=details))
    if 3 in setup.points and not stats.rounds:
        first_ms = first_s / repeats * 1e3
        report(Figure(3, f"one token through LLM.generate, {batch}", "ms", first_ms))


def _first_token(setup: Setup, report: Report, client: Client, suffix: str) -> None:
    """From `generate_async` to the first increment in the reader's thread, request by request."""
    scale, seconds = setup.scale, []
    for _ in range(2 + 4 * scale.repeats):
        (prompt,), (params,) = client.prompts(1, scale.prompt_len), _sampling(1, 4)
        start = time.perf_counter()
        handle = client.llm.generate_async(prompt, params, streaming=True)
        next(handle)
        seconds.append(time.perf_counter() - start)
        handle.result()
    found = percentiles([each * 1e3 for each in seconds[2:]])
    name = f"time to first token, 1 prompt of {scale.prompt_len}{suffix}"
    report(Figure(3, name, "ms", found["p50"], details={"slowest": found["maximum"]}))


@dataclass
class Stream:
    """When a request was sent, and when each of its increments came."""

    sent: float
    arrivals: list[float] = field(default_factory=list)


def serving_details(streams: Sequence[Stream]) -> dict[str, float]:
    """Milliseconds over all requests. With drafts an increment holds several tokens."""
    first = percentiles([(stream.arrivals[0] - stream.sent) * 1e3 for stream in streams])
    gaps = [(b - a) * 1e3 for stream in streams for a, b in pairwise(stream.arrivals)]
    between = percentiles(gaps)
    return {
        "first token ms": first["p50"],
        "its p99": first["p99"],
        "between increments ms": between["p50"],
        "p99 of it": between["p99"],
    }


def _serve(setup: Setup, report: Report, client: Client, name: str, loads: Loads) -> None:
    scale = setup.scale
    shape = f"{scale.serving_input_len} in / {scale.serving_output_len} out"
    warm_up = client.prompts(loads[-1][0], scale.serving_input_len)
    asyncio.run(all_streams(client.llm, warm_up, WARM_UP_TOKENS, len(warm_up)))
    for at_a_time, total in loads:
        prompts = client.prompts(total, scale.serving_input_len)
        start = time.perf_counter()
        streams = asyncio.run(all_streams(client.llm, prompts, scale.serving_output_len, at_a_time))
        rate = total * scale.serving_output_len / (time.perf_counter() - start)
        details = {"requests": float(total), **serving_details(streams)}
        report(Figure(5, f"{name}, {at_a_time} at a time, {shape}", "tok/s", rate, details=details))


async def all_streams(
    llm: LLM, prompts: list[list[int]], max_tokens: int, at_a_time: int
) -> list[Stream]:
    gate, sampling = asyncio.Semaphore(at_a_time), _sampling(len(prompts), max_tokens)

    async def read(prompt: list[int], params: SamplingParams) -> Stream:
        async with gate:
            stream = Stream(time.perf_counter())
            handle = llm.generate_async(prompt, params, streaming=True)
            async for _ in handle:
                stream.arrivals.append(time.perf_counter())
            check_complete([handle], max_tokens)
            return stream

    return await asyncio.gather(*map(read, prompts, sampling))
