"""Contract suite of tiers, also for a class of your own: `check_tier(make)`, where `make()` gives an empty tier."""

import threading
from collections.abc import Callable, Sequence

import numpy as np

from workbench.chunks import Chunk, ChunkChain
from workbench.tiers.base import Tier

__all__ = ["check_tier", "sample_chunks", "sample_payload"]


def sample_chunks(count: int, *, chunk_tokens: int = 16, salt: int = 0) -> list[Chunk]:
    """Chunks of one prompt; another salt, another prompt."""
    tokens = np.random.default_rng(salt).integers(0, 1 << 20, count * chunk_tokens)
    return list(ChunkChain(bytes([salt % 256]) * 32, chunk_tokens).extend(tokens))


def sample_payload(chunk: Chunk, nbytes: int) -> np.ndarray:
    """Bytes that only this chunk has, no two pages alike: (nbytes,) uint8."""
    return np.random.default_rng(list(chunk.key)).integers(0, 256, nbytes, dtype=np.uint8)


def check_tier(make: Callable[[], Tier], *, nbytes: int = 20_000) -> None:
    """Hold a tier to its contract. Raises AssertionError that names the clause.

    Args:
        make: Gives a tier that holds none of the chunks of this suite; it is closed at the end.
        nbytes: Size of a payload; deliberately no multiple of a page.
    """
    tier = make()
    chunks = sample_chunks(6, salt=7)
    try:
        _check_round_trip(tier, chunks[0], nbytes)
        _check_identity(tier, chunks[1], nbytes)
        _check_presence(tier, chunks[2:4], nbytes)
        _check_threads(tier, nbytes)
    finally:
        tier.close()
        tier.close()
    out = np.zeros(nbytes, np.uint8)
    assert isinstance(tier.read(chunks[0], out), str), "a closed tier answers with a reason or the bytes"


def _check_round_trip(tier: Tier, chunk: Chunk, nbytes: int) -> None:
    payload, out = sample_payload(chunk, nbytes), np.zeros(nbytes, np.uint8)
    assert tier.read(chunk, out) == "absent", "what was never written is absent"
    reason, taken = tier.write(chunk, payload)
    assert reason == "" and 0 < taken <= tier.nbytes_of(nbytes, chunk.num_tokens), (
        f"a write of {nbytes} bytes gave {reason!r}, {taken}; nbytes_of allows "
        f"{tier.nbytes_of(nbytes, chunk.num_tokens)}"
    )
    assert tier.read(chunk, out) == "" and np.array_equal(out, payload), "read gives what write took"
    assert tier.write(chunk, sample_payload(chunk, nbytes))[0] == "dedup", "the first writer wins"
    tier.erase(chunk.key)
    tier.erase(chunk.key)
    assert tier.read(chunk, out) == "absent", "erase removes the bytes"
    assert tier.write(chunk, payload)[0] == "", "what was erased can be stored again"


def _check_identity(tier: Tier, chunk: Chunk, nbytes: int) -> None:
    """The key nominates, tokens, place and size decide."""
    out = np.zeros(nbytes, np.uint8)
    strangers = [
        chunk._replace(tokens=bytes(len(chunk.tokens))),
        chunk._replace(parent=bytes(32)),
        chunk._replace(start=chunk.start + 16, stop=chunk.stop + 16),
    ]
    for stranger in strangers:
        assert tier.write(chunk, sample_payload(chunk, nbytes))[0] in ("", "dedup")
        assert tier.read(stranger, out) == "mismatch", f"the record of another chunk was taken for {stranger}"
        assert tier.read(chunk, out) == "absent", "a record that is not what its key says is removed"
    assert tier.write(chunk, sample_payload(chunk, nbytes))[0] == ""
    reason = tier.read(chunk, np.zeros(nbytes - 1, np.uint8))
    assert reason in ("corrupt", "mismatch"), f"a record of another size was given as a hit: {reason!r}"


def _check_presence(tier: Tier, chunks: Sequence[Chunk], nbytes: int) -> None:
    present, absent = chunks
    assert tier.write(present, sample_payload(present, nbytes))[0] == ""
    if contains := getattr(tier, "contains", None):
        assert contains([]) == []
        assert contains([absent.key, present.key, absent.key]) == [False, True, False]


def _check_threads(tier: Tier, nbytes: int, threads: int = 4, rounds: int = 8) -> None:
    """Several threads, each with chunks of its own and all with one in common."""
    common = sample_chunks(1, salt=8)[0]
    faults: list[str] = []

    def work(number: int) -> None:
        out = np.zeros(nbytes, np.uint8)
        for chunk in [*sample_chunks(rounds, salt=9 + number), common]:
            payload = sample_payload(chunk, nbytes)
            reason, _ = tier.write(chunk, payload)
            if reason not in ("", "dedup"):
                faults.append(f"write: {reason}")
            elif (reason := tier.read(chunk, out)) or not np.array_equal(out, payload):
                faults.append(f"read: {reason or 'other bytes'}")

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not faults, f"{len(faults)} of {threads * (rounds + 1)} concurrent round trips failed: {faults[:3]}"
