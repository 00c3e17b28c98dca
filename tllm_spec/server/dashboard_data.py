"""The figures of the dashboard, from the executor's state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from tllm_spec.server.histograms import Histogram

Json = dict[str, Any]


def dashboard_data(state: Mapping[str, Any], histograms: Mapping[str, Histogram]) -> Json:
    """state: of `server_info`. Counters are since the start; the page makes rates of them."""
    totals = state["totals"]
    speculation, rows = totals["speculation"], totals["by_draft_len"].values()
    return {
        "running": state["num_requests_running"],
        "waiting": state["num_requests_waiting"],
        "preemptions": state["num_preemptions"],
        "draft_len": state["speculative_num_steps"],
        "shape": shape_name(state),
        "batch_size": totals.get("latest_round", {}).get("batch_size", 0),
        "generated_tokens": totals["generated_tokens"],
        "prompt_tokens": totals["prompt_tokens"],
        "cached_prompt_tokens": totals["cached_prompt_tokens"],
        "request_rounds": sum(row["request_rounds"] for row in rows),
        "emitted_tokens": sum(row["emitted_tokens"] for row in rows),
        "acceptance_length": speculation["acceptance_length"] if speculation["rounds"] else None,
        "drafted": speculation["per_position_drafted"],
        "accepted": speculation["per_position_accepted"],
        "kv": {name: state["kv_cache"][name] for name in ("num_pages", "used", "cached", "free")},
        "why": why(state) + rows_shared(state),
        "decisions": [
            _sentence(each) for each in _decisions(state)[:-4:-1] if each is not _explaining(state)
        ],
        "measured": measured(state),
        "histograms": {name: asdict(found) for name, found in histograms.items()},
    }


def shape_name(state: Mapping[str, Any]) -> str:
    """The present draft length, or the tree as the controller names it: `5x8/31` has 5 steps, 8
    children of a node at most, 31 drafts."""
    return str(state["draft_shape"]["name"])


def why(state: Mapping[str, Any]) -> str:
    """Why the draft length is what it is, in a sentence."""
    draft_len, controller = shape_name(state), state["controller"]
    limits = controller.get("limits") or {}
    if (gate := limits.get("gate")) and gate["is_closed"]:
        return f"No drafts: the acceptance rate, {gate['acceptance_rate']}, closed the gate."
    if decision := _explaining(state):
        where = f"decided at batch size {decision['batch_size']}"
        return f"Draft length {draft_len}, {where}: {decision['reason']}."
    if schedule := limits.get("draft_len_schedule"):
        return f"Draft length {draft_len}: draft_len_schedule = {schedule}."
    if len(controller.get("draft_lens") or ()) > 1:
        return f"Draft length {draft_len}: no other one has been better yet."
    if draft_len == "0":
        return "No drafts: plain decoding is configured."
    return f"Draft length {draft_len}: it is configured and does not adapt."


def rows_shared(state: Mapping[str, Any]) -> str:
    """What became of the drafts, where requests share the rows of a round."""
    totals = state["totals"]
    offered, verified = totals.get("offered_drafts", 0), totals.get("verified_drafts", 0)
    if "@" not in shape_name(state) and verified >= offered:
        return ""
    accepted = totals["speculation"]["num_accepted_tokens"]
    return f" Of {offered} drafts {verified} had a row, and {accepted} were accepted."


def measured(state: Mapping[str, Any]) -> Json | None:
    """For the explorer: tokens per round at the present draft length or, if that is 0, at the one
    with the most rounds; and the times of such a round and a plain one at the latest batch size,
    if the controller has measured them. None without drafts."""
    drafted = {
        int(name): row
        for name, row in state["totals"]["by_draft_len"].items()
        if int(name) and row["request_rounds"]
    }
    if not drafted:
        return None
    present = state["speculative_num_steps"]
    length = present if present in drafted else max(drafted, key=lambda k: drafted[k]["rounds"])
    row = drafted[length]
    batch_size = state["totals"].get("latest_round", {}).get("batch_size", 0)
    times = (state["controller"].get("round_ms") or {}).get(str(batch_size)) or {}
    # Round times of trees have the names of their shapes.
    name = shape_name(state) if length == present else str(length)
    return {
        "draft_len": length,
        "tokens_per_round": row["emitted_tokens"] / row["request_rounds"],
        "plain_ms": times.get("0"),
        "round_ms": times.get(name),
    }


def _decisions(state: Mapping[str, Any]) -> list[Json]:
    """Oldest first."""
    found: list[Json] = state["controller"].get("decisions", {}).get("last", [])
    return found


def _explaining(state: Mapping[str, Any]) -> Json | None:
    """The decision that led to the present draft length."""
    gate = (state["controller"].get("limits") or {}).get("gate")
    if gate and gate["is_closed"]:
        return None
    name = shape_name(state)
    return next((e for e in reversed(_decisions(state)) if str(e["new_steps"]) == name), None)


def _sentence(decision: Mapping[str, Any]) -> str:
    return (
        f"{decision['old_steps']} → {decision['new_steps']} at batch size "
        f"{decision['batch_size']}: {decision['reason']}"
    )
