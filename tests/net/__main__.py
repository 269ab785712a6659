"""Bring back what was mended once, fault by fault, and see that a test notices.

Each patch of this folder is a fault that an older CHANGELOG lists as mended, and names the test that has to fail:

    python -m tests.net [NN ...]    # all of them, or those with these numbers; exits with 1 if a test passes

Patches are applied in a worktree of their own, which has what is committed.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]


@dataclass(frozen=True)
class Patch:
    """A fault.

    Attributes:
        path: Its file.
        entry: What the CHANGELOG said when it was mended.
        test: The test that notices it.
    """

    path: Path
    entry: str
    test: str


def patches() -> list[Patch]:
    """All of them, in the order of their numbers."""
    return [
        Patch(path, *(re.findall(rf"^{word}: (.*)$", path.read_text(), re.M)[0] for word in ("Entry", "Test")))
        for path in sorted(FOLDER.glob("*.patch"))
    ]


@contextmanager
def worktree() -> Iterator[Path]:
    """A checkout of HEAD that patches may change."""
    with tempfile.TemporaryDirectory(prefix="memfit-net-") as folder:
        path = Path(folder, "checkout")
        subprocess.run(["git", "worktree", "add", "--detach", "--quiet", str(path)], check=True, cwd=ROOT)
        try:
            yield path
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(path)], check=True, cwd=ROOT)


def is_noticed(patch: Patch, checkout: Path) -> bool:
    """Whether the patch's test fails with it."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=no", "-p", "no:cacheprovider", patch.test]
    subprocess.run(["git", "apply", str(patch.path)], check=True, cwd=checkout)
    try:
        code = subprocess.run(command, cwd=checkout, env=environment, stdout=subprocess.DEVNULL).returncode
    finally:
        subprocess.run(["git", "checkout", "--quiet", "--", "."], check=True, cwd=checkout)
    if code > 1:
        raise RuntimeError(f"{' '.join(command)} ended with {code}")
    return code == 1


def main(numbers: list[str]) -> int:
    """Run the command."""
    passed = 0
    with worktree() as checkout:
        for patch in patches():
            if not numbers or patch.path.name[:2] in numbers:
                noticed = is_noticed(patch, checkout)
                passed += not noticed
                print(f"{patch.path.name[:2]} {'noticed' if noticed else 'NOT NOTICED'}: {patch.entry}", flush=True)
    return int(passed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
