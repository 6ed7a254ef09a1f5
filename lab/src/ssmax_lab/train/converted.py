"""Fine-tune a converted Hugging Face model in the loop that trains the paper's own."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ssmax.hf
from ssmax._extras import require
from ssmax._files import whole_folder
from ssmax.errors import UsageError
from ssmax.hf.conversion import Conversion
from ssmax.hf.hook import watched
from ssmax.hf.inputs import copy_inputs
from ssmax.hf.sources import is_adapter, read_by_transformers, whole_files
from ssmax_lab.data.qa import IGNORE
from ssmax_lab.data.shards import Vocabulary
from ssmax_lab.data.tokenizer import FILE as TOKENIZER
from ssmax_lab.data.tokenizer import Tokenizer, load_tokenizer
from ssmax_lab.train.config import (
    LENGTH,
    ConvertedConfig,
    ConvertedTrainConfig,
    DataConfig,
    OptimConfig,
    RunConfig,
    ScheduleConfig,
)
from ssmax_lab.train.dist import DistContext, full_tensor, parallelize
from ssmax_lab.train.finetuning import VALIDATION_ROWS, Rows, encoded_questions, question_rows
from ssmax_lab.train.loop import Outcome, train
from ssmax_lab.train.pretraining import Windows, text_windows
from ssmax_lab.train.questions import (
    INVENTED,
    are_same_questions,
    check_folder_and_base,
    check_samples,
    with_full_paths,
)
from ssmax_lab.train.run import MODEL, resumed_config
from ssmax_lab.train.task import adamw

MOST_STEPS, EPOCHS = 1000, 3
"""Unless told otherwise: steps at most, and how often every question is seen."""


class ConvertedLoss(nn.Module):
    """The sum of the losses of a micro-batch."""

    def __init__(self, model: Any, length: int) -> None:
        super().__init__()
        self.model: Any = model
        self.length: int = length

    def forward(
        self, inputs_BT: Tensor, targets_BT: Tensor, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """Sum over all targets that count; with bounds, rows of examples lie end to end."""
        positions_BT = None
        if cu_seqlens is not None:
            inputs_BT = inputs_BT.view(-1, self.length)
            targets_BT = targets_BT.view(-1, self.length)
            positions_BT = restarting_positions(cu_seqlens).view(-1, self.length)
        # With a cache Transformers would not look at where the positions restart.
        logits_BTV = self.model(
            input_ids=inputs_BT, position_ids=positions_BT, use_cache=False
        ).logits
        counts_BT = targets_BT != IGNORE
        return F.cross_entropy(
            logits_BTV[counts_BT].float(), targets_BT[counts_BT], reduction="sum"
        )


def restarting_positions(cu_seqlens: Tensor) -> Tensor:
    """Count 0, 1, ... in every segment between the bounds."""
    lengths = cu_seqlens.diff()
    starts = cu_seqlens[:-1].repeat_interleave(lengths)
    return torch.arange(len(starts), device=starts.device) - starts


class ConvertedTask:
    """Train a converted model."""

    def __init__(self, model: Any, home: str, config: ConvertedConfig) -> None:
        """Take a model, and `home`, which has its tokenizer and processors."""
        self.model: Any = model
        self.home: str = home
        self.config: ConvertedConfig = config

    def make(self, config: ConvertedConfig, *, is_resumed: bool) -> nn.Module:
        """Return the model as it was loaded: what is frozen is in no checkpoint."""
        if config.only_ssmax:
            ssmax.hf.freeze_all_but_ssmax(self.model)
        if config.gradient_checkpointing:
            enable = getattr(self.model, "activation_checkpointing_enable", None)
            if enable is None:  # its name before Transformers 5.23, which warns of it
                enable = self.model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        return self.model.train()

    def parallelize(self, model: Any, config: RunConfig, ranks: DistContext) -> nn.Module:
        """Wrap the loss, block by block as the model's class says what must not be split."""
        kinds = set(model._no_split_modules or ())
        blocks = [module for module in model.modules() if type(module).__name__ in kinds]
        return parallelize(ConvertedLoss(model, self.config.train_length), blocks, config, ranks)

    def optimizer(
        self, model: nn.Module, config: OptimConfig, device: torch.device
    ) -> torch.optim.AdamW:
        """Give s and b a learning rate of their own, without decay."""
        groups = ssmax.hf.param_groups(
            model, config.lr, self.config.ssmax_lr, weight_decay=config.weight_decay
        )
        for group in groups:
            group["lr_share"] = group["lr"] / config.lr
        return adamw(groups, config, device)

    def after_step(self, model: nn.Module, step: int, steps: int) -> None:
        """Lead an annealed model on."""
        if self.config.anneals:
            ssmax.hf.anneal(model, step / steps, (step - 1) / steps)

    def save(self, model: Any, folder: Path, ranks: DistContext) -> None:
        """Write what `ssmax.hf.from_pretrained` loads, with tokenizer and processors."""
        record = Conversion.of(model)
        if record is not None and record.init == "anneal":
            # Resumed after its last step, which said so of the copy that it was done with.
            ssmax.hf.anneal(model, 1.0, 1.0)
        weights = {name: full_tensor(tensor).cpu() for name, tensor in model.state_dict().items()}
        if ranks.is_first:
            with whole_folder(folder / MODEL, replace=True) as writing:
                model.save_pretrained(writing, state_dict=weights)
                copy_inputs(self.home, writing, model.config)


def finetune_converted(
    source: Path,
    folder: Path,
    *,
    ranks: DistContext,
    base: str | None = None,
    data: Path | None = None,
    questions: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    resume: bool = False,
) -> Outcome:
    """Fine-tune what `ssmax convert` wrote: on prepared tokens, or on questions.

    An adapter needs the `base` that it is for. `questions` is a file in SQuAD's format or
    "invented", the default without `data`. `overrides` are laid over what suits most models.
    """
    overrides = dict(overrides or {})
    check_samples(data, questions)
    before = resumed_config(folder, overrides, ConvertedTrainConfig) if resume else None
    if before is not None:
        base = base or before.model.base
        # What is frozen is in no checkpoint: another model's weights would take its place.
        for began, given in (
            (before.model.folder, str(source.resolve())),
            (before.model.base, base),
        ):
            if began != given:
                raise UsageError(f"{folder} began with {began}, not with {given}; resume with that")
        if data is None and questions is None:
            questions = before.data.questions
            data = Path(before.data.folder) if before.data.folder else None
        _check_same_samples(folder, before.data, data, questions)
    model, home = _load(source, base or "")
    tokenizer_file = _tokenizer_file(home)
    tokenizer = load_tokenizer(str(tokenizer_file))
    config = before or _first_config(model, source, base or "", ranks, overrides)
    if data is not None:
        samples, validation = _text(data, tokenizer, home, config)
        where = {"data.folder": str(data.resolve())}
    else:
        samples, validation, questions = _questions(questions or INVENTED, tokenizer, model, config)
        where = {"data.questions": questions}
    if before is None:
        is_given = "run.steps" in overrides
        lengths = _lengths(config, samples, validation, are_steps_given=is_given)
        config = config.with_overrides({**where, **lengths, **overrides})
    else:
        config = config.with_overrides(where)
    return train(
        config,
        folder,
        samples,
        ranks=ranks,
        tokenizer_from=tokenizer_file.parent,
        validation=validation if config.data.validation_windows else None,
        task=ConvertedTask(model, home, config.model),
        resume=resume,
    )


def _check_same_samples(
    folder: Path, before: DataConfig, data: Path | None, questions: str | None
) -> None:
    """Refuse other samples; prepared text may have been moved, a checkpoint knows it again."""
    if data is not None:
        is_same = bool(before.folder)
    else:
        is_same = not before.folder and are_same_questions(questions or "", before.questions)
    if not is_same:
        given = with_full_paths(questions or "") if data is None else str(data.resolve())
        raise UsageError(
            f"{folder} began with {before.folder or before.questions!r}, not with {given!r}; "
            "resume without --data and --questions, or give another name"
        )


def _load(source: Path, base: str) -> tuple[Any, str]:
    """Load the model; name the folder or the model on the Hub that has its tokenizer."""
    transformers = require(
        "transformers", install="ssmax-lab[hf]", purpose="ssmax-lab finetune --hf"
    )
    check_folder_and_base(source, base)
    is_whole = not is_adapter(source)
    # float32 whatever it was stored in: steps of an optimizer would be rounded away.
    if is_whole:
        model, home = ssmax.hf.from_pretrained(source, dtype=torch.float32), str(source)
    else:
        kind = transformers.AutoModelForCausalLM
        with read_by_transformers(base), whole_files(base):
            plain = kind.from_pretrained(base, dtype=torch.float32, trust_remote_code=False)
        ssmax.hf.load(plain, source)
        model, home = plain, base
    if model.config.is_encoder_decoder or not model.can_generate():
        raise UsageError(
            f"{type(model).__name__} does not predict the next token; only such models are "
            "fine-tuned here"
        )
    return model, home


def _tokenizer_file(home: str) -> Path:
    from transformers.utils.hub import cached_file

    found = cached_file(home, TOKENIZER, _raise_exceptions_for_missing_entries=False)
    if found is None:
        raise UsageError(
            f"{home} has no {TOKENIZER}; write one there with its tokenizer's save_pretrained"
        )
    return Path(found)


def _first_config(
    model: Any, source: Path, base: str, ranks: DistContext, overrides: Mapping[str, Any]
) -> ConvertedTrainConfig:
    record = Conversion.of(model)
    assert record is not None
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or LENGTH
    known: dict[str, Any] = {
        "model.folder": str(source.resolve()),
        "model.base": base,
        "model.rule": record.rule,
        "model.anneals": record.init == "anneal",
    }
    for key in overrides:
        if key in known or key in ("data.folder", "data.questions"):
            raise UsageError(f"{key} is not a setting: the model, --data or --questions says it")
    config = ConvertedTrainConfig(
        model=ConvertedConfig(train_length=min(LENGTH, longest)),
        data=DataConfig(tokenizer=TOKENIZER),
        optim=OptimConfig(lr=2e-5, beta2=0.999, weight_decay=0.0),
        schedule=ScheduleConfig(kind="cosine", warmup_steps=0),
        run=RunConfig(
            recipe="converted",
            steps=MOST_STEPS,
            batch_size=16,
            micro_batch=4,
            precision="bfloat16" if ranks.device.type == "cuda" else "float32",
            compile=False,
            checkpoint_every=100,
            validate_every=100,
            scale_every=10,
        ),
    ).with_overrides({**known, **overrides})
    if config.model.train_length > longest:
        raise UsageError(
            f"model.train_length must be at most {longest}, the model's max_position_embeddings, "
            f"got {config.model.train_length}"
        )
    if config.model.only_ssmax and not any(
        ".ssmax." in name for name, _ in model.named_parameters()
    ):
        raise UsageError(f"model.only_ssmax: the rule {record.rule!r} has nothing that could learn")
    return config


def _text(
    data: Path, tokenizer: Tokenizer, home: str, config: ConvertedTrainConfig
) -> tuple[Windows, Windows | None]:
    """Open windows of prepared tokens, to learn from and to validate with."""

    def check(vocabulary: Vocabulary) -> None:
        if vocabulary.hash != tokenizer.vocabulary.hash:
            raise UsageError(
                f"{data} holds tokens of another tokenizer, {vocabulary.name!r}; prepare the text "
                f"with: ssmax-lab data prepare TEXT {data} --tokenizer {home}"
            )

    return text_windows(data, config, check=check)


def _questions(
    source: str, tokenizer: Tokenizer, model: Any, config: ConvertedTrainConfig
) -> tuple[Rows, Rows, str]:
    """Pack rows to learn from and to validate with; name where they came from."""
    source = source if source == INVENTED else str(Path(source).resolve())
    length, seed = config.model.train_length, config.data.seed
    examples, _ = encoded_questions(source, tokenizer, length=length, seed=seed)
    _check_packing(model)
    return (*question_rows(examples, length=length, seed=seed), source)


@torch.no_grad()
def _check_packing(model: Any) -> None:
    """Refuse a model whose attention does not stop where the positions start again."""
    seen: list[int] = []
    device = next(model.parameters()).device
    positions = torch.arange(8, device=device).remainder(4).view(1, -1)
    with watched(lambda module, num_keys, *_: seen.append(int(num_keys.max()))):
        model(input_ids=positions, position_ids=positions, use_cache=False)
    if max(seen) > 4:
        raise UsageError(
            f"in {type(model).__name__} the examples of a packed row would see each other; "
            "fine-tune it on text, with --data"
        )


def _lengths(
    config: ConvertedTrainConfig,
    samples: Windows | Rows,
    validation: Windows | Rows | None,
    *,
    are_steps_given: bool,
) -> dict[str, int]:
    """Choose how many steps, and what is a share of them."""
    if isinstance(samples, Rows):
        full = EPOCHS * samples.stream.steps_per_epoch(config.run.batch_size)
    else:
        full = math.ceil(samples.stream.num_windows / config.run.batch_size)
    steps = config.run.steps if are_steps_given else min(MOST_STEPS, full)
    held_out = VALIDATION_ROWS
    if isinstance(validation, Rows):
        held_out = min(held_out, validation.stream.rows_in_epoch(0))
    return {
        "run.steps": steps,
        "schedule.warmup_steps": min(50, steps // 10),
        "data.validation_windows": held_out,
    }
