"""Replaces the draft weights of a running engine: `LLM.load_draft_weights`, `POST
/v1/draft_model`."""

from functools import partial
from pathlib import Path
from typing import Any

from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.executor.draft_weights import DraftWeights
from tllm_spec.executor.weight_swap import StagedWeights
from tllm_spec.rank_calls import RankCalls, WeightSteps
from tllm_spec.recording.replay import replay
from tllm_spec.recording.traffic_folder import latest_records, states_files

NUM_REPLAYED = 64  # the latest recorded requests, which new weights are tried with
MIN_REPLAYED = 8
NOT_REPLACEABLE = (
    "load_draft_weights: this engine's draft weights cannot be replaced while it runs; an engine "
    "whose speculative_model is a folder and whose draft_backend is torch is accepted"
)


class DraftSwap(WeightSteps):
    """Swaps the draft weights of an engine, as a `whole` or, in one of several, by steps."""

    def __init__(self, args: LlmArgs, calls: RankCalls) -> None:
        super().__init__(calls)
        self._args = args

    def whole(self, folder: str, keep_cache: bool, force: bool) -> dict[str, Any]:
        """Waits until the weights are served. Returns the new version, how many recorded requests
        were `replayed`, and the tokens a round of both in this replay, or the reason for none.

        Raises ValueError for weights that do not fit, and without `force` for those that are worse
        in the replay. Then nothing has changed."""
        if self._calls.are_several:
            self._weights()
            version = self._calls("swap_draft", folder=folder, keep_cache=keep_cache)
            told = _not_replayed("several ranks swap together")
        else:
            staged, told = self._read(folder, force)
            version = self._served(staged, keep_cache, None)["version"]
        return {"version": version, "folder": folder} | told

    def forced(self, folder: str) -> dict[str, Any]:
        """A whole swap, without a replay."""
        return self.whole(folder, keep_cache=False, force=True)

    def stage(self, folder: str, version: int, keep_cache: bool, force: bool) -> dict[str, Any]:
        """Loads the weights. Returns what there is of a replay, and raises, as `whole` does."""
        staged, told = self._read(folder, force)
        self._staged[folder, version] = partial(self._served, staged, keep_cache, version)
        return told

    def _loaded(self, folder: str, version: int) -> dict[str, Any]:
        self.stage(folder, version, False, True)
        return self._staged[folder, version]()

    def _read(self, folder: str, force: bool) -> tuple[StagedWeights, dict[str, Any]]:
        weights = self._weights()
        staged = weights.stage(folder)
        told = _not_replayed("force = true")
        return staged, told if force else _replayed(self._args, weights.folder, folder)

    def _served(
        self, staged: StagedWeights, keep_cache: bool, version: int | None
    ) -> dict[str, Any]:
        swap = partial(self._calls.executor.swap_draft, keep_cache=keep_cache, version=version)
        return {"version": self._calls.here(partial(swap, staged))}

    def _weights(self) -> DraftWeights:
        if (weights := self._calls.executor.parts.draft_weights) is None:
            raise ValueError(NOT_REPLACEABLE)
        return weights


def _replayed(args: LlmArgs, old: str, new: str) -> dict[str, Any]:
    """The tokens a round of both. Raises ValueError where the new weights are worse."""
    if args.record_traffic is None:
        return _not_replayed("no requests are recorded (record_traffic)")
    recorded = Path(args.record_traffic)
    records, states = latest_records(recorded, NUM_REPLAYED), states_files(recorded)
    if len(records) < MIN_REPLAYED:
        return _not_replayed(
            f"{len(records)} requests are recorded, and {MIN_REPLAYED} are needed; with several "
            "API keys or a cache_salt, only requests with store: true are recorded"
        )
    lengths = [
        replay(records, with_draft_weights(args, folder), states).total.acceptance_length
        for folder in (old, new)
    ]
    if lengths[1] < lengths[0]:
        raise ValueError(
            f"{new}: on {len(records)} recorded requests it has {lengths[1]:.3f} tokens a round, "
            f"and {old} has {lengths[0]:.3f}; force = true takes it all the same"
        )
    lengths_told = {"before": lengths[0], "after": lengths[1]}
    return {"replayed": len(records), "tokens_per_round": lengths_told}


def _not_replayed(reason: str) -> dict[str, Any]:
    return {"replayed": 0, "reason": reason}


def with_draft_weights(args: LlmArgs, folder: str) -> LlmArgs:
    assert args.speculative_config is not None
    spec = args.speculative_config.model_copy(update={"speculative_model": folder})
    return args.model_copy(update={"speculative_config": spec})
