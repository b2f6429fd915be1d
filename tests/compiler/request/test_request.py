"""A request from Python takes what the command line does, and refuses the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from splitc.compiler import Request
from splitc.runtime.errors import MisuseError


def test_text_is_read_as_on_the_command_line() -> None:
    request = Request(headroom="2GiB", tensor_split="3,1", memory="4GiB")  # type: ignore[arg-type]
    assert (request.headroom, request.tensor_split, request.memory) == (2 << 30, [3.0, 1.0], ["4GiB"])
    request = Request(shapes="ids:1x16", states=["past=present"], lora=["style:0.5"], settings=["rate=16000"])  # type: ignore[arg-type, list-item]
    assert (request.shapes, request.states, request.lora) == ({"ids": (1, 16)}, {"past": "present"}, (("style", 0.5),))
    assert request.settings == {"rate": 16000}
    with pytest.raises(MisuseError, match="can't read --tensor-split '3;1'"):
        Request(tensor_split="3;1")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"batch_groups": 0}, "--batch-groups 0: it is a number from 1 on"),
        ({"headroom": -1}, "--headroom -1: it is a number from 0 on"),
        ({"row_min": -5}, "--row-min -5: it is a number from 1 on"),
        ({"pipeline_stages": 1.5}, "--pipeline-stages 1.5: it is a number from 1 on"),
        ({"lora_slots": True}, "--lora-slots True: it is a number from 1 on"),
        ({"threads": "2"}, "--threads '2': it is a number from 1 on"),
        ({"shapes": {"ids": 5}}, "--shapes gives 'ids' the shape 5: a shape is a list of sizes"),
        ({"shapes": {"ids": (1, 2.5)}}, "--shapes: a size of 'ids' is 2.5: it is a number from 0 to"),
        ({"max_shapes": {"ids": (1, -1)}}, "--max-shapes: a size of 'ids' is -1: it is a number from 0 to"),
        ({"shapes": [("ids", 1)]}, "it has lists of sizes by the names of inputs"),
    ],
)
def test_numbers_are_whole_and_large_enough(numbers: dict[str, Any], message: str) -> None:
    with pytest.raises(MisuseError, match=message):
        Request(**numbers)


def test_numbers_may_be_those_of_numpy() -> None:
    request = Request(batch_groups=np.int64(2), lora_slots=None, tensor_split=np.array([3, 1]))  # type: ignore[arg-type]
    assert request.tensor_split == [3, 1]
    assert (request.batch_groups, type(request.batch_groups), request.lora_slots) == (2, int, None)
