"""What of a running engine can be changed. A part's steps `stage` and `keep` are those of several
engines: all of them stage a change while requests run, and then all keep what is in force: the
change, or what was before it if any engine fails."""

from collections.abc import Callable

from tllm_spec.adapter_loading import AdapterLoading
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.draft_swap import DraftSwap
from tllm_spec.rank_calls import Pausing, RankCalls
from tllm_spec.target_update import TargetUpdate


class ChangingParts:
    """cancel_all, tell: as of `Pausing`."""

    def __init__(
        self,
        args: LlmArgs,
        calls: RankCalls,
        cancel_all: Callable[[], None],
        tell: Callable[[str | None], None] = lambda mode: None,
    ) -> None:
        self.draft = DraftSwap(args, calls)
        self.target = TargetUpdate(args, calls, self.draft.forced)
        self.adapters = AdapterLoading(calls)
        self.sleep = Pausing(calls, cancel_all, tell)
