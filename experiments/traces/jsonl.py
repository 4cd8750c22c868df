"""Block-hash traces as JSON lines (Mooncake, Bailian), read at hundreds of MB a second by a compiled scanner.

One line: {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}; other keys are skipped,
in any order, and `chat_id` becomes the tenant. The scanner checks the JSON that it reads; what it cannot read is
reported with its row, and left to Python's json module to explain.
"""

import json

import numpy as np
from numba import njit

__all__ = ["COLUMNS", "RowError", "scan_lines"]

COLUMNS = ("timestamp", "input_length", "output_length", "hash_ids", "chat_id")
TIMESTAMP, INPUT, OUTPUT, HASH_IDS, CHAT = range(5)
KEYS = np.frombuffer(b"".join(name.encode().ljust(16, b"\0") for name in COLUMNS), np.uint8).reshape(5, 16)

OK, MALFORMED, MISSING, NEGATIVE, NOT_WHOLE = range(5)  # NOT_WHOLE: a fraction or a number beyond 64 bits


class RowError(Exception):
    """One row that cannot be used.

    Args:
        row: Row number from 1.
        kind: A short name, under which skipped rows are counted.
        message: What is wrong with it.
    """

    def __init__(self, row: int, kind: str, message: str):
        super().__init__(f"row {row}: {message}")
        self.row, self.kind, self.message = row, kind, message


def scan_lines(data: np.ndarray) -> tuple[dict[str, np.ndarray], list[RowError]]:
    """Read JSON lines.

    Args:
        data: uint8[n], the file; the last line may lack its newline.

    Returns:
        Columns by name, plus "offsets" (int64[rows + 1] into hash_ids) and "row" (int64[rows], line numbers from 1);
        and the rows that were left out, with the reason.
    """
    lines = int(np.count_nonzero(data == 10)) + 1
    numbers = np.empty((5, lines), np.float64)
    ids = np.empty(len(data) // 2 + 1, np.int64)
    offsets = np.zeros(lines + 1, np.int64)
    rows = np.empty(lines, np.int64)
    problems = np.empty((lines, 4), np.int64)  # row, code, first byte, last byte
    count, bad = _scan(data, numbers, ids, offsets, rows, problems)
    columns: dict[str, np.ndarray] = {name: numbers[i, :count] for i, name in enumerate(COLUMNS)}
    columns["hash_ids"] = ids[: offsets[count]]
    columns["offsets"], columns["row"] = offsets[: count + 1], rows[:count]
    return columns, [_explain(data, *problem) for problem in problems[:bad].tolist()]


def _explain(data: np.ndarray, row: int, code: int, first: int, last: int) -> RowError:
    text = data[first:last].tobytes()
    try:
        value = json.loads(text)
    except ValueError as error:
        return RowError(row, "not JSON", f"not JSON ({error}): {text[:60]!r}")
    if not isinstance(value, dict):
        return RowError(row, "not an object", f"a JSON object is expected, got {text[:60]!r}")
    missing = [name for name in COLUMNS[:4] if name not in value]
    if missing:
        return RowError(row, "missing column", f"missing {', '.join(missing)}; got {', '.join(value)}")
    if code == NEGATIVE:
        return RowError(row, "negative id", "hash_ids holds a negative id")
    return RowError(row, "wrong type", f"lengths and ids must be whole numbers, ids a list: {text[:100]!r}")


@njit(cache=True, nogil=True)
def _scan(data, numbers, ids, offsets, rows, problems):
    n = len(data)
    position = 0
    line = 0
    count = 0
    bad = 0
    used = 0
    while position < n:
        line += 1
        first = position
        start = _skip_space(data, position)
        if start < n and data[start] == 10:  # an empty line
            position = start + 1
            continue
        if start >= n:
            break
        for column in range(5):
            numbers[column, count] = 0.0
        code, position, used_now = _object(data, start, numbers[:, count], ids, used)
        if code == OK:
            rest = _skip_space(data, position)
            if rest < n and data[rest] != 10:
                code = MALFORMED
        while position < n and data[position] != 10:
            position += 1
        if code == OK:
            used = used_now
            rows[count] = line
            count += 1
            offsets[count] = used
        else:
            problems[bad, 0] = line
            problems[bad, 1] = code
            problems[bad, 2] = first
            problems[bad, 3] = position
            bad += 1
        position += 1
    return count, bad


@njit(cache=True, nogil=True)
def _skip_space(data, position):
    while position < len(data) and (data[position] == 32 or data[position] == 9 or data[position] == 13):
        position += 1
    return position


@njit(cache=True, nogil=True)
def _object(data, position, row, ids, used):
    """Parse one object of a line: (code, position after it, ids used)."""
    n = len(data)
    found = 0
    if data[position] != 123:  # {
        return MALFORMED, position, used
    position = _skip_space(data, position + 1)
    while position < n and data[position] == 34:  # "
        key = position + 1
        position = _skip_string(data, position)
        column = _column(data, key, position - 1)
        position = _skip_space(data, position)
        if position >= n or data[position] != 58:  # :
            return MALFORMED, position, used
        position = _skip_space(data, position + 1)
        if position >= n:
            return MALFORMED, position, used
        if column == HASH_IDS:
            code, position, used = _id_list(data, position, ids, used)
            if code != OK:
                return code, position, used
            found |= 1 << HASH_IDS
        elif column >= 0 and (data[position] == 45 or 48 <= data[position] <= 57):
            value, position, whole = _number(data, position)
            if not whole and column != TIMESTAMP:
                return NOT_WHOLE, position, used
            row[column] = value
            found |= 1 << column
        else:
            position = _skip_value(data, position)
        position = _skip_space(data, position)
        if position < n and data[position] == 44:  # ,
            position = _skip_space(data, position + 1)
            if position < n and data[position] != 34:
                return MALFORMED, position, used
        elif position < n and data[position] != 125:
            return MALFORMED, position, used
    if position >= n or data[position] != 125:  # }
        return MALFORMED, position, used
    wanted = (1 << TIMESTAMP) | (1 << INPUT) | (1 << OUTPUT) | (1 << HASH_IDS)
    return OK if found & wanted == wanted else MISSING, position + 1, used


@njit(cache=True, nogil=True)
def _column(data, start, stop):
    for column in range(5):
        i = 0
        while start + i < stop and i < 16 and data[start + i] == KEYS[column, i]:
            i += 1
        if start + i == stop and (i == 16 or KEYS[column, i] == 0):
            return column
    return -1


@njit(cache=True, nogil=True)
def _skip_string(data, position):
    position += 1
    while position < len(data) and data[position] != 34 and data[position] != 10:
        position += 2 if data[position] == 92 else 1
    return position + 1


@njit(cache=True, nogil=True)
def _skip_value(data, position):
    """Past a string, a number, a word, or a nested list or object, up to the comma or brace after it."""
    depth = 0
    while position < len(data) and data[position] != 10:
        byte = data[position]
        if byte == 34:
            position = _skip_string(data, position)
            continue
        if byte == 91 or byte == 123:
            depth += 1
        elif depth == 0 and (byte == 44 or byte == 125):
            return position
        elif byte == 93 or byte == 125:
            depth -= 1
        position += 1
    return position


@njit(cache=True, nogil=True)
def _number(data, position):
    """(value, position after it, whether it is a whole number that an int64 holds)."""
    n = len(data)
    sign = 1.0
    if data[position] == 45:
        sign = -1.0
        position += 1
    value = 0.0
    while position < n and 48 <= data[position] <= 57:
        value = value * 10.0 + (data[position] - 48)
        position += 1
    whole = value < 2.0**53
    if position < n and data[position] == 46:
        whole = False
        scale = 0.1
        position += 1
        while position < n and 48 <= data[position] <= 57:
            value += (data[position] - 48) * scale
            scale *= 0.1
            position += 1
    if position < n and (data[position] == 101 or data[position] == 69):
        whole = False
        position += 1
        negative = position < n and data[position] == 45
        if position < n and (data[position] == 45 or data[position] == 43):
            position += 1
        exponent = 0
        while position < n and 48 <= data[position] <= 57:
            exponent = exponent * 10 + (data[position] - 48)
            position += 1
        value *= 10.0 ** (-exponent if negative else exponent)
    return sign * value, position, whole


@njit(cache=True, nogil=True)
def _id_list(data, position, ids, used):
    """Parse [1, 2, 3] into ids[used:]: (code, position after it, ids used)."""
    n = len(data)
    if data[position] != 91:
        return NOT_WHOLE, position, used
    position += 1
    while True:
        while position < n and data[position] == 32:
            position += 1
        if position >= n:
            return MALFORMED, position, used
        byte = data[position]
        if byte == 93:
            return OK, position + 1, used
        if byte == 45:
            return NEGATIVE, position, used
        if not 48 <= byte <= 57:
            return NOT_WHOLE, position, used
        value = np.int64(0)
        digits = 0
        while position < n and 48 <= data[position] <= 57:
            value = value * 10 + np.int64(data[position] - 48)
            position += 1
            digits += 1
        if digits > 18:
            return NOT_WHOLE, position, used
        ids[used] = value
        used += 1
        while position < n and data[position] == 32:
            position += 1
        if position < n and data[position] == 44:
            position += 1
        elif position >= n or data[position] != 93:
            return MALFORMED if position >= n or data[position] == 10 else NOT_WHOLE, position, used
