"""What the study compares: one row for each configuration. Standard library only.

To add a control, add its row: it is then trained, measured, judged and drawn in the presets that
its `seeds` names.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Configuration:
    """A model under a scaling rule, when the rule is applied, and how it is drawn."""

    rule: str
    label: str
    colour: str
    dash: str
    """A key of `report.charts.DASHES`: colour alone does not distinguish curves in print."""
    in_words: str = ""
    """What a sentence calls it, where that is not its name in brackets."""
    applied: Literal["training", "last steps", "fine-tuning", "test time"] = "training"
    """From when on the rule holds; nothing is trained of what is applied at test time."""
    base: str = ""
    """The configuration whose pretrained model it is, where it has none of its own."""
    s: Literal["initial", "base", "constant"] = "initial"
    """Its s where the rule replaces another: the rule's first value, the base's (1 where that has
    none), or the study's `test_constant`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of its training, where they are not everybody's."""
    is_papers: bool = False
    loses_less_than: tuple[str, ...] = ()
    loses_more_than: tuple[str, ...] = ()
    """What is expected of a control beyond the training length; `study.claims` has what the paper
    expects of its own."""
    seeds: Mapping[str, int] = field(default_factory=lambda: {"gpu": 1})
    """How many a preset has; none where it is not named."""

    @property
    def is_pretrained(self) -> bool:
        """Whether it has a pretraining of its own."""
        return not self.base

    @property
    def is_finetuned(self) -> bool:
        """Whether it has a fine-tuning of its own."""
        return self.applied != "test time"


_TWICE = {"quick": 3, "million": 7, "small": 3, "gpu": 1, "paper": 3}
_ONCE = {**_TWICE, "quick": 0, "million": 0}
_CONTROLS = {"million": 7, "gpu": 1}
PROBE, CONTROL = "probe", "temperature"
PILOT_SEED = 0
"""Where retrieval is taught in pretraining: (a) of this seed fixes which cells count, and is itself
not counted."""


def _at_test_time(
    rule: str, label: str, colour: str, words: str = "", *, is_control: bool = False
) -> Configuration:
    """A rule of n that others use, in the place of (a)'s softmax."""
    return Configuration(
        rule=rule, label=f"(a), {label} at test time", colour=colour, dash=":", base="a",
        in_words=f"(a) with {words or rule} applied at test time", applied="test time",
        s="constant" if words else "initial", loses_less_than=("a",), loses_more_than=("b",),
        seeds=_CONTROLS if is_control else {"gpu": 1},
    )  # fmt: skip


def _held(base: str, colour: str) -> Configuration:
    """Is it the growth of the factor beyond the training length that helps?"""
    return Configuration(
        rule="ssmax_held", label=f"({base}), n held at test time", colour=colour, dash=":",
        in_words=f"({base}) with n held at the training length", applied="test time", base=base,
        s="base", loses_more_than=(base,), seeds=_CONTROLS if base == "b" else {"gpu": 1},
    )  # fmt: skip


def _sharper(gain: float, colour: str) -> Configuration:
    """Softmax from a larger initial logit scale: is that what a rule gains in training?"""
    return Configuration(
        rule="softmax", label=f"(a), W_q x {gain:g} at first", colour=colour, dash="-.",
        in_words=f"(a) with W_q x {gain:g} at first", settings={"model.query_gain": gain},
        loses_less_than=("a",), loses_more_than=("b",), seeds={},
    )  # fmt: skip


def _faster(base: str, rule: str, colour: str) -> Configuration:
    """A rule whose s and b learn ten times as fast as the weights."""
    words = "the control" if base == CONTROL else f"({base})"
    return Configuration(
        rule=rule, label=f"{words}, faster s", colour=colour, dash="-.",
        in_words=f"{words} with s and b at ten times the rate",
        settings={"optim.scale_lr": 10.0}, loses_less_than=(base,), seeds={},
    )  # fmt: skip


# The colours of the paper's are Okabe and Ito's, which survive the common colour blindnesses.
CONFIGURATIONS: dict[str, Configuration] = {
    "a": Configuration(
        rule="softmax", label="(a) softmax", colour="#24292f", dash="-", is_papers=True,
        seeds=_TWICE,
    ),
    "b": Configuration(
        rule="ssmax", label="(b) SSMax", colour="#D55E00", dash="-", is_papers=True, seeds=_TWICE,
    ),
    "c": Configuration(
        rule="ssmax_no_s", label="(c) SSMax, no s", colour="#E69F00", dash="--", is_papers=True,
        seeds={**_ONCE, "million": 7},
    ),
    "d": Configuration(
        rule="ssmax_bias", label="(d) SSMax + bias", colour="#0072B2", dash="--", is_papers=True,
        seeds=_ONCE,
    ),
    "e": Configuration(
        rule="ssmax", label="(e) (a), replaced after", colour="#009E73", dash=":", is_papers=True,
        applied="fine-tuning", base="a", seeds=_ONCE,
    ),
    "f": Configuration(
        rule="ssmax", label="(f) (a), replaced late", colour="#CC79A7", dash="-.", is_papers=True,
        applied="last steps", seeds=_ONCE,
    ),
    # It has s but no log n.
    CONTROL: Configuration(
        rule="temperature", label="control: learned temperature", colour="#56B4E9", dash="-.",
        in_words="the control", seeds=_TWICE,
    ),
    "mean_log": Configuration(
        rule="mean_log", label="a constant, (c)'s mean", colour="#BDB76B", dash="-.",
        in_words="a model trained with (c)'s mean factor",
        loses_less_than=("a",), loses_more_than=("c",),
    ),
    "sqrt_log": Configuration(
        rule="sqrt_log", label="s sqrt(log n)", colour="#A0522D", dash="--",
        in_words="a model trained with sqrt_log", loses_more_than=("b",),
    ),
    "polylog": Configuration(
        rule="polylog", label="polylog", colour="#556B2F", dash="--",
        in_words="a model trained with polylog", loses_more_than=("b",),
    ),
    "gain_2": _sharper(2.3, "#7B68EE"),
    # The mean of (c)'s factor to T = 512.
    "gain_5": _sharper(5.25, "#4B0082"),
    "b_fast": _faster("b", "ssmax", "#FF4500"),
    "d_fast": _faster("d", "ssmax_bias", "#1E90FF"),
    "temperature_fast": _faster(CONTROL, "temperature", "#20B2AA"),
    "entropy_invariant": _at_test_time("entropy_invariant", "log n / log L", "#8A2BE2"),
    "clamp": _at_test_time("clamp", "Qwen log-n", "#B8860B", is_control=True),
    "llama4": _at_test_time("llama4", "Llama 4", "#708090"),
    "yarn": _at_test_time("yarn", "YaRN temperature", "#B22222"),
    # The control of the four before it: it knows nothing of n.
    "constant": _at_test_time(
        "temperature", "a constant", "#2F4F4F", "a constant", is_control=True
    ),
    "b_held": _held("b", "#FF8C69"),
    "c_held": _held("c", "#C0A000"),
    PROBE: Configuration(
        rule="probe", label="probe", colour="#777777", dash="-",
        seeds={**dict.fromkeys(_TWICE, 1), "quick": 0, "million": 0},
    ),
}  # fmt: skip
"""By name, in the order in which they are done and shown."""
MEASURED = tuple(name for name in CONFIGURATIONS if name != PROBE)
"""Those whose losses and needles are measured; the probe is defined for training lengths alone."""


def look(name: str) -> Configuration:
    """Return a configuration; one that is not in the table gets a grey line."""
    unknown = Configuration(rule="", label=name, colour="#777777", dash="-")
    return CONFIGURATIONS.get(name, unknown)


def called(name: str) -> str:
    """Name a configuration in a sentence."""
    return look(name).in_words or f"({name})"


def labels(runs: Mapping[str, int]) -> dict[str, str]:
    """Label configurations, with their numbers of runs where these are not the same."""
    found = {name: look(name).label for name in runs}
    if len(set(runs.values())) < 2:
        return found
    return {name: f"{found[name]}, {n} run{'s' * (n > 1)}" for name, n in runs.items()}
