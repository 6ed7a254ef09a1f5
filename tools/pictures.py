"""Draw docs/pictures: who sees which keys, and n, case by case; and figure 1. `make pictures`.

What is seen comes from ssmax.ops.visible, so a picture cannot differ from what is computed.
"""

from pathlib import Path
from typing import Any

import torch

from ssmax import visible_keys
from ssmax.ops.visible import mask_spec
from ssmax_lab.report.figures import figure1
from ssmax_lab.report.style import as_svg

FOLDER = Path(__file__).parent.parent / "docs" / "pictures"
CELL, GAP, LEFT, TOP = 22, 3, 66, 40

CASES: dict[str, dict[str, Any]] = {
    "causal": {"num_queries": 6, "num_keys": 6, "is_causal": True},
    "cached": {"num_queries": 2, "num_keys": 6, "is_causal": True},
    "bidirectional": {"num_queries": 6, "num_keys": 6},
    "cross": {"num_queries": 3, "num_keys": 6},
    "packed": {
        "num_queries": 6,
        "num_keys": 6,
        "is_causal": True,
        "cu_seqlens": torch.tensor([0, 2, 6], dtype=torch.int32),
    },
    "padded": {
        "num_queries": 6,
        "num_keys": 6,
        "is_causal": True,
        "key_padding_mask": torch.tensor([[False, False, True, True, True, True]]),
    },
    "window": {"num_queries": 6, "num_keys": 6, "is_causal": True, "window": 3},
    "window-padded-cached": {
        "num_queries": 2,
        "num_keys": 6,
        "is_causal": True,
        "window": 4,
        "key_padding_mask": torch.tensor([[False, False, False, True, True, True]]),
    },
}


def picture(case: dict[str, Any]) -> str:
    """One row per query, one column per key; what is seen is filled, and n stands at the end."""
    options = {"is_causal": False, **case}
    queries, keys = options.pop("num_queries"), options.pop("num_keys")
    seen = mask_spec(queries, keys, **options).visible_mask()[0, 0]
    n = visible_keys(queries, keys, **options).view(-1).tolist()
    step = CELL + GAP
    width, height = LEFT + step * keys + 44, TOP + step * queries + 6
    parts = [_text(LEFT + step * keys / 2, 14, "keys"), _text(LEFT + step * keys + 20, 32, "n")]
    for key in range(keys):
        parts.append(_text(LEFT + step * key + CELL / 2, 32, str(key)))
    for query in range(queries):
        y = TOP + step * query
        # Of a row that goes on, the queries are the last keys.
        name = query + (keys - queries if options["is_causal"] else 0)
        parts.append(_text(LEFT - 34, y + 16, f"query {name}"))
        for key in range(keys):
            fill = "#D55E00" if seen[query, key] else "#88888833"
            x = LEFT + step * key
            parts.append(
                f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" rx="3" fill="{fill}"/>'
            )
        parts.append(_text(LEFT + step * keys + 20, y + 16, str(n[query])))
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    style = 'font-family="sans-serif" font-size="12" fill="#808080" text-anchor="middle"'
    content = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n{content}\n</svg>\n'


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:g}" y="{y:g}">{text}</text>'


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, case in CASES.items():
        (FOLDER / f"{name}.svg").write_text(picture(case))
    (FOLDER / "fading.svg").write_text(as_svg(figure1()))


if __name__ == "__main__":
    main()
