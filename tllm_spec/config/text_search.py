"""How drafts are looked up in texts, and the options of texts that requests share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import PositiveInt

from tllm_spec.config.config_base import ConfigModel, PathText, check

MAX_MATCH = 64  # tokens of a text's end, as in TensorRT-LLM's pool
SHARED_WIDTH = 4096  # tokens of a row of shared texts, of which the last is none
MIN_SHARED = 64  # rows of finished texts, as many as TensorRT-LLM keeps


@dataclass(frozen=True)
class TextSearch:
    """max_match: tokens of a text's end that are compared, at most. oldest: of equally long matches
    the first is taken, not the last. num_shared: rows of finished texts that requests share; 0:
    they share none, and no texts of running requests either. corpus: the file of texts for every
    request, and how many tokens it has at most."""

    max_match: int
    oldest: bool = False
    num_shared: int = 0
    corpus: tuple[str, int] | None = None


class CorpusConfig(ConfigModel):
    """The options of texts that drafts are copied from for every request. SGLang's names begin with
    `speculative_ngram_`."""

    external_corpus_path: PathText | None = None
    """A `.jsonl` file of texts that drafts are also copied from, for every request: each line is a
    JSON string, or a list of token ids. They are on the device from the start on, and stay
    there."""
    external_corpus_max_tokens: PositiveInt = 1_000_000
    """Tokens of that file, at most; a longer one is refused. Each round reads 4 bytes of each for
    every request. SGLang's default is 10 million."""

    @check
    def _check_corpus(self) -> Iterator[str]:
        if self.external_corpus_path is None and (
            "external_corpus_max_tokens" in self.model_fields_set
        ):
            yield (
                f"external_corpus_max_tokens = {self.external_corpus_max_tokens} needs "
                "external_corpus_path"
            )

    @property
    def corpus(self) -> tuple[str, int] | None:
        path = self.external_corpus_path
        return None if path is None else (path, self.external_corpus_max_tokens)


class GlobalPoolConfig(CorpusConfig):
    """The options of a pool of texts."""

    enable_global_pool: bool = False
    """Drafts are also copied from texts of other requests with the same `cache_salt`: running ones,
    and finished ones. It proposes one user's text to another, who can tell from timing that it was
    there."""
    global_pool_size: PositiveInt | None = None
    """Finished texts of up to 4,095 tokens that are kept, more if they are shorter; the oldest go
    first. null: `max_batch_size`, and at least 64."""

    @check
    def _check_pool(self) -> Iterator[str]:
        if self.global_pool_size is not None and not self.enable_global_pool:
            yield f"global_pool_size = {self.global_pool_size} needs enable_global_pool: true"

    def num_shared(self, max_batch_size: int) -> int:
        """Rows of finished texts that requests share."""
        if not self.enable_global_pool:
            return 0
        return self.global_pool_size or max(MIN_SHARED, max_batch_size)
