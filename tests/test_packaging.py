"""A wheel installs all of the two packages."""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_every_package_is_listed() -> None:
    """An editable installation also finds folders that a wheel would lack."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    block = re.search(r"^packages = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)
    assert block is not None
    folders = [path.parent for top in ("compiler", "runtime") for path in (ROOT / top).rglob("__init__.py")]
    expected = {"splitc." + ".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert set(re.findall(r'"([^"]+)"', block[1])) == expected | {"splitc", "splitc.docs"}


def test_extra_for_gpus_has_one_version_of_cuda() -> None:
    """ONNX Runtime, CuPy and NCCL must be for the same version of CUDA."""
    if sys.version_info < (3, 11):
        pytest.skip("the extra wants a later ONNX Runtime than there is for Python 3.10")
    try:
        requires = metadata.requires("onnxruntime-gpu") or []
    except metadata.PackageNotFoundError:
        pytest.skip("the onnxruntime of this platform has no GPU")
    major = next(found[1] for each in requires if (found := re.match(r"nvidia-cuda-runtime~=(\d+)", each)))
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extra = re.search(r"^cuda = \[(.*?)\]$", text, re.MULTILINE)
    assert extra is not None
    assert f'"cupy-cuda{major}x>=' in extra[1] and f'"nvidia-nccl-cu{major}"' in extra[1]
    assert not re.search(rf"-cu(?!da{major}|{major})\d+", extra[1])
