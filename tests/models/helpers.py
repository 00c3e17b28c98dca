"""Tiny random checkpoints written by transformers, and a runner for a model with its own pool."""

import random
import shutil
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from tests.kernels.row_counts import rows_of
from tllm_spec.attention.choice import create_backend
from tllm_spec.attention.geometry import Geometry, KVFormat, KVPool
from tllm_spec.attention.interface import (
    AttentionBackend,
    AttentionMetadata,
    ForwardContext,
    HeadsBackend,
)
from tllm_spec.attention.recurrent import RecurrentGeometry, RecurrentMemory, RecurrentRows
from tllm_spec.attention.vanilla import VanillaAttention
from tllm_spec.distributed.communicator import SINGLE_RANK, Mapping
from tllm_spec.kernels.states.delta_blocks import BLOCK_ROWS
from tllm_spec.models.draft_head import DraftHead
from tllm_spec.models.llama import CausalLM
from tllm_spec.models.registry import load_model

VOCAB_SIZE = 128
MAX_POSITIONS = 64
# Of layers with a recurrent state.
WIDEST, NUM_SLOTS = 8, 8
CPU = torch.device("cpu")


# Of models of random weights.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
}


def randomise(model: Any, *, norms: float = 1.0, has_stacks: bool = False) -> None:
    """norms: what is added to the weights of norms; has_stacks: of matrices with inputs first."""
    generator = torch.Generator().manual_seed(1)
    biases = [item for item in model.named_buffers() if item[0].endswith("correction_bias")]
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *biases]:
            noise = torch.randn(parameter.shape, generator=generator)
            is_stack = has_stacks and parameter.dim() == 3
            inputs = parameter.shape[-2 if is_stack else -1]
            scaled = noise * (inputs**-0.5 if parameter.dim() > 1 else 0.3)
            parameter.copy_(scaled + norms if "norm" in name else scaled)


def save_checkpoint(
    folder: Path, architecture: str, *, shard_size: str = "1GB", **config: Any
) -> Any:
    """Write a random model of `architecture` (`Llama`, `Qwen3`, …) to `folder`; returns it."""
    sizes = SIZES | {"sliding_window": None}
    kind = "Gemma3Text" if architecture == "Gemma3" else architecture
    settings = getattr(transformers, f"{kind}Config")(**(sizes | config))
    model = getattr(transformers, f"{architecture}ForCausalLM")(settings).eval()
    randomise(model)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return model


def load(folder: Path, **options: Any) -> CausalLM:
    options = {"dtype": torch.float32, "device": CPU, "max_positions": MAX_POSITIONS} | options
    return load_model(folder, **options)


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=count)


def reference_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """`[len(tokens), V]` from one forward in transformers, without a cache."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert expected.std() > 0.3, "logits this flat would hide a difference"
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


def quantised_pair(
    folder: Path,
    save: Callable[[Path], object],
    quantise: Callable[[Path], dict[str, torch.Tensor]],
) -> tuple[Path, Path]:
    """The folders of a model that `quantise` rewrites, and of the values that it returns."""
    quantised, plain = folder / "quantised", folder / "plain"
    save(plain)
    shutil.copytree(plain, quantised)
    save_file(quantise(quantised), plain / "model.safetensors")
    return quantised, plain


def check_same_logits(*models: CausalLM, tokens: list[int]) -> torch.Tensor:
    """Returns the logits of the last model."""
    found, expected = (PagedRunner(model).step({0: tokens})[0] for model in models)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    return expected


def pages_for(texts: list[list[int]]) -> int:
    """Pages of a PagedRunner's size for the texts and 16 more tokens of each."""
    return sum(len(text) // 4 + 5 for text in texts)


class PagedRunner:
    """Runs forwards of requests, which are numbers; pages are allocated in a shuffled order."""

    def __init__(
        self,
        model: CausalLM,
        num_pages: int = 64,
        page_size: int = 4,
        mapping: Mapping = SINGLE_RANK,
    ) -> None:
        self.model, self.mapping = model, mapping
        self.page_size = page_size
        self.num_pages = num_pages
        self.use_layers_of(model)
        self.free = random.Random(2).sample(range(num_pages), num_pages)
        self.pages: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}

    def use_layers_of(self, model: CausalLM | DraftHead) -> None:
        """Makes a pool and a VANILLA backend for each of its layer groups."""
        groups = model.config.layer_groups(self.mapping)
        self.pools = [
            KVPool(
                group.geometry,
                num_pages=self.num_pages,
                page_size=self.page_size,
                kv_format=KVFormat(model.dtype),
                device=model.device,
            )
            for group in groups
        ]
        self._geometries = [group.geometry for group in groups]
        self.memory: RecurrentMemory | None = None
        if (delta := model.config.delta) is not None:
            shape = delta.shape(self.mapping)
            geometry = RecurrentGeometry(len(delta.layers), shape, WIDEST, BLOCK_ROWS)
            self.memory = RecurrentMemory(geometry, NUM_SLOTS, model.dtype, model.device)
        self.use(partial(create_backend, VanillaAttention))

    def use(self, create: Callable[[Geometry, KVPool], AttentionBackend]) -> None:
        self.backends = [
            create(geometry, pool)
            for geometry, pool in zip(self._geometries, self.pools, strict=True)
        ]

    def context(
        self, metadata: AttentionMetadata, *arguments: Any, **options: Any
    ) -> ForwardContext:
        """All groups have the same pages."""
        groups = ((backend, backend.plan(metadata)) for backend in self.backends)
        return ForwardContext(tuple(groups), *arguments, **options)

    @property
    def pool(self) -> KVPool:
        """The pool of a model with one group."""
        [pool] = self.pools
        return pool

    @torch.inference_mode()
    def step(
        self,
        contexts: dict[int, list[int]] | None = None,
        windows: dict[int, list[int]] | None = None,
        slack: int = 0,
    ) -> dict[int, torch.Tensor]:
        """Logits `[n, V]` from one forward over new tokens of each request. `slack` is added to the
        length bound."""
        contexts, windows = contexts or {}, windows or {}
        rows = contexts | windows
        metadata = self.metadata(contexts, windows, slack)
        tokens = torch.tensor(
            [token for tokens in rows.values() for token in tokens], device=self.model.device
        )
        context = self.context(metadata, recurrent=self.recurrent(contexts, windows))
        logits = self.model.compute_logits(self.model(tokens, metadata.positions, context))
        return dict(zip(rows, logits.split([len(tokens) for tokens in rows.values()]), strict=True))

    def metadata(
        self, contexts: dict[int, list[int]], windows: dict[int, list[int]], slack: int
    ) -> AttentionMetadata:
        positions, slots, kv_lens = [], [], []
        for request, tokens in (contexts | windows).items():
            start = self.lengths.get(request, 0)
            end = self.lengths[request] = start + len(tokens)
            pages = self.pages.setdefault(request, [])
            while len(pages) * self.page_size < end:
                pages.append(self.free.pop())
            positions += range(start, end)
            slots += [self._slot(pages, position) for position in range(start, end)]
            kv_lens.append(end)
        max_kv_len = max(kv_lens[len(contexts) :], default=0) + slack
        width = -(-max(*kv_lens, max_kv_len) // self.page_size)
        tables = [(self.pages[request] + [0] * width)[:width] for request in contexts | windows]
        on = {"device": self.model.device}
        return AttentionMetadata(
            context_lens=tuple(len(tokens) for tokens in contexts.values()),
            context_kv_lens=tuple(kv_lens[: len(contexts)]),
            rows=rows_of([len(tokens) for tokens in windows.values()]),
            block_tables=torch.tensor(tables, dtype=torch.int32, **on),
            kv_lens=torch.tensor(kv_lens, dtype=torch.int32, **on),
            positions=torch.tensor(positions, **on),
            kv_slots=torch.tensor(slots, **on),
            max_kv_len=max_kv_len,
        )

    def recurrent(
        self, contexts: dict[int, list[int]], windows: dict[int, list[int]]
    ) -> RecurrentRows | None:
        """The rows of the latest metadata in layers with a state; a request's number is its
        slot."""
        if self.memory is None:
            return None
        parts = []
        for requests, are_kept in ((contexts, True), (windows, False)):
            if requests:
                counts = [len(tokens) for tokens in requests.values()]
                starts = [self.lengths[request] - len(requests[request]) for request in requests]
                on = {"device": self.model.device}
                slots, first = torch.tensor([*requests], **on), torch.tensor(starts, **on)
                rows = rows_of(counts, device=str(self.model.device))
                parts.append(self.memory.begin(slots, first, rows, are_kept=are_kept))
        return RecurrentRows(self.memory, parts)

    def _slot(self, pages: list[int], position: int) -> int:
        return pages[position // self.page_size] * self.page_size + position % self.page_size

    def rewind(self, request: int, count: int) -> None:
        self.lengths[request] -= count


def assert_logits_in_all_ways(
    folder: Path, kind: type[HeadsBackend], expected: torch.Tensor, tokens: list[int]
) -> None:
    """Logits `[64, V]` of 64 tokens as a prompt, in chunks, the last 24 one by one, in windows of
    8, and, after a rewind, in a window next to a shorter prompt."""
    runner = PagedRunner(load(folder), num_pages=128)
    use(runner, kind)

    def check(found: torch.Tensor, start: int = 0) -> None:
        torch.testing.assert_close(found, expected[start : start + len(found)], rtol=0, atol=1e-4)

    check(runner.step({0: tokens})[0])
    parts = [*pairwise((0, 3, 14, 25, 64))]
    check(torch.cat([runner.step({1: tokens[start:end]})[1] for start, end in parts]))
    runner.step({2: tokens[:40]})
    check(torch.cat([runner.step(windows={2: [token]})[2] for token in tokens[40:]]), 40)
    check(torch.cat([runner.step(windows={3: tokens[i : i + 8]})[3] for i in range(0, 64, 8)]))
    runner.rewind(3, 11)
    mixed = runner.step({4: tokens[:30]}, {3: tokens[53:61]})
    check(mixed[3], 53)
    check(mixed[4])


def use(runner: PagedRunner, kind: type[HeadsBackend]) -> None:
    """Backends of this kind for all layer groups."""
    runner.use(partial(create_backend, kind))
