"""Options that verbs share: one name, one wording."""

from pathlib import Path
from typing import Annotated

import typer

from ssmax_lab.tiny import NAMES

USUAL_DIGITS = 7
"""Of a hidden number, as in the paper."""
TINY = f"{', '.join(NAMES)}, which come with the package"
A_RUN = f"A run's folder; or {TINY}."
Data = Annotated[
    Path | None,
    typer.Option("--data", help="Folder that ssmax-lab data prepare wrote; by default the run's."),
]
OpenPage = Annotated[
    bool | None, typer.Option("--open/--no-open", help="Show the page; by default on a desktop.")
]
Theta = Annotated[
    float | None, typer.Option(help="Base of the rotary frequencies; by default the run's.")
]
TOKENIZERS = "gpt2, gpt2-digits, bytes, small, or the path of a tokenizer.json"
