"""Train runs, fine-tune, continue texts and export, from the command line."""

import os
import shlex
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ssmax.cli.options import Device, Json, Out
from ssmax.errors import UsageError
from ssmax_lab.cli.data import default_data, text_of_shipped
from ssmax_lab.cli.options import Run, Sets, Theta
from ssmax_lab.tiny import is_shipped

if TYPE_CHECKING:
    from ssmax_lab.train.loop import Outcome

File = Annotated[Path | None, typer.Option(help="Settings in .toml or .json.")]
Resume = Annotated[bool, typer.Option("--resume", help="Resume from the newest whole checkpoint.")]


def pretrain(
    preset: Annotated[
        str | None,
        typer.Option(help="quick, million, small, gpu, paper or long; by default quick."),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            help="a (softmax), b (SSMax), c, d, f, probe, or a rule's name; by default b."
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder that ssmax-lab data prepare wrote; by default the preset's text."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The run's folder; by default runs/PRESET-CONFIG.")
    ] = None,
    file: File = None,
    set_: Sets = None,
    resume: Resume = False,
    device: Device = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print size, hours and price of the run only.")
    ] = False,
) -> int:
    """Train the paper's model, or a smaller one, from scratch.

    The quick preset trains on Python's standard library.
    """
    from ssmax._device import check_device
    from ssmax_lab.train.recipes import PRETRAINING, check_gpu, configured
    from ssmax_lab.train.run import check_text, resumed_config

    overrides = _overrides(file, set_)
    recipe = "quick" if preset is None else preset
    configuration = "b" if config is None else config
    if recipe not in PRETRAINING:
        raise UsageError(f"--preset must be one of {', '.join(PRETRAINING)}, got {preset!r}")
    check_device(device)
    folder = out or Path("runs") / f"{recipe}-{configuration}"
    if data is not None:
        overrides["data.folder"] = str(data)
    if resume:
        # The command that began it may be given again whole; another one means another run.
        began = {} if preset is None else {"run.recipe": preset}
        if config is not None:
            asked = configured(PRETRAINING[recipe](), config)
            began |= {"model.rule": asked.model.rule, "switch.rule": asked.switch.rule}
        settings = resumed_config(folder, began | overrides)
    else:
        settings = configured(PRETRAINING[recipe](), configuration).with_overrides(overrides)
    if dry_run:
        from ssmax_lab.train.cost import plan_words

        print(plan_words(settings, folder.name))
        return 0
    if not resume and not settings.data.folder:
        settings = settings.with_overrides({"data.folder": str(default_data(recipe))})
    check_text(settings)
    check_gpu(settings.run.recipe, device)
    from ssmax_lab.train.dist import init_distributed
    from ssmax_lab.train.pretraining import pretrain

    with init_distributed(device) as ranks:
        outcome = pretrain(settings, folder, ranks=ranks, resume=resume)
    return _ended(outcome, folder, ["pretrain"], device)


def finetune(
    base: Run,
    questions: Annotated[
        str | None,
        typer.Option(
            help="A SQuAD file, invented, or hidden (a number in the run's own text); "
            "several joined by +. By default hidden for quick runs, else invented."
        ),
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="Replace the scaling rule first: e, or a rule's name.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The new run's folder; by default RUN-qa, beside it.")
    ] = None,
    file: File = None,
    set_: Sets = None,
    resume: Resume = False,
    device: Device = None,
) -> int:
    """Fine-tune a run on questions, as in table 3."""
    from ssmax._device import check_device
    from ssmax.nn.rules import RULES
    from ssmax_lab.data.qa import check_files
    from ssmax_lab.train.run import read_run_config, with_name

    overrides = _overrides(file, set_)
    check_device(device)
    read_run_config(base).with_overrides(overrides)
    if questions is not None:
        check_files(questions)
    if config not in (None, "e", *RULES):
        raise UsageError(f"--config must be e or one of {', '.join(RULES)}, got {config!r}")
    base = with_name(base)
    suffix = f"-{config}-qa" if config else "-qa"
    beside = Path("runs") if is_shipped(base) else base.parent
    folder = out or beside / f"{base.name}{suffix}"
    text_of_shipped(base)
    from ssmax_lab.train.dist import init_distributed
    from ssmax_lab.train.finetuning import finetune

    with init_distributed(device) as ranks:
        outcome = finetune(
            base,
            folder,
            ranks=ranks,
            questions=questions,
            rule="ssmax" if config == "e" else config,
            overrides=overrides,
            resume=resume,
        )
    return _ended(outcome, folder, ["finetune", str(base)], device)


def generate(
    folder: Run,
    prompts: Annotated[
        list[str], typer.Argument(metavar="PROMPT", help="One or more texts to continue.")
    ],
    max_new_tokens: Annotated[int, typer.Option(min=0, help="New tokens, at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k likeliest tokens.")] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Sample from the likeliest tokens up to this probability mass."),
    ] = None,
    theta: Theta = None,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    device: Device = None,
) -> None:
    """Continue prompts with a run's model."""
    from ssmax._device import select_device
    from ssmax_lab.model.config import check_sampling
    from ssmax_lab.train.run import read_run_config

    read_run_config(folder)
    check_sampling(temperature, top_k, top_p)
    if temperature == 0 and not (top_k is None and top_p is None):
        raise UsageError(
            "--top-k and --top-p choose among what is drawn, and at --temperature 0 nothing is; "
            "give --temperature above 0"
        )
    here = select_device(device)
    import torch

    from ssmax_lab.data.tokenizer import UNKNOWN
    from ssmax_lab.train.run import load_run_model, load_run_tokenizer

    tokenizer = load_run_tokenizer(folder)
    encoded = [tokenizer.encode(prompt) for prompt in prompts]
    for prompt, tokens in zip(prompts, encoded, strict=True):
        if not tokens:
            raise UsageError(
                f"a prompt must hold at least one token, got {prompt!r}; give a text to continue"
            )
    model = load_run_model(folder, device=here).eval()
    if theta is not None:
        model.theta = theta
    new: list[list[int]] = [[] for _ in prompts]
    is_alone, printed = len(prompts) == 1, 0
    print(prompts[0] if is_alone else "", end="")
    for step in model.stream(
        encoded,
        max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop_tokens=[tokenizer.vocabulary.end_of_document],
        generator=torch.Generator(here).manual_seed(seed),
    ):
        for row, token in zip(new, step, strict=True):
            if token is not None:
                row.append(token)
        # What may be half a character is held back.
        if is_alone and not (text := tokenizer.decode(new[0])).endswith(UNKNOWN):
            print(text[printed:], end="", flush=True)
            printed = len(text)
    if is_alone:
        print(tokenizer.decode(new[0])[printed:])
        return
    for prompt, row in zip(prompts, new, strict=True):
        print(f"{prompt}{tokenizer.decode(row)}\n---")


def export(folder: Run, out: Out, json_: Json = False) -> None:
    """Write a run as a Hugging Face model, for ssmax export."""
    import json

    from ssmax._files import check_empty
    from ssmax_lab.train.run import read_run_config

    read_run_config(folder)
    check_empty(out)
    from ssmax_lab.model.llama import save_as_llama
    from ssmax_lab.train.run import load_run_model, load_run_tokenizer

    tokenizer = load_run_tokenizer(folder)
    end = tokenizer.vocabulary.end_of_document
    save_as_llama(
        load_run_model(folder),
        out,
        tokenizer=tokenizer.definition,
        end=(end, tokenizer.decode([end])),
    )
    then = shlex.join(["ssmax", "export", str(out), "OUT", "--to", "ministral"])
    if json_:
        print(json.dumps({"out": str(out)}))
    else:
        print(f"{out}: load it with ssmax.hf.from_pretrained({str(out)!r}); for engines: {then}")


def _overrides(file: Path | None, sets: Sequence[str] | None) -> dict[str, Any]:
    """Collect what is laid over a preset: a file, and over it --set."""
    from ssmax_lab.train.config import read_config_file, read_overrides

    return (read_config_file(file) if file else {}) | read_overrides(sets or [])


def _ended(outcome: "Outcome", folder: Path, verb: list[str], device: str | None) -> int:
    """Print how a run ended and what to do next; return the exit code."""
    to_use_it = ["ssmax-lab", "generate", str(folder), "a prompt"]
    to_resume = ["ssmax-lab", *verb, "--out", str(folder), "--resume"]
    to_resume += [] if device is None else ["--device", device]
    if outcome.stopped_by is None:
        code, said = 0, f"done, {outcome.step:,} steps; {shlex.join(to_use_it)}"
    else:
        code = 128 + getattr(signal, outcome.stopped_by, signal.SIGTERM)
        said = (
            f"stopped by {outcome.stopped_by} after step {outcome.step:,}, which is saved; resume "
            f"with: {shlex.join(to_resume)}"
        )
    if os.environ.get("RANK", "0") == "0":
        print(f"{folder}: {said}")
    return code
