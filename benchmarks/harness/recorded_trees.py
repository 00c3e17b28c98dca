"""The draft trees of one request of the zoo, round by round, and the paths that were accepted."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.harness.engine import Rounds
from tllm_spec.text.tokenizer import load_tokenizer


@dataclass(frozen=True)
class RecordedTree:
    """`texts` and `parents` of the nodes; the root, node 0, is the last token before the round.
    `path`: accepted nodes, from the root on. `own`: the target's own token after them."""

    texts: tuple[str, ...]
    parents: tuple[int, ...]
    path: tuple[int, ...]
    own: str


def recorded(prompt: str, shape: dict[str, Any], rounds: int) -> list[RecordedTree]:
    """shape: options of the head's trees. Greedy."""
    tokenizer = load_tokenizer("zoo:llama")
    tokens = tokenizer.encode(prompt)
    depth = shape["max_draft_len"]
    config = {"decoding_type": "Eagle3", "speculative_model": "zoo:llama-eagle3", **shape}
    room = (rounds + 2) * (1 + depth)
    engine = Rounds(
        "zoo:llama",
        max_batch_size=1,
        max_seq_len=len(tokens) + room,
        speculative_config=config,
        device="cpu",
        disable_overlap_scheduler=True,
        kv_cache_config={"max_tokens": 4096},
    )
    request = engine._request(1, len(tokens), room)
    request.tokens[:] = tokens
    engine.built.queue.put([request])
    engine.executor.step()
    found = []
    for _ in range(rounds):
        drafts, parents = _window(engine, request.slot)
        before = request.num_tokens
        engine.executor.step()
        emitted = request.tokens[before:]
        texts = tuple(tokenizer.decode([token]) for token in drafts)
        path = _path(drafts, parents, emitted[:-1])
        found.append(RecordedTree(texts, parents, path, tokenizer.decode(emitted[-1:])))
    return found


def _window(engine: Rounds, slot: int) -> tuple[list[int], tuple[int, ...]]:
    """Tokens and parents of the tree in a slot."""
    slots = engine.executor.parts.slots
    number = int(slots.num_drafts[slot]) + 1
    parents = slots.parents(torch.tensor([slot]), number)[0]
    return slots.window[slot, :number].tolist(), tuple(parents.tolist())


def _path(
    drafts: Sequence[int], parents: Sequence[int], accepted: Sequence[int]
) -> tuple[int, ...]:
    path = [0]
    for token in accepted:
        children = (node for node, parent in enumerate(parents) if parent == path[-1] and node)
        path.append(next(node for node in children if drafts[node] == token))
    return tuple(path)
