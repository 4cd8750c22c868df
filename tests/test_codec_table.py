"""The table of codecs, the claims read from it, and its plot: figures worked out by hand."""

import dataclasses
import json

import plotly.graph_objects as go
import pytest
from typer.testing import CliRunner

pytest.importorskip("torch")
pytest.importorskip("transformers")

from experiments.cli import app
from experiments.codec_table import COMPARED_CODECS, EXAMPLE_TABLE, SECOND_TABLE, CodecTable, measure_codec_table
from experiments.compression_claims import CLAIMS, compression_claims
from experiments.kvtc import calibration_texts, fit_kvtc
from experiments.peer_process import PeerError
from experiments.plots.codec_pareto import codec_pareto_data, plot_codec_pareto
from experiments.quality import CodecQuality, StudyModel, measure_quality, sample_texts
from experiments.references import missing_references
from workbench.codecs import codec_names, resolve_codec
from workbench.errors import InvalidInputError


def quality_of(codec: str, bits: float, kl: float, **changes) -> CodecQuality:
    plain = dict.fromkeys((field.name for field in dataclasses.fields(CodecQuality)), 0.0)
    about = {"codec": codec, "bits_per_value": bits, "size_fraction": bits / 16, "kl": kl, "kl_by_text": {"a.py": kl}}
    about |= {"needles": 5, "key_values": 4}
    speeds = {"encode_seconds": 2.0, "decode_seconds": 1.0, "source_nbytes": 10**9}
    return CodecQuality(**plain | about | speeds | changes)


@pytest.fixture(scope="module")
def table() -> CodecTable:
    rows = [
        quality_of("raw", 16, 0.0),
        quality_of("lossless", 10.72, 0.0),
        quality_of("kivi", 5, 5e-3, key_error=0.04),
        quality_of("int4(group=32)", 5, 8e-3, key_error=0.1),
        quality_of("fp8", 8, 1e-3, top1_agreement=0.97),
        quality_of("kvtc(basis='x', digest='y')", 1.5, 0.03, kl_by_text={"prose": 0.01, "code.py": 0.05}),
        quality_of(
            "kvpress(press='Knorm', removed=0.5)",
            8,
            0.2,
            encode_seconds=None,
            decode_seconds=None,
            key_error=None,
            value_error=None,
            key_value_recall=None,
            key_values=0,
        ),
    ]
    return CodecTable("none", 1024, 256, rows, {"cpu": "none", "time": "2026-01-01"})


def test_claims_are_judged_by_their_numbers(table):
    found = {row["claim"]: row for row in compression_claims(table).to_dicts()}
    assert list(found) == [claim.name for claim in CLAIMS]
    assert (found["kivi_channel_keys"]["measured"], found["kivi_channel_keys"]["verdict"]) == ("0.4 x", "reproduced")
    assert found["zipnn_saving"]["verdict"] == "reproduced" and found["zipnn_saving"]["measured"] == "33.0 %"
    assert found["fp8_lossless"]["verdict"] == "not reproduced"
    assert found["kvtc_size"]["verdict"] == "reproduced in shape"
    assert found["kvtc_quality"]["verdict"] == "reproduced" and found["kvtc_other_text"]["verdict"] == "not reproduced"
    assert found["rotation"]["verdict"] == "not measured yet" and "rotated" in found["rotation"]["how"]
    assert found["kvzip"]["verdict"] == "not testable here" and found["kvzip"]["how"]


def test_every_claim_names_codecs_that_the_table_has():
    measured = {repr(resolve_codec(spec)) for spec in COMPARED_CODECS}
    assert len(measured) == len(COMPARED_CODECS) and set(codec_names()) <= measured
    for claim in CLAIMS:
        assert set(claim.codecs) <= measured | {"kvtc"}, claim.name
        assert (claim.figure is None) == (not claim.codecs) and claim.source and claim.says, claim.name


def test_a_table_is_its_file(table, tmp_path):
    table.save(tmp_path / "codecs.json")
    assert CodecTable.load(tmp_path / "codecs.json") == table
    assert [path.name for path in tmp_path.iterdir()] == ["codecs.json"]
    (tmp_path / "codecs.json").write_text(json.dumps({"rows": [1]}))
    for path in (tmp_path / "codecs.json", tmp_path / "none.json"):
        with pytest.raises(InvalidInputError, match="no table of codecs"):
            CodecTable.load(path)


def test_newer_rows_take_the_place_of_old_ones(table):
    newer = dataclasses.replace(table, rows=[quality_of("kivi", 4, 1e-3), quality_of("int8", 8, 1e-5)],
                                provenance={"time": "2026-02-02"})  # fmt: skip
    both = table.joined(newer)
    assert [row.codec for row in both.rows] == [*(row.codec for row in table.rows), "int8"]
    assert {row.codec: row.kl for row in both.rows}["kivi"] == 1e-3
    assert both.provenance == {"time": "2026-02-02", "earlier": [table.provenance]}
    assert [old["time"] for old in both.joined(newer).provenance["earlier"]] == ["2026-01-01", "2026-02-02"]
    for change in ({"model": "another"}, {"scored_tokens": 128}):
        with pytest.raises(InvalidInputError, match="do not belong there"):
            table.joined(dataclasses.replace(newer, **change))


def test_figures_that_do_not_apply_are_none(table):
    rows = {row["codec"]: row for row in table.frame().to_dicts()}
    pressed = rows["kvpress(press='Knorm', removed=0.5)"]
    assert pressed["decode_gb_per_s"] is pressed["key_error"] is pressed["key_value_recall"] is None
    assert not pressed["own"] and pressed["needle_recall"] == 0
    assert all(row["own"] and row["model"] == "none" for name, row in rows.items() if name != pressed["codec"])


def test_the_example_tables_are_of_two_models():
    first, second = CodecTable.load(EXAMPLE_TABLE), CodecTable.load(SECOND_TABLE)
    assert first.model == "smollm2" and second.model != "smollm2"
    specs = {repr(resolve_codec(spec)) for spec in COMPARED_CODECS}
    for table in (first, second):
        assert specs <= {row.codec for row in table.rows}
        assert {row.codec: row.kl for row in table.rows}["lossless"] == 0
    assert {row.codec.partition("(")[0] for row in first.rows} >= {"quantized_cache", "kvpress"}
    libraries = [
        about["references"] for about in (first.provenance, *first.provenance["earlier"]) if "references" in about
    ]
    assert libraries and libraries[-1].keys() >= {"transformers", "kvpress", "hqq", "optimum-quanto"}


def test_the_front_is_what_nobody_beats(table):
    data = codec_pareto_data(table.frame())
    assert data["bits_per_value"].is_sorted()
    front = data.filter("on_front")["family"].to_list()
    assert front == ["kvtc", "kivi", "fp8", "lossless"]
    assert data.filter(family="kivi")["decode_gb_per_s"].item() == 1.0
    assert data.filter(family="kivi")["times_smaller"].item() == pytest.approx(3.2)


def test_the_plot_shows_every_codec(table):
    data = codec_pareto_data(table.frame())
    for template in ("light", "dark"):
        figure = plot_codec_pareto(data, template=template, badge=table.badge)
        names = {name for trace in figure.data[1:] for name in trace.text}
        assert names == {*data.filter("own")["codec"], "kvpress(Knorm, 0.5)"}
        hover = [text for trace in figure.data[1:] for text in trace.hovertext if "kvpress" in text]
        assert len(hover) == 1 and "decoding" not in hover[0] and "needles found: 0%" in hover[0]
        assert "on none" in figure.layout.title.text
        assert min(min(trace.y) for trace in figure.data) > 0, "a lossless codec is off a logarithmic axis"
        assert "6 texts" not in figure.layout.title.subtitle.text and "1 text," in figure.layout.title.subtitle.text
    assert isinstance(plot_codec_pareto(data.clear()), go.Figure)


def test_calibration_is_worth_it_on_text_of_its_kind(tmp_path):
    model = StudyModel("random:tiny")
    texts = calibration_texts(6)
    assert len(texts) == 6 and not any(text[:2000] in own for text in texts for own in sample_texts().values())
    settings = {"tokens_each": 512, "layers_together": 1, "rank_fraction": 1.0, "step": 0.1}
    codec = fit_kvtc(model, texts[:3], tmp_path / "kvtc.npz", **settings)
    sample = {"reference": sample_texts()["reference 1"]}
    kvtc, plain = measure_quality(model, [codec, "ecsq(step=0.1)"], texts=sample, prefix_tokens=256, scored_tokens=16)
    assert kvtc.size_fraction < 0.9 * plain.size_fraction and kvtc.key_error < 1.1 * plain.key_error
    assert "kvtc" in repr(codec) and codec.digest in repr(codec)
    (tmp_path / "kvtc.npz").write_bytes(b"another basis")
    from experiments import kvtc as module

    module._load.cache_clear()
    with pytest.raises(InvalidInputError, match="digest"):
        measure_quality(model, [codec], texts=sample, prefix_tokens=256, scored_tokens=16)


def test_commands(tmp_path):
    run = CliRunner().invoke
    listed = json.loads(run(app, ["codecs", "list", "--json"]).output)
    assert [row["codec"] for row in listed] == codec_names() and all(row["what"] for row in listed)
    sizes = ["--model", "random:tiny", "--texts", "1", "--prefix-tokens", "256", "--scored-tokens", "8"]
    out = tmp_path / "codecs.json"
    measured = run(
        app, ["codecs", "measure", "lossless", "kivi", "int4(group=32)", *sizes, "--out", str(out), "--json"]
    )
    assert measured.exit_code == 0, measured.output
    assert [row["codec"] for row in json.loads(measured.output)][-1] == "lossless"
    claims = json.loads(run(app, ["codecs", "table", "--from", str(out), "--json"]).output)
    verdicts = {row["claim"]: row["verdict"] for row in claims}
    assert verdicts["zipnn_saving"] in ("reproduced", "reproduced in shape") and verdicts["sinks"] == "not measured yet"


def test_watching_counts_every_step():
    steps = []
    measure_codec_table("random:tiny", ["raw", "int8"], texts=2, prefix_tokens=256, scored_tokens=8,
                        also=(), watch=lambda what, done, total: steps.append((done, total)))  # fmt: skip
    assert steps == [(n, 6) for n in range(6)]
    with pytest.raises(InvalidInputError, match="allowed: tasks, calibrated, references"):
        measure_codec_table("random:tiny", ["raw"], also=["needles"])


def test_references_are_measured_as_codecs_are():
    if missing := missing_references():
        pytest.skip(missing)
    found = measure_codec_table("random:tiny", ["int4"], texts=1, prefix_tokens=256, scored_tokens=16,
                                also=["references", "tasks"])  # fmt: skip
    rows = {row.codec: row for row in found.rows}
    assert "kvpress" in found.provenance["references"]
    four, two = (rows[f"quantized_cache(library='quanto', bits={bits})"] for bits in (4, 2))
    assert four.bits_per_value == 4.5 and two.bits_per_value == 2.5  # a bfloat16 scale and zero for 64 values
    assert four.key_error < 0.2 < two.key_error and 0 < four.kl < two.kl and four.encode_seconds > 0
    for removed in (0.25, 0.5, 0.75):
        assert rows[f"kvpress(press='Knorm', removed={removed})"].size_fraction == pytest.approx(1 - removed)
    kls = [rows[f"kvpress(press='Knorm', removed={removed})"].kl for removed in (0.25, 0.5, 0.75)]
    assert 0 < kls[0] < kls[1] < kls[2]


def test_without_an_interpreter_the_references_say_so(monkeypatch, tmp_path):
    monkeypatch.delenv("KVWORKBENCH_REFERENCES_PYTHON", raising=False)
    with pytest.raises(PeerError, match="KVWORKBENCH_REFERENCES_PYTHON"):
        measure_codec_table("random:tiny", ["raw"], also=["references"])
    sizes = ["--model", "random:tiny", "--texts", "1", "--prefix-tokens", "256", "--scored-tokens", "8"]
    run = CliRunner().invoke(app, ["codecs", "measure", "raw", *sizes, "--also", "references"])
    assert run.exit_code == 0 and "the references are left out" in run.stderr and "raw" in run.stdout
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setenv("KVWORKBENCH_REFERENCES_PYTHON", str(python))
    with pytest.raises(PeerError, match="exit code 3"):
        measure_codec_table("random:tiny", ["raw"], also=["references"])
