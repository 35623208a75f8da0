"""JSON from disk, through types: what is wrong is one line that names the file, the field and its value."""

from dataclasses import dataclass
from typing import NotRequired

import pytest
from colossal_vit import typed_json
from colossal_vit.errors import UserError
from colossal_vit.typed_json import RECORD, Count, Finite
from typing_extensions import TypedDict


class Best(TypedDict):
    step: Count


class Record(TypedDict):
    __pydantic_config__ = RECORD
    step: Count
    name: str
    loss: NotRequired[Finite]
    best: NotRequired[Best | None]
    places: NotRequired[list[Count]]
    colour: NotRequired[tuple[Count, Count, Count]]


@dataclass
class Speeds:
    speeds: list[Finite]


def test_a_value_of_the_type_is_read_and_fields_of_newer_versions_are_kept(tmp_path):
    (tmp_path / "a.json").write_text('{"later": [1, {"x": null}], "step": 3, "name": "fl\\udcf6", "loss": 2}')
    read = typed_json.read(tmp_path / "a.json", Record)
    assert read == {"later": [1, {"x": None}], "step": 3, "name": "fl\udcf6", "loss": 2.0}
    assert typed_json.parse('{"speeds": [1, 2.5]}', Speeds, "") == Speeds([1.0, 2.5])


GOOD = '"step": 1, "name": ""'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is no JSON: Expecting value"),
        (b"\xff", "is no JSON: 'utf-8' codec"),
        ('{"step": 1', "is no JSON: "),
        ("[" * 100_000, "is too deeply nested"),
        ('{"step": 1%s}' % ("0" * 5000), "is no JSON: "),
        ("null", "should be a valid dictionary"),
        ("[]", "should be a valid dictionary"),
        ("{}", "lacks name, step"),
        ('{"step": "3", "name": ""}', "step = '3': should be a valid integer"),
        ('{"step": 3.0, "name": ""}', "step = 3.0: should be a valid integer"),
        ('{"step": true, "name": ""}', "step = True: should be a valid integer"),
        ('{"step": null, "name": ""}', "step = None: should be a valid integer"),
        ('{"step": -1, "name": ""}', "step = -1: should be greater than or equal to 0"),
        ('{"step": 1e400, "name": ""}', "step = inf: should be a valid integer"),
        ('{"step": 1%s, "name": ""}' % ("0" * 400), "step = 10"),
        ('{"step": 1, "name": 5}', "name = 5: should be a valid string"),
        (f'{{{GOOD}, "loss": NaN}}', "loss = nan: should be a finite number"),
        (f'{{{GOOD}, "loss": 1e400}}', "loss = inf: should be a finite number"),
        (f'{{{GOOD}, "loss": "1"}}', "loss = '1': should be a valid number"),
        (f'{{{GOOD}, "best": 7}}', "best = 7: should be a valid dictionary"),
        (f'{{{GOOD}, "best": {{}}}}', "best lacks step"),
        (f'{{{GOOD}, "best": {{"step": "{"x" * 999}"}}}}', "best.step = 'xxxxxxxxxxxx...xxxxxxxxxxxxx': should be a"),
        (f'{{{GOOD}, "colour": [1]}}', "colour lacks 1, 2"),
        (f'{{{GOOD}, "places": [0, "a\\nb"]}}', "places.1 = 'a\\\\nb': should be a valid integer"),
    ],
)
def test_a_value_of_another_type_is_one_line_that_names_file_field_and_value(tmp_path, text, words):
    path = tmp_path / "a.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as caught:
        typed_json.read(path, Record)
    said = str(caught.value)
    assert said.startswith(f"{path}: {words}".replace("\\\\", "\\"))
    assert len(said.splitlines()) == 1
    assert len(said) < len(str(path)) + 160


def test_a_file_that_is_missing_or_no_file_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"a\.json: No such file or directory"):
        typed_json.read(tmp_path / "a.json", Record)
    with pytest.raises(UserError, match="Is a directory"):
        typed_json.read(tmp_path, Record)
