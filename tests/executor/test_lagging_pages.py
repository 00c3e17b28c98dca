"""Pages whose draft layers were not written yet: cached for the target all the same, and nobody
takes them for whole.

Random uses of the cache beside two simulated memories, the target's and the draft's, which is
written later."""

import random

import pytest

from tests.executor.paged_cache_driver import Device
from tllm_spec.executor.resources.paged_cache import PagedCache
from tllm_spec.executor.resources.radix import Node


class Lagging:
    """Sequences with their tokens, and how many of them the draft has read."""

    def __init__(self, num_pages: int, page_size: int, *, partial_reuse: bool = True) -> None:
        self.page_size = page_size
        self.target, self.draft = Device(num_pages, page_size), Device(num_pages, page_size)
        self.cache = PagedCache(
            num_pages, page_size, copy_page=self._copy_page, enable_partial_reuse=partial_reuse
        )
        self.tokens: dict[int, list[int]] = {}
        self.num_read: dict[int, int] = {}
        self._next_id = 0

    def _copy_page(self, source: int, destination: int) -> None:
        self.target.copy_page(source, destination)
        self.draft.copy_page(source, destination)

    def start(self, prompt: list[int], *, gives_up: bool = False) -> int | None:
        """Reads what the draft lacks of the prefix, then the prompt. None: no room, or it gave up
        before that."""
        seq_id, cache = self._next_id, self.cache
        self._next_id += 1
        cached = cache.add_sequence(seq_id, prompt)
        whole_len = cache.whole_len(seq_id)
        assert whole_len <= cached
        assert (
            self.draft.read(cache.pages(seq_id), whole_len) == self.draft.values(prompt)[:whole_len]
        )
        if gives_up or not cache.extend(seq_id, len(prompt)):
            cache.free(seq_id, prompt[:cached], whole_len)
            return None
        self.tokens[seq_id], self.num_read[seq_id] = list(prompt), whole_len
        self.target.write(cache.pages(seq_id), prompt, cached, len(prompt))
        self.catch_up(seq_id)
        return seq_id

    def begin(self, prompt: list[int]) -> int:
        seq_id = self.start(prompt)
        assert seq_id is not None
        return seq_id

    def catch_up(self, seq_id: int) -> None:
        tokens = self.tokens[seq_id]
        self.draft.write(self.cache.pages(seq_id), tokens, self.num_read[seq_id], len(tokens))
        self.num_read[seq_id] = len(tokens)

    def grow(self, seq_id: int, tokens: list[int], *, plain: bool) -> None:
        own, length = self.tokens[seq_id], len(self.tokens[seq_id])
        if not self.cache.extend(seq_id, length + len(tokens)):
            return
        own += tokens
        self.target.write(self.cache.pages(seq_id), own, length, len(own))
        if not plain:
            self.catch_up(seq_id)

    def store(self, seq_id: int) -> None:
        self.cache.store(seq_id, self.tokens[seq_id], self.num_read[seq_id])

    def free(self, seq_id: int) -> None:
        self.cache.free(seq_id, self.tokens.pop(seq_id), self.num_read.pop(seq_id))

    def lacking(self) -> list[Node]:
        return [node for node in self.cache._tree.nodes() if not node.is_whole]

    def check(self) -> None:
        self.cache.check_integrity()
        for seq_id, tokens in self.tokens.items():
            pages, num_read = self.cache.pages(seq_id), self.num_read[seq_id]
            assert self.target.read(pages, len(tokens)) == self.target.values(tokens)
            assert self.draft.read(pages, num_read) == self.draft.values(tokens)[:num_read]
        for node in self.cache._tree.nodes():
            path = [node]
            while path[0].parent is not None:
                path.insert(0, path[0].parent)
            values = self.target.values([token for each in path for token in each.key])[
                -len(node.key) :
            ]
            assert self.target.kv[node.page][: len(values)] == values
            if node.is_whole:
                assert self.draft.kv[node.page][: len(values)] == values, (
                    "it is not as whole as it says"
                )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("partial_reuse", [True, False])
@pytest.mark.parametrize("num_pages", [8, 20])
@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_a_draft_finds_whole_what_the_cache_says_is_whole(
    page_size: int, num_pages: int, partial_reuse: bool, seed: int
) -> None:
    rng = random.Random(1000 * seed + page_size * 100 + num_pages)
    use = Lagging(num_pages, page_size, partial_reuse=partial_reuse)
    texts = [rng.choices(range(2), k=2 * num_pages * page_size) for _ in range(2)]

    def text(length: int) -> list[int]:
        tokens = rng.choice(texts)[:length]
        if tokens and rng.random() < 0.3:
            tokens[rng.randrange(len(tokens))] += 1
        return tokens

    num_lacking = num_whole_again = 0
    for _ in range(1500):
        before = set(use.lacking())
        if not use.tokens or rng.random() < 0.3:
            use.start(text(rng.randint(1, page_size * num_pages // 2)), gives_up=rng.random() < 0.2)
        else:
            seq_id = rng.choice(list(use.tokens))
            action = rng.randrange(6)
            if action < 3:
                own = use.tokens[seq_id]
                use.grow(seq_id, text(len(own) + rng.randint(1, 4))[len(own) :], plain=action < 2)
            elif action < 5:
                use.store(seq_id)
            else:
                use.free(seq_id)
        num_lacking += len(set(use.lacking()) - before)
        num_whole_again += sum(node.is_whole for node in before)
        use.check()
    assert num_lacking > 50 and num_whole_again > 2


def test_a_prefix_that_lacks_the_drafts_part_is_reused_and_whole_as_soon_as_it_was_read() -> None:
    use = Lagging(num_pages=10, page_size=4)
    first = use.begin([1, 2, 3, 4, 5])
    use.grow(first, [6, 7, 8, 9, 10], plain=True)
    use.free(first)
    text = list(range(1, 11))
    assert use.cache.match([*text, 11]) == 10
    second = use.begin([*text, 11])
    use.store(second)
    assert use.cache.whole_len(second) == 11
    third = use.cache.add_sequence(99, [*text[:8], 50])
    assert third == 8 == use.cache.whole_len(99)


def test_a_page_with_the_drafts_part_takes_the_place_of_one_without_that_nobody_holds() -> None:
    use = Lagging(num_pages=12, page_size=2)
    first, second = (
        use.begin([1, 2]),
        use.begin([1, 2, 3, 4]),
    )  # side by side, nothing is cached yet
    use.grow(first, [3, 4], plain=True)
    use.free(first)
    assert [node.key for node in use.lacking()] == [(3, 4)]
    own = list(use.cache.pages(second))
    use.store(second)
    assert not use.lacking() and use.cache.pages(second)[1] == own[1]
    use.check()


def test_who_has_the_drafts_part_does_not_move_to_a_page_without_that_others_hold() -> None:
    use = Lagging(num_pages=12, page_size=2)
    first, second = use.begin([1, 2]), use.begin([1, 2, 3, 4, 5, 6])
    use.grow(first, [3, 4], plain=True)
    use.store(first)
    use.store(second)
    assert use.cache.pages(first)[0] == use.cache.pages(second)[0]
    assert len(use.cache.private_pages(second)) == 2
    use.check()
    use.free(second)
    assert use.cache.match([1, 2, 3, 4, 5, 6, 7]) == 4
    use.catch_up(first)
    use.store(first)
    assert not use.lacking()
    use.check()


def test_who_has_read_a_part_of_a_page_does_not_move_to_one_without_it() -> None:
    """It would go on from the middle of a page whose beginning nobody has read."""
    use = Lagging(num_pages=20, page_size=4)
    first, second = use.begin([1, 2, 3, 4, 5]), use.begin([1, 2, 3, 4])
    use.grow(second, [5, 6, 7, 8], plain=True)
    use.grow(first, [6, 7, 8], plain=True)
    use.store(second)
    use.store(first)
    use.check()
    use.catch_up(first)
    use.store(first)
    use.check()
