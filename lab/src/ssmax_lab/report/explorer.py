"""The explorer: softmax's and SSMax's output for any n, s, b and z_max, moved by sliders."""

from collections.abc import Callable
from typing import Any

from ssmax_lab.analysis.formulas import FIGURE_1_S
from ssmax_lab.configurations import look
from ssmax_lab.report.style import LINE, QUIET, Figure, Panel, altair

SLIDERS = (
    ("power", "n, as a power of ten", 0.5, 6.0, 0.05, 3.0),
    ("s", "s, scaling parameter", 0.0, 2.0, 0.01, FIGURE_1_S),
    ("b", "b, bias", -2.0, 2.0, 0.05, 0.0),
    ("z", "z_max, the largest entry", 0.0, 20.0, 0.1, 3.0),
)
N = "max(2, round(pow(10, power)))"
EVEN, SPREAD = (
    text.replace("-", "\u2212") for text in ("(-2, …, -2, z_max)", "(0, 1/(n-2), …, 1, z_max)")
)


def explorer() -> Figure:
    """Draw the outputs of z_max: against n for figure 1's input, against z_max for figure 3's."""
    alt = altair()
    params = [
        alt.param(name=name, value=value,
                  bind=alt.binding_range(min=low, max=high, step=step, name=words))
        for name, words, low, high, step, value in SLIDERS
    ]  # fmt: skip
    sizes = alt.Chart(alt.sequence(0.3, 6.001, 0.05, as_="p")).transform_calculate(
        x="max(2, round(pow(10, datum.p)))", **_outputs(_figure1, "datum.x", "z")
    )
    leads = alt.Chart(alt.sequence(0, 20.01, 0.1, as_="x")).transform_calculate(
        **_outputs(_figure3, N, "datum.x")
    )
    here_n, here_z = (
        {"x": N, **_outputs(_figure1, N, "z")},
        {"x": "z", **_outputs(_figure3, N, "z")},
    )
    panels = [
        _panel(alt, sizes, here_n, EVEN, "n", [2, 1_000_000], is_log=True),
        _panel(alt, leads, here_z, SPREAD, "z_max", [0, 20], critical=True),
    ]
    return Figure(
        title="Softmax fades as n grows; SSMax keeps what leads by more than 1/s",
        panels=[Panel(panels[0].add_params(*params)), Panel(panels[1])],
        width=400,
    )


def _outputs(output: Callable[[str, str, str], str], n: str, z: str) -> dict[str, str]:
    """Write an output under both rules as expressions."""
    return {"softmax": output("1", n, z), "ssmax": output(f"(s * log({n}) + b)", n, z)}


def _figure1(factor: str, n: str, z: str) -> str:
    """Write the largest output of softmax over factor (-2, ..., -2, z)."""
    return f"1 / (1 + ({n} - 1) * exp(-{factor} * ({z} + 2)))"


def _figure3(factor: str, n: str, z: str) -> str:
    """Write the output of z under softmax over factor (0, 1/(n-2), ..., 1, z).

    The sum over the others is a geometric series.
    """
    step = f"({factor} / ({n} - 2))"
    series = f"(exp({step} * ({n} - 1)) - 1) / (exp({step}) - 1)"
    others = f"({n} == 2 ? 1 : abs({factor}) < 1e-9 ? {n} - 1 : {series})"
    return f"1 / (1 + {others} * exp(-{factor} * {z}))"


def _panel(
    alt: Any,
    data: Any,
    here: dict[str, str],
    title: str,
    x: str,
    domain: list[float],
    *,
    is_log: bool = False,
    critical: bool = False,
) -> Any:
    scale = {"type": "log" if is_log else "linear", "domain": domain, "nice": False}
    ticks = {"values": [10**power for power in range(1, 7)]} if is_log else {"tickCount": 5}
    at = alt.X("x:Q", title=x, axis=alt.Axis(format=",d", **ticks)).scale(**scale)
    up = alt.Y("y:Q", title="output of z_max").scale(domain=[0, 1])
    colour = alt.Color("rule:N", legend=None).scale(
        domain=["softmax", "ssmax"], range=[look("a").colour, look("b").colour]
    )
    lines = data.transform_fold(["softmax", "ssmax"], as_=["rule", "y"])
    point = (
        alt.Chart(alt.Data(values=[{}]))
        .transform_calculate(**here)
        .transform_fold(["softmax", "ssmax"], as_=["rule", "y"])
        .transform_calculate(words="(datum.rule == 'ssmax' ? 'SSMax ' : 'softmax ') + "
                             "format(datum.y, '.4f')")
    )  # fmt: skip
    layers = [
        lines.mark_line(strokeWidth=2.5, clip=True).encode(at, up, colour),
        point.mark_rule(color=LINE).encode(alt.X("x:Q").scale(**scale)),
        point.mark_point(filled=True, size=80, opacity=1).encode(at, up, colour),
        *(
            point.transform_filter(f"datum.rule == '{rule}'")
            .mark_text(align="left", baseline="bottom", x=x_of_words, y=-22, fontSize=13,
                       fontWeight="bold")
            .encode(colour, alt.Text("words:N"))
            for rule, x_of_words in (("softmax", 0), ("ssmax", 125))
        ),
        alt.Chart(alt.Data(values=[{}])).mark_text(
            align="left", baseline="bottom", x=0, y=-5, fontSize=12, color=QUIET,
            text=alt.ExprRef(f"'n = ' + format({N}, ',d') + ', input {title}'"),
        ),
    ]  # fmt: skip
    if critical:
        mark = (
            alt.Chart(alt.Data(values=[{}]))
            .transform_calculate(x="1 + 1 / s", words="'1 + 1/s = ' + format(1 + 1 / s, '.3g')")
            .transform_filter("s > 0 && datum.x <= 20")
        )
        layers.append(
            mark.mark_rule(color=LINE, strokeDash=[3, 3]).encode(alt.X("x:Q").scale(**scale))
        )
        layers.append(
            mark.mark_text(align="left", baseline="bottom", dx=4, y=130, color=QUIET)
            .encode(alt.X("x:Q").scale(**scale), alt.Text("words:N"))
        )  # fmt: skip
    return alt.layer(*layers).properties(height=260)
