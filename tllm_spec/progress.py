"""How far long work is: a bar on a terminal, otherwise one line of the log for each part."""

import io
import logging
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

logger = logging.getLogger(__name__)

LINE = "{desc}: {n_fmt}/{total_fmt}{unit} [{elapsed}<{remaining}{postfix}]"
NOTHING_YET = " [00:00<?]"
LINE_WITH_BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt}{unit} [{elapsed}<{remaining}{postfix}]"


class Bar(tqdm):  # type: ignore[type-arg]  # it is subscriptable in its stubs only
    monitor_interval = 0  # no thread that draws


class LogLines(io.TextIOBase):
    """What tqdm draws, as lines of the log."""

    def write(self, text: str) -> int:
        if line := text.strip():
            logger.info(line.removesuffix(NOTHING_YET))
        return len(text)


class Progress:
    """How much is done. counts_parts: whether each part that has ended is one of the total."""

    def __init__(self, title: str, bar: Bar, *, counts_parts: bool) -> None:
        self._title, self._bar, self._counts_parts = title, bar, counts_parts
        self._has_begun = False

    def begin(self, part: str) -> None:
        """The next part begins, and the one before has ended."""
        if self._counts_parts:
            self._bar.update(self._has_begun)
        self._has_begun = True
        self._bar.set_description_str(f"{self._title}, {part}")

    def advance(self, amount: float = 1, note: str = "") -> None:
        self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(amount)


@contextmanager
def progress(
    title: str,
    total: float,
    unit: str = "",
    *,
    has_parts: bool = False,
    every: float = math.inf,
    is_shown: bool = True,
) -> Iterator[Progress]:
    """total: of `unit`, or without one the number of parts. has_parts: whether parts begin where
    amounts are counted. every: seconds between lines of the log while amounts are done; a part has
    one line when it begins."""
    is_drawn = sys.stderr.isatty() and "TQDM_DISABLE" not in os.environ
    with Bar(
        total=total,
        desc=title,
        unit=f" {unit}" if unit else "",
        file=None if is_drawn else LogLines(),
        bar_format=LINE_WITH_BAR if is_drawn else LINE,
        mininterval=0.1 if is_drawn else every,
        dynamic_ncols=is_drawn,
        position=None if is_drawn else 0,
        # After a delay the first drawing is that of `begin`.
        delay=0 if unit and not has_parts else 1e-9,
        miniters=0,
        leave=False,
        disable=not is_shown,
    ) as bar:
        yield Progress(title, bar, counts_parts=not unit)


def show_lines() -> None:
    """Shows the lines where a command's log has warnings only."""
    logger.setLevel(logging.INFO)
