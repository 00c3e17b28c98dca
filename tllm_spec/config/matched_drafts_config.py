"""The option by which drafts of a network and drafts that continue an earlier occurrence of the
text's end are combined."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from tllm_spec.config.config_base import ConfigModel
from tllm_spec.config.option_checks import NotServed
from tllm_spec.config.speculative_base import DecodingBaseConfig

MAX_MATCH = 64  # tokens of a text's end, as in TensorRT-LLM's pool
POOL_NOT_SERVED: Mapping[str, NotServed] = {
    "enable_global_pool": NotServed((False,), "a request is drafted for from its own text only"),
    "global_pool_size": NotServed((None,), "there is no pool: a request has its own text only"),
}


class SAEnhancerConfig(ConfigModel):
    """How drafts of a network and drafts that continue an earlier occurrence of the text's end are
    combined. Each request has those of one source in a round."""

    threshold: Annotated[int, Field(ge=1, le=MAX_MATCH)] | None = None
    """Tokens of the text's end that must occur earlier for the text's drafts to be taken instead of
    the network's. null: learned as it runs, from how many drafts of both were right after matches
    of each length. TensorRT-LLM's default is 4."""

    not_served: ClassVar[Mapping[str, NotServed]] = POOL_NOT_SERVED


class MatchedDraftsConfig(DecodingBaseConfig):
    """The option by which drafts of a network are combined with those of `SA`."""

    sa_config: SAEnhancerConfig | None = None
    """A mapping, also an empty one, combines the drafts with those of `SA`: a request whose text
    repeats itself has drafts that continue the earlier occurrence. For chains."""

    @model_validator(mode="after")
    def _check_matches(self) -> MatchedDraftsConfig:
        if self.sa_config is None:
            return self
        if self.drafts_trees:
            raise ValueError(
                "sa_config is refused for draft trees: a match is a chain, and one source has all "
                "drafts of a request; accepted: None"
            )
        if self.use_rejection_sampling:
            raise ValueError(
                "sa_config and use_rejection_sampling = True are exclusive: drafts that are copied "
                "from the text have no probabilities to accept against"
            )
        return self
