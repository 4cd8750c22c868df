"""The Redis tier against a real server: contract, records that were tampered with, access, outages, sharing."""

import logging
import multiprocessing
import os
import signal
import socket
import struct
import threading
import time

import numpy as np
import pytest
import redis
from fault_servers import certificate, free_port, redis_process, wait_until

from workbench.errors import InvalidInputError
from workbench.record import header_nbytes
from workbench.testing_tiers import check_tier, sample_chunks, sample_payload
from workbench.tiers.redis import PASSWORD_VARIABLE, RedisTier
from workbench.tiers.sealed import MAC_KEY_VARIABLE, Seal, seal_from_environment

pytestmark = pytest.mark.redis

NBYTES = 20_000
PATIENT = 5.0  # where no outage is tested: the machine may be busy
SECRET = "correct-horse-battery-staple"
KEY = b"0123456789abcdef0123456789abcdef"
COMMANDS = {"get", "set", "del", "exists", "strlen", "getrange", "auth", "select"}


@pytest.fixture(scope="module")
def server():
    server = redis_process()
    yield server
    server.close()


@pytest.fixture
def client(server):
    client = redis.Redis(port=server.port)
    client.flushall()
    client.config_resetstat()
    yield client
    client.close()


@pytest.fixture
def tier(server, client):
    tier = RedisTier(server.url, timeout_seconds=PATIENT)
    yield tier
    tier.close()


def stored(tier, *, salt: int = 0, nbytes: int = NBYTES):
    chunk = sample_chunks(1, salt=salt)[0]
    payload = sample_payload(chunk, nbytes)
    assert tier.write(chunk, payload) == ("", tier.nbytes_of(nbytes, chunk.num_tokens))
    return chunk, payload


def value_name(chunk) -> str:
    return f"kvworkbench:{chunk.key.hex()}"


def read(tier, chunk, nbytes: int = NBYTES):
    out = np.zeros(nbytes, np.uint8)
    return tier.read(chunk, out), out


def spent(call) -> float:
    start = time.monotonic()
    call()
    return time.monotonic() - start


# --- contract


@pytest.mark.parametrize("seal", [None, Seal(KEY)], ids=["plain", "sealed"])
@pytest.mark.parametrize("nbytes", [20_000, 300_001])
def test_keeps_the_contract(server, client, seal, nbytes):
    check_tier(lambda: RedisTier(server.url, timeout_seconds=PATIENT, seal=seal), nbytes=nbytes)
    used = {name.decode() if isinstance(name, bytes) else name for name in client.info("commandstats")}
    used = {name.removeprefix("cmdstat_") for name in used} - {"info", "config|resetstat", "flushall", "config"}
    assert used and used <= COMMANDS | {"hello", "client|setinfo", "client"}, used


def test_many_in_one_pipeline(tier):
    chunks = sample_chunks(40)
    payloads = [sample_payload(chunk, NBYTES) for chunk in chunks]
    assert {reason for reason, _ in tier.write_many(chunks[:30], payloads[:30])} == {""}
    outcomes = tier.write_many(chunks, payloads)
    assert [reason for reason, _ in outcomes] == ["dedup"] * 30 + [""] * 10
    tier.erase(chunks[5].key)
    outs = [np.zeros(NBYTES, np.uint8) for _ in chunks]
    assert tier.read_many(chunks, outs) == [""] * 5 + ["absent"] + [""] * 34
    assert all(np.array_equal(o, p) for i, (o, p) in enumerate(zip(outs, payloads, strict=True)) if i != 5)
    assert tier.contains([chunk.key for chunk in chunks]) == [i != 5 for i in range(40)]


def test_lookup_of_40_chunks_is_one_round_trip():
    """The server answers nothing before it has all 40 questions."""
    keys = [chunk.key for chunk in sample_chunks(40)]
    question = b"*2\r\n$6\r\nSTRLEN\r\n$76\r\nkvworkbench:" + b"0" * 64 + b"\r\n"
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                left = 40 * len(question)
                while left and (data := connection.recv(left)):
                    left -= len(data)
                connection.sendall(b":5000\r\n:0\r\n" * 20)
                connection.recv(1)

        threading.Thread(target=answer, daemon=True).start()
        tier = RedisTier(f"redis://127.0.0.1:{listener.getsockname()[1]}", timeout_seconds=PATIENT)
        assert tier.contains(keys) == [True, False] * 20
        tier.close()


# --- records that were tampered with


def damaged(record: bytes, at: int, how: str) -> bytes:
    if how == "flip":
        return record[:at] + bytes([record[at] ^ 1]) + record[at + 1 :]
    if how == "truncate":
        return record[:at]
    return record[:at] + bytes(len(record) - at)  # zeros from here on


def check_damage(client, tier, chunk, payload, *, at: int, how: str) -> str:
    record = client.get(value_name(chunk))
    bad = damaged(record, at, how)
    client.set(value_name(chunk), bad)
    reason, out = read(tier, chunk, payload.nbytes)
    if reason == "":
        assert np.array_equal(out, payload), f"wrong bytes after {how} at {at}"
        assert bad == record or (how == "flip" and 160 + len(chunk.tokens) <= at < 4096), f"{how} at {at} unseen"
    else:
        assert reason in ("corrupt", "absent") and not client.exists(value_name(chunk)), (reason, how, at)
        assert reason == "corrupt" or bad == b""
        assert read(tier, chunk, payload.nbytes)[0] == "absent", "removed once, then absent"
        assert tier.write(chunk, payload)[0] == ""
    return reason


@pytest.mark.parametrize("how", ["flip", "truncate", "zeros"])
def test_damage_is_a_miss_and_is_removed_once(client, tier, how):
    chunk, payload = stored(tier, nbytes=61_440)
    border = header_nbytes(chunk.num_tokens)
    offsets = [*range(0, 240, 3), *range(240, border + 61_440, 977), border - 1, border, border + 61_439]
    reasons = [check_damage(client, tier, chunk, payload, at=at, how=how) for at in offsets]
    assert reasons.count("corrupt") > 100


@pytest.mark.slow
@pytest.mark.parametrize("how", ["flip", "truncate", "zeros"])
def test_damage_at_every_offset(client, tier, how):
    chunk, payload = stored(tier, nbytes=61_440)
    for at in range(header_nbytes(chunk.num_tokens) + 61_440):
        check_damage(client, tier, chunk, payload, at=at, how=how)


def test_foreign_records_are_misses(client, tier):
    chunk, _ = stored(tier)
    record = client.get(value_name(chunk))
    other = sample_chunks(1, salt=1)[0]
    older = record[:8] + struct.pack("<I", 0) + record[12:]
    cases = [(other, record, "mismatch"), (chunk, record + b"x", "corrupt"), (chunk, record * 3, "corrupt"),
             (chunk, older, "corrupt"), (chunk, b"1", "corrupt")]  # fmt: skip
    for asked, value, expected in cases:
        client.set(value_name(asked), value)
        assert read(tier, asked)[0] == expected
        assert not client.exists(value_name(asked))
        assert read(tier, asked)[0] == "absent"
    assert tier.breaker.trips == 0


def test_a_bad_record_does_not_harm_its_neighbours(client, tier):
    chunks = sample_chunks(5)
    payloads = [sample_payload(chunk, NBYTES) for chunk in chunks]
    tier.write_many(chunks, payloads)
    client.set(value_name(chunks[1]), b"short")
    client.delete(value_name(chunks[2]))
    client.lpush(value_name(chunks[2]), "a list")
    client.delete(value_name(chunks[3]))
    outs = [np.zeros(NBYTES, np.uint8) for _ in chunks]
    assert tier.read_many(chunks, outs) == ["", "corrupt", "WRONGTYPE", "absent", ""]
    assert np.array_equal(outs[0], payloads[0]) and np.array_equal(outs[4], payloads[4])
    assert tier.contains([chunk.key for chunk in chunks]) == [True, False, False, False, True]
    assert not client.exists(value_name(chunks[1]), value_name(chunks[2]))


def test_a_store_replaces_what_is_no_record(client, tier):
    chunk = sample_chunks(1)[0]
    for spoil in (lambda: client.set(value_name(chunk), b"short"), lambda: client.lpush(value_name(chunk), "a list")):
        client.flushall()
        spoil()
        payload = sample_payload(chunk, NBYTES)
        assert tier.write(chunk, payload)[0] == ""
        reason, out = read(tier, chunk)
        assert reason == "" and np.array_equal(out, payload)


# --- seal


def test_a_record_without_the_right_seal_is_a_miss_by_name(server, client):
    ours, theirs, open_to_all = (
        RedisTier(server.url, timeout_seconds=PATIENT, seal=seal) for seal in (Seal(KEY), Seal(KEY[::-1]), None)
    )
    for forger in (theirs, open_to_all):
        chunk, _ = stored(forger)
        assert read(ours, chunk)[0] == "mac"
        assert not client.exists(value_name(chunk)) and read(ours, chunk)[0] == "absent"
    chunk, payload = stored(ours)
    reason, out = read(ours, chunk)
    assert reason == "" and np.array_equal(out, payload)
    record = client.get(value_name(chunk))
    padding = header_nbytes(chunk.num_tokens) - 1
    client.set(value_name(chunk), damaged(record, padding, "flip"))
    assert read(ours, chunk)[0] == "mac", "the seal covers the whole record, padding included"
    for tier in (ours, theirs, open_to_all):
        tier.close()


def test_the_mac_key_comes_from_the_environment(monkeypatch):
    monkeypatch.delenv(MAC_KEY_VARIABLE, raising=False)
    assert seal_from_environment() is None
    monkeypatch.setenv(MAC_KEY_VARIABLE, KEY.decode())
    seal = seal_from_environment()
    assert seal is not None and seal.tag(b"ab", b"c") == Seal(KEY).tag(b"abc")
    assert KEY.decode() not in repr(seal)
    monkeypatch.setenv(MAC_KEY_VARIABLE, "short secret")
    with pytest.raises(InvalidInputError) as error:
        seal_from_environment()
    assert "short secret" not in str(error.value) and "32" in str(error.value)


# --- access


def test_password(monkeypatch, caplog, tmp_path):
    locked, file = redis_process("--requirepass", SECRET), tmp_path / "password"
    caplog.set_level(logging.DEBUG)

    def tier(text: str = "") -> RedisTier:
        file.write_text(text + "\n")
        return RedisTier(locked.url, timeout_seconds=PATIENT, password_file=file if text else None)

    try:
        monkeypatch.setenv(PASSWORD_VARIABLE, SECRET)
        tiers = [tier(), tier(SECRET)]
        for salt, opened in enumerate(tiers):
            stored(opened, salt=salt)
        monkeypatch.delenv(PASSWORD_VARIABLE)
        tiers += [tier(), tier("wrong-" + SECRET)]
        assert [read(refused, sample_chunks(1)[0])[0] for refused in tiers[2:]] == ["NOAUTH", "WRONGPASS"]
        assert not tiers[3].breaker.allows
        assert SECRET not in caplog.text + "".join(repr(t) + str(vars(t.breaker)) for t in tiers)
        for opened in tiers:
            opened.close()
    finally:
        locked.close()


@pytest.mark.parametrize(
    "url", [f"redis://:{SECRET}@host", f"redis://host?password={SECRET}", f"http://{SECRET}", "redis://host:port"]
)
def test_a_url_that_is_none_or_holds_a_password_is_refused(url):
    with pytest.raises(InvalidInputError) as error:
        RedisTier(url)
    assert SECRET not in str(error.value)


def test_an_open_server_elsewhere_is_warned_of(caplog, monkeypatch):
    monkeypatch.delenv(PASSWORD_VARIABLE, raising=False)
    for url in ("redis://127.0.0.1", "redis://localhost", "redis://[::1]", "unix:///run/redis.sock"):
        RedisTier(url).close()
    assert not caplog.records
    RedisTier("redis://cache.example").close()
    assert "no password for cache.example" in caplog.text
    caplog.clear()
    monkeypatch.setenv(PASSWORD_VARIABLE, SECRET)
    RedisTier("redis://cache.example").close()
    assert not caplog.records


def test_tls(tmp_path):
    cert, key = certificate(tmp_path)
    port = free_port()
    url = f"rediss://127.0.0.1:{port}"
    files = ("--tls-cert-file", str(cert), "--tls-key-file", str(key), "--tls-ca-cert-file", str(cert))
    secure = redis_process("--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no", *files, port=port)
    try:
        check_tier(lambda: RedisTier(url, ca_file=cert, timeout_seconds=PATIENT), nbytes=500_000)
        stranger = RedisTier(url, timeout_seconds=PATIENT)
        assert stranger.write(sample_chunks(1)[0], np.zeros(9, np.uint8)) == ("unreachable", 0), "not trusted"
        stranger.close()
    finally:
        secure.close()


def test_unix_socket(tmp_path):
    path = tmp_path / "redis.sock"
    local = redis_process("--unixsocket", str(path))
    try:
        check_tier(lambda: RedisTier(f"unix://{path}", timeout_seconds=PATIENT))
    finally:
        local.close()


# --- limits


def test_a_value_beyond_the_servers_limit_is_refused_before_it_is_sent(client, tier):
    chunk = sample_chunks(1)[0]
    before = client.info("stats")["total_net_input_bytes"]
    assert tier.write(chunk, np.zeros(600 << 20, np.uint8)) == ("too large", 0)
    assert client.info("stats")["total_net_input_bytes"] - before < 10_000
    assert tier.breaker.allows and stored(tier)


def test_a_full_server_refuses_and_is_left_alone_for_a_moment(server, client, tier):
    stored(tier, salt=1)
    client.config_set("maxmemory", 1)
    try:
        chunk = sample_chunks(1)[0]
        payload = sample_payload(chunk, 5_000_000)
        assert tier.write(chunk, payload) == ("OOM", 0)
        before = client.info("stats")["total_net_input_bytes"]
        assert tier.write(chunk, payload) == ("OOM", 0)
        assert client.info("stats")["total_net_input_bytes"] - before < 10_000, "the record was sent again at once"
        assert read(tier, sample_chunks(1, salt=1)[0])[0] == "", "reads go on"
    finally:
        client.config_set("maxmemory", 0)
    wait_until(lambda: tier.write(chunk, payload)[0] == "", 5.0)


def test_records_expire_if_asked(server, client):
    tier = RedisTier(server.url, timeout_seconds=PATIENT, expire_seconds=60)
    chunk, _ = stored(tier)
    assert 50 < client.ttl(value_name(chunk)) <= 60
    tier.close()


# --- outages


def test_stopped_server(server, client):
    patient = RedisTier(server.url, timeout_seconds=PATIENT)
    chunk, payload = stored(patient)
    patient.close()
    tiers = [RedisTier(server.url) for _ in range(3)]
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        first = [spent(lambda tier=tier: tier.contains([chunk.key])) for tier in tiers]
        assert min(first) < 0.3 and max(first) < 0.6, f"the first failure took {first}"
        later = [spent(lambda: (tiers[0].contains([chunk.key] * 40), read(tiers[0], chunk))) for _ in range(50)]
        assert sorted(later)[45] < 0.005 and read(tiers[0], chunk)[0] == "breaker open"
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
    for tier in tiers:
        wait_until(lambda tier=tier: np.array_equal(read(tier, chunk)[1], payload), 5.0)
        tier.close()


def test_killed_and_restarted_server():
    server = redis_process()
    tier = RedisTier(server.url, timeout_seconds=PATIENT)
    try:
        chunks = sample_chunks(8)
        payloads = [sample_payload(chunk, NBYTES) for chunk in chunks]
        tier.write_many(chunks, payloads)
        server.kill()
        assert read(tier, chunks[0])[0] == "refused", "the dead connection is noticed, a new one refused"
        server.start()
        wait_until(lambda: tier.breaker.allows, 5.0)
        assert tier.read_many(chunks, [np.zeros(NBYTES, np.uint8) for _ in chunks]) == ["absent"] * 8
        assert [reason for reason, _ in tier.write_many(chunks, payloads)] == [""] * 8, "every chunk lands"
    finally:
        tier.close()
        server.close()


def test_a_connection_that_was_dropped_while_idle_costs_nothing(client, tier):
    chunk, payload = stored(tier)
    assert client.client_kill_filter(_type="normal", skipme=True) >= 1
    time.sleep(0.05)
    reason, out = read(tier, chunk)
    assert reason == "" and np.array_equal(out, payload) and tier.breaker.trips == 0


# --- processes


def test_a_child_misses_and_its_parent_is_unharmed(tier):
    chunk, payload = stored(tier)
    child = os.fork()
    if child == 0:
        reason, _ = read(tier, chunk)
        found = tier.contains([chunk.key])
        tier.close()
        os._exit(0 if (reason, found) == ("forked", [False]) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    reason, out = read(tier, chunk)
    assert reason == "" and np.array_equal(out, payload)


def _share(url: str, seed: int, rounds: int, results) -> None:
    """One engine of several: stores, reads and erases chunks that all have in common."""
    tier, rng = RedisTier(url, timeout_seconds=PATIENT), np.random.default_rng(seed)
    chunks = sample_chunks(20, salt=3)
    payloads = [sample_payload(chunk, NBYTES) for chunk in chunks]
    counts: dict[str, int] = {}
    for _ in range(rounds):
        i = int(rng.integers(len(chunks)))
        action = rng.choice(["write", "read", "read", "erase"])
        if action == "write":
            outcome = "write " + tier.write(chunks[i], payloads[i])[0]
        elif action == "erase":
            tier.erase(chunks[i].key)
            continue
        else:
            reason, out = read(tier, chunks[i])
            outcome = "read " + (reason or ("exact" if np.array_equal(out, payloads[i]) else "WRONG"))
        counts[outcome] = counts.get(outcome, 0) + 1
    tier.close()
    results.put(counts)


def test_engines_in_several_processes(server, client):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    workers = [context.Process(target=_share, args=(server.url, seed, 400, results)) for seed in range(3)]
    for worker in workers:
        worker.start()
    counts = [results.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join(10)
    seen = {outcome for count in counts for outcome in count}
    assert seen == {"write ", "write dedup", "read exact", "read absent"}, counts


# --- release


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_nothing_is_left_open(server, client):
    stored(RedisTier(server.url, timeout_seconds=PATIENT), salt=50)
    files, threads = open_files(), threading.active_count()
    for salt in range(50):
        tier = RedisTier(server.url, timeout_seconds=PATIENT)
        stored(tier, salt=salt)
        tier.close()
        assert tier.write(sample_chunks(1)[0], np.zeros(9, np.uint8)) == ("closed", 0)
    wait_until(lambda: threading.active_count() <= threads, 5.0)
    assert open_files() <= files


def test_close_does_not_wait_for_a_dead_server():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tier = RedisTier(f"redis://127.0.0.1:{silent.getsockname()[1]}")
        assert tier.contains([bytes(32)]) == [False]
        assert spent(lambda: (tier.close(), tier.close())) < 0.5
