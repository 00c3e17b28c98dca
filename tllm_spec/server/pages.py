"""Pages for people: `/` says what runs and how to call it, `/dashboard` shows it at work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from html import escape
from pathlib import Path
from string import Template
from time import monotonic
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse

from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.server.admission import engine_running
from tllm_spec.server.histograms import Histogram, Histograms
from tllm_spec.server.replicas import Engine
from tllm_spec.version import __version__

# The figures of the dashboard, from the executor's state.


MIN_ROUNDS = 30  # timed ones, for a comparison
SIMILAR = 1.25  # a ratio of mean batch sizes

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
        "round_draft_len": _latest(state).get("draft_len"),
        "batch_size": _latest(state).get("batch_size", 0),
        "generated_tokens": totals["generated_tokens"],
        "prompt_tokens": totals["prompt_tokens"],
        "cached_prompt_tokens": totals["cached_prompt_tokens"],
        "request_rounds": sum(row["request_rounds"] for row in rows),
        "emitted_tokens": sum(row["emitted_tokens"] for row in rows),
        "acceptance_length": speculation["acceptance_length"] if speculation["rounds"] else None,
        "drafted": speculation["per_position_drafted"],
        "accepted": speculation["per_position_accepted"],
        "kv": {name: state["kv_cache"][name] for name in ("num_pages", "used", "cached", "free")},
        "why": why(state) + rows_shared(state) + pauses(state),
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
    return (
        f" Rounds had room for {offered} drafts; {verified} were checked, and {accepted} accepted."
    )


def pauses(state: Mapping[str, Any]) -> str:
    """How many rounds had no drafts, where no decision of the controller explains them."""
    rows = {int(name): row["rounds"] for name, row in state["totals"]["by_draft_len"].items()}
    plain, total = rows.get(0, 0), sum(rows.values())
    if not plain or plain == total or "0" in map(str, state["controller"].get("draft_lens") or ()):
        return ""
    return (
        f" {plain} of {total} rounds had no drafts: a request whose drafts are rejected pauses "
        "(max_rejected_rounds), and one may ask for none."
    )


def measured(state: Mapping[str, Any]) -> Json | None:
    """Figures of the present draft length or, if it is 0, of that with the most rounds: tokens per
    round, the times of such a round and of a plain one, and how many times faster than plain rounds
    it is, for a request. The times are null until both lengths have MIN_ROUNDS of about the same
    batch size, or the controller has measured them at the latest one. None without drafts."""
    rows = {int(name): row for name, row in state["totals"]["by_draft_len"].items()}
    drafted = {length: row for length, row in rows.items() if length and row["request_rounds"]}
    if not drafted:
        return None
    present = state["speculative_num_steps"]
    length = present if present in drafted else max(drafted, key=lambda k: drafted[k]["rounds"])
    tokens = drafted[length]["emitted_tokens"] / drafted[length]["request_rounds"]
    plain_ms, round_ms = _counted_times(rows.get(0), drafted[length]) or (None, None)
    if plain_ms is None:
        by_size = state["controller"].get("round_ms") or {}
        found = by_size.get(str(_latest(state).get("batch_size", 0))) or {}
        # Round times of trees have the names of their shapes.
        name = shape_name(state) if length == present else str(length)
        plain_ms, round_ms = found.get("0"), found.get(name)
    return {
        "draft_len": length,
        "tokens_per_round": tokens,
        "plain_ms": plain_ms,
        "round_ms": round_ms,
        "speed_up": tokens * plain_ms / round_ms if plain_ms and round_ms else None,
    }


def _counted_times(
    plain: Mapping[str, Any] | None, drafted: Mapping[str, Any]
) -> tuple[float, float] | None:
    """Milliseconds of a round without and with drafts; None for too few rounds, or for those of
    other batch sizes."""
    if plain is None or min(plain["timed_rounds"], drafted["timed_rounds"]) < MIN_ROUNDS:
        return None
    sizes = [row["request_rounds"] / row["rounds"] for row in (plain, drafted)]
    if max(sizes) > SIMILAR * min(sizes):
        return None
    first, second = (1000 * row["seconds"] / row["timed_rounds"] for row in (plain, drafted))
    return first, second


def _latest(state: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = state["totals"].get("latest_round", {})
    return found


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


FOLDER = Path(__file__).parent
# Nothing is loaded from another host, whatever a model's name says.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'"
)


class Pages:
    """has_key: whether `/` shows where a key belongs."""

    def __init__(self, llm: Engine, model: str, histograms: Histograms, has_key: bool) -> None:
        self._llm = llm
        self._model = model
        self._histograms = histograms
        self._has_key = has_key
        self._home = Template((FOLDER / "home.html").read_text("utf-8"))
        self._dashboard = (FOLDER / "dashboard.html").read_text("utf-8")

    def add_to(self, app: FastAPI) -> None:
        add = partial(app.add_api_route, include_in_schema=False)
        add("/", self.home, response_model=None)
        add("/dashboard", self.dashboard, response_model=None)
        add("/dashboard/data", self.data)

    async def home(self, request: Request) -> HTMLResponse:
        """What runs, and how to call it."""
        facts = facts_of(self._llm.args, self._llm.max_seq_len)
        page = self._home.substitute(
            model=escape(self._model),
            version=escape(__version__),
            facts="".join(f"<dt>{escape(n)}</dt><dd>{escape(v)}</dd>" for n, v in facts.items()),
            base=escape(str(request.base_url).rstrip("/")),
            key="KEY" if self._has_key else "none",
            key_header=" -H 'Authorization: Bearer KEY'" if self._has_key else "",
        )
        return _page(page)

    async def dashboard(self) -> HTMLResponse:
        """The page without data, which it asks for once a second."""
        return _page(self._dashboard)

    def data(self) -> dict[str, Any]:
        """What the dashboard shows. Runs in a thread: it waits for the end of a round."""
        with engine_running():
            state, *others = self._llm.server_info()["internal_states"]
        facts = facts_of(self._llm.args, self._llm.max_seq_len)
        devices = ", ".join(rank["device"] for rank in state["ranks"])
        attention = f", attention {facts['attention']}" if "attention" in facts else ""
        which = f" · engine {state['engine']} of {len(others) + 1}" if others else ""
        return {
            "time": monotonic(),
            "model": self._model,
            "what": f"{facts['drafter']} · on {devices}{attention}{which}",
            **dashboard_data(state, self._histograms.read()),
        }


def facts_of(args: LlmArgs, max_seq_len: int) -> dict[str, str]:
    """What a person asks first, by name. `auto` is no answer, so it is left out."""
    speculation = args.speculative_config
    drafter = "none: plain decoding"
    if speculation is not None:
        drafter = f"{speculation.decoding_type}, {speculation.max_draft_len} drafts at most"
        if speculation.drafts_trees:
            size, depth = speculation.max_total_draft_tokens, speculation.max_draft_len
            drafter = f"{speculation.decoding_type}, trees of {size} nodes, {depth} deep at most"
    facts = {
        "model": str(args.model),
        "drafter": drafter,
        "device": str(args.device),
        "attention": f"{args.attn_backend}{', deterministic' if args.deterministic else ''}",
        "batch": f"{args.max_batch_size} requests at most",
        "context": f"{max_seq_len} tokens, prompt and output together",
    }
    return {name: value for name, value in facts.items() if value != "auto"}


def _page(text: str) -> HTMLResponse:
    return HTMLResponse(text, headers={"Content-Security-Policy": POLICY})
