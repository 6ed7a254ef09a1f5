"""The text of a study, as the command line names it. Needs no torch, so that it answers at once."""

from pathlib import Path

from ssmax.errors import UsageError
from ssmax_lab.data.sources import EMBEDDED, HUB
from ssmax_lab.data.token_files import TOKENS

MOST_READS = 4
"""Text read more often than this teaches a model little more (arXiv 2305.16264)."""
EMBEDDED_TOKENS = 4_000_000
"""About as many GPT-2 tokens has the embedded text."""


def check_embedded_is_enough(preset: str, tokens: int) -> None:
    """Refuse to train so long on the embedded text where nobody asked for that text."""
    times = tokens / EMBEDDED_TOKENS
    if times <= MOST_READS:
        return
    raise UsageError(
        f"the {preset} preset trains on {tokens / 1e6:.0f} M tokens, and no text was given: it "
        f"would read the embedded one (Python's standard library, about "
        f"{EMBEDDED_TOKENS / 1e6:.0f} M tokens) about {times:.0f} times. Give real "
        f"text, as in: ssmax-lab reproduce --preset {preset} --text FOLDER "
        f"(files of .txt, .jsonl or .parquet), --text "
        f"{HUB}NAME (a dataset of Hugging Face), or --data FOLDER (what ssmax-lab data prepare "
        f"wrote); --text {EMBEDDED} takes the embedded text all the same"
    )


def check_source(source: str) -> str:
    """Return the source as `ssmax-lab data prepare` takes it, a path in full."""
    if not is_local(source):
        return source
    kind = TOKENS if source.startswith(TOKENS) else ""
    path = Path(source.removeprefix(kind))
    if not path.exists():
        raise UsageError(
            f"there is no file or folder {str(path)!r}; --text takes {EMBEDDED!r}, a file or "
            f"folder, or '{HUB}NAME' for a dataset of Hugging Face"
        )
    return f"{kind}{path.resolve()}"


def is_local(source: str) -> bool:
    """Say whether a source lies on this machine."""
    return source != EMBEDDED and not source.startswith(HUB)
