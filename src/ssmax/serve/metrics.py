"""What an engine does, in Prometheus' text format."""

from collections.abc import Mapping
from typing import get_args

from ssmax.serve.engine import Engine, Finish


def metrics_text(engine: Engine) -> str:
    """Every number with what it means."""
    totals = engine.totals
    ends = {f'{{finish="{end}"}}': totals.finished[end] for end in get_args(Finish)}
    first = {"_sum": totals.first_token_seconds, "_count": totals.first_tokens}
    families: list[tuple[str, str, str, Mapping[str, float]]] = [
        ("requests_total", "counter", "Requests that have ended, by the reason.", ends),
        ("requests_refused_total", "counter", "Requests without room.", {"": totals.refused}),
        ("requests_running", "gauge", "Requests read or continued.", {"": engine.num_running}),
        ("requests_waiting", "gauge", "Requests without a place yet.", {"": engine.num_waiting}),
        ("prompt_tokens_total", "counter", "Tokens read.", {"": totals.prompt_tokens}),
        ("completion_tokens_total", "counter", "Tokens written.", {"": totals.new_tokens}),
        ("decode_steps_total", "counter", "Steps, a token for every row.", {"": totals.steps}),
        ("first_token_seconds", "summary", "From arrival to the first token.", first),
    ]
    lines = []
    for name, kind, meaning, values in families:
        lines += [f"# HELP ssmax_{name} {meaning}", f"# TYPE ssmax_{name} {kind}"]
        lines += [f"ssmax_{name}{suffix} {value}" for suffix, value in values.items()]
    return "\n".join(lines) + "\n"
