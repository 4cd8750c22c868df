"""The claims: the rule of the verdict, the table, the store of results; one measure really runs."""

import json
import math
from dataclasses import asdict

import pytest
from typer.testing import CliRunner

from experiments import claims_measures, claims_runs
from experiments.claims import (
    EXAMPLE_RESULTS,
    Measured,
    Published,
    claims_table,
    figure_text,
    load_measured,
    run_claims,
    save_measured,
    verdict_of,
)
from experiments.claims_list import CLAIMS
from experiments.claims_plot import claims_data, plot_claims
from experiments.claims_runs import Bench
from experiments.cli import app
from workbench.errors import InvalidInputError, UnknownNameError

SHARE, TIMES = Published(0.5, 0.7), Published(3, 5, "times", neutral=1.0)


@pytest.mark.parametrize(
    "published, measured, verdict",
    [
        (SHARE, 0.6, "reproduced"),
        (SHARE, 0.38, "reproduced"),  # within 25 % of the lower end
        (SHARE, 0.3, "reproduced in shape"),  # at least half of it
        (SHARE, 0.24, "not reproduced"),
        (SHARE, 0.95, "reproduced in shape"),  # a larger effect, in the same direction
        (SHARE, -0.6, "not reproduced"),
        (TIMES, 4.0, "reproduced"),
        (TIMES, 2.0, "reproduced in shape"),  # half of the way from 1 to 3
        (TIMES, 1.9, "not reproduced"),
        (TIMES, 40.0, "reproduced in shape"),
        (TIMES, 0.3, "not reproduced"),
        (Published(-0.15, -0.03), -0.05, "reproduced"),
        (Published(-0.15, -0.03), 0.01, "not reproduced"),
        (Published(-0.15, -0.03), -0.016, "reproduced in shape"),
        (Published(0.85, 1.0, bound="least"), 0.9, "reproduced"),
        (Published(0.85, 1.0, bound="least"), 0.84, "reproduced in shape"),
        (Published(0, 1, "ms", "most", None), 0.05, "reproduced"),
        (Published(0, 1, "ms", "most", None), 1.9, "reproduced in shape"),
        (Published(0, 1, "ms", "most", None), 2.1, "not reproduced"),
        (Published(2, 5, "ms", "range", None), 0.4, "not reproduced"),
        (Published(512, 512, "tokens", "range", None), 256, "reproduced in shape"),
        (Published(512, 512, "tokens", "range", None), math.inf, "not reproduced"),
        (Published(1, 1, "share", "least", None), 0.999, "reproduced in shape"),
        (SHARE, math.nan, "not reproduced"),
    ],
)
def test_the_verdict_follows_from_two_numbers(published, measured, verdict):
    assert verdict_of(published, measured) == verdict


def test_every_claim_can_be_measured_or_says_why_not():
    names = [claim.name for claim in CLAIMS]
    assert len(set(names)) == len(names) >= 35
    for claim in CLAIMS:
        assert claim.source and claim.says and claim.workload and claim.hardware
        assert claim.how and (claim.measure is None) == (claim.figure == "")
        assert claim.measure is None or "." in (claim.measure.__doc__ or "")


def test_the_table_has_a_verdict_in_every_row():
    table = claims_table(runs=EXAMPLE_RESULTS.parent / "none")
    allowed = {"reproduced", "reproduced in shape", "not reproduced", "not testable here"}
    assert table.height == len(CLAIMS) and set(table["verdict"]) <= allowed
    measured = table.filter(table["verdict"] != "not testable here")
    assert measured.height >= 25 and (measured["measured"] != "–").all() and (measured["when"] != "").all()
    assert set(measured["kind"]) == {"measured", "simulated"}
    assert max(one.seconds for one in load_measured(EXAMPLE_RESULTS.parent / "none").values()) < 600, "each alone"
    assert (table.filter(table["verdict"] == "not testable here")["how"] != "").all()


def test_the_models_figures_are_of_the_published_size():
    """Not fitted to anything: assumed efficiencies on the hardware that was named."""
    for claim in CLAIMS:
        if claim.modelled:
            assert verdict_of(claim.published, claim.modelled()) != "not reproduced", claim.name


def test_results_are_stored_and_found_again_before_the_examples(tmp_path):
    bench = Bench(runs=tmp_path)
    assert [one.measure for one in run_claims(["lru_thrash"], bench)] == ["overflowing_loop"]
    found = load_measured(tmp_path)["overflowing_loop"]
    assert found.figures["lru_second_pass"] == 0 and found.figures["mru_second_pass"] > 0.9
    assert found.provenance["versions"] and found.size == "quick"
    row = claims_table(["lru_thrash"], runs=tmp_path).row(0, named=True)
    assert (row["verdict"], row["kind"], row["measured"]) == ("reproduced", "simulated", "0.0 %")
    worse = asdict(found) | {"figures": {"lru_second_pass": 0.4}}
    (tmp_path / "claims" / "overflowing_loop.json").write_text(json.dumps(worse))
    assert claims_table(["lru_thrash"], runs=tmp_path)["verdict"][0] == "not reproduced"


def test_figures_are_kept_in_one_file_beside_those_that_were_there(tmp_path):
    run_claims(["lru_thrash"], Bench(runs=tmp_path))
    save_measured(tmp_path / "all.json", runs=tmp_path)
    kept = {one["measure"]: Measured(**one) for one in json.loads((tmp_path / "all.json").read_text())}
    assert set(kept) == {"overflowing_loop", *load_measured(tmp_path / "none")}
    assert kept["overflowing_loop"].provenance == load_measured(tmp_path)["overflowing_loop"].provenance


def test_lmcache_itself_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.delenv("KVWORKBENCH_LMCACHE_PYTHON", raising=False)
    names = [claim.name for claim in CLAIMS if claim.measure is claims_runs.lmcache_documents]
    (found,) = run_claims(names, Bench(runs=tmp_path))
    assert len(names) >= 3 and "KVWORKBENCH_LMCACHE_PYTHON" in found.error and found.seconds < 5
    assert set(claims_table(names, runs=tmp_path)["verdict"]) == {"not testable here"}


def test_a_measure_that_cannot_run_here_gives_its_reason(tmp_path, monkeypatch):
    def fails(bench):
        raise InvalidInputError("no such medium on this machine")

    monkeypatch.setattr("experiments.claims_list.CLAIMS", [type(CLAIMS[0])(**{**vars(CLAIMS[0]), "measure": fails})])
    (result,) = run_claims(bench=Bench(runs=tmp_path))
    assert result.error == "no such medium on this machine" and not result.figures
    row = claims_table(runs=tmp_path).row(0, named=True)
    assert row["verdict"] == "not testable here" and row["how"] == result.error


def test_one_measure_serves_all_claims_that_read_it(tmp_path):
    shared = [claim.name for claim in CLAIMS if claim.measure is claims_measures.overflowing_loop] * 2
    assert len(run_claims(shared, Bench(runs=tmp_path))) == 1
    with pytest.raises(UnknownNameError, match="did you mean"):
        run_claims(["lru_trash"])
    with pytest.raises(InvalidInputError, match="quick or full"):
        Bench(size="huge")


def test_figures_have_their_units():
    figures = {(0.683, "share"): "68.3 %", (3.04, "times"): "3.04 x", (1.2, "ms"): "1.2 ms",
               (math.inf, "tokens"): "never", (None, "share"): "–"}  # fmt: skip
    assert [figure_text(*pair) for pair in figures] == list(figures.values())
    assert str(SHARE) == "50.0 % to 70.0 %" and str(Published(0, 1, "ms", "most")) == "at most 1 ms"


def test_the_picture_shows_published_measured_and_modelled():
    claims = tuple(
        claim for claim in CLAIMS if claim.name in ("same_prefix_throughput", "chat_ttft_8b", "redis_lookup")
    )
    found = {claim.measure.__name__: Measured(claim.measure.__name__, {claim.figure: 3.5}, "quick", 1.0, "m")
             for claim in claims}  # fmt: skip
    data = claims_data(claims, found)
    assert data["claim"].to_list() == ["same_prefix_throughput", "chat_ttft_8b"], "a figure in ms has no panel"
    assert (data["low"] < data["high"]).all() and data["modelled"].null_count() == 0
    figure = plot_claims(data, template="dark")
    assert [trace.name for trace in figure.data].count("here") == 2
    assert "no claim was measured" in plot_claims(data.clear()).layout.annotations[0].text


def test_the_command_line_lists_shows_and_measures(tmp_path):
    rows = json.loads(CliRunner().invoke(app, ["claims", "--json"], catch_exceptions=False).stdout)
    assert len(rows) == len(CLAIMS) and all(row["verdict"] for row in rows)
    one = CliRunner().invoke(app, ["claims", "lru_thrash", "--run", "--runs", str(tmp_path)], catch_exceptions=False)
    assert "reproduced" in one.stdout and (tmp_path / "claims" / "overflowing_loop.json").exists()
    assert "kvworkbench claims" in CliRunner().invoke(app, ["claims", "--help"]).stdout


@pytest.mark.vllm
@pytest.mark.slow
def test_a_claim_runs_on_real_vllm(tmp_path):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    (found,) = run_claims(["same_prefix_throughput"], Bench("random:llama-8layer", runs=tmp_path))
    assert not found.error and found.figures["throughput_times"] > 1.5 and found.figures["hit_rate"] > 0.7
    assert (tmp_path / found.runs[0] / "requests.parquet").exists()


def test_measured_rows_survive_their_file():
    one = Measured("x", {"a": 1.0}, "quick", 1.5, "m", ["r"], {"cpu": "c"})
    assert Measured(**json.loads(json.dumps(asdict(one)))) == one
