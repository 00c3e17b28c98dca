"""Runs a loaded EAGLE-3 head over (token, hidden state) pairs, and captures the target's hidden
states."""

from pathlib import Path
from typing import Any

import torch

from tests.models.helpers import MAX_POSITIONS, PagedRunner, pages_for
from tllm_spec.attention.interface import SpecMetadata
from tllm_spec.models.draft_head import HeadRows, HeadSource
from tllm_spec.models.eagle3 import Eagle3Head, load_eagle3_head
from tllm_spec.models.llama import CausalLM


def load_head(folder: Path, target: CausalLM, num_captured: int = 3, **options: Any) -> Eagle3Head:
    defaults: dict[str, Any] = {"load_format": "auto", "max_positions": MAX_POSITIONS}
    return load_eagle3_head(HeadSource(folder, target, **(defaults | options)), num_captured)


class HeadRunner(PagedRunner):
    """Runs the head over (token, hidden state) pairs of each request, with its own pool."""

    model: Any

    @torch.inference_mode()
    def draft(
        self,
        contexts: dict[int, tuple[list[int], torch.Tensor]] | None = None,
        windows: dict[int, tuple[list[int], torch.Tensor]] | None = None,
    ) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Logits `[n, V_draft]` and recurrent states `[n, H]` of each request."""
        rows = (contexts or {}) | (windows or {})
        tokens = {request: row[0] for request, row in rows.items()}
        metadata = self.metadata(
            {request: tokens[request] for request in contexts or {}},
            {request: tokens[request] for request in windows or {}},
            slack=2,
        )
        hidden = torch.cat([row[1] for row in rows.values()])
        before = hidden.clone()
        context = self.context(metadata)
        flat = torch.tensor(
            [token for row in tokens.values() for token in row], device=self.model.device
        )
        recurrent = self.model.forward(HeadRows(flat, metadata.positions, hidden), context)
        assert torch.equal(hidden, before), "the caller's hidden states were changed"
        counts = [len(row) for row in tokens.values()]
        logits = self.model.compute_logits(recurrent)
        return dict(
            zip(rows, zip(logits.split(counts), recurrent.split(counts), strict=True), strict=True)
        )


def assert_wanted_rows_are_those_of_a_whole_forward(
    head: Any, tokens: list[int], hidden: torch.Tensor
) -> None:
    """All rows write their keys and values, whichever are wanted."""
    states, pools = [], []
    for wanted in (None, [9, 4], []):
        runner = HeadRunner(head)
        metadata = runner.metadata({0: tokens}, {}, slack=0)
        rows = None if wanted is None else torch.tensor(wanted, dtype=torch.int64)
        context = runner.context(metadata, wanted=rows)
        read = HeadRows(torch.tensor(tokens), metadata.positions, hidden)
        states.append(head.forward(read, context))
        pools.append(runner.pool.data)
    every, some, none = states
    torch.testing.assert_close(some, every[[9, 4]])
    assert none.shape == (0, 32) and pools[0][-1].count_nonzero() > 0
    assert torch.equal(pools[1], pools[0]) and torch.equal(pools[2], pools[0])


def captured_states(target: CausalLM, tokens: list[int], layers: tuple[int, ...]) -> torch.Tensor:
    """The target's hidden states from one forward, `[T, n * H]`."""
    return captured_states_of(target, [tokens], layers)[0]


def captured_states_of(
    target: CausalLM, texts: list[list[int]], layers: tuple[int, ...]
) -> list[torch.Tensor]:
    """The same for several texts, from one forward."""
    runner = PagedRunner(target, pages_for(texts))
    metadata = runner.metadata(dict(enumerate(texts)), {}, 0)
    tokens = [token for text in texts for token in text]
    on = target.dtype, target.device
    spec = SpecMetadata(layers, target.config.hidden_size, len(tokens), *on)
    context = runner.context(metadata, spec)
    with torch.inference_mode():
        ids = torch.tensor(tokens, device=target.device)
        target.forward(ids, metadata.positions, context)
    captured = spec.captured(len(tokens)).clone()
    return list(captured.split([len(text) for text in texts]))
