"""Questions to fine-tune on, by name; without torch, so that bad ones are refused at once."""

from pathlib import Path

from ssmax.errors import UsageError

INVENTED, HIDDEN = "invented", "hidden"
"""Questions that need no file: about a few facts, or about a number hidden in the base's text.

`hidden:7` hides numbers of 7 digits.
"""
HIDDEN_DIGITS = 4


def question_sources(questions: str) -> list[str]:
    """Split what is joined by + into files, "invented" and "hidden"."""
    return [questions] if Path(questions).is_file() else questions.split("+")


def with_full_paths(questions: str) -> str:
    """Name the same questions from wherever they are asked for."""
    return "+".join(
        str(Path(source).resolve()) if is_path(source) else source
        for source in question_sources(questions)
    )


def check_files(questions: str) -> None:
    """Refuse a file that is not there."""
    for source in question_sources(questions):
        if is_path(source) and not Path(source).is_file():
            raise UsageError(f"there is no file {source}")


def is_path(source: str) -> bool:
    """Tell a path from the words for questions that are made."""
    return source != INVENTED and hidden_digits(source) is None


def digits_taught(questions: str) -> int | None:
    """Count the digits of the numbers that are hidden in any of the questions."""
    found = (hidden_digits(source) for source in question_sources(questions))
    return next((digits for digits in found if digits is not None), None)


def hidden_digits(questions: str) -> int | None:
    """Count the digits of the numbers that are hidden; None where questions are others."""
    name, _, digits = questions.partition(":")
    if name != HIDDEN or not (digits or "1").isdecimal():
        return None
    if int(digits or HIDDEN_DIGITS) < 1:
        raise UsageError(f"a hidden number has at least 1 digit, got {questions!r}")
    return int(digits or HIDDEN_DIGITS)
