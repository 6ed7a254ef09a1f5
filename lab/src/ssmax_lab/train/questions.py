"""Check what fine-tuning is given, without torch: questions, text, a converted model."""

import filecmp
from pathlib import Path

from ssmax.errors import UsageError
from ssmax.hf.sources import is_adapter

INVENTED, HIDDEN = "invented", "hidden"
"""Questions that need no file: about a few facts, or about a number hidden in the base's text.

`hidden:7` hides numbers of 7 digits.
"""
HIDDEN_DIGITS = 4


def with_full_paths(questions: str) -> str:
    """Name the same questions from wherever they are asked for."""
    return "+".join(
        str(Path(source).resolve()) if is_path(source) else source
        for source in question_sources(questions)
    )


def question_sources(questions: str) -> list[str]:
    """Split into files, "invented" and "hidden"; a file may have a + in its path.

    The longest path that is a file is taken; parts that are neither file nor word stay together.
    """
    parts, sources, is_open = questions.split("+"), [], False
    while parts:
        joined = ["+".join(parts[:count]) for count in range(len(parts), 0, -1)]
        found = next((path for path in joined if Path(path).is_file()), None)
        source = found or parts[0]
        is_known = found is not None or not is_path(source)
        if is_open and not is_known:
            sources[-1] += f"+{source}"
        else:
            sources.append(source)
        is_open = not is_known
        del parts[: source.count("+") + 1]
    return sources


def check_files(questions: str) -> None:
    """Refuse a file that is not there."""
    for source in question_sources(questions):
        if is_path(source) and not Path(source).is_file():
            raise UsageError(f"there is no file {source}")


def are_same_questions(given: str, began: str) -> bool:
    """Compare questions; a file that was moved is taken for the same, and so is a copy."""
    mine, theirs = (question_sources(with_full_paths(one)) for one in (given, began))
    return len(mine) == len(theirs) and all(map(_is_same_source, mine, theirs))


def _is_same_source(given: str, began: str) -> bool:
    if not is_path(given) or not is_path(began):
        return is_path(given) == is_path(began) and hidden_digits(given) == hidden_digits(began)
    if given == began or not Path(began).is_file():
        return True
    return Path(given).is_file() and filecmp.cmp(given, began, shallow=False)


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


def check_samples(data: Path | None, questions: str | None) -> None:
    """Refuse text and questions together, and questions that only a run's text can answer."""
    if data is not None and questions is not None:
        raise UsageError("text and questions are two runs; give --data or --questions")
    if any(hidden_digits(source) is not None for source in question_sources(questions or INVENTED)):
        raise UsageError(
            "hidden questions are about the text of a run, which a converted model does not have; "
            "give --questions invented or a file in SQuAD's format, or text with --data"
        )


def check_folder_and_base(source: Path, base: str) -> None:
    """Refuse what is no folder, an adapter without its base, and a whole model with one."""
    if not source.is_dir():
        raise UsageError(f"there is no folder {source}; ssmax convert writes one")
    if is_adapter(source) and not base:
        raise UsageError(f"{source} holds an adapter; name the model it is for with --base")
    if base and not is_adapter(source):
        raise UsageError(f"{source} holds a whole model; --base is for adapters")
