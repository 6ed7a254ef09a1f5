"""Training and what it made, from the command line."""

import os
import shlex
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssmax._device import check_device, device_of
from ssmax.errors import UsageError
from ssmax.hf.sources import check_typed
from ssmax.nn.rules import RULES
from ssmax_lab.cli.prepare import default_data, text_of_shipped
from ssmax_lab.cli.runs import check_run
from ssmax_lab.model.config import check_sampling
from ssmax_lab.tiny import is_shipped
from ssmax_lab.train.config import TrainConfig, read_config_file, read_overrides
from ssmax_lab.train.converted_config import (
    ConvertedTrainConfig,
    check_folder_and_base,
    check_samples,
)
from ssmax_lab.train.questions import check_files
from ssmax_lab.train.recipes import PRETRAINING, configured, refuse_cpu
from ssmax_lab.train.run_config import named_folder, read_run_config, resumed_config, with_name
from ssmax_lab.train.text import check_text

if TYPE_CHECKING:
    from ssmax_lab.train import Outcome


def pretrain_shown(
    *,
    preset: str | None,
    config: str | None,
    data: Path | None,
    name: str | None,
    runs: Path,
    changes: dict[str, Any],
    resume: bool,
    device: str | None,
) -> int:
    """Train from scratch, or go on; how the command ended."""
    recipe = "quick" if preset is None else preset
    configuration = "b" if config is None else config
    if recipe not in PRETRAINING:
        raise UsageError(f"--preset must be one of {', '.join(PRETRAINING)}, got {preset!r}")
    check_device(device)
    folder = named_folder(runs, f"{recipe}-{configuration}" if name is None else name)
    if data is not None:
        changes = {**changes, "data.folder": str(data)}
    if resume:
        settings = resumed_config(folder, changes)
        _refuse_another(folder, settings, preset, config, changes)
    else:
        settings = configured(PRETRAINING[recipe](), configuration).replaced(changes)
        if not settings.data.folder:
            settings = settings.replaced({"data.folder": str(default_data(recipe))})
    check_text(settings)
    refuse_cpu(settings.run.recipe, device)
    from ssmax_lab.train import joined_world, pretrain

    with joined_world(device) as world:
        outcome = pretrain(settings, folder, world=world, resume=resume)
    return _ended(outcome, folder, ["pretrain"], device)


def finetune_shown(
    base: Path,
    *,
    hf: bool,
    adapter_base: str | None,
    data: Path | None,
    only_ssmax: bool,
    questions: str | None,
    config: str | None,
    name: str | None,
    runs: Path | None,
    changes: dict[str, Any],
    resume: bool,
    device: str | None,
) -> int:
    """Go on from a run's model or a converted one; how the command ended."""
    if hf and config is not None:
        raise UsageError("--config is for runs; a converted model has its rule already")
    if not hf and (adapter_base is not None or data is not None or only_ssmax):
        raise UsageError("--base, --data and --only-ssmax are for converted models; add --hf")
    if hf and not resume and data is None and questions is None:
        # All weights would be trained on questions that nobody asked for.
        raise UsageError(
            "--hf needs something to learn from; give --data, a folder that ssmax-lab data prepare "
            "wrote, or --questions, a file in SQuAD's format; --questions invented takes made-up "
            "ones"
        )
    check_device(device)
    if only_ssmax:
        changes = {**changes, "model.only_ssmax": True}
    if hf:
        check_folder_and_base(base, adapter_base or "")
        check_samples(data, questions)
        if adapter_base is not None:
            check_typed(adapter_base)
        ConvertedTrainConfig().replaced(changes)
    else:
        check_run(base)
        read_run_config(base).replaced(changes)
    if questions is not None:
        check_files(questions)
    if config not in (None, "e", *RULES):
        raise UsageError(f"--config must be e or one of {', '.join(RULES)}, got {config!r}")
    base = with_name(base)
    suffix = "-tuned" if hf else f"-{config}-qa" if config else "-qa"
    beside = Path("runs") if hf or is_shipped(base) else base.parent
    folder = named_folder(runs or beside, base.name + suffix if name is None else name)
    if is_shipped(base):
        text_of_shipped(base)
    from ssmax_lab.train import finetune, finetune_converted, joined_world

    with joined_world(device) as world:
        if hf:
            outcome = finetune_converted(
                base,
                folder,
                world=world,
                base=adapter_base,
                data=data,
                questions=questions,
                changes=changes,
                resume=resume,
            )
        else:
            outcome = finetune(
                base,
                folder,
                world=world,
                questions=questions,
                rule="ssmax" if config == "e" else config,
                changes=changes,
                resume=resume,
            )
    typed = ["finetune", *(["--hf"] if hf else []), str(base)]
    then = f"load it with ssmax.hf.from_pretrained({str(folder / 'model')!r})" if hf else None
    return _ended(outcome, folder, typed, device, then)


def generate_shown(
    folder: Path,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    theta: float | None,
    seed: int,
    device: str | None,
) -> None:
    """Continue prompts; one is shown as it comes."""
    check_run(folder)
    check_device(device)
    check_sampling(temperature, top_k, top_p)
    if temperature == 0 and not (top_k is None and top_p is None):
        raise UsageError(
            "--top-k and --top-p choose among what is drawn, and at --temperature 0 nothing is; "
            "give --temperature above 0"
        )
    if max_new_tokens < 0:
        raise UsageError(f"--max-new-tokens must be at least 0, got {max_new_tokens}")
    read_run_config(folder)
    here = device_of(device)
    import torch

    from ssmax_lab.data.detokenizer import IncrementalDetokenizer
    from ssmax_lab.train import load_run_model, load_run_tokenizer

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
    text = IncrementalDetokenizer(tokenizer.decode) if len(prompts) == 1 else None
    unprinted = prompts[0]
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
                if text is not None:
                    print(unprinted + text.add(token), end="", flush=True)
                    unprinted = ""
    if text is not None:
        print(unprinted + text.finish())
    else:
        for prompt, row in zip(prompts, new, strict=True):
            print(f"{prompt}{tokenizer.decode(row)}\n---")


def changes_of(
    file: Path | None, sets: Sequence[str] | None, on_nonfinite: str | None
) -> dict[str, Any]:
    """What is laid over a preset: a file, over it --set, over it the flags."""
    changes = read_config_file(file) if file else {}
    changes |= read_overrides(sets or [])
    if on_nonfinite is not None:
        changes["run.on_nonfinite"] = on_nonfinite
    return changes


def _refuse_another(
    folder: Path,
    began: TrainConfig,
    preset: str | None,
    config: str | None,
    changes: dict[str, Any],
) -> None:
    """A run goes on as what it began as; whoever names something else means another run."""
    asked = began if config is None else configured(began, config)
    # The command that began it may be given again whole: what it overrides stays overridden.
    asked = asked.replaced(({} if preset is None else {"run.recipe": preset}) | changes)

    def rules(settings: TrainConfig) -> str:
        return " then ".join(map(repr, filter(None, (settings.model.rule, settings.switch.rule))))

    for what, option, was, named in (
        ("preset", "--preset", repr(began.run.recipe), repr(asked.run.recipe)),
        ("rule", "--config", rules(began), rules(asked)),
    ):
        if was != named:
            raise UsageError(
                f"{folder} began under the {what} {was}, not {named}; resume without {option}, "
                "or give another name"
            )


def _ended(
    outcome: "Outcome", folder: Path, verb: list[str], device: str | None, then: str | None = None
) -> int:
    to_use_it = ["ssmax-lab", "generate", str(folder), "a prompt"]
    where = ["--runs", str(folder.parent), "--name", folder.name]
    where += [] if device is None else ["--device", device]
    if outcome.stopped_by is None:
        code, said = 0, f"done, {outcome.step:,} steps; " + (then or shlex.join(to_use_it))
    else:
        code = 128 + getattr(signal, outcome.stopped_by, signal.SIGTERM)
        said = (
            f"stopped by {outcome.stopped_by} after step {outcome.step:,}, which is saved; go on "
            f"with: {shlex.join(['ssmax', *verb, *where, '--resume'])}"
        )
    if os.environ.get("RANK", "0") == "0":
        print(f"{folder}: {said}")
    return code
