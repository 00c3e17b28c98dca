"""Runs a data set through an `LLM` and measures the time."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tllm_spec.bench.dataset import BenchRequest
from tllm_spec.config.engine_config import SHARES, KvCacheConfig
from tllm_spec.config.llm_args import overlay, read_options
from tllm_spec.config.option_checks import shown
from tllm_spec.models.automatic import with_drafter
from tllm_spec.outputs import RequestOutput
from tllm_spec.progress import Progress, progress
from tllm_spec.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tllm_spec.llm import LLM


@dataclass(frozen=True)
class Run:
    """One pass over the data set: the outputs in its order, and the seconds from the first
    submission to the last completion."""

    outputs: list[RequestOutput]
    elapsed_s: float

    @property
    def num_output_tokens(self) -> int:
        return sum(map(num_output_tokens, self.outputs))

    @property
    def output_tokens_per_s(self) -> float:
        return self.num_output_tokens / self.elapsed_s


def num_output_tokens(output: RequestOutput) -> int:
    return sum(sample.length for sample in output.outputs)


def sampling_for(
    requests: Sequence[BenchRequest],
    sampler_options: Mapping[str, Any] | None = None,
    eos_id: int = -1,
) -> list[SamplingParams]:
    """The SamplingParams of each request.

    As in TensorRT-LLM, without sampler options decoding is greedy and ignores EOS, so that an
    output has exactly `output_tokens` tokens; a request that `ends_itself` ends at the model's end
    tokens. `eos_id` >= 0 ends an output. The seed is the task_id
    unless the options have one, so that a run can be repeated. Raises ValueError for unknown or
    invalid sampler options, and for `max_tokens`, which the requests define."""
    is_usual = sampler_options is None
    options = {"ignore_eos": True} if sampler_options is None else dict(sampler_options)
    if "max_tokens" in options:
        raise ValueError(
            f"max_tokens = {shown(options['max_tokens'])} is refused in sampler options: the "
            "output length is output_tokens of the data set, or --target_output_len for all"
        )
    if eos_id >= 0:
        options |= {"end_id": eos_id, "ignore_eos": False}
    # max_tokens None: min_tokens is compared with each request's own max_tokens below.
    common = SamplingParams.from_dict({**options, "max_tokens": None})
    return [
        replace(
            common,
            max_tokens=request.output_tokens,
            ignore_eos=common.ignore_eos and not (is_usual and request.ends_itself),
            seed=request.task_id if common.seed is None else common.seed,
        )
        for request in requests
    ]


def run_requests(
    llm: "LLM",
    requests: Sequence[BenchRequest],
    sampling: Sequence[SamplingParams],
    concurrency: int = -1,
    streaming: bool = False,
    bar: Progress | None = None,
) -> Run:
    """Runs all requests, at most `concurrency` at a time (-1: all at once). bar: counts requests;
    None: one of its own.

    Raises ValueError when a request fails, and for one that the engine would cut short: its figures
    would be wrong without notice. Prompts of token ids are checked before any request runs.
    """
    for request, params in zip(requests, sampling, strict=True):
        if isinstance(request.prompt, list):
            _check_fits(llm, request, params, len(request.prompt))
    with nullcontext(bar) if bar else progress("run", len(requests), "requests") as shown_in:
        run = asyncio.run(_run_all(llm, requests, sampling, concurrency, streaming, shown_in))
    failed = [pair for pair in zip(requests, run.outputs, strict=True) if pair[1].error]
    if failed:
        request, output = failed[0]
        number = f"{len(failed)} of {len(requests)} requests failed"
        raise ValueError(f"{number}; the first, task_id {request.task_id}: {output.error}")
    return run


def warm_up(
    llm: "LLM",
    requests: Sequence[BenchRequest],
    sampling: Sequence[SamplingParams],
    concurrency: int,
    count: int,
) -> None:
    """Runs `count` requests from the top of the data set, which repeats when it is shorter."""
    chosen = list(islice(cycle(zip(requests, sampling, strict=True)), count))
    with progress("warm-up", count, "requests") as bar:
        run_requests(
            llm,
            [request for request, _ in chosen],
            [params for _, params in chosen],
            concurrency,
            bar=bar,
        )


def _check_fits(
    llm: "LLM", request: BenchRequest, params: SamplingParams, num_prompt_tokens: int
) -> None:
    """Raises ValueError when max_seq_len would end the output before its output_tokens."""
    num_kept = min(num_prompt_tokens, params.truncate_prompt_tokens or num_prompt_tokens)
    if num_kept + request.output_tokens > llm.max_seq_len:
        raise ValueError(
            f"task_id {request.task_id} is refused: its {num_kept} prompt tokens and "
            f"{request.output_tokens} output tokens exceed max_seq_len = {llm.max_seq_len}, which "
            "would end the output early"
        )


async def _run_all(
    llm: "LLM",
    requests: Sequence[BenchRequest],
    sampling: Sequence[SamplingParams],
    concurrency: int,
    streaming: bool,
    bar: Progress,
) -> Run:
    gate = asyncio.Semaphore(concurrency) if concurrency > 0 else nullcontext()
    pairs = zip(requests, sampling, strict=True)
    start = time.perf_counter()
    num_tokens = 0

    async def answer(request: BenchRequest, params: SamplingParams) -> RequestOutput:
        nonlocal num_tokens
        output = await _answer(llm, request, params, streaming, gate)
        num_tokens += num_output_tokens(output)
        speed = num_tokens / (time.perf_counter() - start)
        bar.advance(note=f"{speed:.0f} output tokens/s")
        return output

    outputs = await asyncio.gather(*[answer(*pair) for pair in pairs])
    return Run(outputs, time.perf_counter() - start)


async def _answer(
    llm: "LLM",
    request: BenchRequest,
    params: SamplingParams,
    streaming: bool,
    gate: AbstractAsyncContextManager[Any],
) -> RequestOutput:
    """The finished output. With streaming every increment is read, as by a client, so that its cost
    is measured."""
    async with gate:
        try:
            handle = llm.generate_async(request.prompt, params, streaming=streaming)
        except ValueError as error:
            raise ValueError(f"task_id {request.task_id} is refused: {error}") from error
        if not isinstance(request.prompt, list):
            _check_fits(llm, request, params, len(handle.prompt_token_ids))
        if not streaming:
            return await handle
        async for output in handle:
            last = output
        return last


def arguments_of(
    model: str, flags: Mapping[str, Any], yaml_path: Path | None, num_engines: int = 1
) -> dict[str, Any]:
    """Keyword arguments of `LLM`, without the model: those of the command line, over which the file
    takes precedence. Each of several engines on a device takes an equal part of the memory that one
    would take for its KV cache. Raises ValueError when the file names a model or cannot be read."""
    file = read_options(yaml_path) if yaml_path else {}
    if "model" in file:
        raise ValueError(
            f"model = {file['model']!r} in {yaml_path}: the command line names the model"
        )
    options = overlay(flags, file)
    if not SHARES & (options.get("kv_cache_config") or {}).keys():
        part = KvCacheConfig().free_gpu_memory_fraction / num_engines
        options = overlay(options, {"kv_cache_config": {"free_gpu_memory_fraction": part}})
    return with_drafter(model, options)
