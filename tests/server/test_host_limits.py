"""Limits that the host sets are read before they are met."""

import resource

import pytest

from tllm_spec.server.child import MIN_FILES, WANTED_FILES, memory_note, raise_file_limit

INFINITY = resource.RLIM_INFINITY


class Limits:
    """What the host would say; `raised` is what was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, soft: int, hard: int) -> None:
        self.raised: list[tuple[int, int]] = []
        monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
        monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: self.raised.append(limits))


@pytest.mark.parametrize(
    ("soft", "hard", "found"),
    [
        (1024, INFINITY, WANTED_FILES),
        (1024, 4096, 4096),
        (INFINITY, INFINITY, WANTED_FILES),
        (1 << 20, 1 << 20, 1 << 20),
        (MIN_FILES, MIN_FILES, MIN_FILES),
    ],
)
def test_the_limit_of_open_files_is_raised_as_far_as_it_may(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, found: int
) -> None:
    limits = Limits(monkeypatch, soft, hard)
    assert raise_file_limit() == found
    assert all(limit == (found, hard) for limit in limits.raised)


def test_too_few_open_files_are_refused_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    Limits(monkeypatch, 20, 20)
    with pytest.raises(ValueError, match=r"may have 20 open files, .* \(ulimit -n\)"):
        raise_file_limit()


def test_a_limit_of_the_address_space_is_named_where_a_process_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Limits(monkeypatch, INFINITY, INFINITY)
    assert memory_note() == ""
    Limits(monkeypatch, 600 << 20, INFINITY)
    assert memory_note() == "; a process may have 600 MiB of address space (ulimit -v)"
