"""The noise against Philox in Python integers, and its distribution."""

import pytest
import torch

from tllm_spec.kernels.sampling.gumbel import (
    COIN_DOMAIN,
    DRAFT_DOMAIN,
    RESIDUAL_DOMAIN,
    TARGET_DOMAIN,
    gumbel_noise,
    philox_bits,
    philox_bits_torch,
    uniform,
)

MASK = 0xFFFFFFFF
DOMAINS = (TARGET_DOMAIN, DRAFT_DOMAIN, COIN_DOMAIN, RESIDUAL_DOMAIN)


def philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox4x32-10 as in Salmon et al. (SC11), in Python integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & MASK, (p0 >> 32) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3


def bits(seed: int, position: int, num_tokens: int, domain: int = 0) -> list[int]:
    arguments = torch.tensor([seed]), torch.tensor([position]), num_tokens, domain
    found = philox_bits(*arguments)
    assert torch.equal(found, philox_bits_torch(*arguments))
    return found[0].tolist()


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((MASK,) * 4, (MASK, MASK), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_the_python_philox_of_these_tests_gives_the_known_answers_of_random123(
    counter: tuple[int, ...], key: tuple[int, int], words: str
) -> None:
    assert " ".join(f"{word:08x}" for word in philox(counter, key)) == words


def test_philox_bits_gives_the_known_answer() -> None:
    assert (
        " ".join(f"{word:08x}" for word in bits(0, 0, 4)) == "6627e8d5 e169c58d bc57ac4c 9b00dbd8"
    )


@pytest.mark.covering
@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("seed", [1, 0x299F31D0A4093822, 2**63 - 1, -1, -(2**63), 1 << 32])
@pytest.mark.parametrize("position", [0, 1, 77, 0x85A308D3, MASK])
def test_the_words_are_philox_of_token_quad_position_and_domain(
    seed: int, position: int, domain: int
) -> None:
    key = (seed & MASK, seed >> 32 & MASK)
    expected = [word for quad in range(3) for word in philox((quad, position, domain, 0), key)]
    assert bits(seed, position, 11, domain) == expected[:11]


def test_a_rows_words_depend_on_its_own_seed_and_position_only() -> None:
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**62), 2**62, (40,), generator=generator)
    positions = torch.randint(0, 5000, (40,), generator=generator)
    together = gumbel_noise(seeds, positions, 513)
    for row in (0, 17, 39):
        alone = gumbel_noise(seeds[row : row + 1], positions[row : row + 1], 513)
        assert torch.equal(together[row], alone[0])
    assert torch.equal(together[:, :100], gumbel_noise(seeds, positions, 100))


def test_every_seed_position_and_domain_gives_other_noise() -> None:
    rows = {
        tuple(bits(seed, position, 4, domain))
        for seed in (0, 1, 1 << 32, -1)
        for position in (0, 1, 2)
        for domain in DOMAINS
    }
    assert len(rows) == 4 * 3 * 4


def test_the_noise_has_the_gumbel_distribution() -> None:
    """exp(-exp(-noise)) is uniform. With 2**19 numbers each of 64 cells has 8192 +- 90; 5 sigma are
    allowed."""
    noise = gumbel_noise(torch.arange(1 << 9), torch.arange(1 << 9) * 3, 1 << 10)
    assert noise.dtype == torch.float32 and bool(noise.isfinite().all())
    cells = torch.bincount(
        (noise.double().neg().exp().neg().exp() * 64).long().flatten(), minlength=64
    )
    assert cells.numel() == 64 and (cells - 8192).abs().max() < 5 * 90


def test_the_argmax_of_logits_plus_noise_is_distributed_as_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, 2.5, 0.3])
    num = 200_000
    for seeds, positions in (
        (torch.arange(num), torch.zeros(num, dtype=torch.int64)),
        (torch.zeros(num, dtype=torch.int64), torch.arange(num)),
    ):
        drawn = (logits + gumbel_noise(seeds, positions, 5)).argmax(-1)
        expected = logits.softmax(-1)
        deviation = (expected * (1 - expected) / num).sqrt()
        assert ((torch.bincount(drawn, minlength=5) / num - expected).abs() < 5 * deviation).all()


def test_adjacent_positions_and_domains_are_independent() -> None:
    num = 100_000
    seeds, positions = torch.full((num,), 5), torch.arange(num)
    columns = [
        gumbel_noise(seeds, positions + shift, 1, domain)[:, 0]
        for shift, domain in ((0, 0), (1, 0), (0, 1))
    ]
    correlations = torch.corrcoef(torch.stack(columns)).fill_diagonal_(0.0)
    assert correlations.abs().max() < 5 / num**0.5


def test_uniform_numbers_fill_the_open_unit_interval() -> None:
    numbers = uniform(torch.arange(100_000), torch.arange(100_000), COIN_DOMAIN)
    assert numbers.dtype == torch.float64 and numbers.min() > 0 and numbers.max() < 1
    cells = torch.bincount((numbers * 50).long(), minlength=50)
    assert (cells - 2000).abs().max() < 5 * 45


def test_the_smallest_and_the_largest_word_give_finite_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "tllm_spec.kernels.sampling.gumbel.philox_bits",
        lambda *arguments: torch.tensor([[0], [MASK]]),
    )
    ends = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    low, high = gumbel_noise(*ends, 1)[:, 0].tolist()
    assert -4 < low < -3 and 22 < high < 24  # -ln(ln(2**33)) and ln(2**33)
    assert uniform(*ends, COIN_DOMAIN).min() > 0 and uniform(*ends, COIN_DOMAIN).max() < 1
