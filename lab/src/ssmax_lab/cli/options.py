"""Options that verbs share: one name, one wording."""

from pathlib import Path
from typing import Annotated

import typer

from ssmax_lab.tiny import TINY, run_folder

USUAL_DIGITS = 7
"""Of a hidden number, as in the paper."""
A_RUN = f"A run's folder; or {TINY}."
Run = Annotated[Path, typer.Argument(metavar="RUN", parser=run_folder, help=A_RUN)]
Theta = Annotated[float | None, typer.Option(help="RoPE base; by default the run's.")]
TOKENIZERS = "gpt2, gpt2-digits, bytes, small, or the path of a tokenizer.json"
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a setting, as optim.lr=3e-4; may be repeated."
    ),
]
