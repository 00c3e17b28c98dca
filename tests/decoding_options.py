"""Speculative configurations as mappings, for tests."""

from typing import Any


class FixedDrafter:
    """A user's drafter, as far as configurations look at it."""

    def __init__(self, token: int = 0) -> None:
        self.token = token


def ngram(**options: object) -> dict[str, object]:
    return {"decoding_type": "NGram", "max_draft_len": 4, **options}


def eagle3(**options: object) -> dict[str, object]:
    return {
        "decoding_type": "Eagle3",
        "max_draft_len": 3,
        "speculative_model": "some/head",
        **options,
    }


def mtp(**options: object) -> dict[str, object]:
    return {"decoding_type": "MTP", "max_draft_len": 3, **options}


def speculate(options: dict[str, object]) -> dict[str, Any]:
    return {"speculative_config": options}
