"""Converted models in other people's trainers: s learns as it should, and nothing is lost."""

import copy

import peft
import pytest
import torch
import transformers as tf
import trl
from datasets import Dataset
from tiny_models import build, randomise, tokens_of

import ssmax.hf
from ssmax.hf.conversion import Conversion

# What the compiler and the trainers import, and what they say of themselves, is not ours.
NO_NOISE = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
TOKENS = tokens_of(8, 11)


def ssmax_of(model, layer=0):
    return model.model.layers[layer].self_attn.ssmax


def is_ours(name):
    return ".ssmax." in name


def adamw(model):
    return torch.optim.AdamW(ssmax.hf.param_groups(model, lr=1e-3, ssmax_lr=1e-2, weight_decay=0.5))


def gradients(model, **options):
    model.train()
    model(input_ids=TOKENS, labels=TOKENS, use_cache=False, **options).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def arguments(folder, kind=tf.TrainingArguments, **changes):
    return kind(
        str(folder), max_steps=6, per_device_train_batch_size=2, save_steps=3, logging_steps=1,
        report_to=[], use_cpu=True, disable_tqdm=True, weight_decay=0.5, **changes,
    )  # fmt: skip


ROWS = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in TOKENS]


def trainer(model, folder, **changes):
    return tf.Trainer(
        model, arguments(folder, **changes), train_dataset=ROWS, optimizers=(adamw(model), None)
    )


def test_groups_for_an_optimizer():
    model = ssmax.hf.convert(build("llama"))
    groups = ssmax.hf.param_groups(model, lr=2e-5, ssmax_lr=1e-3, weight_decay=0.1)
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    ours = {id(p) for n, p in model.named_parameters() if is_ours(n)}
    (mine,) = [group for group in groups if {id(p) for p in group["params"]} & ours]
    assert {id(p) for p in mine["params"]} == ours
    assert (mine["lr"], mine["weight_decay"]) == (1e-3, 0.0)


def test_frozen_but_for_s_nothing_else_moves():
    model = ssmax.hf.freeze_all_but_ssmax(ssmax.hf.convert(build("llama")))
    before = copy.deepcopy(model.state_dict())
    optimizer = adamw(model)
    gradients(model)
    optimizer.step()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) != is_ours(name), name


def test_trainers_own_groups_decay_s_and_ours_do_not(tmp_path):
    """Why Trainer is given an optimizer: by itself it decays s, whose name has no "bias" in it."""
    model = ssmax.hf.convert(build("llama"))
    own = tf.Trainer(model, arguments(tmp_path), train_dataset=ROWS)
    name = "model.layers.0.self_attn.ssmax.s"
    assert name in own.get_decay_parameter_names(model)
    given = trainer(model, tmp_path)
    given.create_optimizer_and_scheduler(6)
    (group,) = [
        group
        for group in given.optimizer.param_groups
        if any(parameter is ssmax_of(model).s for parameter in group["params"])
    ]
    assert (group["weight_decay"], group["initial_lr"]) == (0.0, 1e-2)
    assert {id(p) for p in group["params"]} == {
        id(p) for n, p in model.named_parameters() if is_ours(n)
    }


def state_after(train):
    """The weights and the losses of a trainer, made by a function, after a run."""
    ran = train()
    losses = [line["loss"] for line in ran.state.log_history if "loss" in line]
    return ran.model.state_dict(), losses


def assert_resumed_is_uninterrupted(make, tmp_path):
    """`make(folder)` gives a trainer of six steps with a checkpoint after the third."""

    def whole():
        trainer = make(tmp_path / "run")
        trainer.train()
        return trainer

    def resumed():
        trainer = make(tmp_path / "run")
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.zero_()  # everything has to come from the checkpoint
        trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
        return trainer

    (weights, losses), (again, losses_again) = state_after(whole), state_after(resumed)
    assert losses_again == losses and len(losses) == 6
    first = make(tmp_path / "other").model.state_dict()
    for name, value in weights.items():
        assert torch.equal(again[name], value), name
        if is_ours(name):
            assert not torch.equal(value, first[name]), name


@NO_NOISE
def test_trainer_resumed_is_trainer_uninterrupted(tmp_path):
    assert_resumed_is_uninterrupted(
        lambda folder: trainer(ssmax.hf.convert(build("llama")), folder), tmp_path
    )
    loaded = ssmax.hf.from_pretrained(tmp_path / "run" / "checkpoint-6")
    assert ssmax.hf.verify(loaded).layers == 2
    with pytest.raises(ValueError, match="model type `ssmax_llama`"):
        tf.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-6")


@NO_NOISE
@pytest.mark.slow
def test_sft_trainer_resumed_is_sft_trainer_uninterrupted(tmp_path):
    def make(folder):
        model = ssmax.hf.convert(build("llama"))
        return trl.SFTTrainer(
            model,
            args=arguments(folder, trl.SFTConfig, max_length=11, eos_token="2", pad_token="0"),
            train_dataset=Dataset.from_list([{"input_ids": row["input_ids"]} for row in ROWS]),
            processing_class=tokenizer(),
            optimizers=(adamw(model), None),
        )

    assert_resumed_is_uninterrupted(make, tmp_path)


def tokenizer():
    """Numbers for words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({str(number): number for number in range(99)}, "1"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="2", pad_token="0", unk_token="1"
    )


@NO_NOISE
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_checkpointing_changes_no_gradient(dtype, reentrant):
    found = []
    for is_on in (False, True):
        model = randomise(ssmax.hf.convert(build("llama")))
        if is_on:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            found.append(gradients(model))
    plain, checkpointed = found
    for name, gradient in plain.items():
        assert gradient.abs().max() > 0 and torch.equal(gradient, checkpointed[name]), name
        assert gradient.dtype == torch.float32


def test_autocast_gives_s_its_gradient_within_bfloat16s_error():
    exact = gradients(randomise(ssmax.hf.convert(build("llama"))).double())
    with torch.autocast("cpu", torch.bfloat16):
        narrow = gradients(randomise(ssmax.hf.convert(build("llama"))))
        softmax = gradients(build("llama"))
    wide = gradients(build("llama").double())

    def error(found, wanted):
        return ((found.double() - wanted).norm() / wanted.norm()).item()

    # What bfloat16 does to the model's own weights, before there is an s.
    budget = max(error(softmax[name], wide[name]) for name in softmax)
    for name, gradient in narrow.items():
        if is_ours(name):
            assert error(gradient, exact[name]) < 2 * budget, name


@NO_NOISE
def test_a_compiled_step_is_an_eager_one():
    """One graph, forward and backward; no worse than eager against float64."""
    exact = gradients(randomise(ssmax.hf.convert(build("llama"))).double())
    eager = gradients(randomise(ssmax.hf.convert(build("llama"))))
    model = randomise(ssmax.hf.convert(build("llama"))).train()
    torch.compiler.reset()
    # Inductor would compile for most of a minute what the tests of ops let it compile.
    step = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    step(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss.backward()
    for name, parameter in model.named_parameters():
        error = (parameter.grad.double() - exact[name]).abs().max()
        allowed = (eager[name].double() - exact[name]).abs().max()
        assert error <= 4 * allowed + 1e-7, name


def lora(model):
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["ssmax"])
    return peft.get_peft_model(model, config)


def base():
    return randomise(ssmax.hf.convert(build("llama")))


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=TOKENS).logits


def test_lora_beside_s(tmp_path):
    before = logits(base())
    model = lora(base())
    # The copy of s that PEFT trains is used, and the one below it is left alone.
    assert torch.equal(logits(model), before)
    for wrapped in (model, model.get_base_model()):
        assert ssmax.hf.verify(wrapped).layers == 2
    optimizer = adamw(model)
    groups = {group["lr"]: len(group["params"]) for group in optimizer.param_groups}
    assert groups == {1e-3: 8, 1e-2: 4}
    for _ in range(3):
        gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    trained = logits(model)
    s = ssmax_of(model.get_base_model())
    assert not torch.equal(s.modules_to_save["default"].s, s.original_module.s)
    with model.disable_adapter():
        assert torch.equal(logits(model), before)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(base(), tmp_path)
    assert torch.equal(logits(again), trained)
    merged = again.merge_and_unload()
    torch.testing.assert_close(logits(merged), trained, rtol=1e-4, atol=1e-6)
    assert torch.equal(ssmax_of(merged).s, s.modules_to_save["default"].s)
    ssmax.hf.save(merged, tmp_path / "adapter")
    ssmax.hf.verify(merged)
    ssmax.hf.convert(ssmax.hf.revert(merged))


def test_what_is_merged_is_refused_by_plain_transformers(tmp_path):
    """PEFT finds the layers that it wraps by the type in memory, which stays the plain one."""
    model = peft.get_peft_model(base(), peft.LoraConfig(modules_to_save=["ssmax"]))
    model.merge_and_unload().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="model type `ssmax_llama`"):
        tf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(ssmax.hf.from_pretrained(tmp_path)), logits(base()))


def test_of_pefts_copies_of_s_the_one_in_use_alone_learns():
    """DDP waits in vain for the gradient of any other."""
    model = lora(base())
    config = model.peft_config["default"]
    model.add_adapter("other", config)
    for active in ("default", "other"):
        model.set_adapter(active)
        ssmax.hf.freeze_all_but_ssmax(model)
        learning = {name for name, one in model.named_parameters() if one.requires_grad}
        assert len(learning) == 4
        assert all(f".ssmax.modules_to_save.{active}." in name for name in learning)
        model.zero_grad()
        got = {name for name, gradient in gradients(model).items() if gradient is not None}
        assert got == learning


def test_peft_loads_softmax_onto_an_unconverted_base_and_verify_tells(tmp_path):
    """PEFT passes by what it has no place for, so that nothing in its files could refuse."""
    lora(base()).save_pretrained(tmp_path)
    plain = peft.PeftModel.from_pretrained(build("llama"), tmp_path)
    with pytest.raises(ValueError, match="LlamaForCausalLM is not converted; .*before anything"):
        ssmax.hf.verify(plain)


def test_a_model_that_was_annealed_in_a_wrapper_says_so_without_it():
    model = lora(ssmax.hf.convert(build("llama"), init="anneal", train_length=8))
    ssmax.hf.anneal(model, 1.0, 0.0)
    assert Conversion.of(model.get_base_model()).init == "annealed"
    with pytest.raises(ValueError, match="init='annealed', not 'anneal'"):
        ssmax.hf.anneal(model.merge_and_unload(), 1.0, 0.0)


def test_an_s_that_peft_leaves_alone_is_saved_by_its_own_name_and_reverted(tmp_path):
    model = peft.get_peft_model(base(), peft.LoraConfig(target_modules=["q_proj"]))
    ssmax.hf.save(model, tmp_path)
    assert torch.equal(logits(ssmax.hf.load(build("llama"), tmp_path)), logits(base()))
    ssmax.hf.revert(model)
    assert torch.equal(logits(model), logits(build("llama")))


def test_s_in_the_hands_of_peft_is_not_saved_as_ours(tmp_path):
    model = lora(base())
    for wrapped in (model, model.get_base_model()):
        for save in (ssmax.hf.save, ssmax.hf.save_remote_code):
            with pytest.raises(ValueError, match=r"PEFT .*merge_and_unload gives"):
                save(wrapped, tmp_path)
    assert not list(tmp_path.iterdir())
