"""The option by which drafts of a network and drafts that continue an earlier occurrence of the
text's end are combined."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from tllm_spec.config.config_base import check
from tllm_spec.config.speculative_base import DecodingBaseConfig
from tllm_spec.config.text_search import MAX_MATCH, GlobalPoolConfig, TextSearch


class SAEnhancerConfig(GlobalPoolConfig):
    """How drafts of a network and drafts that continue an earlier occurrence of the text's end are
    combined. With chains each request has those of one source in a round; a tree has the likeliest
    of both."""

    threshold: Annotated[int, Field(ge=1, le=MAX_MATCH)] | None = None
    """Tokens of the text's end that must occur earlier for the text's drafts to be taken instead of
    the network's. null: learned as it runs, from how many drafts of both were right after matches
    of each length. TensorRT-LLM's default is 4."""

    def text_search(self, max_batch_size: int) -> TextSearch:
        return TextSearch(MAX_MATCH, num_shared=self.num_shared(max_batch_size), corpus=self.corpus)


class MatchedDraftsConfig(DecodingBaseConfig):
    """The option by which drafts of a network are combined with those of `SA`."""

    sa_config: SAEnhancerConfig | None = None
    """A mapping, also an empty one, combines the drafts with those of `SA`: a request whose text
    repeats itself has drafts that continue the earlier occurrence."""

    @check
    def _check_matches(self) -> Iterator[str]:
        if self.sa_config is not None and self.use_rejection_sampling:
            yield (
                "sa_config and use_rejection_sampling = True are exclusive: drafts that are copied "
                "from the text have no probabilities to accept against"
            )

    def text_search(self, max_batch_size: int) -> TextSearch | None:
        return None if self.sa_config is None else self.sa_config.text_search(max_batch_size)
