"""The choices of a sweep as controls: what is looked at often has one of its own, the rest is a line of text."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ipywidgets as widgets
import yaml

from experiments.arms import ARMS, MORE_ARMS
from experiments.cost_models import MODELS
from experiments.hardware import HARDWARE
from experiments.hardware import TIERS as TIER_SPEEDS
from experiments.policy_comparison import available_traces
from experiments.workloads import workload_names
from workbench.codecs import codec_names
from workbench.errors import InvalidInputError
from workbench.policies import policy_names

__all__ = ["KINDS", "SweepForm"]

KINDS = {"replay": "Replay (simulated)", "serving": "Real vLLM (measured)", "model": "Cost model (simulated)"}
_MODELS = ("smollm2", "random:llama-8layer")
_TIERS = ("memory", "disk", "redis")


@dataclass(frozen=True)
class _Choice:
    """One control.

    Args:
        name: Of the setting.
        title: For people.
        options: Names to choose from; none for numbers, which are typed.
    """

    name: str
    title: str
    options: Sequence[str] = ()


class SweepForm(widgets.Box):
    """Controls for the settings of one kind of study.

    Args:
        kind: Of the study.
        settings: Setting -> the values to begin with. Those without a control of their own go into the line of text.
    """

    def __init__(self, kind: str, settings: Mapping[str, Sequence[Any]]):
        self.kind = kind
        choices = {"replay": _replay_choices, "serving": _serving_choices, "model": _model_choices}[kind]()
        self._controls = {choice.name: _control(choice, settings.get(choice.name, ())) for choice in choices}
        rest = {name: list(values) for name, values in settings.items() if name not in self._controls}
        self._rest = widgets.Text(
            "; ".join(f"{name}={_listed(values)}" for name, values in rest.items()), description="Further settings",
            placeholder="workload.document_tokens=800, 3000; threads=1", style={"description_width": "initial"},
            continuous_update=False, layout={"width": "99%"},
        )  # fmt: skip
        super().__init__(
            (*self._controls.values(), self._rest), layout={"flex_flow": "row wrap", "align_items": "flex-start"}
        )

    def settings(self) -> dict[str, list[Any]]:
        """Setting -> the values that are chosen, one or more; those left empty are left out.

        Raises:
            InvalidInputError: A number that is none, or a line of further settings that cannot be read.
        """
        found = {name: _values(control) for name, control in self._controls.items()}
        return {name: values for name, values in {**found, **self._further()}.items() if values}

    def on_change(self, call: Callable[[], None]) -> None:
        """Call back whenever a choice was changed."""
        for control in (*self._controls.values(), self._rest):
            control.observe(lambda _: call(), "value")

    def _further(self) -> dict[str, list[Any]]:
        parts = [part.strip() for part in self._rest.value.split(";") if part.strip()]
        if wrong := next((part for part in parts if "=" not in part), None):
            raise InvalidInputError(f"{wrong!r} is no setting: write name=value, with ; between settings")
        return {name.strip(): _parsed(text) for name, _, text in (part.partition("=") for part in parts)}


def _replay_choices() -> list[_Choice]:
    return [
        _Choice("trace", "Trace", available_traces()),
        _Choice("policy", "Policy", policy_names()),
        _Choice("chunk_tokens", "Chunk (tokens)"),
        _Choice("capacity_tokens", "Capacity (tokens)"),
    ]


def _serving_choices() -> list[_Choice]:
    return [
        _Choice("model", "Model", _MODELS),
        _Choice("workload", "Workload", workload_names()),
        _Choice("arm", "Arm", ["cache", *(arm.name for arm in (*ARMS, *MORE_ARMS) if arm.cache is None)]),
        _Choice("tier", "Tier", _TIERS),
        _Choice("codec", "Codec", codec_names()),
        _Choice("policy", "Policy", [name for name in policy_names() if name not in ("belady", "optimal")]),
        _Choice("chunk_tokens", "Chunk (tokens)"),
    ]


def _model_choices() -> list[_Choice]:
    return [
        _Choice("model", "Model", list(MODELS)),
        _Choice("hardware", "Hardware", list(HARDWARE)),
        _Choice("tier", "Tier", list(TIER_SPEEDS)),
        _Choice("prompt_tokens", "Prompt (tokens)"),
    ]


def _control(choice: _Choice, values: Sequence[Any]) -> widgets.Widget:
    """A list to choose several from, or a line to type numbers into; its title stands above it."""
    layout = widgets.Layout(width="176px", flex_flow="column nowrap", height="auto", margin="2px 10px 6px 2px")
    style = {"description_width": "initial"}
    if not choice.options:
        return widgets.Text(_listed(values), description=choice.title, placeholder="64, 128, 256", style=style,
                            layout=layout, continuous_update=False)  # fmt: skip
    options = list(dict.fromkeys([*map(str, values), *choice.options]))
    return widgets.SelectMultiple(options=options, value=tuple(map(str, values)), description=choice.title,
                                  rows=min(5, len(options)), style=style, layout=layout)  # fmt: skip


def _values(control: Any) -> list[Any]:
    if isinstance(control, widgets.SelectMultiple):
        return list(control.value)
    return _numbers(control.description, control.value)


def _numbers(title: str, text: str) -> list[int]:
    try:
        return [int(part.replace("_", "")) for part in text.replace(",", " ").split()]
    except ValueError as error:
        raise InvalidInputError(f"{title} is {text!r}; give whole numbers with commas between them") from error


def _parsed(text: str) -> list[Any]:
    """Values with commas between them, as YAML reads each: 800 is a number, 1GiB a text."""
    try:
        found = yaml.safe_load(f"[{text}]")
    except yaml.YAMLError as error:
        raise InvalidInputError(f"{text!r} cannot be read: write values with commas between them") from error
    return found


def _listed(values: Sequence[Any]) -> str:
    return ", ".join(map(_written, values))


def _written(value: Any) -> str:
    """A value as `_parsed` reads it: a text that YAML would take for something else stands in quotes."""
    text = str(value)
    try:
        return text if yaml.safe_load(f"[{text}]") == [value] else json.dumps(value)
    except yaml.YAMLError:
        return json.dumps(value)
