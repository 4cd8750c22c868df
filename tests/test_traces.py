"""Readers, generators, exports: what comes in goes out, and what is wrong is named with its row."""

import gzip
import hashlib
import json

import numpy as np
import polars as pl
import pytest
import zstandard

from experiments.traces import (
    agent,
    chat,
    find_trace,
    load_trace,
    rag,
    to_oracle_general,
    trace_from_frame,
    write_trace,
    zipf,
)
from workbench.errors import InvalidInputError, UnknownNameError

LINES = [
    {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 1500, "input_length": 1024, "output_length": 7, "hash_ids": [0, 1]},
    {"timestamp": 3000, "input_length": 600, "output_length": 1, "hash_ids": [0, 9]},
]


def write_lines(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_mooncake_lines(tmp_path):
    trace = load_trace(write_lines(tmp_path / "t.jsonl", LINES))
    assert trace.ids.tolist() == [0, 1, 2, 0, 1, 0, 3] and trace.offsets.tolist() == [0, 3, 5, 7]
    assert trace.timestamps.tolist() == [0.0, 1.5, 3.0] and trace.input_tokens.tolist() == [1100, 1024, 600]
    assert trace.parent.tolist() == [-1, 0, 1, 0] and trace.depth.tolist() == [0, 1, 2, 1] and trace.conflicts == 0
    assert trace.chunk_tokens().tolist() == [512, 512, 76, 88]


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.ZstdCompressor().compress])
def test_packed_files(tmp_path, pack):
    plain = write_lines(tmp_path / "t.jsonl", LINES)
    packed = tmp_path / "t.jsonl.packed"
    packed.write_bytes(pack(plain.read_bytes()))
    assert load_trace(packed).ids.tolist() == load_trace(plain).ids.tolist()
    packed.write_bytes(pack(plain.read_bytes())[:-9])
    with pytest.raises(InvalidInputError, match="broken or cut short"):
        load_trace(packed)


def test_bailian_lines_with_keys_in_any_order(tmp_path):
    rows = [
        {"chat_id": 7, "parent_chat_id": -1, "type": 'te"x,t}', "hash_ids": [5, 6], "turn": 1, "input_length": 33,
         "timestamp": 1.25e1, "output_length": 3, "extra": {"nested": [1, "]}"]}},
        {"chat_id": 8, "hash_ids": [], "input_length": 3, "timestamp": 1.5, "output_length": 3},
    ]  # fmt: skip
    trace = load_trace(write_lines(tmp_path / "b.jsonl", rows))
    assert trace.block_tokens == 16 and trace.timestamps.tolist() == [1.5, 12.5], "sorted by time"
    assert trace.offsets.tolist() == [0, 0, 2] and trace.tenants.tolist() == [0, 1]


BAD = [
    ({**LINES[0], "hash_ids": [0, -1, 2]}, "negative id"),
    ({**LINES[0], "hash_ids": [0]}, r"1 blocks do not fit 1100 tokens in blocks of 512"),
    ({"timestamp": 1, "output_length": 1, "hash_ids": []}, "missing input_length; got timestamp"),
    ({**LINES[0], "hash_ids": [0, 1.5, 2]}, "must be whole numbers"),
    ({**LINES[0], "hash_ids": "0"}, "ids a list"),
    ({**LINES[0], "hash_ids": [0, 1, 10**20]}, "must be whole numbers"),
    ({**LINES[0], "input_length": -5, "hash_ids": []}, "negative"),
    ('{"timestamp": 1, "input_length"', "not JSON"),
    ("[1, 2]", "a JSON object is expected"),
    ('{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": [0]} x', "not JSON"),
]


@pytest.mark.parametrize(("row", "message"), BAD)
def test_a_bad_row_is_named_and_can_be_skipped(tmp_path, row, message):
    path = write_lines(tmp_path / "bad.jsonl", [LINES[0], LINES[1], row, LINES[2]])
    with pytest.raises(InvalidInputError, match=rf"bad\.jsonl: row 3: .*{message}"):
        load_trace(path)
    trace = load_trace(path, skip_bad=True)
    assert trace.requests == 3 and any(note.startswith("skipped 1 rows") for note in trace.notes)
    assert trace.ids.tolist() == [0, 1, 2, 0, 1, 0, 3]


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with pytest.raises(InvalidInputError, match="empty"):
        load_trace(tmp_path / "empty.jsonl")
    with pytest.raises(UnknownNameError, match="mooncake_conversation"):
        load_trace("mooncake_conversatoin")
    with pytest.raises(UnknownNameError, match="no trace format 'xml'"):
        load_trace(write_lines(tmp_path / "t.jsonl", LINES), format="xml")
    write_lines(tmp_path / "all_bad.jsonl", ["nothing"])
    with pytest.raises(InvalidInputError, match="no requests"):
        load_trace(tmp_path / "all_bad.jsonl", skip_bad=True)
    (tmp_path / "t.oracle").write_bytes(b"x" * 25)
    with pytest.raises(InvalidInputError, match="not a whole number of oracleGeneral records"):
        load_trace(tmp_path / "t.oracle")


def test_scanner_agrees_with_json_on_random_lines(tmp_path):
    rng = np.random.default_rng(0)
    rows = []
    for i in range(300):
        blocks = rng.integers(0, 500, rng.integers(0, 30)).tolist()
        rows.append({"timestamp": int(i * 7), "x": [{"y": "\\\"]"}], "input_length": len(blocks) * 512,
                     "output_length": int(rng.integers(0, 9)), "hash_ids": blocks})  # fmt: skip
    text = "\n".join(
        json.dumps(row, separators=[(",", ":"), (", ", ": "), (" , ", " : ")][i % 3]) for i, row in enumerate(rows)
    )
    (tmp_path / "r.jsonl").write_text(text)
    trace = load_trace(tmp_path / "r.jsonl", format="mooncake")
    original = np.concatenate([row["hash_ids"] for row in rows]).astype(int)
    first = {b: i for i, b in enumerate(dict.fromkeys(original.tolist()))}
    assert trace.ids.tolist() == [first[b] for b in original.tolist()]
    assert trace.lengths.tolist() == [len(row["hash_ids"]) for row in rows]


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl"])
def test_what_is_written_reads_back(tmp_path, suffix):
    trace = chat(sessions=20, seed=3)
    back = load_trace(write_trace(trace, tmp_path / f"t{suffix}"), block_tokens=64)
    assert back.ids.tolist() == trace.ids.tolist() and back.offsets.tolist() == trace.offsets.tolist()
    assert np.allclose(back.timestamps, trace.timestamps, atol=1e-3)


def test_oracle_general_reads_back(tmp_path):
    trace = chat(sessions=5)
    back = load_trace(to_oracle_general(trace, tmp_path / "t.oracle"))
    assert back.requests == trace.accesses and back.ids.tolist() == trace.ids.tolist()


def test_libcachesim_reads_our_export(tmp_path):
    libcachesim = pytest.importorskip("libcachesim", reason="libcachesim is not installed")
    from experiments.replay import replay

    trace = agent(sessions=8)
    path = to_oracle_general(trace, tmp_path / "t.oracleGeneral.bin")
    for name, theirs in (("lru", "LRU"), ("sieve", "Sieve"), ("s3fifo", "S3FIFO"), ("arc", "ARC")):
        reader = libcachesim.TraceReader(str(path), libcachesim.TraceType.ORACLE_GENERAL_TRACE)
        misses, _ = getattr(libcachesim, theirs)(500).process_trace(reader)
        ours = replay(trace, name, capacity_chunks=500, semantics="object")
        assert round(misses, 6) == round(1 - ours.hit_rate_by_chunks, 6), name


def test_frames():
    frame = pl.DataFrame({"block_ids": [[4, 5], [4]], "input_tokens": [32, 16]})
    assert trace_from_frame(frame, block_tokens=16).ids.tolist() == [0, 1, 0]
    with pytest.raises(InvalidInputError, match="missing input_tokens; got block_ids"):
        trace_from_frame(frame.drop("input_tokens"), block_tokens=16)
    with pytest.raises(InvalidInputError, match="row 2: a block id is negative"):
        trace_from_frame(frame.with_columns(block_ids=pl.Series([[4, 5], [-4]])), block_tokens=16)
    with pytest.raises(InvalidInputError, match="row 1: block_ids is missing"):
        trace_from_frame(frame.with_columns(block_ids=pl.Series([None, [4]])), block_tokens=16)
    with pytest.raises(InvalidInputError, match="lists of integers"):
        trace_from_frame(frame.with_columns(block_ids=pl.Series([["a"], ["b"]])), block_tokens=16)


def test_chat_logs_are_tokenised_into_prefix_blocks(tmp_path):
    system = {"role": "system", "content": "a" * 40}
    rows = [
        {"messages": [system, {"role": "user", "content": "b" * 30}], "session_id": "s"},
        {"messages": [system, {"role": "user", "content": [{"type": "text", "text": "c" * 30}]}], "session_id": "s"},
        {"input": "hello there, a plain prompt"},
        {"nothing": 1},
    ]
    path = write_lines(tmp_path / "chat.jsonl", rows)
    with pytest.raises(InvalidInputError, match="needs tokenize"):
        load_trace(path)
    with pytest.raises(InvalidInputError, match="row 4: KeyError"):
        load_trace(path, tokenize=lambda text: list(text.encode()), block_tokens=8)
    trace = load_trace(path, tokenize=lambda text: list(text.encode()), block_tokens=8, skip_bad=True)
    first, second = (trace.ids[trace.offsets[q] : trace.offsets[q + 1]].tolist() for q in (0, 1))
    shared = sum(a == b for a, b in zip(first, second, strict=False))
    assert shared == len("system: " + "a" * 40 + "\nuser: ") // 8 and trace.tenants.tolist() == [0, 0, 1]


def test_weka_sessions_with_sub_agents(tmp_path):
    for k in range(2):
        requests = [
            {"t": 0.0, "in": 130, "out": 1, "hash_ids": [1, 2]},
            {"t": 5.0, "requests": [{"t": 1.0, "in": 64, "out": 1, "hash_ids": [1]}]},
            {"t": 9.0, "in": 200, "out": 1, "hash_ids": [1, 2, 3]},
        ]
        (tmp_path / f"s{k}.json").write_text(json.dumps({"block_size": 64, "requests": requests}))
    trace = load_trace(tmp_path)
    assert trace.timestamps.tolist() == [0, 6, 9, 60, 66, 69] and trace.ids.tolist() == [
        0,
        1,
        0,
        0,
        1,
        2,
        3,
        4,
        3,
        3,
        4,
        5,
    ]


def test_ids_that_do_not_name_prefixes_are_made_to(tmp_path):
    trace = trace_from_frame(
        pl.DataFrame({"block_ids": [[1, 2], [2, 1], [1, 2]], "input_tokens": [32] * 3}), block_tokens=16
    )
    assert trace.conflicts == 2
    prefixes = trace.as_prefixes()
    assert (
        prefixes.ids.tolist() == [0, 1, 2, 3, 0, 1] and prefixes.conflicts == 0 and "name prefixes" in prefixes.notes[0]
    )


def test_coarser_chunks_keep_full_ones_only():
    trace = trace_from_frame(
        pl.DataFrame({"block_ids": [[1, 2, 3], [1, 2, 4, 5], [1, 6]], "input_tokens": [48, 64, 32]}), block_tokens=16
    )
    coarse = trace.coarsen(2)
    assert coarse.block_tokens == 32 and coarse.ids.tolist() == [0, 0, 1, 2] and coarse.offsets.tolist() == [0, 1, 3, 4]
    assert trace.head(requests=2).requests == 2 and trace.head(accesses=4).requests == 1


def test_generators_are_repeatable_and_prefix_shaped():
    for make in (chat, rag, agent):
        one, two = make(seed=5), make(seed=5)
        assert one.ids.tolist() == two.ids.tolist() and one.conflicts == 0
        assert make(seed=6).ids.tolist() != one.ids.tolist()
        assert one.requests > 100 and (one.lengths > 0).all() and (np.diff(one.timestamps) >= 0).all()


def test_the_zipf_trace_is_the_reference_one():
    objects = 1_000_000
    weights = 1.0 / np.arange(1, objects + 1)
    draws = np.random.Generator(np.random.PCG64(42)).random(10_000_000)
    ids = np.searchsorted(np.cumsum(weights) / weights.sum(), draws).astype("<i8")
    assert hashlib.sha256(ids.tobytes()).hexdigest().startswith("fd68c78d8bc02d8c")
    trace = zipf()
    assert trace.accesses == 10_000_000 and trace.distinct == 762_664


@pytest.mark.parametrize(
    ("name", "head"), [("mooncake_conversation", "0aab94d4d574ea3f"), ("mooncake_synthetic", "066f58c009eef2ef")]
)
def test_the_public_traces_are_the_reference_ones(name, head):
    try:
        find_trace(name)
    except InvalidInputError as error:
        pytest.skip(str(error))
    trace = load_trace(name)
    assert hashlib.sha256(trace.ids.astype("<i8").tobytes()).hexdigest().startswith(head)
    assert trace.conflicts == 0


def test_ragpulse_components_become_prefixes():
    try:
        trace = load_trace("ragpulse")
    except InvalidInputError as error:
        pytest.skip(str(error))
    assert trace.requests == 7106 and trace.conflicts > 0 and trace.as_prefixes().conflicts == 0
    assert trace.as_prefixes().block_sizes.min() >= 0
