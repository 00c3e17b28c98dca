"""How many random examples a test has: all in `make test-all`, and a quarter by default."""

from hypothesis import settings

QUARTER = "a quarter"
settings.register_profile(QUARTER, max_examples=settings.default.max_examples // 4)


def examples(number: int) -> settings:
    """`number` in `make test-all`."""
    share = settings.default.max_examples / settings.get_profile("default").max_examples
    return settings(max_examples=int(number * share), deadline=None)
