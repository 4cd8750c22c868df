"""Figures with their units, the same in the terminal, in tables and in plots."""

__all__ = ["bytes_text", "seconds_text", "share_text", "times_text"]


def seconds_text(seconds: float | None) -> str:
    """Three significant digits in s, ms or µs; a dash for nothing."""
    if seconds is None:
        return "–"
    if seconds == 0:
        return "0 ms"
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if abs(seconds) >= 0.9995 * scale:
            return f"{_three_digits(seconds / scale)} {unit}"
    return f"{_three_digits(seconds / 1e-6)} µs"


def bytes_text(nbytes: float | None) -> str:
    """Three significant digits in B, KiB, MiB, GiB or TiB; a dash for nothing."""
    if nbytes is None:
        return "–"
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if abs(nbytes) >= 0.9995 * 2**power:
            return f"{_three_digits(nbytes / 2**power)} {unit}"
    return f"{nbytes:.0f} B"


def share_text(share: float | None) -> str:
    """A share of 1 in per cent with one decimal; a dash for nothing."""
    return "–" if share is None else f"{100 * share:.1f} %"


def times_text(times: float) -> str:
    """How many times, with the digits that a comparison of a few requests bears."""
    return f"{times:.{1 if times >= 2 else 2}f}"


def _three_digits(value: float) -> str:
    size = abs(value)
    decimals = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{value:.{decimals}f}"
