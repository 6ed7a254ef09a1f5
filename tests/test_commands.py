"""Every command of README and docs is given, page by page, and leaves what its page says.

Each page has a folder of its own. What its reader brings along, as texts or finished runs, is put
there when a command first names it; all else the page's commands have to leave for each other.
"""

import contextlib
import fnmatch
import io
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import types
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import typer.main

import ssmax.cli
import ssmax.cli.app
import ssmax_lab.cli
import ssmax_lab.cli.app
from hugging_face import write_model
from ssmax_lab.cli.data import default_data
from ssmax_lab.data import sources
from ssmax_lab.data.tokenizer import load_tokenizer
from ssmax_lab.tiny import run_folder

ROOT = Path(__file__).parent.parent
CLI = {"ssmax": ssmax.cli, "ssmax-lab": ssmax_lab.cli}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

LEFT_OUT = {
    ". .venv/bin/activate": "changes the shell it is typed in",
    "pip install": "needs a network; make release-check installs what is released",
    "python library/tests/hf/families.py": "minutes; test_families.py looks at every family",
    "srun": "needs SLURM",
    "ssmax audit": "needs the engines that it names; library/tests/audit runs what it does",
    "ssmax serve": "runs until Ctrl-C; library/tests/cli/test_serve.py runs and asks it",
    "vllm serve": "needs vLLM; make test-engines runs its engine on the same folders",
}
"""How a command begins that is not given, and why. There are no others."""

STEPS = (
    "--device cpu --set run.steps=2 --set run.batch_size=2 --set run.micro_batch=1 "
    "--set data.validation_windows=2"
)
SMALL = (
    f"{STEPS} --set model.num_layers=1 --set model.num_heads=2 --set model.hidden_size=16 "
    "--set model.intermediate_size=16 --set model.train_length=64 --set run.compile=false "
    "--set run.precision=float32"
)
SHORTER = {
    "lm_eval run": """--metadata '{"lengths": [150], "depths": [0.5], "trials": 1}'""",
    "python examples/train_only_s.py": "--steps 1",
    "ssmax-lab data prepare": "--workers 1",
    "ssmax-lab evaluate all": "--documents 1 --depths 1 --trials 1 --device cpu",
    "ssmax-lab evaluate sharpness": "--length 300 --documents 1 --device cpu",
    "ssmax-lab evaluate needle": "--depths 1 --trials 1 --device cpu",
    "ssmax-lab evaluate needle-score": "--trials 1 --device cpu",
    "ssmax-lab evaluate position-loss": "--documents 1 --device cpu",
    "ssmax-lab evaluate position-loss runs/": "--length 300 --documents 1 --device cpu",
    "ssmax-lab evaluate --hf": "--length 200 --documents 1 --trials 1 --digits 2 --device cpu",
    "ssmax export": "--check-tokens 100",
    "ssmax extend": "--to 160",
    "ssmax-lab finetune": STEPS,
    "ssmax-lab generate": "--max-new-tokens 4 --device cpu",
    "ssmax-lab pretrain": SMALL,
    "ssmax-lab pretrain --preset long": f"{SMALL} --set schedule.decay_steps=1",
    "ssmax-lab reproduce": "--dry-run",
    # What is computed needs no training, and the records are packed all the same.
    "ssmax-lab reproduce --only figure1 ": "",
    "ssmax-lab reproduce --preset gpu --data": "--only figure1",
    "torchrun": SMALL,
    "torchrun --nproc-per-node 8 -m ssmax_lab pretrain --preset long": (
        f"{SMALL} --set schedule.decay_steps=1 --set run.context_parallel=2"
    ),
}
"""What is added to a command that begins so, so that it takes seconds; the longest fits best."""


def parts(page: Path) -> list[tuple[str, str, str]]:
    """A page's blocks by their language, and its `words`, in their order."""
    text = page.read_text().replace(".venv/bin/ssmax", "ssmax")
    return re.findall(r"^```(\w*)\n(.*?)^```|`([^`]+)`", text, re.DOTALL | re.MULTILINE)


def commands(page: Path) -> list[str]:
    """The lines of a page's shell blocks and the commands in its text, in their order."""
    found = []
    for language, block, words in parts(page):
        if language == "sh":
            lines = block.replace("\\\n", " ").splitlines()
            found += [shlex.join(shlex.split(line, comments=True)) for line in lines]
        elif words and is_command(words.split()):
            found.append(" ".join(words.split()))
    return [command for command in found if command]


def is_command(words: list[str]) -> bool:
    """A program, a verb and what it is to work on; `ssmax-lab data prepare` is but a name."""
    program, *rest = words
    if program in CLI:
        verb, _, rest = parsed(words)
        # What is measured is a word of the verb, by whatever name typer knows it.
        rest = rest[1:] if verb == "evaluate" else rest
    programs = {*GIVEN, *(begin.split()[0] for begin in LEFT_OUT)}
    given = [word for word in rest if not word.startswith("-")]
    return program in programs and bool(given) and not any(word.isupper() for word in rest)


def parsed(words: list[str]):
    """The verb of `ssmax ...` or `ssmax-lab ...`, its click command, and what stands behind it."""
    command, rest = typer.main.get_command(CLI[words[0]].app.app), words[1:]
    while rest and rest[0] in getattr(command, "commands", {}):
        command, rest = command.commands[rest[0]], rest[1:]
    verb = " ".join(words[1 : len(words) - len(rest)])
    return verb, command, rest


def reason_left_out(command: str) -> str | None:
    return next((why for begin, why in LEFT_OUT.items() if command.startswith(begin)), None)


def shortened(command: str) -> list[str]:
    """Its words, and those that are added to them; without what is set for its process."""
    words = shlex.split(command)
    plain = shlex.join(word for word in words if not re.match(r"[A-Z_]+=", word))
    begins = [begin for begin in SHORTER if plain.startswith(begin)]
    return [*shlex.split(plain), *shlex.split(SHORTER[max(begins, key=len)] if begins else "")]


def environment(command: str) -> dict[str, str]:
    return dict(re.findall(r"^([A-Z_]+)=(\S+) ", command))


def write_gpt2(path: Path, _) -> None:
    """As large a context as the real one has, and little else."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, vocab_size=768, n_positions=1024, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    transformers.GPT2LMHeadModel(config).save_pretrained(path)
    transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(resources.files("ssmax_lab.data") / "small_tokenizer.json"),
        eos_token="<|endoftext|>",
    ).save_pretrained(path)


def write_texts(path: Path, _) -> None:
    path.mkdir()
    for number in range(30):
        (path / f"{number}.txt").write_text(f"{number} bottles of beer on the wall. " * 40)


def write_books(path: Path, _) -> None:
    path.mkdir()
    tokenizer = load_tokenizer("gpt2")
    tokens = []
    for number in range(200):
        tokens += tokenizer.encode(f"It was in {1800 + number} that it began. " * 20)
        tokens.append(tokenizer.vocabulary.end_of_document)
    np.save(path / "books.npy", np.array(tokens, dtype=np.uint16))


def write_questions(path: Path, _) -> None:
    def about(number):
        asked = {"id": str(number), "question": "How many?", "is_impossible": False}
        answer = {"text": str(number), "answer_start": 10}
        context = f"There are {number} bottles."
        return {"context": context, "qas": [asked | {"answers": [answer]}]}

    article = {"title": "Bottles", "paragraphs": [about(number) for number in range(40)]}
    path.write_text(json.dumps({"version": "v2.0", "data": [article]}))


def write_run(path: Path, name: re.Match) -> None:
    """A run that comes with the package, as if it had been made here."""
    shutil.copytree(run_folder(f"tiny-{name[2]}{name[3] or ''}"), path)
    config = json.loads((path / "config.json").read_text())
    if name[3]:
        config["data"]["base"] = str(path).removesuffix(name[3])
        furnish([config["data"]["base"]], set())
    else:
        config["data"]["folder"] = str(default_data("quick"))
    (path / "config.json").write_text(json.dumps(config))


def typed(command: str):
    """Furniture that a command of another page leaves."""

    def write(path: Path, _) -> None:
        give(command.format(path=path))

    return write


def write_part(path: Path, name: re.Match) -> None:
    """Records of another machine."""
    part = f"{name[1]}-{name[2]}"
    study = f"--configs {','.join(name[1])} --first-seed {name[2]} --seeds 1"
    command = (
        f"ssmax-lab reproduce --preset gpu --data tokens {study} --records {path} --out {part}"
    )
    in_process(shortened(command), {})


BROUGHT_ALONG = {
    r"(\w+)-(\d)\.tar\.xz": write_part,
    r"MODEL": lambda path, _: write_model("tiny-a", path),
    r"adapter": typed(
        "ssmax convert openai-community/gpt2 {path} --adapter --init paper --train-length 1024"
    ),
    r"books": write_books,
    r"openai-community/gpt2": write_gpt2,
    r"gpt2-ssmax": typed("ssmax convert openai-community/gpt2 {path}"),
    r"mine\.toml": lambda path, _: path.write_text("[optim]\nweight_decay = 0.05\n"),
    r"runs/(\w+)-([ab])(-qa)?": write_run,
    r"texts": write_texts,
    r"tokens|windows": typed("ssmax-lab data prepare texts {path} --tokenizer gpt2"),
    r"train-v2\.0\.json|squad-part\.json": write_questions,
}
"""What a reader has before the page begins, by its name, and how it comes about."""


def furnish(words: list[str], left: set[Path | None]) -> None:
    """Bring along what a command names and nobody left; not what it is to leave itself."""
    for word in words:
        path = Path(word.removeprefix("tokens:").removesuffix("+hidden:7"))
        if path in left or os.path.lexists(path):
            continue
        for pattern, write in BROUGHT_ALONG.items():
            if name := re.fullmatch(pattern, str(path)):
                path.parent.mkdir(parents=True, exist_ok=True)
                write(path, name)


LEAVES = {
    "convert": "{out}/*",
    "data prepare": "{out}/train/index.json",
    "evaluate": "{results}/*.jsonl",
    "export": "{out}/*",
    "extend": "{out}/*",
    "finetune": "runs/*/model/*",
    "merge": "{folder}/parts/*",
    "python examples/train_only_s.py": "adapter/*",
    "pretrain": "runs/{preset}-{config}/model/*",
    "report": "{folder}/*.html",
    "reproduce": "reproduction/{preset}/report.html",
}
"""What a verb writes anew, in the words of its arguments; others answer on the terminal."""


def give(command: str) -> None:
    """Type it in where all is there that it needs; see that it says or leaves what it should."""
    words = shortened(command)
    verb, asked = understood(words)
    furnish(words, {asked.get("out"), asked.get("records")})
    before = files()
    said = GIVEN[words[0]](words, environment(command))
    written = {path for path, when in files().items() if before.get(path) != when}
    if asked.get("dry_run"):
        assert said and not written, command
    elif verb in LEAVES:
        pattern = LEAVES[verb].format(**asked)
        assert fnmatch.filter(written, pattern), f"{command}: no {pattern} among {written}"
        if asked.get("records"):
            assert str(asked["records"]) in written, command
    else:
        assert said, command


def understood(words: list[str]) -> tuple[str, dict[str, Any]]:
    """The verb and what it is told, of `ssmax ...` and of what starts it; else the script."""
    # torchrun starts a module, whose name is the program's but for the dash.
    program = next((number for number, word in enumerate(words) if program_of(word)), None)
    if program is None:
        return " ".join(words[:2]), {}
    name = program_of(words[program])
    verb, command, rest = parsed([name, *words[program + 1 :]])
    return verb, command.make_context(name, rest).params


def program_of(word: str) -> str | None:
    name = word.replace("_", "-")
    return name if name in CLI else None


def files() -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in Path().rglob("*") if path.is_file()}


def in_process(words: list[str], extra: dict[str, str]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert CLI[words[0]].run(words[1:]) == 0, words
    return said.getvalue()


def alone(words: list[str], extra: dict[str, str]) -> str:
    """In a process of its own."""
    done = subprocess.run(
        words, env=os.environ | extra, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def harness(words: list[str], extra: dict[str, str]) -> str:
    """Its table has a row for every task."""
    said = alone([sys.executable, "-m", *words], extra)
    for task in words[words.index("--tasks") + 1].split(","):
        assert re.search(rf"^\|{task} *\|", said, re.MULTILINE), said
    return said


def ranks(words: list[str], extra: dict[str, str]) -> str:
    """By torchrun, on as many ranks as two cores carry."""
    start = words.index("-m")
    launcher = [sys.executable, "-m", "torch.distributed.run", *words[1:start]]
    return alone([*launcher, "--nproc-per-node", "2", *words[start:]], extra)


def planned(words: list[str], extra: dict[str, str]) -> str:
    """What make would do: that it can is enough, its targets take minutes."""
    return alone(["make", "--dry-run", "-C", str(ROOT), *words[1:]], extra)


GIVEN = {
    "lm_eval": harness,
    "make": planned,
    "python": lambda words, extra: alone([sys.executable, *words[1:]], extra),
    "ssmax": in_process,
    "ssmax-lab": in_process,
    "torchrun": ranks,
}
"""How a program is started here."""


@pytest.fixture
def home(tmp_path, tmp_path_factory, monkeypatch):
    """A checkout with examples alone, a small library of Python, one thread and no network."""
    monkeypatch.chdir(tmp_path)
    Path("examples").symlink_to(ROOT / "examples")
    library = tmp_path_factory.mktemp("library")
    for document in itertools.islice(sources.embedded_documents(), 0, None, 10):
        (library / document.name).parent.mkdir(parents=True, exist_ok=True)
        (library / document.name).write_text(document.text)
    paths = types.SimpleNamespace(get_path=lambda _: str(library))
    monkeypatch.setattr(sources, "sysconfig", paths)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(before)


PLACES = r"(?<![\w/.])(?:adapter|data|out|results|runs|tokens)/[\w./-]*\w"


def named(page: Path) -> set[str]:
    """Files and folders that a page speaks of; and those of a tree, `FOLDER/` with names below."""
    found = set()
    for language, block, words in parts(page):
        if language in ("", "sh"):
            found |= set(re.findall(PLACES, block or words))
        folder, _, tree = block.partition("\n")
        if language == "text" and folder.endswith("/"):
            found |= {folder + name for name in re.findall(r"^  (\S+)", tree, re.MULTILINE)}
    return found


@pytest.mark.parametrize("page", [*filter(commands, PAGES)], ids=lambda page: page.name)
def test_the_commands_of_a_page_do_what_it_says(page, home):
    for command in commands(page):
        if reason_left_out(command) is None:
            give(command)
    missing = [name for name in named(page) if not (Path(name).exists() or (ROOT / name).exists())]
    assert missing == []


def test_only_what_is_listed_is_left_out():
    languages = {language for page in PAGES for language, _, words in parts(page) if not words}
    assert languages == {"python", "sh", "text"}
    found = [command for page in PAGES for command in commands(page)]
    programs = {shortened(command)[0] for command in found if not reason_left_out(command)}
    assert programs == set(GIVEN)
    for begin in [*LEFT_OUT, *SHORTER]:
        assert any(begin in command for command in found), f"no command begins with {begin!r}"
