"""Files that the user's code reads meanwhile."""

import contextlib
import importlib.util
import sys
from pathlib import Path

import pytest

from lightning_memfit.profile.files import files_read, note_opened


def test_files_that_are_read_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the user; not what is written, code or a cache."""
    sys.addaudithook(note_opened)  # as in a traced process; it notes nothing once `files_read` has ended
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "project" / "kept"))
    for name in ("project/parts", "project/.hidden", "project/kept", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("project/parts/a.yaml", "project/.hidden/b", "project/kept/c", "elsewhere/d.json", "project/e.py"):
        (tmp_path / name).write_text("x")
    monkeypatch.chdir(tmp_path / "project")
    reader = "from pathlib import Path\nfor name in names: Path(name).read_text()"
    (tmp_path / "elsewhere" / "f.txt").write_text("x")
    with files_read() as found:
        (tmp_path / "project" / "written").write_text("x")
        Path("/proc/self/stat").read_text()
        Path("kept/c").read_text()
        Path("e.py").read_text()
        with contextlib.suppress(OSError):
            Path("absent").read_text()
        (tmp_path / "elsewhere" / "d.json").read_text()
        monkeypatch.chdir("parts")
        names = ["a.yaml", "../.hidden/b", str(tmp_path / "elsewhere" / "f.txt")]
        exec(compile(reader, torch_file(), "exec"), {"names": names})
    assert found == {str(tmp_path / "project/parts/a.yaml"), str(tmp_path / "elsewhere/d.json")}
    Path("a.yaml").read_text()
    assert len(found) == 2


def torch_file() -> str:
    """The file of code that isn't the user's."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return spec.origin
