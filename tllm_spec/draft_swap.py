"""Replaces the draft weights of a running engine: `LLM.load_draft_weights`, `POST
/v1/draft_model`."""

import os
from functools import partial
from pathlib import Path
from typing import Any

from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.executor.py_executor import PyExecutor
from tllm_spec.executor.worker import Worker
from tllm_spec.recording.replay import replay
from tllm_spec.recording.traffic_folder import latest_records, states_files

NUM_REPLAYED = 64  # the latest recorded requests, which new weights are tried with
MIN_REPLAYED = 8
NOT_REPLACEABLE = (
    "load_draft_weights: this engine's draft weights cannot be replaced while it runs; an engine "
    "whose speculative_model is a folder and whose draft_backend is torch is accepted"
)


def swap_draft_weights(
    args: LlmArgs,
    executor: PyExecutor,
    worker: Worker,
    folder: str | os.PathLike[str],
    *,
    keep_cache: bool = False,
    force: bool = False,
) -> dict[str, Any]:
    """Waits until the weights are served. Returns the new version, and with recorded traffic and
    one rank the tokens a round of both in a replay.

    Raises ValueError for weights that do not fit, and without `force` for those that are worse in
    the replay. Then nothing has changed."""
    weights = executor.parts.draft_weights
    if weights is None:
        raise ValueError(NOT_REPLACEABLE)
    if args.tensor_parallel_size > 1:
        path, queue = os.fspath(folder), executor.parts.queue

        def swap_together() -> int:
            queue.announce_swap(path, keep_cache=keep_cache)
            return weights.swap_together(path, keep_cache=keep_cache)

        return {"version": worker.call(swap_together), "folder": path}
    staged = weights.stage(os.fspath(folder))
    told = {} if force else _replayed(args, weights.folder, staged.folder)
    version = worker.call(partial(weights.swap, staged, keep_cache=keep_cache))
    return {"version": version, "folder": staged.folder} | told


def _replayed(args: LlmArgs, old: str, new: str) -> dict[str, Any]:
    """Empty with too few records. Raises ValueError where the new weights are worse."""
    if args.record_traffic is None:
        return {}
    recorded = Path(args.record_traffic)
    records, states = latest_records(recorded, NUM_REPLAYED), states_files(recorded)
    if len(records) < MIN_REPLAYED:
        return {}
    lengths = [
        replay(records, _with_weights(args, folder), states).total.acceptance_length
        for folder in (old, new)
    ]
    if lengths[1] < lengths[0]:
        raise ValueError(
            f"{new}: on {len(records)} recorded requests it has {lengths[1]:.3f} tokens a round, "
            f"and {old} has {lengths[0]:.3f}; force = true takes it all the same"
        )
    return {"tokens_per_round": {"before": lengths[0], "after": lengths[1]}}


def _with_weights(args: LlmArgs, folder: str) -> LlmArgs:
    assert args.speculative_config is not None
    spec = args.speculative_config.model_copy(update={"speculative_model": folder})
    return args.model_copy(update={"speculative_config": spec})
