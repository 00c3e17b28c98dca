"""Points 2, 3 and 5 through `LLM`, as a user meets them: whole answers, first tokens, many requests
as a stream.

Each function is one job. Prompts are random token ids, no prompt is sent twice, no text is made of
the answers."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from driven_rounds import release
from h200_figures import Figure
from h200_setup import Report, Setup

from tllm_spec import LLM, SamplingParams
from tllm_spec.bench.report import percentiles
from tllm_spec.outputs import RequestOutput, SpeculativeStats

Prompt = list[int]
WARM_UP_TOKENS = 48  # while the last prompts of a load are read, its first requests have so many


def plain(setup: Setup, report: Report) -> None:
    """Points 2 and 3: end to end, first tokens; 5."""
    with _llm(setup) as llm:
        prompts = Prompts(llm)
        if setup.points & {2, 3}:
            _generate(setup, report, llm, prompts, "plain")
        if 3 in setup.points:
            _first_token(setup, report, llm, prompts)
        if 5 in setup.points:
            _serve(setup, report, llm, prompts, "plain", setup.scale.serving_loads)


def eagle3(setup: Setup, report: Report) -> None:
    """Points 2 and 5, and first tokens."""
    draft_len = setup.scale.draft_len
    with _llm(setup, speculative_config=setup.eagle3(draft_len)) as llm:
        prompts, name = Prompts(llm), f"EAGLE-3 K={draft_len}"
        if 2 in setup.points:
            _generate(setup, report, llm, prompts, name)
        if 3 in setup.points:
            _first_token(setup, report, llm, prompts, f", {name}")
        if 5 in setup.points:
            _serve(setup, report, llm, prompts, name, setup.scale.serving_loads)


def chunked(setup: Setup, report: Report) -> None:
    """Point 5: the same two with chunked prefill, where prompts wait for each other."""
    draft_len, loads = setup.scale.draft_len, setup.scale.serving_loads[-2:]
    for name, config in (("plain", None), (f"EAGLE-3 K={draft_len}", setup.eagle3(draft_len))):
        _serve_chunked(setup, report, name, loads, speculative_config=config)
        release()


def _serve_chunked(
    setup: Setup, report: Report, name: str, loads: Sequence[tuple[int, int]], **options: Any
) -> None:
    with _llm(setup, enable_chunked_prefill=True, **options) as llm:
        _serve(setup, report, llm, Prompts(llm), f"{name}, chunked prefill", loads)


def _llm(setup: Setup, **options: Any) -> LLM:
    """Graphs of the batch sizes that are measured, and of some below where a load of many ebbs
    away."""
    scale = setup.scale
    largest = scale.serving_batch if 5 in setup.points else scale.batch_sizes[-1]
    sizes = {size for size in (*scale.batch_sizes, 16, 32, 128, 192, largest) if size <= largest}
    return LLM(
        setup.target,
        skip_tokenizer_init=True,
        max_batch_size=largest,
        max_seq_len=2 * scale.prompt_len,
        cuda_graph_config={"batch_sizes": sorted(sizes)},
        **(setup.options | options),
    )


class Prompts:
    """Random token ids: the same in every run, others with every call."""

    def __init__(self, llm: LLM) -> None:
        self._random = Random(0)
        self._ids = range(llm.model_config.vocab_size)

    def draw(self, number: int, length: int) -> list[Prompt]:
        return [self._random.choices(self._ids, k=length) for _ in range(number)]


def _sampling(number: int, max_tokens: int, first_seed: int = 0) -> list[SamplingParams]:
    """With seeds of their own: which drafts are accepted depends on a request's seed and the
    position alone."""
    seeds = range(first_seed, first_seed + number)
    return [SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=seed) for seed in seeds]


def _generate(setup: Setup, report: Report, llm: LLM, prompts: Prompts, name: str) -> None:
    """Batches through `LLM.generate`, once for a single token and once for all of them. The
    difference is the time after the first token, of which every request has then been given one."""
    scale = setup.scale
    for batch_size in scale.batch_sizes:
        _timed_batch(llm, prompts, batch_size, scale.prompt_len, 4)
        repeats = scale.single_repeats if batch_size == 1 else 1
        first_s = whole_s = 0.0
        stats = SpeculativeStats()
        for repeat in range(repeats):
            first_s += _timed_batch(llm, prompts, batch_size, scale.prompt_len, 1)[0]
            seconds, outputs = _timed_batch(
                llm,
                prompts,
                batch_size,
                scale.prompt_len,
                scale.output_len,
                first_seed=repeat * batch_size,
            )
            whole_s += seconds
            stats = sum(
                (output.speculative_decoding or SpeculativeStats() for output in outputs), stats
            )
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


def _timed_batch(
    llm: LLM, prompts: Prompts, number: int, prompt_len: int, max_tokens: int, first_seed: int = 0
) -> tuple[float, list[RequestOutput]]:
    """Seconds of one `generate`. Raises RuntimeError when a request did not get all its tokens."""
    chosen, sampling = prompts.draw(number, prompt_len), _sampling(number, max_tokens, first_seed)
    start = time.perf_counter()
    outputs = llm.generate(chosen, sampling, use_tqdm=False)
    seconds = time.perf_counter() - start
    assert isinstance(outputs, list)
    check_complete(outputs, max_tokens)
    return seconds, outputs


def check_complete(outputs: Sequence[RequestOutput], num_tokens: int) -> None:
    for output in outputs:
        if output.error or output.outputs[0].length != num_tokens:
            found = output.outputs[0].length
            raise RuntimeError(f"an answer has {found} tokens, not {num_tokens}: {output.error}")


def _first_token(setup: Setup, report: Report, llm: LLM, prompts: Prompts, whose: str = "") -> None:
    """From `generate_async` to the first increment in the reader's thread, one request after the
    other."""
    scale, seconds = setup.scale, []
    for _ in range(2 + 4 * scale.repeats):
        (prompt,), (params,) = prompts.draw(1, scale.prompt_len), _sampling(1, 4)
        start = time.perf_counter()
        handle = llm.generate_async(prompt, params, streaming=True)
        next(handle)
        seconds.append(time.perf_counter() - start)
        handle.result()
    found = percentiles([each * 1e3 for each in seconds[2:]])
    name = f"time to first token, 1 prompt of {scale.prompt_len}{whose}"
    report(Figure(3, name, "ms", found["p50"], details={"slowest": found["maximum"]}))


@dataclass
class Stream:
    """When a request was sent, and when each of its increments came."""

    sent: float
    arrivals: list[float] = field(default_factory=list)


def serving_details(streams: Sequence[Stream]) -> dict[str, float]:
    """Milliseconds: to the first token, and between two increments of a request, over all requests.

    With drafts an increment holds several tokens; what a reader waits for is the next increment.
    """
    first = percentiles([(stream.arrivals[0] - stream.sent) * 1e3 for stream in streams])
    between = percentiles(
        [
            (later - earlier) * 1e3
            for stream in streams
            for earlier, later in zip(stream.arrivals, stream.arrivals[1:], strict=False)
        ]
    )
    return {
        "first token ms": first["p50"],
        "its p99": first["p99"],
        "between increments ms": between["p50"],
        "p99 of it": between["p99"],
    }


def _serve(
    setup: Setup,
    report: Report,
    llm: LLM,
    prompts: Prompts,
    name: str,
    loads: Sequence[tuple[int, int]],
) -> None:
    scale = setup.scale
    shape = f"{scale.serving_input_len} in / {scale.serving_output_len} out"
    warm_up = prompts.draw(loads[-1][0], scale.serving_input_len)
    asyncio.run(_all_streams(llm, warm_up, WARM_UP_TOKENS, len(warm_up)))
    for at_a_time, total in loads:
        chosen = prompts.draw(total, scale.serving_input_len)
        start = time.perf_counter()
        streams = asyncio.run(_all_streams(llm, chosen, scale.serving_output_len, at_a_time))
        rate = total * scale.serving_output_len / (time.perf_counter() - start)
        details = {"requests": float(total), **serving_details(streams)}
        report(Figure(5, f"{name}, {at_a_time} at a time, {shape}", "tok/s", rate, details=details))


async def _all_streams(
    llm: LLM, prompts: list[Prompt], max_tokens: int, at_a_time: int
) -> list[Stream]:
    gate, sampling = asyncio.Semaphore(at_a_time), _sampling(len(prompts), max_tokens)

    async def read(prompt: Prompt, params: SamplingParams) -> Stream:
        async with gate:
            stream = Stream(time.perf_counter())
            handle = llm.generate_async(prompt, params, streaming=True)
            async for _ in handle:
                stream.arrivals.append(time.perf_counter())
            check_complete([handle], max_tokens)
            return stream

    return await asyncio.gather(*map(read, prompts, sampling))
