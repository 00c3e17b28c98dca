"""Outputs: diffs of a growing completion, and the definitions of the speculation figures."""

from tllm_spec.outputs import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    SpeculativeStats,
)

# Three rounds: 3, 3 and 1 drafts proposed; 3, 1 and 0 accepted; a stop cut the first run by one
# token.
STATS = SpeculativeStats(
    rounds=3, num_emitted_tokens=6, per_position_drafted=(3, 2, 2), per_position_accepted=(2, 1, 1)
)


def test_acceptance_length_counts_emitted_tokens_with_the_bonus_token() -> None:
    assert STATS.acceptance_length == 2.0


def test_acceptance_rate_counts_proposed_drafts_only() -> None:
    assert (STATS.num_drafted_tokens, STATS.num_accepted_tokens) == (7, 4)
    assert STATS.draft_acceptance_rate == 4 / 7
    assert STATS.per_position_acceptance == (2 / 3, 1 / 2, 1 / 2)


def test_the_histogram_counts_rounds_by_accepted_drafts() -> None:
    assert STATS.acceptance_histogram == (1, 1, 0, 1)
    assert sum(STATS.acceptance_histogram) == STATS.rounds


def test_figures_of_several_samples_are_added() -> None:
    other = SpeculativeStats(1, 2, (1,), (1,))
    total = STATS + other
    assert total == SpeculativeStats(4, 8, (4, 2, 2), (3, 1, 1))
    assert total == other + STATS
    assert STATS + SpeculativeStats() == STATS


def test_figures_without_rounds_are_zero() -> None:
    empty = SpeculativeStats()
    assert (
        empty.acceptance_length,
        empty.draft_acceptance_rate,
        empty.per_position_acceptance,
    ) == (0, 0, ())


def test_diffs_begin_at_the_last_delivery() -> None:
    output = CompletionOutput(
        index=0, text="ab", token_ids=[1, 2], logprobs=[{1: Logprob(-0.5, 1)}, {2: Logprob(-1.0)}]
    )
    assert (output.text_diff, output.token_ids_diff, output.length) == ("ab", [1, 2], 2)
    output.start_next_diff()
    assert (output.text_diff, output.token_ids_diff, output.logprobs_diff) == ("", [], [])
    output.text += "c"
    output.token_ids.append(3)
    output.logprobs.append({3: Logprob(-0.1, 1)})
    assert (output.text_diff, output.token_ids_diff) == ("c", [3])
    assert output.logprobs_diff == [{3: Logprob(-0.1, 1)}]


def test_a_request_sums_the_speculation_of_its_samples() -> None:
    samples = [CompletionOutput(index=0, speculative_decoding=STATS), CompletionOutput(index=1)]
    metrics = RequestMetrics(arrival_time=10.0, first_scheduled_time=10.5, first_token_time=11.0)
    request = RequestOutput(1, "a", [5], samples, metrics)
    assert request.speculative_decoding == STATS
    assert RequestOutput(1, "a", [5], samples[1:], metrics).speculative_decoding is None
    assert (metrics.queue_time, metrics.time_to_first_token, metrics.latency) == (0.5, 1.0, None)


def test_speculative_figures_show_the_acceptance() -> None:
    shown = repr(SpeculativeStats(4, 10, (4, 4), (4, 2)))
    assert "rounds=4, acceptance_length=2.50, draft_acceptance_rate=0.75" in shown
