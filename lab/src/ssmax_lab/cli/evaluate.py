"""Measure what the paper measures, of a run or of Hugging Face models, from the command line."""

import itertools
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ssmax.cli.options import Device, Json
from ssmax.errors import UsageError
from ssmax_lab.cli.data import default_text, text_in_tokens, text_of_shipped
from ssmax_lab.cli.options import A_RUN, TOKENIZERS, USUAL_DIGITS, Theta
from ssmax_lab.tiny import run_folder

if TYPE_CHECKING:
    from ssmax_lab.study.measurement import Measurement

logger = logging.getLogger(__name__)
OPTIONS: dict[str, dict[str, Any]] = {
    "position-loss": {"length": [2048], "documents": 32, "batch": 1},
    "needle": {"length": None, "depths": 11, "trials": 20, "digits": None, "batch": 8, "seed": 0},
    "needle-score": {
        "length": None, "trials": 100, "depth": None, "digits": None, "batch": 8, "seed": 0,
    },
    "sharpness": {"length": [2048], "documents": 8},
    "extension": {
        "length": None, "documents": 4, "trials": 5, "digits": None, "seed": 0,
    },
    "all": {"length": [1024], "documents": 8, "depths": 5, "trials": 10, "digits": None, "seed": 0},
}  # fmt: skip
"""What can be measured, and the options that each takes, with their defaults."""
SHORTEST = 128
"""Of the contexts that hide a needle."""


def evaluate(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="WHAT",
            help="position-loss, the loss at every position (figure 5); needle, a hidden number "
            "asked for (figure 6); needle-score, the attention on it (figures 7 and 8); sharpness, "
            "how sharp attention is as the context grows; all; or extension, whether a longer "
            "context is worth having, as with --hf BEFORE AFTER alone.",
        ),
    ] = None,
    folder: Annotated[
        Path | None, typer.Argument(metavar="RUN", parser=run_folder, help=f"{A_RUN} Or --hf.")
    ] = None,
    hf: Annotated[
        list[str] | None,
        typer.Option(
            "--hf", metavar="MODEL", help="A folder, or a name on the Hub; may be repeated."
        ),
    ] = None,
    adapter: Annotated[
        Path | None, typer.Option(help="Measure the --hf model without and with this adapter.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help=f"For --hf: {TOKENIZERS}; by default the model's own.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Folder that ssmax-lab data prepare wrote; by default the run's."),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            help="For extension: a file or folder of texts; by default four addresses of over "
            "30,000 words that come with the lab."
        ),
    ] = None,
    theta: Theta = None,
    rule: Annotated[
        str | None,
        typer.Option(help="Replace the scaling rule first; ssmax on (a) makes configuration (e)."),
    ] = None,
    results: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("results"),
    length: Annotated[
        list[int] | None,
        typer.Option(
            metavar="TOKENS",
            help="Length of documents or contexts; by default 2048, for all 1024; for "
            "needle (repeatable) 1, 2 and 4 training lengths, for needle-score 2, for extension "
            "the context that it was made for.",
        ),
    ] = None,
    documents: Annotated[
        int | None,
        typer.Option(
            help="Number of documents; by default 32 for position-loss, 4 for extension, else 8."
        ),
    ] = None,
    depths: Annotated[
        int | None,
        typer.Option(help="Number of needle depths; by default 11 for needle, 5 for all."),
    ] = None,
    depth: Annotated[
        float | None,
        typer.Option(help="Depth of needle-score's needles; by default drawn at random."),
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(
            help="Trials; by default 20 per depth for needle, 100 for needle-score, 10 for all, "
            "5 per context for extension."
        ),
    ] = None,
    digits: Annotated[
        int | None,
        typer.Option(
            help=f"Digits of a number; by default as a run was fine-tuned on, else {USUAL_DIGITS}."
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(help="Texts at a time; by default 1 for position-loss, 8 for needles."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of needles and texts; by default 0.")
    ] = None,
    device: Device = None,
    json_: Json = False,
) -> None:
    """Measure a run, or Hugging Face models side by side.

    If interrupted, the same command resumes. --hf BEFORE --hf AFTER shows two models side by side.
    """
    hf = hf or []
    if hf and what not in OPTIONS:
        # --hf BEFORE AFTER: the second one looks like WHAT.
        hf, what = [*hf, *([what] if what else [])], "extension"
    if what is None:
        raise UsageError(f"give WHAT to measure: {', '.join(OPTIONS)}")
    options = _options(
        what, length=length, documents=documents, depths=depths, depth=depth, trials=trials,
        digits=digits, batch=batch, seed=seed,
    )  # fmt: skip
    _check(folder, hf, adapter=adapter, tokenizer=tokenizer, data=data, theta=theta, rule=rule,
           device=device)  # fmt: skip
    if text is not None and (what != "extension" or data is not None):
        raise UsageError("--text is read by extension, instead of --data")
    if what == "extension":
        return _extension(
            hf, adapter, tokenizer, data, text, results, device, as_json=json_, **options
        )
    if folder is not None:
        from ssmax_lab.study.measurement import Measurement

        measurements = iter([
            Measurement.of_run(
                folder, data=data or text_of_shipped(folder), theta=theta, rule=rule,
                results=results, device=device,
            )
        ])  # fmt: skip
    else:
        measurements = _hf_measurements(hf, adapter, tokenizer, data, results, device)
    measured = []
    for here in measurements:
        if hf and not json_:
            print(here.run)
        for records, lines in MEASURE[what](here, **options):
            _show(records, lines, as_json=json_)
        measured.append(here.run)
    if hf and not json_:
        _show_side_by_side(results, measured)


def _options(what: str, **given: Any) -> dict[str, Any]:
    """Complete the options of a measurement; refuse what it does not take."""
    if what not in OPTIONS:
        raise UsageError(f"WHAT must be one of {', '.join(OPTIONS)}, got {what!r}")
    given = {name: value for name, value in given.items() if value is not None}
    for name in given:
        if name not in OPTIONS[what]:
            takes = ", ".join(f"--{known}" for known in OPTIONS[what])
            raise UsageError(f"--{name} is not an option of {what}, which takes {takes}")
        values = given[name] if isinstance(given[name], list) else [given[name]]
        if name not in ("depth", "seed") and min(values) < 1:
            raise UsageError(f"--{name} must be at least 1, got {min(values)}")
    if not 0.0 <= given.get("depth", 0.0) <= 1.0:
        raise UsageError(f"--depth must be from 0 to 1, got {given['depth']}")
    options = {**OPTIONS[what], **given}
    if what != "needle":
        # As everywhere, the last one that is given holds.
        options["length"] = (options["length"] or [None])[-1]
    return options


def _check(
    run: Path | None,
    hf: Sequence[str],
    *,
    adapter: Path | None,
    tokenizer: str | None,
    data: Path | None,
    theta: float | None,
    rule: str | None,
    device: str | None,
) -> None:
    """Refuse what can be told before torch is imported."""
    from ssmax._device import check_device
    from ssmax.hf.sources import CONFIG, check_typed
    from ssmax.nn.rules import RULES
    from ssmax_lab.data.preparation import text_to_measure
    from ssmax_lab.train.run import read_run_config

    if (run is None) == (not hf):
        raise UsageError("give one thing to measure: a run's folder, or --hf MODEL")
    if run is not None and (adapter or tokenizer):
        raise UsageError("--adapter and --tokenizer go with --hf; a run has its own")
    if run is not None:
        read_run_config(run, otherwise=f"; for a Hugging Face model: --hf {run}")
    check_device(device)
    if rule is not None and run is not None and rule not in RULES:
        raise UsageError(f"--rule must be one of {', '.join(RULES)}, got {rule!r}")
    if data is not None:
        text_to_measure(data, is_for_tests=True)
    for source in hf:
        check_typed(
            source,
            of_an_adapter=f"name that model, and {source} as its adapter (--adapter {source})",
        )
    if hf and rule is not None:
        raise UsageError(
            f"--rule is a run's; a Hugging Face model is given one by ssmax convert "
            f"{hf[0]} OUT --rule {rule}, and then measured as --hf OUT"
        )
    if hf and theta is not None:
        raise UsageError(
            "--theta is a run's; for a Hugging Face model copy its folder, set the rope_theta "
            f"in config.json of the copy to {theta:g} (one without rope_theta has no "
            "theta), and measure the copy with --hf"
        )
    if adapter is not None and len(hf) != 1:
        raise UsageError(f"--adapter goes with one --hf, got {len(hf)}")
    # Its base is measured first, which may take hours.
    if adapter is not None and not (adapter / CONFIG).is_file():
        raise UsageError(
            f"{adapter} holds no adapter: ssmax convert MODEL {adapter} --adapter writes one"
        )


def _hf_measurements(
    hf: Sequence[str],
    adapter: Path | None,
    tokenizer: str | None,
    data: Path | None,
    results: Path,
    device: str | None,
    text: str | None = None,
    *,
    has_own_text: bool = False,
) -> "Iterator[Measurement]":
    """Load one model after the other, so that one at a time is in memory.

    An adapter's base comes without it first.
    """
    from ssmax.hf.adapter import check_base
    from ssmax_lab.model.hf_causal_lm import causal_config
    from ssmax_lab.study.hf_measurement import (
        check_same_tokens,
        hf_measurement,
        hf_name,
        hf_tokenizer,
    )

    models: list[tuple[str, Path | None]] = [(source, None) for source in hf]
    if adapter is not None:
        models.append((hf[0], adapter))
    short = [hf_name(source, used) for source, used in models]
    names = [
        _with_its_folder(source, name) if short.count(name) > 1 else name
        for (source, _), name in zip(models, short, strict=True)
    ]
    if len(set(names)) < len(names):
        raise UsageError(f"two models are called {max(short, key=short.count)!r}; rename one")
    # Before its tokenizer is missed, and before another is measured for hours.
    configs = [causal_config(source) for source in hf]
    if adapter is not None:
        check_base(adapter, hf[0], configs[0])
    tokenizer = tokenizer or hf_tokenizer(hf[0])
    for source in hf[1:]:
        check_same_tokens(source, tokenizer)
    if data is None:
        data = text_in_tokens(text, tokenizer) if has_own_text else default_text(tokenizer)
    for (source, used), name in zip(models, names, strict=True):
        yield hf_measurement(
            source, adapter=used, name=name, tokenizer=tokenizer, data=data, results=results,
            device=device,
        )  # fmt: skip


def _extension(
    hf: Sequence[str], adapter: Path | None, tokenizer: str | None, data: Path | None,
    text: str | None, results: Path, device: str | None, *, length: int | None, documents: int,
    trials: int, digits: int | None, seed: int, as_json: bool,
) -> None:  # fmt: skip
    """Measure two models on long texts, and say what the second one's longer context is worth."""
    import numpy as np

    from ssmax_lab.model.hf_causal_lm import check_memory
    from ssmax_lab.report.before_after import extension_verdict

    if len(hf) + (adapter is not None) != 2:
        raise UsageError(
            "extension compares two models: --hf BEFORE AFTER, or --hf BASE --adapter ADAPTER"
        )
    trained, to = _lengths(hf, adapter)
    longest = length or to
    if longest <= trained:
        raise UsageError(
            f"--length {longest} is not longer than the {trained} tokens of the training; there is "
            "nothing to see"
        )
    contexts = [trained // 2, trained]
    while contexts[-1] < longest:
        contexts.append(min(2 * contexts[-1], longest))
    # Shorter ones have no room for a needle and its question.
    contexts = [n for n in contexts if n >= SHORTEST] or [longest]
    depths = ((np.arange(trials) + 0.5) / trials).round(4).tolist()
    found = []
    for here in _hf_measurements(
        hf, adapter, tokenizer, data, results, device, text, has_own_text=True
    ):
        logger.info(here.run)
        check_memory(getattr(here.model, "model"), longest)  # noqa: B009 (of Hugging Face alone)
        loss = here.position_loss(length=longest, documents=documents)
        needles = here.needle(
            lengths=contexts, depths=depths, trials=1, digits=digits or USUAL_DIGITS, batch=1,
            seed=seed, begun=True,
        )  # fmt: skip
        found.append((loss, needles))
        if as_json:
            _show([loss, *needles], (), as_json=True)
    if as_json:
        return
    _show_side_by_side(results, [loss.run for loss, _ in found])
    print("\n" + "\n".join(extension_verdict(*found, train_length=trained)))


def _lengths(hf: Sequence[str], adapter: Path | None) -> tuple[int, int]:
    """Find the trained length and the one that a model was extended to."""
    import json

    from ssmax.hf.extension import KEY
    from ssmax.hf.sources import CONFIG
    from ssmax_lab.model.hf_causal_lm import causal_config

    configs = [causal_config(source) for source in hf]
    about = configs[-1].get(KEY)
    if adapter is not None:
        about = json.loads((adapter / CONFIG).read_text()).get("extension")
    if about is not None:
        return about["train_length"], about["to"]
    key = "max_position_embeddings"
    limits: list[Any] = [one.get(key) or one.get("text_config", {}).get(key) for one in configs]
    if None in limits:
        raise UsageError(
            "neither model says how long its contexts are; extend one with ssmax extend"
        )
    before, after = limits[0], limits[-1]
    return before, after if after > before else 4 * before


def _with_its_folder(source: str, name: str) -> str:
    """Put a folder's name behind that of the folder around it; a name on the Hub stays."""
    path = Path(source).resolve()
    # What finetune wrote is called by its run, the folder around the model's.
    own = next((one for one in (path, path.parent) if one.name == name), None)
    return name if own is None or not path.exists() else f"{own.parent.name}/{name}"


def _show_side_by_side(results: Path, runs: Sequence[str]) -> None:
    """Print the table of these, and name the page of all that a folder of results holds."""
    from ssmax_lab.report.side_by_side import SideBySide, text_table, write_side_by_side

    found, page = write_side_by_side(results)
    print("\n" + "\n".join(text_table(SideBySide(results, runs))))
    others = [run for run in found.runs if run not in runs]
    beside = f", with {', '.join(others)} from earlier commands" if others else ""
    print(f"\nthe page{beside}: {page.resolve()}")


Measured = Iterator[tuple[Sequence[Any], Sequence[str]]]
"""Records, and the lines that tell them."""


def _show(records: Sequence[Any], lines: Sequence[str], *, as_json: bool) -> None:
    """Print records as lines for a script, or what a person reads of them."""
    from ssmax_lab.records import to_jsonl

    print(to_jsonl(records).rstrip("\n") if as_json else "\n".join(lines))


def _position_loss(here: "Measurement", *, length: int, documents: int, batch: int = 1) -> Measured:
    from ssmax_lab.records import POSITION_LOSS

    record = here.position_loss(length=length, documents=documents, batch=batch)
    ranges = zip(itertools.pairwise(record.edges), zip(*record.binned, strict=True), strict=True)
    lines = [
        f"positions {start:6,} to {stop:6,}  loss {sum(losses) / len(losses):.4f}"
        for (start, stop), losses in ranges
    ]
    fewer = f" ({documents} asked for: the text has no more)" if record.count < documents else ""
    yield [record], [*lines, f"{record.count} documents{fewer}; {here.results / POSITION_LOSS}"]


def _needle(
    here: "Measurement", *, length: Sequence[int] | None, depths: int, digits: int | None,
    **options: Any,
) -> Measured:  # fmt: skip
    import numpy as np

    from ssmax_lab.eval.retrieval import accuracy
    from ssmax_lab.records import NEEDLE

    lengths = length or [here.usual_length * factor for factor in (1, 2, 4)]
    places = [0.5] if depths == 1 else np.linspace(0, 1, depths).round(4).tolist()
    found = here.needle(lengths=lengths, depths=places, digits=_digits(here, digits), **options)
    lines = []
    for tokens in lengths:
        cells = [trial for trial in found if trial.length == tokens]
        first = sum(trial.first_digit for trial in cells) / len(cells)
        whole = accuracy(cells)
        lines.append(f"context {tokens:6,}  whole number {whole:.3f}  first digit {first:.3f}")
    yield found, [*lines, f"{here.results / NEEDLE}"]


def _needle_score(
    here: "Measurement", *, length: int | None, trials: int, digits: int | None,
    depth: float | None = None, **options: Any,
) -> Measured:  # fmt: skip
    import numpy as np

    from ssmax_lab.eval.retrieval import top_heads
    from ssmax_lab.records import NEEDLE_SCORE

    scores = here.needle_scores(
        length=length or 2 * here.usual_length, depth=depth, trials=trials,
        digits=_digits(here, digits), **options,
    )  # fmt: skip
    mean = np.mean([score.number_scores for score in scores], axis=0).tolist()
    lines = [
        f"layer {layer:2} head {head:2}  mean needle score {score:.4f}"
        for layer, head, score in top_heads(mean, 5)
    ]
    accuracy = np.mean([score.is_whole for score in scores])
    lines.append(f"needle retrieval accuracy {accuracy:.3f}")
    yield scores, [*lines, f"{here.results / NEEDLE_SCORE}"]


def _sharpness(here: "Measurement", *, length: int, documents: int) -> Measured:
    import numpy as np

    from ssmax_lab.records import SHARPNESS

    record = here.sharpness(length=length, documents=documents)
    largest, entropy = (np.mean(grid, (0, 1)) for grid in (record.largest, record.entropy))
    lines = [
        f"n {keys:6,}  largest weight {weight:.4f}  entropy {nats:.3f}"
        for keys, weight, nats in zip(record.num_keys, largest, entropy, strict=True)
    ]
    yield [record], [*lines, f"{here.results / SHARPNESS}"]


def _all(
    here: "Measurement", *, length: int, documents: int, depths: int, **options: Any
) -> Measured:
    needles = {**options, "digits": _digits(here, options["digits"]), "batch": 1}
    yield from _position_loss(here, length=length, documents=documents)
    yield from _sharpness(here, length=length, documents=documents)
    yield from _needle(here, length=[length], depths=depths, **needles)
    yield from _needle_score(here, length=length, **needles)


MEASURE = {
    "position-loss": _position_loss,
    "needle": _needle,
    "needle-score": _needle_score,
    "sharpness": _sharpness,
    "all": _all,
}


def _digits(here: "Measurement", given: int | None) -> int:
    """Take as many as are given; else as many as a run was fine-tuned on, else the paper's."""
    if given is not None:
        return given
    from ssmax_lab.data.qa import digits_taught

    learned = here.identity.get("run", {}).get("data", {}).get("questions", "")
    digits = digits_taught(learned)
    why = "" if digits is None else ", as the run was fine-tuned on"
    logger.info(f"numbers of {digits or USUAL_DIGITS} digits{why}; --digits takes others")
    return digits or USUAL_DIGITS
