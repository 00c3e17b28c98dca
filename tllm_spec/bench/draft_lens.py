"""The draft lengths that a run used, from the engine's state before and after it."""

from collections.abc import Mapping
from typing import Any

from tllm_spec.config.speculative_config import DecodingBaseConfig


def may_vary(config: DecodingBaseConfig | None) -> bool:
    """Whether rounds of one engine may have different draft lengths."""
    if config is None:
        return False
    limits = (config.draft_len_schedule, config.max_concurrency, config.acceptance_rate_threshold)
    return config.adaptive is not None or any(limit is not None for limit in limits)


def draft_lens_section(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The rounds between two answers of `LLM.server_info`.

    `num_switches` counts decisions of the controller; `num_changes` counts rounds whose draft
    length differs from the previous round's, also because of probes and limits. Times exclude
    rounds that contain prompts."""
    old, new = _state(before), _state(after)
    rows = difference(before, after)
    rounds = sum(row["rounds"] for row in rows.values())
    seconds = sum(row["seconds"] for row in rows.values())
    section: dict[str, Any] = {
        "num_switches": _num_switches(new) - _num_switches(old),
        "num_changes": new["totals"]["draft_len_changes"] - old["totals"]["draft_len_changes"],
    }
    for draft_len, row in rows.items():
        section[f"draft_len_{draft_len}"] = {
            "rounds": row["rounds"],
            "share_of_rounds": row["rounds"] / rounds,
            "share_of_time": row["seconds"] / seconds if seconds else None,
            "round_ms": 1e3 * row["seconds"] / row["timed_rounds"] if row["timed_rounds"] else None,
            "acceptance_length": row["emitted_tokens"] / row["request_rounds"],
        }
    return section


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """The totals of the rounds between two answers of `LLM.server_info`, by draft length. Draft
    lengths without rounds are left out."""
    old, new = (_state(each)["totals"]["by_draft_len"] for each in (before, after))
    rows = {
        int(draft_len): {
            key: value - old.get(draft_len, {}).get(key, 0) for key, value in row.items()
        }
        for draft_len, row in new.items()
    }
    return {draft_len: rows[draft_len] for draft_len in sorted(rows) if rows[draft_len]["rounds"]}


def _state(info: Mapping[str, Any]) -> Mapping[str, Any]:
    state: Mapping[str, Any] = info["internal_states"][0]
    return state


def _num_switches(state: Mapping[str, Any]) -> int:
    return int(state["controller"]["decisions"]["num_switches"])
