"""Generated traces: Zipf objects, multi-turn chat, RAG, agents. Each is the same for the same seed."""

import numpy as np

from experiments.traces.trace import Trace
from experiments.traces.tree import densify
from workbench.errors import InvalidInputError

__all__ = ["agent", "chat", "rag", "zipf"]


def zipf(*, objects: int = 1_000_000, accesses: int = 10_000_000, exponent: float = 1.0, seed: int = 42) -> Trace:
    """Independent accesses to objects with probability 1 / rank ** exponent: one request, to replay as objects.

    The defaults give the trace that the reference miss ratios of libCacheSim were computed on.
    """
    if objects < 1 or accesses < 1:
        raise InvalidInputError(f"zipf needs at least 1 object and 1 access, got {objects} and {accesses}")
    weights = 1.0 / np.arange(1, objects + 1) ** exponent
    cumulative = np.cumsum(weights) / weights.sum()
    draws = np.random.Generator(np.random.PCG64(seed)).random(accesses)
    ids, _ = densify(np.searchsorted(cumulative, draws))
    return _trace("zipf", [ids], np.zeros(1), [0], 1)


def chat(
    *, sessions: int = 200, turns: int = 6, system_blocks: int = 8, block_tokens: int = 64, seed: int = 0
) -> Trace:
    """Conversations that share a few system prompts and grow turn by turn, with think times of about a minute."""
    rng = np.random.default_rng(seed)
    fresh = _Fresh()
    systems = [fresh.blocks(system_blocks) for _ in range(4)]
    requests = []
    for session in range(sessions):
        prompt = list(systems[min(3, rng.geometric(0.5) - 1)])
        clock = rng.uniform(0, 60.0 * sessions / 10)
        for _ in range(1 + rng.poisson(turns - 1)):
            prompt = prompt + fresh.blocks(1 + rng.poisson(3))  # the user's turn
            requests.append((clock, session, prompt))
            prompt = prompt + fresh.blocks(1 + rng.poisson(4))  # the answer comes back with the next turn
            clock += rng.exponential(60.0)
    return _from_requests("chat", requests, block_tokens)


def rag(*, requests: int = 2_000, documents: int = 300, block_tokens: int = 64, seed: int = 0) -> Trace:
    """A system prompt, three documents of Zipf popularity in varying order, a question; ids name prefixes."""
    rng = np.random.default_rng(seed)
    fresh = _Fresh()
    system = fresh.blocks(6)
    sizes = 2 + rng.poisson(6, documents)
    weights = 1.0 / np.arange(1, documents + 1)
    known: dict[tuple[int, int, int], int] = {}
    rows = []
    for number in range(requests):
        prompt = list(system)
        for document in rng.choice(documents, 3, replace=False, p=weights / weights.sum()):
            for part in range(sizes[document]):
                block = known.setdefault((prompt[-1], int(document), part), -1)
                if block < 0:
                    block = known[prompt[-1], int(document), part] = fresh.blocks(1)[0]
                prompt.append(block)
        rows.append((number * 0.5, number, prompt + fresh.blocks(1)))
    return _from_requests("rag", rows, block_tokens)


def agent(*, sessions: int = 40, steps: int = 40, block_tokens: int = 64, seed: int = 0) -> Trace:
    """Tool-using sessions: one shared tool prompt, many short steps, a sub-agent now and then, some compactions."""
    rng = np.random.default_rng(seed)
    fresh = _Fresh()
    tools = fresh.blocks(40)
    rows = []
    for session in range(sessions):
        prompt, clock = tools + fresh.blocks(4), 120.0 * session
        for _ in range(steps):
            prompt = prompt + fresh.blocks(1 + rng.poisson(2))
            rows.append((clock, session, prompt))
            if rng.random() < 0.1:  # a sub-agent starts from the tools alone
                branch = tools[:20] + fresh.blocks(3)
                for step in range(5):
                    branch = branch + fresh.blocks(2)
                    rows.append((clock + step, session, branch))
            if rng.random() < 0.03:  # the history is compacted: same tools, new summary
                prompt = tools + fresh.blocks(8)
            clock += rng.exponential(8.0)
    return _from_requests("agent", rows, block_tokens)


class _Fresh:
    """Hands out block ids that were never used."""

    def __init__(self) -> None:
        self._next = 0

    def blocks(self, count: int) -> list[int]:
        self._next += count
        return list(range(self._next - count, self._next))


def _from_requests(name: str, rows: list[tuple[float, int, list[int]]], block_tokens: int) -> Trace:
    rows = sorted(rows, key=lambda row: row[0])
    clocks = np.array([row[0] for row in rows])
    blocks = [np.array(row[2]) for row in rows]
    return _trace(name, blocks, clocks, [row[1] for row in rows], block_tokens)


def _trace(name: str, blocks: list[np.ndarray], clocks: np.ndarray, tenants: list[int], block_tokens: int) -> Trace:
    lengths = np.array([len(b) for b in blocks], np.int64)
    return Trace(
        name=name,
        ids=densify(np.concatenate(blocks))[0],
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        block_tokens=block_tokens,
        timestamps=clocks,
        input_tokens=lengths * block_tokens,
        output_tokens=np.zeros(len(blocks), np.int64),
        tenants=densify(np.array(tenants, np.int64))[0],
    )
