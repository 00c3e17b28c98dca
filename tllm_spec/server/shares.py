"""What one client and one request may take of the server, so that others get their part."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

from fastapi import Request

from tllm_spec.sampling_params import SamplingParams
from tllm_spec.server.admission import RETRY_AFTER
from tllm_spec.server.refusals import RequestRefused


class ClientShares:
    """Counts the choices that clients, by their key's name or address, have at a time. limit: None
    for any number."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._taken: Counter[str] = Counter()

    def take(self, request: Request, num_choices: int) -> None:
        """Counts the choices of a request until its answer has been sent, and writes the client's
        new number to the scope's state. Raises RequestRefused for more than the limit."""
        state = request.scope["state"]
        client = state["client"]
        if self._limit is not None:
            self._check(client, num_choices, self._limit)
        self._taken[client] += num_choices
        state["num_own_choices"] = self._taken[client]
        state["at_end"].append(partial(self._give_back, client, num_choices))

    def _check(self, client: str, num_choices: int, limit: int) -> None:
        if num_choices > limit:
            raise RequestRefused(
                400,
                f"the request asks for {num_choices} choices and one client may have "
                f"{limit} at a time; send several requests, one after the other",
            )
        if self._taken[client] + num_choices > limit:
            raise RequestRefused(
                429,
                f"one client may have {limit} choices at a time, and you have "
                f"{self._taken[client]}",
                "overloaded",
                retry_after=RETRY_AFTER,
            )

    def _give_back(self, client: str, num_choices: int) -> None:
        self._taken[client] -= num_choices
        if not self._taken[client]:
            del self._taken[client]


def within_budget(
    params: SamplingParams, num_prompts: int, max_tokens: int | None
) -> SamplingParams:
    """max_tokens: that all choices of a request may have together, None for any number. It is
    divided among the choices of a request that does not limit them itself. Raises RequestRefused
    for a request that asks for more."""
    if max_tokens is None:
        return params
    num_choices = num_prompts * params.n
    share = max_tokens // num_choices
    if (params.max_tokens or 1) > share:
        raise RequestRefused(
            400,
            f"the request asks for {num_choices} choices of {params.max_tokens or 1} tokens and "
            f"the server generates {max_tokens} tokens for one request; lower max_tokens or n",
        )
    return params if params.max_tokens is not None else replace(params, max_tokens=share)
