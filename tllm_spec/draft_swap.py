"""Replaces the draft weights of a running engine: `LLM.load_draft_weights`, `POST
/v1/draft_model`."""

from pathlib import Path
from typing import Any

from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.rank_calls import WeightSteps
from tllm_spec.recording.replay import replay
from tllm_spec.recording.traffic_folder import latest_records, states_files

NUM_REPLAYED = 64  # the latest recorded requests, which new weights are tried with
MIN_REPLAYED = 8


class DraftSwap(WeightSteps):
    """Swaps the draft weights of an engine, as a `whole` or, in one of several, by steps."""

    part = "draft"
    refusal = (
        "load_draft_weights: this engine's draft weights cannot be replaced while it runs; an "
        "engine whose speculative_model is a folder and whose draft_backend is torch is accepted"
    )

    def whole(self, folder: str, keep_cache: bool, force: bool) -> dict[str, Any]:
        """Waits until the weights are served. Returns the new version, how many recorded requests
        were `replayed`, and the tokens a round of both in this replay, or the reason for none.

        Raises ValueError for weights that do not fit, and without `force` for those that are worse
        in the replay. Then nothing has changed."""
        replace = self._replacing(folder, keep_cache=keep_cache)
        tried = self._tried(folder, force)
        return {"version": replace(), "folder": folder} | tried

    def forced(self, folder: str) -> dict[str, Any]:
        """A whole swap, without a replay."""
        return self.whole(folder, keep_cache=False, force=True)

    def stage(self, folder: str, version: int, keep_cache: bool, force: bool) -> dict[str, Any]:
        """Loads the weights. Returns what there is of a replay, and raises, as `whole` does."""
        own = {"keep_cache": keep_cache, "version": version}
        self._staged[folder, version] = self._replacing(folder, **own)
        return self._tried(folder, force)

    def _load(self, folder: str, version: int) -> None:
        self.stage(folder, version, keep_cache=False, force=True)

    def _tried(self, folder: str, force: bool) -> dict[str, Any]:
        if self._calls.are_several:
            return _not_replayed("several ranks swap together")
        if force:
            return _not_replayed("force = true")
        return _replayed(self._args, self.weights.folder, folder)


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
    before, after = (
        replay(records, with_draft_weights(args, folder), states).total.acceptance_length
        for folder in (old, new)
    )
    if after < before:
        raise ValueError(
            f"{new}: on {len(records)} recorded requests it has {after:.3f} tokens a round, "
            f"and {old} has {before:.3f}; force = true takes it all the same"
        )
    return {"replayed": len(records), "tokens_per_round": {"before": before, "after": after}}


def _not_replayed(reason: str) -> dict[str, Any]:
    return {"replayed": 0, "reason": reason}


def with_draft_weights(args: LlmArgs, folder: str) -> LlmArgs:
    assert args.speculative_config is not None
    spec = args.speculative_config.model_copy(update={"speculative_model": folder})
    return args.model_copy(update={"speculative_config": spec})
