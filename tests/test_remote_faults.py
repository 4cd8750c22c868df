"""Every fault x {contains, read, write, erase} of the remote tiers: exact or a named miss, in time, nothing deleted.

After each fault the server is well again, and the tier must find out by itself and give the same bytes as before.
"""

import threading
import time

import numpy as np
import pytest
from fault_servers import RespServer, S3Server, s3_options, wait_until

from workbench.errors import InvalidInputError
from workbench.testing_tiers import sample_chunks, sample_payload
from workbench.tiers.breaker import CircuitBreaker
from workbench.tiers.object_store import ObjectStoreTier
from workbench.tiers.presence import Presence
from workbench.tiers.redis import RedisTier
from workbench.tiers.remote import Pace, RemoteError

NBYTES = 20_000
FIRST_FAILURE, OPEN, RECOVERY = 0.3, 0.005, 5.0  # seconds, as promised
SLACK = 0.4  # seconds that a busy machine may add to a single measurement

WORDS = ["WRONGTYPE", "OOM", "NOAUTH", "LOADING", "READONLY", "MOVED", "ERR"]
# fault -> reasons that a read may give
REDIS_FAULTS = {
    "refused": {"refused"}, "blackhole": {"timeout"}, "slow": {"timeout"}, "drip": {"timeout"},
    "cut": {"disconnected"}, "close": {"disconnected"}, "integer": {"not the reply asked for"},
    "http": {"not the reply asked for"}, "huge": {"not the reply asked for"}, "unended": {"not the reply asked for"},
    "gone": {"absent"}, **{word: {word} for word in WORDS},
}  # fmt: skip
S3_FAULTS = {
    "refused": {"refused"}, "blackhole": {"timeout"}, "slow": {"timeout"}, "drip": {"timeout"},
    "truncated": {"disconnected"}, "wrong range": {"not the range asked for"}, "whole": {"not the range asked for"},
    "404 after HEAD": {"absent"},
    "403": {"http 403"}, "503": {"http 503"}, "500": {"http 500"}, "429": {"http 429"}, "404": {"absent"},
    "http": {"disconnected"},
}  # fmt: skip


class Medium:
    """A server that misbehaves on purpose, and tiers for it."""

    def tier_with(self, chunk):
        """A tier in which a chunk is stored."""
        tier = self.tier()
        wait_until(lambda: tier.write(chunk, sample_payload(chunk, NBYTES))[0] in ("", "dedup"), RECOVERY)
        wait_for_bytes(tier, chunk)
        return tier


class Redis(Medium):
    """Redis."""

    def __init__(self):
        self.server = RespServer()
        self.faults = REDIS_FAULTS
        self.values = self.server.values

    def tier(self):
        return RedisTier(self.server.url)


class S3(Medium):
    """An object store."""

    def __init__(self):
        self.server = S3Server()
        self.faults = S3_FAULTS
        self.values = self.server.objects

    def tier(self):
        return ObjectStoreTier("s3://kvcache/a", options=s3_options(self.server.port),
                               client_options={"allow_http": True})  # fmt: skip


@pytest.fixture(params=[Redis, S3], ids=["redis", "object_store"], scope="module")
def medium(request):
    medium = request.param()
    yield medium
    medium.server.stop()


def cells():
    yield from (pytest.param(Redis, fault, id=f"redis-{fault}") for fault in REDIS_FAULTS)
    yield from (pytest.param(S3, fault, id=f"object_store-{fault}") for fault in S3_FAULTS)


def set_fault(server, fault: str) -> None:
    if fault == "refused":
        server.stop()
    else:
        server.fault = fault


def clear_fault(server, fault: str) -> None:
    if fault == "refused":
        server.start()
    server.fault = ""


def wait_for_bytes(tier, chunk, seconds: float = RECOVERY) -> None:
    """Until the tier gives the chunk's bytes again; wrong bytes fail at once."""
    payload, out = sample_payload(chunk, NBYTES), np.zeros(NBYTES, np.uint8)
    wait_until(lambda: tier.read(chunk, out) == "", seconds)
    assert np.array_equal(out, payload)


def timed(call):
    start = time.monotonic()
    answer = call()
    return answer, time.monotonic() - start


@pytest.mark.parametrize("make, fault", cells())
def test_fault_matrix(make, fault):
    medium = make()
    server, reasons = medium.server, medium.faults[fault]
    good, new = sample_chunks(2)
    other, out = sample_payload(new, NBYTES), np.zeros(NBYTES, np.uint8)
    first = medium.tier_with(good)
    before = dict(medium.values)
    calls = {
        "contains": lambda tier: tier.contains([good.key, new.key]),
        "read": lambda tier: tier.read(good, out),
        "write": lambda tier: tier.write(new, other),
        "erase": lambda tier: tier.erase(new.key),
    }
    tiers = {name: medium.tier() for name in calls}  # each its own: the breaker of one would spare the others
    set_fault(server, fault)
    answers = {}
    for name, call in calls.items():
        answers[name], seconds = timed(lambda call=call, tier=tiers[name]: call(tier))
        assert seconds < FIRST_FAILURE + SLACK, f"{name} took {seconds:.3f} s"
    assert answers["read"] in reasons, f"read: {answers['read']!r}"
    assert answers["contains"] in ([False, False], [True, False])
    assert isinstance(answers["write"][0], str) and (answers["write"][0] or answers["write"][1] > NBYTES)
    clear_fault(server, fault)
    assert before.items() <= medium.values.items(), "a fault of the server deletes nothing"
    for tier in [first, *tiers.values()]:
        wait_until(lambda tier=tier: tier.contains([good.key]) == [True], RECOVERY)
        wait_for_bytes(tier, good)
        tier.close()
    server.stop()


@pytest.mark.parametrize("fault", ["refused", "blackhole", "slow", "drip", "http"])
def test_an_outage_is_paid_for_once(medium, fault):
    chunk = sample_chunks(1)[0]
    payload, out = sample_payload(chunk, NBYTES), np.zeros(NBYTES, np.uint8)
    tier = medium.tier_with(chunk)
    trips = tier.breaker.trips
    set_fault(medium.server, fault)
    try:
        _, seconds = timed(lambda: tier.read(chunk, out))
        assert seconds < FIRST_FAILURE + SLACK and tier.breaker.trips == trips + 1
        spent = [timed(lambda: (tier.contains([chunk.key] * 40), tier.read(chunk, out)))[1] for _ in range(300)]
        # A server that answers questions and fails transfers is trusted again now and then, and found out again.
        assert sorted(spent)[280] < OPEN, f"{sorted(spent)[-20:]}"
        assert timed(lambda: tier.write(chunk, payload))[1] < FIRST_FAILURE + SLACK
    finally:
        clear_fault(medium.server, fault)
    wait_for_bytes(tier, chunk)
    tier.close()


def test_a_transient_error_does_not_delete(medium):
    chunk = sample_chunks(1)[0]
    out = np.zeros(NBYTES, np.uint8)
    tier = medium.tier_with(chunk)
    medium.server.fault = "cut" if isinstance(medium, Redis) else "truncated"
    assert tier.read(chunk, out) == "disconnected"
    medium.server.fault = ""
    wait_for_bytes(tier, chunk)
    tier.close()


def test_a_reply_never_meets_another_call():
    """A call that gave up leaves its reply behind; the next call must not read it."""
    server = RespServer()
    tier = RedisTier(server.url, timeout_seconds=0.1)
    one, two = sample_chunks(2)
    outs = [np.zeros(NBYTES, np.uint8) for _ in range(2)]
    for chunk in (one, two):
        wait_until(lambda chunk=chunk: tier.write(chunk, sample_payload(chunk, NBYTES))[0] in ("", "dedup"), RECOVERY)
    server.fault = "drip"
    assert tier.read(one, outs[0]) == "timeout"
    server.fault = ""
    wait_for_bytes(tier, two)
    tier.close()
    server.stop()


def test_a_write_to_redis_that_is_overtaken_is_a_dedup():
    """Another engine stores between our question and our SET: the server refuses, nothing is replaced."""
    server = RespServer()
    tier = RedisTier(server.url, timeout_seconds=5.0)
    chunk = sample_chunks(1)[0]
    server.values[f"kvworkbench:{chunk.key.hex()}".encode()] = b"the other engine's"
    server.fault = "overtaken"
    assert tier.write(chunk, sample_payload(chunk, NBYTES)) == ("dedup", 0)
    assert list(server.values.values()) == [b"the other engine's"]
    tier.close()
    server.stop()


def test_an_interrupted_call_drops_its_connection(monkeypatch):
    server = RespServer()
    tier = RedisTier(server.url, timeout_seconds=5.0)
    chunk = sample_chunks(1)[0]
    payload, out = sample_payload(chunk, NBYTES), np.zeros(NBYTES, np.uint8)
    assert tier.write(chunk, payload)[0] == ""

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tier, "_judge", interrupt)
        with pytest.raises(KeyboardInterrupt):
            tier.read_many([chunk, chunk], [out, out])
    assert tier._idle == [], "a connection with replies under way was kept"
    assert tier.read(chunk, out) == "" and np.array_equal(out, payload)
    tier.close()
    server.stop()


# --- parts


def test_breaker_opens_at_the_first_failure_and_closes_when_a_probe_answers():
    well, probes = threading.Event(), []

    def probe() -> bool:
        probes.append(time.monotonic())
        return well.is_set()

    breaker = CircuitBreaker("test", probe)
    assert breaker.allows
    start = time.monotonic()
    breaker.trip("refused")
    breaker.trip("refused")
    assert not breaker.allows and breaker.trips == 1 and breaker.reason == "refused"
    wait_until(lambda: len(probes) >= 3, 3.0)
    assert probes[0] - start < 0.2, "the first probe is at once"
    assert probes[1] - probes[0] >= 0.25 and probes[2] - probes[1] >= 0.5, "then it rests longer each time"
    well.set()
    wait_until(lambda: breaker.allows, RECOVERY)
    breaker.trip("timeout")
    assert breaker.trips == 2
    known = len(probes)
    time.sleep(0.1)
    assert len(probes) == known and not breaker.allows, "one that failed again is not trusted at once"
    breaker.close()


def test_breaker_stops_probing_when_closed():
    probes = []
    breaker = CircuitBreaker("test", lambda: bool(probes.append(1)))
    breaker.trip("refused")
    wait_until(lambda: probes, 1.0)
    breaker.close()
    count = len(probes)
    time.sleep(0.4)
    assert len(probes) <= count + 1
    breaker.trip("again")
    assert breaker.trips == 1


def test_pace_bounds_silence_and_the_whole(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("workbench.tiers.remote.time.monotonic", lambda: now[0])
    pace = Pace(0.25, 1e6)
    assert pace.left() == 0.25
    now[0] += 0.2
    assert pace.left() == pytest.approx(0.05)
    pace.moved(500_000)
    assert pace.left() == 0.25, "bytes that arrived earn time, but silence stays bounded"
    now[0] += 0.56
    with pytest.raises(RemoteError, match="timeout"):
        pace.left()
    assert Pace(0.25, 1e6).left(unheard_bytes=1_000_000) == pytest.approx(1.25)


def test_limits_are_checked():
    with pytest.raises(InvalidInputError, match="over 0"):
        RedisTier(timeout_seconds=0)


class Asked:
    """Counts what it is asked."""

    def __init__(self, present):
        self.present, self.questions = set(present), []

    def contains(self, keys):
        self.questions.append(list(keys))
        return [key in self.present for key in keys]


def test_presence_asks_only_for_what_it_does_not_know():
    keys = [bytes([i]) for i in range(10)]
    now, tier = [0.0], Asked(keys[:6])
    presence = Presence(tier, seconds=2.0, batch=4, clock=lambda: now[0])
    assert presence.leading(keys) == 6 and tier.questions == [keys[:4], keys[4:8]]
    tier.questions.clear()
    assert presence.leading(keys[:6]) == 6 and tier.questions == []
    assert presence.leading(keys) == 6 and tier.questions == [keys[6:10]], "a no is asked again"
    tier.questions.clear()
    tier.present.add(keys[6])
    presence.forget(keys[2])
    assert presence.leading(keys) == 7 and tier.questions == [keys[2:6], keys[6:10]]
    now[0] = 3.0
    tier.present.clear()
    presence.note(keys[0])
    assert presence.leading(keys) == 1, "an old yes is not believed"
    assert presence.leading([]) == 0


def test_presence_forgets_the_oldest():
    keys = [bytes([i]) for i in range(10)]
    tier = Asked(keys)
    presence = Presence(tier, limit=3, batch=64)
    assert presence.leading(keys) == 10 and len(presence._known) == 3
