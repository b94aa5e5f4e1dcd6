"""The boot's warning about spools that were filled under another number of workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import structlog

from queen_trio import boot

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("workers", "stranded"), [(1, ["0", "2"]), (2, [".", "2"]), (3, ["."]), (7, ["."])]
)
def test_who_is_stranded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, stranded: list[str]
) -> None:
    for name, content in ((".", b"x"), ("0", b"x"), ("1", b""), ("2", b"x"), ("failed", b"x")):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "0000000000000001.spool").write_bytes(content)
    logger = structlog.testing.CapturingLogger()
    monkeypatch.setattr(boot, "log", logger)
    boot.warn_of_stranded_spools(tmp_path, workers)
    found = [call.kwargs["directory"] for call in logger.calls]
    assert found == [str(tmp_path / name) for name in stranded]


def test_a_first_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boot, "log", None)
    boot.warn_of_stranded_spools(tmp_path / "not yet", 1)


def test_what_goes_while_we_look_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its broker may still be ending; a link to nothing is listed, and not there, too."""
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "0000000000000001.spool").symlink_to(tmp_path / "gone")
    monkeypatch.setattr(boot, "log", None)
    boot.warn_of_stranded_spools(tmp_path, 1)
    (tmp_path / "0" / "0000000000000002.spool").write_bytes(b"x")
    logger = structlog.testing.CapturingLogger()
    monkeypatch.setattr(boot, "log", logger)
    boot.warn_of_stranded_spools(tmp_path, 1)
    assert len(logger.calls) == 1
