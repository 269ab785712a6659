"""Every command of the README's blocks does what the page says: offline, without a GPU, beside the recipes."""

import re
import shlex
from pathlib import Path

import pytest

from cli.main import main

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()


def commands() -> list[str]:
    """Lines of the bash blocks, continued lines joined and comments off."""
    found = []
    for block in re.findall(r"^```bash\n(.*?)^```", README, re.S | re.M):
        lines = block.replace("\\\n", " ").splitlines()
        found += [shlex.join(words) for line in lines if (words := shlex.split(line, comments=True))]
    return found


def of(command: str) -> list[str]:
    return [line for line in commands() if line.startswith(command)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("reader")
    (made / "recipes").symlink_to(ROOT / "recipes")
    return made


@pytest.fixture(autouse=True)
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def test_the_page_is_short() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= 7000


def test_every_command_is_tried_below() -> None:
    ours = ("estimate", "plan", "fit", "export")
    kinds = ("make ", "pip install", *(f"memfit {name}" for name in ours))
    assert not [line for line in commands() if not line.startswith(kinds)]
    assert all(of(kind) for kind in kinds)


@pytest.mark.parametrize("line", of("make "))
def test_make_has_the_target(line: str) -> None:
    assert re.search(rf"^{shlex.split(line)[1]}:", (ROOT / "Makefile").read_text(), re.M)


@pytest.mark.parametrize("line", of("memfit estimate"))
def test_an_estimate_is_a_table_with_a_verdict(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(shlex.split(line)[1:])
    printed = capsys.readouterr()
    assert code in (0, 1)  # 2: it can't be told
    assert ("Fits" if code == 0 else "Does not fit") in printed.out
    for words in ("optimizer state", "backward", "Next: memfit"):
        assert words in printed.out
    assert all(line.startswith("memfit: estimating") for line in printed.err.splitlines())


@pytest.mark.nightly
def test_a_plan_is_made_and_is_one_that_fit_takes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (plan,) = of("memfit plan")
    assert main(shlex.split(plan)[1:]) == 0
    printed = capsys.readouterr().out
    (fit,) = (line for line in of("memfit fit") if "plan.yaml" in line)
    assert f"Next: {fit}" in printed
    assert printed.count("Fits: ") == 1
    assert configuration(fit, capsys).count("lightning_memfit.PlanFeedback") == 1


@pytest.mark.parametrize("line", [line for line in of("memfit fit") if "plan.yaml" not in line])
def test_a_run_is_configured(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "--print_config" not in line:
        line += " --print_config"  # it takes a GPU, and weights or a folder that only the reader has
    assert "trainer:" in configuration(line, capsys)


def configuration(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What a run would train with."""
    words = shlex.split(line)[1:]
    assert main(words if "--print_config" in words else [*words, "--print_config"]) == 0
    return capsys.readouterr().out


def test_a_checkpoint_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = of("memfit export")
    assert main(shlex.split(line)[1:]) == 2
    assert "runs/.../last.ckpt" in capsys.readouterr().err
