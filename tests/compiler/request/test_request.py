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
    with pytest.raises(MisuseError, match="can't read --tensor-split '3;1'"):
        Request(tensor_split="3;1")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"batch_groups": 0}, "--batch-groups 0: it is a number from 1 on"),
        ({"row_min": -5}, "--row-min -5: it is a number from 1 on"),
        ({"pipeline_stages": 1.5}, "--pipeline-stages 1.5: it is a number from 1 on"),
        ({"lora_slots": True}, "--lora-slots True: it is a number from 1 on"),
        ({"threads": "2"}, "--threads '2': it is a number from 1 on"),
    ],
)
def test_numbers_are_whole_and_large_enough(numbers: dict[str, Any], message: str) -> None:
    with pytest.raises(MisuseError, match=message):
        Request(**numbers)


def test_numbers_may_be_those_of_numpy() -> None:
    request = Request(batch_groups=np.int64(2), lora_slots=None)  # type: ignore[arg-type]
    assert (request.batch_groups, type(request.batch_groups), request.lora_slots) == (2, int, None)
