"""The command line: what it prints, and how it ends."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from experiments.cli import app

COMMANDS = ("demo", "report", "runs", "models", "doctor", "lab", "explain", "export", "traces", "replay", "policy",
            "advise", "claims", "codecs", "serve", "share", "studies", "sweep")  # fmt: skip

GROUPS = ("policy", "codecs", "studies")  # their commands have the examples


def run(*arguments):
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "kvworkbench" in result.stdout or command in GROUPS, "the help shows an example"


def test_a_mistake_is_one_line_and_exit_code_2(tmp_path):
    command = [sys.executable, "-m", "experiments.cli", "replay", str(tmp_path / "absent.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_replay_of_a_generated_trace():
    result = run("replay", "chat", "--policy", "lru,optimal", "--capacities", "500,5000", "--json")
    rows = json.loads(result.stdout[result.stdout.index("[\n") :])
    assert [(r["policy"], r["capacity_chunks"]) for r in rows] == [
        ("Lru()", 500), ("Lru()", 5000), ("Optimal()", 500), ("Optimal()", 5000)]  # fmt: skip
    assert 0 < rows[0]["hit_rate"] <= rows[2]["hit_rate"] <= 1
    assert "simulated" in result.stdout


def test_policies_are_listed_and_checked(tmp_path):
    names = [row["policy"] for row in json.loads(run("policy", "list", "--json").stdout)]
    assert {"lru", "fifo", "sieve"} <= set(names)
    broken = tmp_path / "broken.py"
    broken.write_text(
        "from workbench.policies import policy\n\n@policy\nclass Broken:\n    scalars = dict(last=-1)\n"
        "    def on_insert(self, c):\n        self.last = c\n    def on_hit(self, c):\n        pass\n"
        "    def evict(self):\n        return self.last + 100000\n"
    )
    assert "keeps the contract" in run("policy", "check", "sieve").stdout
    command = [sys.executable, "-m", "experiments.cli", "policy", "check", f"{broken}:Broken"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "Broken" in done.stderr


def test_runs_of_an_empty_store(tmp_path):
    assert json.loads(run("runs", "--runs", str(tmp_path), "--json").stdout) == []


def test_traces_say_where_they_come_from():
    rows = json.loads(run("traces", "--json").stdout)
    assert all(row["origin"].startswith("github.com/") for row in rows)


def test_doctor_names_a_remedy_for_what_is_missing():
    for finding in json.loads(run("doctor", "--json").stdout):
        assert finding["state"] == "ok" or finding["remedy"] or finding["what"] == "GPU"
