"""What a draft network on the target's pages should hold and propose: from one prefill of the true
tokens and a plain loop after it. Shared by the tests of drafters, graphs and overlap."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch

from tests.executor.harness import Harness, draft_target, output_of
from tests.models.eagle3_runner import HeadRunner, captured_states, captured_states_of
from tests.models.helpers import PagedRunner, pages_for
from tests.models.tiny_eagle import write_tiny_eagle
from tests.models.tiny_eagle3 import write_tiny_eagle3
from tllm_spec.attention.geometry import KVPool
from tllm_spec.executor.engine.rows import Windows
from tllm_spec.executor.request import LlmRequest, RequestState
from tllm_spec.executor.speculative.drafting.draft_net import (
    CausalNet,
    DraftNet,
    ExternalHeadNet,
    HeadNet,
)
from tllm_spec.executor.speculative.drafting.network_drafter import NetworkDrafter
from tllm_spec.kernels.sampling.gumbel import gumbel_noise
from tllm_spec.models.draft_head import HeadRows, Masks

LAYERS = (0, 1)  # of the two-layer target, for a head with num_captured=2
TOLERANCE = 1e-4
MASK = 63  # of heads and models that draft all tokens at once
HOT = 6.0  # a temperature at which the common noise makes any two networks agree now and then
# Pages for little more than a request, which others take from it.
PREEMPTS: dict[str, Any] = {
    "kv_cache_config": {"tokens_per_block": 4, "max_tokens": 72},
    "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"},
}
SMALL_POOL = PREEMPTS | {
    "max_batch_size": 4,
    "max_num_tokens": 24,
    "enable_chunked_prefill": True,
}


TREE = {"use_dynamic_tree": True, "dynamic_tree_max_topK": 3}


def eagle3(head: Path, draft_len: int = 3, **options: Any) -> dict[str, Any]:
    """Keyword arguments for EAGLE-3 decoding of a two-layer target."""
    return {
        "speculative_config": {
            "decoding_type": "Eagle3",
            "speculative_model": str(head),
            "max_draft_len": draft_len,
            "eagle3_layers_to_capture": LAYERS,
            **options,
        }
    }


def write_heads(folder: Path) -> Path:
    """An EAGLE-3 head for a two-layer target and, in folders in it, an EAGLE-1/2 head for the modes
    `eagle` and a P-EAGLE head for the modes `peagle`."""
    write_tiny_eagle(folder / "eagle", bias=True, seed=1)
    write_tiny_eagle3(folder / "peagle", num_captured=2, num_layers=2, mask_token=MASK, seed=2)
    return write_tiny_eagle3(folder, num_captured=2)


def eagle(head: Path, draft_len: int = 3, **options: Any) -> dict[str, Any]:
    """The same for an EAGLE-1/2 head."""
    own = {"decoding_type": "Eagle", "eagle3_layers_to_capture": None}
    return eagle3(head, draft_len, **own, **options)


def one_model(
    draft: Path, head: Path, mode: str, draft_len: int = 3, **options: Any
) -> dict[str, Any]:
    """Keyword arguments of a mode whose drafts share the target's pages, of `plain`, or of a draft
    model with pages of its own. With the ending `_tree` it drafts trees, with `_sa` also
    from matches in the text."""
    if mode.endswith("_tree"):
        mode, options = mode.removesuffix("_tree"), TREE | options
    if mode.endswith("_sa"):
        mode, options = mode.removesuffix("_sa"), {"sa_config": {}} | options
    if mode == "plain":
        return {}
    if mode == "sa":
        own = {"decoding_type": "SA", "max_draft_len": draft_len}
        return {"speculative_config": own | options}
    if mode == "draft_target_two_model":
        return draft_target(draft, draft_len, **options)
    if mode == "draft_target":
        return draft_target(draft, draft_len, draft_target_one_model=True, **options)
    if mode.startswith("pard"):
        options |= {"decoding_type": "PARD", "mask_token_id": MASK}
        options["draft_target_one_model"] = not mode.endswith("_two_model")
        return draft_target(draft, draft_len, **options)
    options["eagle3_one_model"] = not mode.endswith(("_two_model", "_onnxruntime"))
    if mode.endswith("_onnxruntime"):
        options["draft_backend"] = "onnxruntime"
    if mode.startswith("eagle3"):
        return eagle3(head, draft_len, **options)
    if mode.startswith("peagle"):
        return eagle3(head / "peagle", draft_len, **options)
    return eagle(head / "eagle", draft_len, **options)


def submit_traffic(harness: Harness, random: Random, number: int) -> list[LlmRequest]:
    """Prompts with common prefixes. Some requests are sampled; some have stop tokens, so that they
    end at unforeseen positions."""
    shared = [random.randrange(64) for _ in range(24)]
    return [
        harness.submit(
            shared[: random.randrange(20)]
            + [random.randrange(64) for _ in range(random.randrange(1, 9))],
            max_tokens=random.randrange(1, 26),
            temperature=HOT if index % 3 else None,
            stop_token_ids=[random.randrange(64) for _ in range(index % 4)],
        )
        for index in range(number)
    ]


def network_of(harness: Harness) -> NetworkDrafter:
    drafter = harness.parts.drafter
    assert isinstance(drafter, NetworkDrafter)
    return drafter


def draft_place(harness: Harness) -> tuple[int, KVPool]:
    """The pool of the draft layers, and the group that has it."""
    net = network_of(harness).net
    is_outside = isinstance(net, ExternalHeadNet)
    pool = net.pool if is_outside else net.attention.groups[0].backend.pool
    groups = enumerate(harness.parts.kv.groups)
    number = next(i for i, group in groups if any(own is pool for own in group.pools))
    return number, pool


def pools_of(harness: Harness) -> list[KVPool]:
    """All that have the target's pages: the draft layers' too, if there are any."""
    return [pool for group in harness.parts.kv.groups for pool in group.pools]


def spoil_free_pages(harness: Harness) -> None:
    """A read of a position that was not written since gives NaN."""
    kv = harness.parts.kv
    for free, group in zip(kv.cache._free_pages, kv.groups, strict=True):
        for pool in group.pools:
            pool.data[:, :, free] = torch.nan


def entries(pool: KVPool, pages: list[int], num_entries: int) -> torch.Tensor:
    """`[planes, num_entries, size]` of the first positions of the pages."""
    return pool.planes[:, pages].flatten(1, 2)[:, :num_entries]


def draft_entries(harness: Harness, request: LlmRequest, num_entries: int) -> torch.Tensor:
    group, pool = draft_place(harness)
    return entries(pool, harness.parts.kv.cache.pages(request.request_id, group), num_entries)


class SlowDrafter:
    """A request's draft network after one prefill of its tokens, by `slow_drafters`. logits:
    `[V_draft]`, state: `[1, H]` of a head, after the last token."""

    def __init__(
        self, harness: Harness, runner: PagedRunner, number: int, last: tuple[torch.Tensor, Any]
    ) -> None:
        net = network_of(harness).net
        self._map = net.head.draft_to_target if isinstance(net, HeadNet) else net.token_map
        self._masks = net.masks
        self._runner, self._number, self._vocab_size = runner, number, harness.vocab_size
        self._logits, self._state = last
        self.num_entries = runner.lengths[number]
        # A head's cache begins with the second token.
        self._num_tokens = self.num_entries + isinstance(net, HeadNet)

    def entries(self) -> torch.Tensor:
        """What the cache holds when nothing is missing, in the shape of `draft_entries`."""
        return entries(self._runner.pool, self._runner.pages[self._number], self.num_entries)

    def drafts(self, num_drafts: int, temperature: float | None, seed: int) -> list[int]:
        """Chosen one by one, or from mask rows. With a temperature the noise is the target's at the
        same position."""
        chosen: list[int] = []
        block = None if self._masks is None else self._block(self._masks, num_drafts - 1)
        for step in range(num_drafts):
            if step and block is None:
                self._read(chosen[-1])
            scores = self._logits if block is None or not step else block[step - 1]
            if temperature is not None:
                position = torch.tensor([self._num_tokens + step])
                noise = gumbel_noise(torch.tensor([seed]), position, self._vocab_size)[0]
                scores = scores / temperature + (noise if self._map is None else noise[self._map])
            best = int(scores.argmax())
            chosen.append(best if self._map is None else int(self._map[best]))
        return chosen

    def after(self, path: Sequence[int]) -> torch.Tensor:
        """The logits after more tokens, which are forgotten again."""
        before = self._logits, self._state
        for token in path:
            self._read(token)
        found, (self._logits, self._state) = self._logits, before
        self._runner.rewind(self._number, len(path))
        return found

    def _block(self, masks: Masks, number: int) -> torch.Tensor:
        """The logits of mask rows, which are forgotten again."""
        if not number:
            return self._logits.new_empty(0)
        tokens = [masks.token_id] * number
        if isinstance(self._runner, HeadRunner):
            assert masks.state is not None
            windows = {self._number: (tokens, masks.state.expand(number, -1))}
            logits, _ = self._runner.draft(windows=windows)[self._number]
        else:
            logits = self._runner.step(windows={self._number: tokens})[self._number]
        self._runner.rewind(self._number, number)
        return logits

    def _read(self, token: int) -> None:
        if isinstance(self._runner, HeadRunner):
            windows = {self._number: ([token], self._state)}
            logits, self._state = self._runner.draft(windows=windows)[self._number]
        else:
            logits = self._runner.step(windows={self._number: [token]})[self._number]
        self._logits = logits[-1]


def slow_drafters(harness: Harness, requests: list[LlmRequest]) -> list[SlowDrafter]:
    """One forward for all requests: the number of forwards is what such a test costs. The last
    token of each is the bonus token."""
    if not requests:
        return []
    net, target = network_of(harness).net, harness.parts.runner.engine.model
    texts = [request.tokens for request in requests]
    last: list[tuple[torch.Tensor, Any]]
    if isinstance(net, HeadNet):
        head: Any = net.head  # a runner takes whatever has a config and runs over pages
        spec = harness.parts.runner.engine.spec
        assert spec is not None
        states = captured_states_of(target, [text[:-1] for text in texts], spec.layers)
        contexts = {i: (text[1:], net.head.fuse(states[i])) for i, text in enumerate(texts)}
        runner: PagedRunner = HeadRunner(head, pages_for(texts))
        drafted = HeadRunner.draft(runner, contexts=contexts).values()
        last = [(logits[-1], state[-1:]) for logits, state in drafted]
    else:
        assert isinstance(net, CausalNet)
        runner = PagedRunner(net._model, pages_for(texts))
        last = [(logits[-1], None) for logits in runner.step(dict(enumerate(texts))).values()]
    return [SlowDrafter(harness, runner, i, each) for i, each in enumerate(last)]


def watch_logits(net: DraftNet) -> list[torch.Tensor]:
    """All logits that the network computes from now on."""
    found: list[torch.Tensor] = []
    compute_logits = net.compute_logits

    def kept(state: torch.Tensor) -> torch.Tensor:
        found.append(compute_logits(state))
        return found[-1]

    net.compute_logits = kept
    return found


def watch_correction(net: DraftNet) -> list[torch.Tensor] | None:
    """All logits that the network corrects from now on; None: it does not."""
    if (correction := net.correction) is None:
        return None
    found: list[torch.Tensor] = []
    forward = correction.forward

    def kept(*inputs: Any) -> Any:
        result = forward(*inputs)
        found.append(result[0].clone())
        return result

    correction.__dict__["forward"] = kept
    return found


def generating(harness: Harness) -> list[LlmRequest]:
    return [
        each for each in harness.parts.scheduler.running if each.state is RequestState.GENERATION
    ]


def assert_nothing_is_missing(harness: Harness, *requests: LlmRequest) -> None:
    assert_all_is_there(harness, slow_drafters(harness, list(requests)), requests)


def assert_all_is_there(
    harness: Harness, references: Sequence[SlowDrafter], requests: Sequence[LlmRequest]
) -> None:
    """references: of the requests, in their order."""
    for reference, request in zip(references, requests, strict=True):
        num_unread = max(0, request.draft_backlog - request.tokens_in_flight)
        num_entries = reference.num_entries - num_unread
        own = draft_entries(harness, request, num_entries)
        expected = reference.entries()[:, :num_entries]
        assert own.shape == expected.shape
        assert (own - expected).abs().max() < TOLERANCE


def assert_cached_pages_are_whole(harness: Harness) -> int:
    """Every position that the prefix cache offers was written in all pools. Returns how many
    there are."""
    kv, cache, num_cached = harness.parts.kv, harness.parts.kv.cache, 0
    for node in cache._tree.nodes():
        num_positions = len(node.key) - cache.lookahead
        for page, group in zip(node.pages, kv.groups, strict=True):
            for pool in group.pools:
                assert pool.data[:, :, page, :num_positions].isfinite().all()
        num_cached += num_positions
    return num_cached


def with_lengths(harness: Harness, lengths: Iterator[int] | int) -> None:
    """Sets the draft lengths of the rounds to come."""
    harness.parts.tier_for = lambda *_: lengths if isinstance(lengths, int) else next(lengths)


def count_forwards(harness: Harness) -> list[int]:
    """Rows of every forward of the draft network; of chunks outside torch, each is a forward."""
    rows: list[int] = []
    net = network_of(harness).net
    if isinstance(net, ExternalHeadNet):
        run = net._run

        def counted_run(windows: Windows, *others: Any) -> torch.Tensor:
            rows.append(windows.token_ids.numel())
            return run(windows, *others)

        net._run = counted_run  # type: ignore[method-assign] # a spy on this one object
        return rows
    forward = net.run

    def counted(read: HeadRows, *others: Any) -> torch.Tensor:
        rows.append(len(read.input_ids))
        return forward(read, *others)

    net.run = counted  # type: ignore[method-assign] # a spy on this one object
    return rows


def random_lengths(random: Random) -> Iterator[int]:
    while True:
        yield from [random.randrange(1, 4)] * random.randrange(1, 5)
        yield from [0] * random.choice((1, 5, 15, 16, 17, 40))


def assert_texts_are(requests: list[LlmRequest], expected: list[LlmRequest]) -> None:
    """The same as those of plain decoding; of cancelled ones a beginning."""
    for own, other in zip(requests, expected, strict=True):
        assert output_of(own) == output_of(other)[: own.num_output_tokens]
        assert own.num_output_tokens == other.num_output_tokens or own.finish_reason == "cancelled"


def assert_texts_are_those_of(plain: Harness, requests: list[LlmRequest]) -> None:
    """Runs the same requests, which are greedy or HOT, without drafts."""
    expected = [
        plain.submit(
            request.tokens[: request.prompt_len],
            request.max_tokens,
            temperature=None if request.rules.is_greedy else HOT,
            seed=request.seed,
        )
        for request in requests
    ]
    plain.run()
    assert_texts_are(requests, expected)


def assert_drafts_one_by_one(
    harness: Harness, layers: tuple[int, ...], reference: Any, draft_len: int
) -> None:
    """In every round, those of greedy requests. reference: of a head that reads these layers."""
    target, slots = harness.parts.runner.engine.model, harness.parts.slots
    token_map, num_checked = network_of(harness).net.token_map, 0
    while harness.round():
        for request in generating(harness):
            if request.rules.temperature:
                continue  # its drafts are sampled
            tokens = request.tokens[1:]
            hidden = reference.fuse(captured_states(target, request.tokens[:-1], layers))
            for _ in range(draft_len):
                logits, states = reference.forward(tokens, hidden)
                hidden = torch.cat((hidden, states[-1:]))
                best = logits[-1].argmax()
                tokens = [*tokens, int(best if token_map is None else token_map[best])]
            window = slots.window[request.slot].tolist()
            assert window == [request.tokens[-1], *tokens[-draft_len:]]
            num_checked += 1
    assert num_checked > 20


def assert_drafts_at_once(
    harness: Harness,
    layers: tuple[int, ...],
    block: Callable[[list[int], torch.Tensor, list[int]], torch.Tensor],
    draft_len: int,
) -> None:
    """In every round. block: the logits `[K, V]` of a head that drafts all tokens at once, after
    these tokens and the captured states before the last, each after the drafts before it."""
    target, slots = harness.parts.runner.engine.model, harness.parts.slots
    net, num_checked = network_of(harness).net, 0
    seen = watch_logits(net)
    corrected = watch_correction(net)
    while harness.round():
        running = generating(harness)
        for place, request in enumerate(running):
            captured = captured_states(target, request.tokens[:-1], layers)
            drafts = slots.window[request.slot, 1 : 1 + draft_len].tolist()
            logits = block(request.tokens, captured, drafts)
            last = seen[-1] if corrected is None else torch.cat(corrected[-draft_len:])
            own = last.view(draft_len, -1, logits.shape[1])
            if own.shape[1] == len(running):
                both = own[:, place].clamp_min(-1e9), logits.clamp_min(-1e9)
                assert (both[0] - both[1]).abs().max() < TOLERANCE
                num_checked += 1
            if not request.rules.temperature:
                best = logits.argmax(-1)
                best = best if net.token_map is None else net.token_map[best]
                assert slots.window[request.slot].tolist() == [request.tokens[-1], *best.tolist()]
    assert num_checked > 20
