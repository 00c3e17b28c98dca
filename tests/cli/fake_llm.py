"""An LLM without a model for the benchmark commands: its tokens and times are fixed."""

from collections.abc import AsyncIterator, Generator
from typing import Any, ClassVar

from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.outputs import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    SpeculativeStats,
)
from tllm_spec.sampling_params import SamplingParams

WRONG_DRAFT_LEN = 7  # an engine with this draft length has a wrong token at output position 2
FAILING_TOKEN = 666  # a prompt that starts with it fails


def make_output(
    input_len: int,
    output_len: int,
    *,
    latency_s: float = 2.0,
    stats: SpeculativeStats | None = None,
) -> RequestOutput:
    """A finished request that arrived at 100 s."""
    metrics = RequestMetrics(100.0, 100.0, 100.5, 100.0 + latency_s)
    sample = CompletionOutput(0, "text", list(range(output_len)), speculative_decoding=stats)
    return RequestOutput(0, None, [1] * input_len, [sample], metrics, finished=True)


class FakeHandle:
    def __init__(self, llm: "FakeLLM", output: RequestOutput) -> None:
        self.llm, self.output = llm, output
        self.prompt_token_ids = output.prompt_token_ids

    def __await__(self) -> Generator[None, None, RequestOutput]:
        yield  # lets other requests start before this one ends
        self.llm.under_way -= 1
        return self.output

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        self.llm.num_streamed += 1
        yield await self


class FakeTokenizer:
    def decode(self, token_ids: list[int], **options: Any) -> str:
        return f"prompt of {len(token_ids)} tokens"


class FakeLLM:
    """Output token i is i. With speculation a request has two rounds with 6 proposed and 3 accepted
    drafts."""

    made: ClassVar[list["FakeLLM"]] = []
    calls: ClassVar[list["FakeLLM"]] = []  # the engine of each request, in order

    def __init__(self, model: str, **arguments: Any) -> None:
        self.args = LlmArgs.from_kwargs(model, **arguments)
        self.tokenizer = FakeTokenizer()
        self.max_seq_len = self.args.max_seq_len or 4096
        self.under_way = self.max_under_way = self.num_streamed = 0
        self.rounds: list[dict[str, Any]] = []
        self.sampling: list[SamplingParams] = []
        FakeLLM.made.append(self)

    def __enter__(self) -> "FakeLLM":
        return self

    def __exit__(self, *exception: object) -> None:
        self.is_shut_down = True

    def server_info(self) -> dict[str, Any]:
        """As if each request so far had been one round with the largest draft length."""
        spec = self.args.speculative_config
        number = len(self.sampling)
        row = {"rounds": number, "request_rounds": number, "emitted_tokens": 2 * number}
        by_draft_len = {
            str(spec.max_draft_len if spec else 0): row | {"timed_rounds": 0, "seconds": 0.0}
        }
        totals = {"by_draft_len": by_draft_len, "draft_len_changes": 0}
        return {
            "internal_states": [
                {"totals": totals, "controller": {"decisions": {"num_switches": 0}}}
            ]
        }

    def get_stats(self) -> list[dict[str, Any]]:
        """A round for each request since the last call."""
        taken, self.rounds = self.rounds, []
        return taken if self.args.enable_iter_perf_stats else []

    def generate_async(
        self, prompt: str | list[int], params: SamplingParams, streaming: bool = False
    ) -> FakeHandle:
        FakeLLM.calls.append(self)
        self.sampling.append(params)
        self.rounds.append({"iter": len(self.sampling)})
        self.under_way += 1
        self.max_under_way = max(self.max_under_way, self.under_way)
        spec = self.args.speculative_config
        stats = SpeculativeStats(2, 5, (2, 2, 2), (2, 1, 0)) if spec else None
        output = make_output(len(prompt), params.max_tokens or 0, stats=stats)
        if spec and spec.max_draft_len == WRONG_DRAFT_LEN:
            output.outputs[0].token_ids[2] = -1
        if params.prompt_logprobs:
            predicted = ({token: Logprob(-1.0, 1)} for token in output.prompt_token_ids[1:])
            output.outputs[0].prompt_logprobs = [None, *predicted]
        if prompt[0] == FAILING_TOKEN:
            output.error = "the prompt is too long"
        return FakeHandle(self, output)
