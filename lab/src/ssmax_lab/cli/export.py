"""`ssmax-lab export`: a run in, the Hugging Face folder that computes the same out."""

import json
import shlex
from pathlib import Path

from ssmax._files import check_empty
from ssmax_lab.cli.runs import check_run


def export_shown(run: Path, out: Path, *, as_json: bool) -> None:
    """Load, write, say what can be done with it."""
    check_run(run)
    check_empty(out)
    from ssmax_lab.model.hf_llama import save_as_llama
    from ssmax_lab.train import load_run_model, load_run_tokenizer

    tokenizer = load_run_tokenizer(run)
    end = tokenizer.vocabulary.end_of_document
    save_as_llama(
        load_run_model(run),
        out,
        tokenizer=tokenizer.definition,
        end=(end, tokenizer.decode([end])),
    )
    then = shlex.join(["ssmax", "export", str(out), "OUT", "--to", "ministral"])
    if as_json:
        print(json.dumps({"out": str(out)}))
    else:
        print(f"{out}: load it with ssmax.hf.from_pretrained({str(out)!r}); for engines: {then}")
