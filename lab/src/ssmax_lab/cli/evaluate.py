"""Measure what the paper measures, of a run or of Hugging Face models, from the command line."""

import itertools
import logging
from collections.abc import Callable, Sequence
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
    "position-loss": {"length": [2048], "documents": 32},
    "needle": {"length": None, "depths": 11, "trials": 20, "digits": None, "seed": 0},
    "needle-score": {"length": None, "trials": 100, "digits": None, "seed": 0},
    "sharpness": {"length": [2048], "documents": 8},
    "all": {"length": [1024], "documents": 8, "depths": 5, "trials": 10, "digits": None, "seed": 0},
    "extension": {"length": None, "documents": 4, "trials": 5, "digits": None, "seed": 0},
}
"""What can be measured, and the options that each takes, with their defaults."""
SHORTEST = 128
"""Of the contexts that hide a needle."""
AT_A_TIME = 8192
"""Tokens of needle prompts that are read at a time, where one is not longer."""


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
            help="For --hf: a file or folder of texts; by default, for extension, four addresses "
            "of over 30,000 words that come with the lab."
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
    if what not in OPTIONS:
        raise UsageError(f"give WHAT to measure, one of {', '.join(OPTIONS)}; got {what}")
    options = _options(
        what, length=length, documents=documents, depths=depths, trials=trials, digits=digits,
        seed=seed,
    )  # fmt: skip
    _check(folder, hf, adapter=adapter, tokenizer=tokenizer, data=data, text=text, theta=theta,
           rule=rule, device=device)  # fmt: skip
    trained = 0
    if what == "extension":
        trained, options["length"] = _contexts(hf, adapter, options["length"])
    from ssmax_lab.records import to_jsonl
    from ssmax_lab.report.before_after import extension_verdict
    from ssmax_lab.report.side_by_side import SideBySide, text_table, write_side_by_side

    if folder is not None:
        from ssmax_lab.study.measurement import Measurement

        measurements = iter([
            Measurement.of_run(
                folder, data=data or text_of_shipped(folder), theta=theta, rule=rule,
                results=results, device=device,
            )
        ])  # fmt: skip
    else:
        from ssmax_lab.study.hf_measurement import hf_measurements

        def own_text(tokenizer: str) -> Path:
            is_long = text is not None or what == "extension"
            return text_in_tokens(text, tokenizer) if is_long else default_text(tokenizer)

        measurements = hf_measurements(
            hf, adapter, tokenizer=tokenizer, text=data or own_text, results=results, device=device
        )
    measured = []
    for here in measurements:
        logger.info(here.run)
        records = _measure(here, what, options)
        measured.append(records)
        if json_:
            print(to_jsonl(records).rstrip("\n"))
    if json_:
        return
    print("\n" + "\n".join(text_table(SideBySide(itertools.chain(*measured)))) + "\n")
    if hf:
        _, page = write_side_by_side(results)
        print(f"the page of all in {results}: {page.resolve()}")
    else:
        print(f"records: {results}")
    if what == "extension":
        print("\n" + "\n".join(extension_verdict(*measured, train_length=trained)))


def _options(what: str, **given: Any) -> dict[str, Any]:
    """Complete the options of a measurement; refuse what it does not take."""
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if name not in OPTIONS[what]:
            takes = ", ".join(f"--{known}" for known in OPTIONS[what])
            raise UsageError(f"--{name} is not an option of {what}, which takes {takes}")
        least = min(value) if isinstance(value, list) else value
        if name != "seed" and least < 1:
            raise UsageError(f"--{name} must be at least 1, got {least}")
    return {**OPTIONS[what], **given}


def _check(
    run: Path | None,
    hf: Sequence[str],
    *,
    adapter: Path | None,
    data: Path | None,
    theta: float | None,
    rule: str | None,
    device: str | None,
    **of_hf: str | None,
) -> None:
    """Refuse what can be told before torch is imported."""
    from ssmax._device import check_device
    from ssmax.hf.sources import CONFIG, check_typed
    from ssmax.nn.rules import RULES
    from ssmax_lab.data.preparation import text_to_measure
    from ssmax_lab.train.run import read_run_config

    if (run is None) == (not hf):
        raise UsageError("give one thing to measure: a run's folder, or --hf MODEL")
    check_device(device)
    if data is not None:
        if of_hf["text"] is not None:
            raise UsageError("--text and --data are two texts; give one")
        text_to_measure(data, is_for_tests=True)
    if run is not None:
        for name, value in {"adapter": adapter, **of_hf}.items():
            if value is not None:
                raise UsageError(f"--{name} goes with --hf; a run has its own")
        read_run_config(run, otherwise=f"; for a Hugging Face model: --hf {run}")
        if rule is not None and rule not in RULES:
            raise UsageError(f"--rule must be one of {', '.join(RULES)}, got {rule!r}")
        return
    if rule is not None:
        raise UsageError(
            f"--rule is a run's; measure what ssmax convert {hf[0]} OUT --rule {rule} writes"
        )
    if theta is not None:
        raise UsageError(
            "--theta is a run's; copy the model's folder and set rope_theta in its config.json"
        )
    for source in hf:
        check_typed(
            source,
            of_an_adapter=f"name that model, and {source} as its adapter (--adapter {source})",
        )
    if adapter is not None and len(hf) != 1:
        raise UsageError(f"--adapter goes with one --hf, got {len(hf)}")
    # Its base is measured first, which may take hours.
    if adapter is not None and not (adapter / CONFIG).is_file():
        raise UsageError(
            f"{adapter} holds no adapter: ssmax convert MODEL {adapter} --adapter writes one"
        )


def _contexts(
    hf: Sequence[str], adapter: Path | None, length: Sequence[int] | None
) -> tuple[int, list[int]]:
    """Choose the contexts that show an extension, from half of the trained length to its own.

    Returns the trained length too.
    """
    import json

    from ssmax.hf.extension import KEY
    from ssmax.hf.sources import CONFIG
    from ssmax_lab.model.hf_causal_lm import causal_config

    if len(hf) + (adapter is not None) != 2:
        raise UsageError(
            "extension compares two models: --hf BEFORE AFTER, or --hf BASE --adapter ADAPTER"
        )
    configs = [causal_config(source) for source in hf]
    about = configs[-1].get(KEY)
    if adapter is not None:
        about = json.loads((adapter / CONFIG).read_text()).get("extension")
    if about is None:
        key = "max_position_embeddings"
        limits: list[Any] = [one.get(key) or one.get("text_config", {}).get(key) for one in configs]
        if None in limits:
            raise UsageError(
                "neither model says how long its contexts are; extend one with ssmax extend"
            )
        before, after = limits[0], limits[-1]
        about = {"train_length": before, "to": after if after > before else 4 * before}
    trained, longest = about["train_length"], length[-1] if length else about["to"]
    if longest <= trained:
        raise UsageError(
            f"--length {longest} is not longer than the {trained} tokens of the training; there is "
            "nothing to see"
        )
    contexts = [trained // 2, trained]
    while contexts[-1] < longest:
        contexts.append(min(2 * contexts[-1], longest))
    # Shorter ones have no room for a needle and its question.
    return trained, [tokens for tokens in contexts if tokens >= SHORTEST] or [longest]


def _measure(here: "Measurement", what: str, options: dict[str, Any]) -> list[Any]:
    """Measure one model; returns the records."""
    if what == "all":
        return [
            record
            for each in ("position-loss", "sharpness", "needle", "needle-score")
            for record in _measure(
                here, each, {name: options[name] for name in OPTIONS[each] if name in options}
            )
        ]
    if "digits" in options:
        options = {**options, "digits": _digits(here, options["digits"])}
    return MEASURE[what](here, **options)


def _position_loss(here: "Measurement", *, length: Sequence[int], documents: int) -> list[Any]:
    record = here.position_loss(length=length[-1], documents=documents)
    if record.count < documents:
        logger.info(f"{record.count} documents, {documents} asked for: the text has no more")
    return [record]


def _needle(
    here: "Measurement", *, length: Sequence[int] | None, depths: int, **options: Any
) -> list[Any]:
    import numpy as np

    lengths = length or [here.usual_length * times for times in (1, 2, 4)]
    places = [0.5] if depths == 1 else np.linspace(0, 1, depths).round(4).tolist()
    return here.needle(lengths=lengths, depths=places, batch=_batch(max(lengths)), **options)


def _needle_score(
    here: "Measurement", *, length: Sequence[int] | None, **options: Any
) -> list[Any]:
    longest = length[-1] if length else 2 * here.usual_length
    return here.needle_scores(length=longest, depth=None, batch=_batch(longest), **options)


def _sharpness(here: "Measurement", *, length: Sequence[int], documents: int) -> list[Any]:
    return [here.sharpness(length=length[-1], documents=documents)]


def _extension(
    here: "Measurement", *, length: Sequence[int], documents: int, trials: int, **options: Any
) -> list[Any]:
    """Measure the loss up to the longest context, and needles in all of them."""
    from ssmax.hf.extension import memory_shortfall

    # The one of Transformers inside.
    model: Any = here.model
    lack = memory_shortfall(model.model, length[-1], here.device)
    if lack is not None:
        raise UsageError(f"{lack}; give a shorter --length")
    # One needle at each depth, and none at either end.
    depths = [round((place + 0.5) / trials, 4) for place in range(trials)]
    loss = here.position_loss(length=length[-1], documents=documents)
    needles = here.needle(
        lengths=length, depths=depths, trials=1, batch=1, begun=True, **options
    )  # fmt: skip
    return [loss, *needles]


MEASURE: dict[str, Callable[..., list[Any]]] = {
    "position-loss": _position_loss,
    "needle": _needle,
    "needle-score": _needle_score,
    "sharpness": _sharpness,
    "extension": _extension,
}


def _batch(length: int) -> int:
    """Choose how many prompts to read at a time."""
    return max(1, min(8, AT_A_TIME // length))


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
