"""The page of the engines is that of the record."""

import json

import engines_table


def test_the_page_is_written_from_the_record():
    record = json.loads(engines_table.RECORD.read_text())
    assert engines_table.PAGE.read_text() == engines_table.page(record), (
        "write it anew: python tools/engines_table.py"
    )
