"""The explorer: softmax's and SSMax's largest output for any n, s, b and lead, moved by sliders."""

from ssmax_lab.analysis.formulas import FIGURE_1_S
from ssmax_lab.configurations import look
from ssmax_lab.report.style import LINE, QUIET, Figure, Panel, altair

SLIDERS = (
    ("power", "n, as a power of ten", 0.5, 6.0, 0.05, 3.0),
    ("s", "s, scaling parameter", 0.0, 2.0, 0.01, FIGURE_1_S),
    ("b", "b, bias", -2.0, 2.0, 0.05, 0.0),
    ("lead", "lead of the largest entry", 0.0, 20.0, 0.1, 5.0),
)
N = "max(2, round(pow(10, power)))"


def explorer() -> Figure:
    """Draw the largest output against n, all other entries being equal, as in figure 1."""
    alt = altair()
    params = [
        alt.param(name=name, value=value,
                  bind=alt.binding_range(min=low, max=high, step=step, name=words))
        for name, words, low, high, step, value in SLIDERS
    ]  # fmt: skip
    scale = {"type": "log", "domain": [2, 1_000_000], "nice": False}
    axis = alt.Axis(format=",d", values=[10**power for power in range(1, 7)])
    at = alt.X("x:Q", title="n", axis=axis).scale(**scale)
    up = alt.Y("y:Q", title="largest output").scale(domain=[0, 1])
    colour = alt.Color("rule:N", legend=None).scale(
        domain=["softmax", "SSMax"], range=[look("a").colour, look("b").colour]
    )
    curves = alt.Chart(alt.sequence(0.3, 6.001, 0.05, as_="p")).transform_calculate(
        x="max(2, round(pow(10, datum.p)))", **_outputs("datum.x")
    )
    here = alt.Chart(alt.Data(values=[{}])).transform_calculate(x=N, **_outputs(N))
    curves, here = (
        one.transform_fold(["softmax", "SSMax"], as_=["rule", "y"]) for one in (curves, here)
    )
    told = here.transform_calculate(words="datum.rule + ' ' + format(datum.y, '.4f')")
    needed = "(s > 0 ? ', 1/s = ' + format(1 / s, '.3g') : '')"
    above = f"'n = ' + format({N}, ',d') + ', lead ' + lead + {needed}"
    layers = [
        curves.mark_line(strokeWidth=2.5, clip=True).encode(at, up, colour),
        here.mark_rule(color=LINE).encode(alt.X("x:Q").scale(**scale)),
        here.mark_point(filled=True, size=80, opacity=1).encode(at, up, colour),
        *(
            told.transform_filter(f"datum.rule == '{rule}'")
            .mark_text(align="left", baseline="bottom", x=x, y=-22, fontSize=13, fontWeight="bold")
            .encode(colour, alt.Text("words:N"))
            for rule, x in (("softmax", 0), ("SSMax", 125))
        ),
        alt.Chart(alt.Data(values=[{}])).mark_text(
            align="left", baseline="bottom", x=0, y=-5, fontSize=12, color=QUIET,
            text=alt.ExprRef(above),
        ),
    ]  # fmt: skip
    return Figure(
        title="Softmax fades as n grows; SSMax keeps what leads by more than 1/s",
        panels=[Panel(alt.layer(*layers).add_params(*params).properties(height=260))],
    )


def _outputs(n: str) -> dict[str, str]:
    """Write the largest output of n entries under both rules as expressions."""
    factors = {"softmax": "1", "SSMax": f"(s * log({n}) + b)"}
    return {
        rule: f"1 / (1 + ({n} - 1) * exp(-{factor} * lead))" for rule, factor in factors.items()
    }
