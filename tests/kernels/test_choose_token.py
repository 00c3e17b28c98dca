"""The kernels against their references, bit for bit: under Triton's interpreter by default, on a
CUDA device with `-m gpu`."""

from collections.abc import Callable

import pytest
import torch

from tests.kernels.cuda_graphs import captured_graph, copy_all
from tests.kernels.interpreter import DEVICES, INTERPRETED
from tllm_spec.distributed.communicator import Communicator, VocabShard
from tllm_spec.kernels.sampling.choose_token import (
    choose_best,
    choose_draft,
    choose_token,
    offer_token,
)
from tllm_spec.kernels.sampling.gumbel import DRAFT_DOMAIN, TARGET_DOMAIN, gumbel_noise

SEEDS = [0, 1, -1, -(2**63), 2**63 - 1, 1 << 32, 0x299F31D0A4093822, -123456789012345]
POSITIONS = [0, 1, 77, 4095, 2**31 - 1, 2**31, 2**32 - 1, 5]
NAN, INF = float("nan"), float("inf")
VOCAB_SIZES = [1, 3, 5, 64, 1000, 2048 + 3]

# Runs a function of choose_token_triton by name; arguments and result are on the CPU.
Run = Callable[..., torch.Tensor]


@pytest.fixture(params=DEVICES)
def run(request: pytest.FixtureRequest) -> Run:
    from tllm_spec.kernels.sampling import choose_token as choose_token_triton

    def there(argument: object) -> object:
        return argument.to(request.param) if isinstance(argument, torch.Tensor) else argument

    def run_there(name: str, *arguments: object, **options: object) -> torch.Tensor:
        result = getattr(choose_token_triton, name)(
            *map(there, arguments), **{key: there(value) for key, value in options.items()}
        )
        assert isinstance(result, torch.Tensor)
        return result.cpu()

    return run_there


def keys() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(SEEDS), torch.tensor(POSITIONS)


def random_logits(num_rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def near_ties(num_rows: int) -> tuple[torch.Tensor, ...]:
    """Arguments of `choose_token` with two tokens whose sums differ by at most a few float32
    steps."""
    generator = torch.Generator().manual_seed(3)
    seeds = torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator)
    positions = torch.arange(num_rows)
    temperature = torch.rand(num_rows, generator=generator) + 0.1
    first = torch.randn(num_rows, generator=generator) * 5
    noise = gumbel_noise(seeds, positions, 2)
    second = (first / temperature + noise[:, 0] - noise[:, 1]) * temperature
    steps = torch.randint(-2, 3, (num_rows,), generator=generator)
    second = (second.view(torch.int32) + steps.to(torch.int32)).view(torch.float32)
    return torch.stack((first, second), dim=1), temperature, seeds, positions


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("domain", [TARGET_DOMAIN, DRAFT_DOMAIN])
def test_the_kernels_noise_equals_the_references_bit_for_bit(
    run: Run, vocab_size: int, domain: int
) -> None:
    noise = run("gumbel_noise_triton", *keys(), vocab_size, domain)
    expected = gumbel_noise(*keys(), vocab_size, domain)
    assert torch.equal(noise.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_the_kernel_chooses_the_references_tokens_at_any_temperature(
    run: Run, vocab_size: int
) -> None:
    temperature = torch.tensor([0.7, 0.0, 1e-45, 1e-38, 1e-3, 1.0, 100.0, -0.0])
    arguments = (random_logits(8, vocab_size), temperature, *keys())
    chosen = run("choose_token_triton", *arguments)
    assert chosen.dtype == torch.int64
    assert chosen.tolist() == choose_token.reference(*arguments).tolist()


def test_sums_that_differ_in_the_last_bit_are_distinguished(run: Run) -> None:
    num_rows = 96 if INTERPRETED else 8192  # the interpreter takes 15 ms per row
    arguments = near_ties(num_rows)
    expected = choose_token.reference(*arguments)
    assert 0.2 < expected.double().mean() < 0.8  # both tokens win often
    assert torch.equal(run("choose_token_triton", *arguments), expected)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_with_nan_and_infinities_follow_the_documented_rules(
    run: Run, temperature: float
) -> None:
    vocab_size = 2048 + 3  # three parts
    logits = random_logits(8, vocab_size)
    logits[0, 2050] = NAN
    logits[1] = -INF
    logits[2, 7], logits[2, 1024] = INF, NAN  # a NaN wins over an earlier +inf
    logits[3, 1500] = INF
    logits[4, [2049, 1030, 40]] = INF
    logits[5], logits[5, 2047] = -INF, -1e30
    logits[6] = NAN
    logits[7, :2050] = -INF
    arguments = (logits, torch.full((8,), temperature), *keys())
    assert choose_token.reference(*arguments).tolist() == [-1, -1, -1, 1500, 40, 2047, -1, 2050]
    assert run("choose_token_triton", *arguments).tolist() == [-1, -1, -1, 1500, 40, 2047, -1, 2050]


def test_ties_go_to_the_lowest_token_id(run: Run) -> None:
    logits = random_logits(8, 3000)
    ties = [
        [2999, 1],
        [1023, 1024],
        [0, 2999],
        [5, 4, 3],
        [1500, 1501],
        [2047, 2048],
        [800, 801],
        [2, 1026],
    ]
    for row, tied in enumerate(ties):
        logits[row, tied] = 50.0
    logits[7, 2], logits[7, 1026] = -0.0, 0.0  # equal numbers
    logits[7, logits[7] > 0] = -1.0
    arguments = (logits, torch.zeros(8), *keys())
    expected = [min(tied) for tied in ties]
    assert choose_token.reference(*arguments).tolist() == expected
    assert run("choose_token_triton", *arguments).tolist() == expected


def test_sampled_sums_that_tie_go_to_the_lowest_token_id(run: Run) -> None:
    logits = torch.full((8, 2050), 1e30)  # the noise is lost in the rounding
    logits[:, :3] = -1.0
    arguments = (logits, torch.ones(8), *keys())
    assert choose_token.reference(*arguments).tolist() == [3] * 8
    assert run("choose_token_triton", *arguments).tolist() == [3] * 8


def test_arguments_may_be_columns_and_slices_of_tables(run: Run) -> None:
    table = random_logits(16, 1300)
    integers = torch.stack((*keys(), torch.arange(8)), dim=1)
    floats = torch.tensor([[0.5, 0.9]]).repeat(8, 1)
    views = (table[::2, 1:1101], floats[:, 0], integers[:, 0], integers[:, 1])
    assert not any(view.is_contiguous() for view in views)
    expected = choose_token.reference(*(view.contiguous() for view in views))
    assert torch.equal(run("choose_token_triton", *views), expected)
    noise = run("gumbel_noise_triton", *views[2:], 6)
    assert torch.equal(noise, gumbel_noise(*views[2:], 6))


def test_no_rows_give_no_tokens(run: Run) -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    assert run("choose_token_triton", torch.zeros(0, 9), torch.zeros(0), empty, empty).shape == (0,)
    assert run("gumbel_noise_triton", empty, empty, 9).shape == (0, 9)


def test_the_references_tokens_are_distributed_as_the_softmax() -> None:
    """Chi-square with 5 degrees of freedom is below 20.5 with probability 0.999."""
    num_rows, logits = 50_000, torch.tensor([0.0, 1.0, -1.0, 2.5, 0.3, 0.9])
    for temperature in (0.6, 1.7):
        tokens = choose_token.reference(
            logits.expand(num_rows, -1),
            torch.full((num_rows,), temperature),
            torch.full((num_rows,), 11),
            torch.arange(num_rows),
        )
        expected = (logits / temperature).softmax(-1) * num_rows
        assert ((torch.bincount(tokens, minlength=6) - expected) ** 2 / expected).sum() < 20.5


def test_greedy_and_sampled_rows_can_share_a_batch() -> None:
    logits = random_logits(8, 100)
    temperature = torch.tensor([0.0, 2.0]).repeat(4)
    tokens = choose_token.reference(logits, temperature, *keys())
    assert torch.equal(tokens[::2], logits.argmax(-1)[::2])
    assert not torch.equal(tokens[1::2], logits.argmax(-1)[1::2])
    noise = gumbel_noise(*keys(), 100)
    assert torch.equal(tokens[1::2], (logits / 2 + noise).argmax(-1)[1::2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_logits_give_the_tokens_of_their_float32_copies(
    run: Run, dtype: torch.dtype
) -> None:
    logits = random_logits(8, 2051).to(dtype)
    temperature = torch.tensor([0.7, 0.0, 1e-3, 1.0, 0.3, 2.0, 100.0, 0.0])
    expected = choose_token.reference(logits.float(), temperature, *keys())
    assert torch.equal(choose_token.reference(logits, temperature, *keys()), expected)
    assert torch.equal(run("choose_token_triton", logits, temperature, *keys()), expected)


@pytest.mark.parametrize("num_rows", [8, 19])  # 19 rows take long blocks
def test_choose_best_equals_temperature_zero(run: Run, num_rows: int) -> None:
    logits = random_logits(num_rows, 4096 + 905).bfloat16()  # many ties
    logits[0, 4500], logits[1], logits[2, 4999] = NAN, -INF, INF
    nothing = torch.zeros(num_rows, dtype=torch.int64)
    expected = choose_token.reference(logits.float(), nothing.float(), nothing, nothing)
    assert expected[:3].tolist() == [-1, -1, 4999]
    assert torch.equal(choose_best(logits), expected)
    assert torch.equal(run("choose_best_triton", logits), expected)


def test_tokens_below_the_cut_are_not_chosen(run: Run) -> None:
    logits, temperature = (
        random_logits(8, 2051),
        torch.tensor([0.7, 0.0, 0.9, 1.0, 3.0, 2.0, 5.0, 9.0]),
    )
    scaled = logits / temperature.unsqueeze(1)
    cut = scaled.sort(descending=True).values[:, 3].contiguous()  # four tokens stay
    cut[0], cut[2] = -INF, scaled[2].max()
    expected = choose_token.reference(
        scaled.masked_fill(scaled < cut.unsqueeze(1), -INF), torch.ones(8), *keys()
    )
    expected[1] = logits[1].argmax()  # greedy rows have no cut
    assert (choose_token.reference(logits, temperature, *keys())[4:] != expected[4:]).any()
    assert torch.equal(choose_token.reference(logits, temperature, *keys(), cut), expected)
    assert torch.equal(run("choose_token_triton", logits, temperature, *keys(), cut), expected)


@pytest.mark.parametrize("width", [1, 1500])
def test_drafts_of_a_reduced_vocabulary_use_the_targets_noise(run: Run, width: int) -> None:
    logits = random_logits(8, width).bfloat16()
    token_map = (
        torch.randperm(5003, generator=torch.Generator().manual_seed(4))[:width].sort().values
    )
    temperature = torch.tensor([0.7, 0.0, 1.0, 3.0, 0.3, 2.0, 100.0, 0.0])
    noise = gumbel_noise(*keys(), 5003)[:, token_map]
    sums = torch.where(
        temperature.unsqueeze(1) == 0,
        logits.float(),
        logits.float() / temperature.unsqueeze(1) + noise,
    )
    expected = token_map[sums.argmax(1)]
    assert torch.equal(choose_draft.reference(logits, token_map, temperature, *keys()), expected)
    drawn = run("choose_draft_triton", logits, token_map, temperature, *keys())
    assert torch.equal(drawn, expected)


def test_a_draft_is_always_a_valid_token(run: Run) -> None:
    logits = random_logits(3, 50)
    logits[0, 7], logits[1] = NAN, -INF
    token_map = torch.arange(50) * 2 + 9
    best = int(logits[2].argmax())
    for own, expected in ((None, [0, 0, best]), (token_map, [9, 9, best * 2 + 9])):
        assert choose_draft(logits, own).tolist() == expected
        found = run("choose_draft_triton", logits, own)
        assert found.tolist() == expected


@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize("drawn", [False, True])
def test_the_best_of_all_ranks_offers_is_the_choice_among_all_columns(
    run: Run, number: int, drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ties within and between ranks, and rows with NaN, +inf and only -inf."""
    logits = random_logits(8, 2048)
    logits[1, [5, 700, 1500]] = 20.0
    logits[2, 9], logits[2, 1700] = INF, NAN
    logits[3], logits[4, :1024] = -INF, -INF
    logits[5, [1023, 1024]] = INF
    temperature = torch.tensor([0.7, 0.0, 1.0, 3.0, 0.3, 2.0, 100.0, 0.0])
    keyed = (temperature, *keys()) if drawn else ()
    expected = choose_token.reference(logits, *keyed) if drawn else choose_best.reference(logits)
    size, offered = 2048 // number, list[torch.Tensor]()
    for rank in range(number):
        own, ids = logits[:, rank * size : (rank + 1) * size], torch.arange(2048)
        arguments = own, rank * size, ids[rank * size : (rank + 1) * size], *keyed
        offered.append(run("offer_token_triton", *arguments))
        assert torch.equal(offered[-1], offer_token.reference(*arguments))
    gathering = Communicator()
    monkeypatch.setattr(gathering, "all_gather", lambda offers: torch.cat(offered, 1))
    shard = VocabShard(gathering, 0, size)
    assert torch.equal(shard.communicator.best_offers(offered[0]), expected)


@pytest.mark.gpu
def test_a_large_vocabulary_has_the_references_noise_and_tokens_on_the_device(run: Run) -> None:
    num_rows, vocab_size = 40, 128256
    seeds, positions = (column.repeat(5) for column in keys())
    positions = positions ^ torch.arange(num_rows)
    noise = run("gumbel_noise_triton", seeds, positions, vocab_size)
    assert torch.equal(noise, gumbel_noise(seeds, positions, vocab_size))
    logits, temperature = (
        random_logits(num_rows, vocab_size).cuda(),
        torch.linspace(0, 1.5, num_rows).cuda(),
    )
    tokens = choose_token(logits, temperature, seeds.cuda(), positions.cuda())
    assert torch.equal(
        tokens.cpu(), choose_token.reference(logits.cpu(), temperature.cpu(), seeds, positions)
    )


@pytest.mark.gpu
def test_rows_may_start_beyond_2_to_the_31_elements() -> None:
    if torch.cuda.mem_get_info()[0] < 10 << 30:
        pytest.skip("needs 10 GB of free device memory")
    logits = torch.zeros((1 << 31) + 3000, device="cuda").as_strided((3, 3000), (1 << 30, 1))
    logits.copy_(random_logits(3, 3000))
    others = (torch.tensor([0.0, 0.8, 0.8]), *(column[:3] for column in keys()))
    tokens = choose_token(logits, *(column.cuda() for column in others))
    assert torch.equal(tokens.cpu(), choose_token.reference(random_logits(3, 3000), *others))


@pytest.mark.gpu
def test_a_captured_graph_can_be_replayed_with_other_arguments() -> None:
    def arguments(round_id: int) -> tuple[torch.Tensor, ...]:
        temperature = torch.tensor([0.0, 0.7, 1.0, 0.3]).roll(round_id).repeat(2)
        seeds, positions = keys()
        return (
            random_logits(8, 32003, round_id),
            temperature,
            seeds + round_id,
            positions + 7 * round_id,
        )

    static = tuple(argument.cuda() for argument in arguments(0))
    graph, tokens = captured_graph(lambda: choose_token(*static))
    for round_id in (1, 2, 3):
        copy_all(static, arguments(round_id))
        graph.replay()
        assert torch.equal(tokens.cpu(), choose_token.reference(*arguments(round_id)))
