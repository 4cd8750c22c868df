"""A study as text: YAML, the notebook call, the command line. Each makes an equal study again."""

import pprint
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from experiments.runs import RUNS_FOLDER
from workbench.errors import InvalidInputError

if TYPE_CHECKING:
    from experiments.study import Study

__all__ = ["EXAMPLE", "command_text", "python_text", "read_yaml", "yaml_text"]

EXAMPLE = """\
# Real vLLM: does reuse pay for questions about long documents, and with which settings?
name: chunks-tiers-codecs
kind: serving          # real vLLM, measured; or replay (traces through policies) and model (cost model), both simulated
space:                 # every combination is a cell
  chunk_tokens: [128, 256, 512]
  tier: [memory, disk]
  codec: [raw, int8]
  arm: [none, cache]   # without and with the engine; also memory, disk, redis, object_store (a tier each),
                       # prefix_cache, offloading_cpu, offloading_file, example, lmcache
  # request_rate: [1, 4, 16]   # a server under load, so many requests a second; without it, one request at a time
fixed:
  model: smollm2
  workload: long_document
  workload.groups: 5
  workload.documents_per_group: 1
  workload.document_tokens: 1000
  workload.max_tokens: 8
repeats: 1             # each repeat has texts of its own
search: grid           # or random, or bayes with trials: 20 and objective: min ttft_warm_s
seed: 0
"""

_DEFAULTS: dict[str, Any] = {"fixed": {}, "kind": "serving", "repeats": 1, "search": "grid", "trials": None,
                             "objective": None, "seed": 0}  # fmt: skip
_KNOWN = ("name", "kind", "space", "fixed", "repeats", "search", "trials", "objective", "seed")


def yaml_text(study: "Study") -> str:
    """The description; what has its default value is left out, bar kind, repeats and seed."""
    shown = {name: value for name, value in study.description.items()
             if name in ("kind", "repeats", "seed") or _DEFAULTS.get(name, ...) != value}  # fmt: skip
    return yaml.safe_dump(shown, sort_keys=False, allow_unicode=True, width=120, default_flow_style=None)


def read_yaml(source: str | Path) -> dict[str, Any]:
    """Arguments of `Study` from a file or a text.

    Raises:
        InvalidInputError: No such file, no YAML, no mapping, or a name that a study does not have.
    """
    text = str(source)
    if isinstance(source, Path) or "\n" not in text:
        if not Path(source).is_file():
            raise InvalidInputError(f"{source} is not a file")
        text = Path(source).read_text()
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InvalidInputError(f"this is no YAML: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("space"), dict) or "name" not in found:
        raise InvalidInputError("a study needs a name and a space, as `kvworkbench sweep --example` shows")
    if unknown := sorted(set(found) - set(_KNOWN)):
        raise InvalidInputError(f"a study has no {', '.join(unknown)}; there are {', '.join(_KNOWN)}")
    return found


def python_text(study: "Study") -> str:
    """Two statements: make the study, run it."""
    arguments = [repr(study.name)]
    for name in ("kind", "space", "fixed", "repeats", "search", "trials", "objective", "seed"):
        value = getattr(study, name)
        if name == "space" or value != _DEFAULTS[name]:
            arguments.append(f"{name}={_indented(pprint.pformat(value, sort_dicts=False, width=100))}")
    if study.runs != RUNS_FOLDER:
        arguments.append(f"runs={str(study.runs)!r}")
    lines = "".join(f"    {argument},\n" for argument in arguments)
    return f"from experiments.study import Study\n\nstudy = Study(\n{lines})\nstudy.run()\n"


def command_text(study: "Study") -> str:
    """The description as the standard input of `kvworkbench sweep`; pasted into a shell, it runs."""
    return f"kvworkbench sweep - <<'STUDY'\n{yaml_text(study)}STUDY\n"


def _indented(text: str) -> str:
    return text.replace("\n", "\n    ")
