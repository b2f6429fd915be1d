"""The C library of operators, and one of other sources."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from splitc.runtime.engines import operator_library
from splitc.runtime.errors import PackageError

pytestmark = pytest.mark.skipif(not operator_library.is_built(), reason="splitc was installed without a C compiler")


def test_library_of_other_sources_is_refused(decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by ONNX Runtime, which would say that some operator is not registered, and not what to do."""
    plan = plan_model(decoder, ["2xcpu"], Request(split_mode="tensor"))
    compile_model(plan, tmp_path / "package", verify=False)
    monkeypatch.setattr(operator_library, "INTERFACE", operator_library.INTERFACE + 1)
    operator_library.load_library.cache_clear()
    with pytest.raises(PackageError, match=r"of interface \d, and its Python code wants \d: .* Install splitc again"):
        Session(tmp_path / "package")
    with pytest.raises(PackageError, match="Install splitc again"):
        compile_model(plan, tmp_path / "other", verify=False)
