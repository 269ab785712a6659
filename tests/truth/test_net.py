"""Faults that were mended once can be brought back: `python -m tests.net` sees whether their tests notice."""

import re
import subprocess

from tests.net.__main__ import ROOT, patches


def test_every_patch_applies_and_names_a_test() -> None:
    for patch in patches():
        done = subprocess.run(["git", "apply", "--check", patch.path], cwd=ROOT, capture_output=True, text=True)
        assert not done.returncode, done.stderr
        file, _, name = patch.test.partition("::")
        assert re.search(rf"^def {name.partition('[')[0]}\(", (ROOT / file).read_text(), re.M), patch
