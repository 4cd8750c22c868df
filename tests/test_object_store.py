"""The object store tier against a real S3-compatible server process, a directory and memory."""

import os
import threading
import time

import numpy as np
import obstore
import pytest
from fault_servers import S3Server, s3_options, s3_process, wait_until

from workbench.errors import InvalidInputError
from workbench.record import header_nbytes
from workbench.testing_tiers import check_tier, sample_chunks, sample_payload
from workbench.tiers.object_store import ObjectStoreTier
from workbench.tiers.sealed import Seal

NBYTES = 20_000
KEY = b"0123456789abcdef0123456789abcdef"
PATIENT = 5.0  # the S3-compatible server is a Python process on a busy machine
HTTP = {"allow_http": True}


@pytest.fixture(scope="module")
def bucket():
    with s3_process() as options:
        yield options


@pytest.fixture(params=["memory", "directory", "s3"])
def make(request, tmp_path):
    """Makes tiers that share one medium, where the medium can be shared."""
    if request.param == "s3":
        options = request.getfixturevalue("bucket")
        prefix = f"s3://kvcache/{os.urandom(4).hex()}"
        settings = {"options": options, "client_options": HTTP, "timeout_seconds": PATIENT}
        return lambda **more: ObjectStoreTier(prefix, **settings, **more)
    url = "memory:///" if request.param == "memory" else f"file://{tmp_path}/store"
    return lambda **more: ObjectStoreTier(url, timeout_seconds=PATIENT, **more)


def s3_settings(server: S3Server) -> dict:
    return {"options": s3_options(server.port), "client_options": HTTP, "timeout_seconds": PATIENT}


def stored(tier, *, salt: int = 0, nbytes: int = NBYTES):
    chunk = sample_chunks(1, salt=salt)[0]
    payload = sample_payload(chunk, nbytes)
    assert tier.write(chunk, payload) == ("", tier.nbytes_of(nbytes, chunk.num_tokens))
    return chunk, payload


def read(tier, chunk, nbytes: int = NBYTES):
    out = np.zeros(nbytes, np.uint8)
    return tier.read(chunk, out), out


def path(chunk) -> str:
    return f"{chunk.key.hex()[:2]}/{chunk.key.hex()}.kv"


# --- contract


@pytest.mark.parametrize("seal", [None, Seal(KEY)], ids=["plain", "sealed"])
def test_keeps_the_contract(make, seal):
    check_tier(lambda: make(seal=seal))


def test_a_record_of_many_pieces(make):
    tier = make()
    chunk, payload = stored(tier, nbytes=5_000_003)
    reason, out = read(tier, chunk, 5_000_003)
    assert reason == "" and np.array_equal(out, payload)
    tier.close()


def test_many_side_by_side(make):
    tier = make()
    chunks = sample_chunks(40)
    payloads = [sample_payload(chunk, NBYTES) for chunk in chunks]
    assert {reason for reason, _ in tier.write_many(chunks[:39], payloads[:39])} == {""}
    outs = [np.zeros(NBYTES, np.uint8) for _ in chunks]
    assert tier.read_many(chunks, outs) == [""] * 39 + ["absent"]
    assert all(np.array_equal(o, p) for o, p in zip(outs[:39], payloads, strict=False))
    assert tier.contains([chunk.key for chunk in chunks]) == [True] * 39 + [False]
    tier.close()


def test_engines_share_a_store(bucket, tmp_path):
    for url, more in (("s3://kvcache/shared", {"options": bucket, "client_options": HTTP}), (f"file://{tmp_path}", {})):
        one, two = (ObjectStoreTier(url, timeout_seconds=PATIENT, **more) for _ in range(2))
        chunk, payload = stored(one)
        assert two.contains([chunk.key]) == [True]
        assert two.write(chunk, payload) == ("dedup", 0)
        reason, out = read(two, chunk)
        assert reason == "" and np.array_equal(out, payload)
        two.erase(chunk.key)
        assert read(one, chunk)[0] == "absent"
        one.close()
        two.close()


def test_the_first_of_many_writers_wins(tmp_path):
    """Each engine stores the same chunks with bytes of its own: one outcome a chunk is "", and its bytes stay."""
    tiers = [ObjectStoreTier(f"file://{tmp_path}/store", timeout_seconds=PATIENT) for _ in range(4)]
    chunks = sample_chunks(25)
    outcomes: dict[int, list[str]] = {}
    barrier = threading.Barrier(len(tiers))

    def work(number: int) -> None:
        barrier.wait()
        outcomes[number] = [tiers[number].write(chunk, np.full(NBYTES, number, np.uint8))[0] for chunk in chunks]

    workers = [threading.Thread(target=work, args=(number,)) for number in range(len(tiers))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for i, chunk in enumerate(chunks):
        winners = [number for number in outcomes if outcomes[number][i] == ""]
        assert len(winners) == 1 and {outcomes[n][i] for n in outcomes} <= {"", "dedup"}
        reason, out = read(tiers[0], chunk)
        assert reason == "" and (out == winners[0]).all()
    for tier in tiers:
        tier.close()


def test_a_write_that_is_overtaken_is_a_dedup():
    """Another engine stores between our question and our upload: the store refuses, nothing is replaced."""
    server = S3Server()
    tier = ObjectStoreTier("s3://kvcache/a", **s3_settings(server))
    chunk = sample_chunks(1)[0]

    class Overtaken(dict):
        def get(self, name, default=None):
            return default if server.requests[-1] == "HEAD" else super().get(name, default)

    server.objects = Overtaken({f"/kvcache/a/{path(chunk)}": b"the other engine's"})
    try:
        assert tier.write(chunk, sample_payload(chunk, NBYTES)) == ("dedup", 0)
        assert list(server.objects.values()) == [b"the other engine's"]
    finally:
        tier.close()
        server.stop()


def test_a_read_is_one_ranged_request():
    server = S3Server()
    tier = ObjectStoreTier("s3://kvcache/a", **s3_settings(server))
    try:
        chunk, _ = stored(tier)
        server.requests.clear()
        server.objects = {name: data + bytes(50_000_000) for name, data in server.objects.items()}
        assert read(tier, chunk)[0] == "corrupt", "an object that is too long is no record"
        assert server.requests == ["GET", "POST"] and not server.objects
    finally:
        tier.close()
        server.stop()


# --- records that were tampered with


def test_damage_is_a_miss_and_is_removed_once(tmp_path):
    tier = ObjectStoreTier(f"file://{tmp_path}/store", timeout_seconds=PATIENT)
    chunk, payload = stored(tier)
    file = tmp_path / "store" / path(chunk)
    record = file.read_bytes()
    border = header_nbytes(chunk.num_tokens)
    seen = {"": 0, "corrupt": 0}
    for at in [*range(0, 240, 5), *range(240, len(record), 499), border - 1, border, len(record) - 1]:
        flipped = record[:at] + bytes([record[at] ^ 0x80]) + record[at + 1 :]
        for bad in (flipped, record[:at], record[:at] + bytes(len(record) - at), record + record[:at]):
            file.write_bytes(bad)
            reason, out = read(tier, chunk)
            seen[reason] += 1
            if reason == "":
                assert np.array_equal(out, payload) and (bad == record or 160 + len(chunk.tokens) <= at < border)
            else:
                assert not file.exists() and read(tier, chunk)[0] == "absent"
    assert seen["corrupt"] > 200 and seen[""] < 40, seen
    other = sample_chunks(1, salt=1)[0]
    foreign = tmp_path / "store" / path(other)
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_bytes(record)
    assert read(tier, other)[0] == "mismatch" and not foreign.exists()
    tier.close()


def test_a_record_without_the_right_seal_is_a_miss_by_name(tmp_path):
    url = f"file://{tmp_path}/store"
    ours, open_to_all = (ObjectStoreTier(url, timeout_seconds=PATIENT, seal=seal) for seal in (Seal(KEY), None))
    chunk, _ = stored(open_to_all)
    assert read(ours, chunk)[0] == "mac" and read(ours, chunk)[0] == "absent"
    forged = ObjectStoreTier(url, timeout_seconds=PATIENT, seal=Seal(KEY[::-1]))
    chunk, _ = stored(forged)
    assert read(ours, chunk)[0] == "mac" and read(ours, chunk)[0] == "absent"
    for tier in (ours, open_to_all, forged):
        tier.close()


# --- settings and release


@pytest.mark.parametrize("url", ["nonsense", "ftp://host/x", "s3://kvcache"])
def test_what_obstore_does_not_know_is_refused_without_its_values(url):
    with pytest.raises(InvalidInputError) as error:
        ObjectStoreTier(url, options={"secret_access_kee": "hunter2"})
    assert "hunter2" not in str(error.value) and "secret_access_kee" in str(error.value)


def test_objects_of_the_wrong_length_on_a_real_server(bucket):
    tier = ObjectStoreTier("s3://kvcache/damaged", options=bucket, client_options=HTTP, timeout_seconds=PATIENT)
    store = obstore.store.from_url("s3://kvcache/damaged", config=bucket, client_options=HTTP)
    chunk, payload = stored(tier)
    record = bytes(store.get(path(chunk)).bytes())
    for bad in (b"", record[:1], record[:-1], record + b"x", bytes(len(record))):
        store.put(path(chunk), bad)
        assert read(tier, chunk)[0] == "corrupt" and read(tier, chunk)[0] == "absent"
    store.put(path(chunk), b"short")
    assert tier.write(chunk, payload)[0] == "", "a store replaces what is no record"
    assert read(tier, chunk)[0] == "" and tier.breaker.trips == 0
    tier.close()


def test_a_directory_is_for_this_user_alone(tmp_path):
    tier = ObjectStoreTier(f"file://{tmp_path}/new/store", timeout_seconds=PATIENT)
    stored(tier)
    assert (tmp_path / "new" / "store").stat().st_mode & 0o777 == 0o700
    tier.close()


def test_a_missing_bucket_is_named(bucket):
    tier = ObjectStoreTier("s3://nowhere", options=bucket, client_options=HTTP, timeout_seconds=PATIENT)
    chunk = sample_chunks(1)[0]
    assert tier.contains([chunk.key]) == [False] and read(tier, chunk)[0] == "absent"
    assert tier.write(chunk, sample_payload(chunk, NBYTES)) == ("no such bucket", 0)
    tier.close()


def test_nothing_is_left_open(tmp_path):
    stored(ObjectStoreTier(f"file://{tmp_path}", timeout_seconds=PATIENT), salt=99)
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for salt in range(50):
        tier = ObjectStoreTier(f"file://{tmp_path}", timeout_seconds=PATIENT)
        stored(tier, salt=salt)
        tier.close()
        tier.close()
        assert tier.write(sample_chunks(1)[0], np.zeros(9, np.uint8)) == ("closed", 0)
    wait_until(lambda: threading.active_count() <= threads, 5.0)
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= files, 5.0)


def test_close_ends_what_is_under_way():
    server = S3Server()
    server.fault = "blackhole"
    tier = ObjectStoreTier("s3://kvcache", **{**s3_settings(server), "timeout_seconds": 30.0})
    answers: list[list[bool]] = []
    asking = threading.Thread(target=lambda: answers.append(tier.contains([bytes(32)] * 3)))
    asking.start()
    try:
        wait_until(lambda: server.requests, 5.0)
        start = time.monotonic()
        tier.close()
        asking.join(5.0)
        assert time.monotonic() - start < 1.0 and answers == [[False] * 3]
    finally:
        server.stop()


def test_a_child_misses(tmp_path):
    tier = ObjectStoreTier(f"file://{tmp_path}", timeout_seconds=PATIENT)
    chunk, payload = stored(tier)
    child = os.fork()
    if child == 0:
        reason, _ = read(tier, chunk)
        tier.close()
        os._exit(0 if reason == "forked" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    reason, out = read(tier, chunk)
    assert reason == "" and np.array_equal(out, payload)
    tier.close()


def test_names_in_the_store_are_digests(bucket):
    tier = ObjectStoreTier("s3://kvcache/names", options=bucket, client_options=HTTP, timeout_seconds=PATIENT)
    chunk, _ = stored(tier)
    store = obstore.store.from_url("s3://kvcache/names", config=bucket, client_options=HTTP)
    assert [entry["path"] for batch in store.list() for entry in batch] == [path(chunk)]
    tier.close()
