"""Pages for people: `/` says what runs and how to call it, `/dashboard` shows it at work."""

from __future__ import annotations

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
from tllm_spec.server.dashboard_data import dashboard_data
from tllm_spec.server.engine import Engine
from tllm_spec.server.histograms import Histograms
from tllm_spec.version import __version__

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
