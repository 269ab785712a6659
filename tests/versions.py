"""Run tests under older and the newest supported versions: `make test-versions`.

Those of rules, techniques, numerics and strategies.

The oldest environment takes the lower bounds of `pyproject.toml`, the newest the pins of `constraints.txt`, so that
what is claimed is what runs. Wheels of older torch are CUDA builds of some gigabytes; they run on the CPU, too.

    python -m tests.versions                       # every environment
    python -m tests.versions oldest -- -k trace    # one of them; the rest goes to pytest
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".venv-versions"
TESTS = {
    ("tests/rules", "tests/contract", "tests/numerics", "tests/truth/profile"): "not gpu and not nightly",
    # What transformers, DeepSpeed and FSDP2 do together shows only where ranks train.
    tuple(f"tests/ranks/test_{name}.py" for name in ("zero", "zero_checkpoints", "ddp_and_fsdp2")): "not gpu",
}
"""Files, and which of their tests are run."""

DEFAULT_ARGUMENTS = ("-n", "2", "--dist", "loadfile")

_NO_TESTS = 5  # pytest's exit code


@dataclass(frozen=True)
class Environment:
    """A Python and the packages whose versions decide; the rest is what pip takes."""

    python: str
    pins: dict[str, str]


def newest() -> dict[str, str]:
    """Versions in `constraints.txt`."""
    return dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))


def oldest() -> dict[str, str]:
    """Lower bounds in `pyproject.toml`, extras included, of the packages that `constraints.txt` pins."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    bounds = dict(re.findall(r"^([\w-]+)(?:\[\w+\])?>=([\d.]+)", "\n".join(lines), re.MULTILINE))
    return {name: bounds[name] for name in newest()}


ENVIRONMENTS = {
    "oldest": Environment("3.10", oldest()),
    # What GPU machines of 2026 carry.
    "middle": Environment("3.12", {"torch": "2.11.0", "lightning": "2.6.6", "transformers": "5.17.0"}),
    "newest": Environment("3.13", newest()),
}


def interpreter(version: str) -> str | None:
    """A Python of that minor version on the path or among pyenv's; None where there is none."""
    name = f"python{version}"
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = sorted(str(path) for path in pyenv.glob(f"{version}.*/bin/{name}"))
    # pyenv's shims are on the path and fail for versions that aren't selected.
    return found[-1] if found else shutil.which(name)


def install(name: str, environment: Environment, python: str) -> Path:
    """Make the virtual environment, unless it is there with the same pins; returns its folder of programs."""
    folder = FOLDER / name
    pins = "".join(f"{package}=={version}\n" for package, version in environment.pins.items())
    wanted = f"{python}\n{pins}{(ROOT / 'pyproject.toml').read_text()}"
    stamp, constraints = folder / ".installed", folder / "constraints.txt"
    if stamp.exists() and stamp.read_text() == wanted:
        return folder / "bin"
    subprocess.run([python, "-m", "venv", "--clear", str(folder)], check=True)
    constraints.write_text(pins)
    program = str(folder / "bin" / "python")
    options = ["install", "--quiet", "--constraint", str(constraints)]
    pip, uv = [program, "-m", "pip", *options], [sys.executable, "-m", "uv", "pip", *options, "--python", program]
    quiet = {**os.environ, "DS_BUILD_OPS": "0"}
    subprocess.run([*pip, "--upgrade", "pip"], check=True)
    subprocess.run([*pip, "torch"], check=True)
    # Where old versions meet new ones, pip tries releases so old that they can't be built, and gives up.
    subprocess.run([*uv, "--editable", ".[dev,all]"], check=True, cwd=ROOT, env=quiet)
    stamp.write_text(wanted)
    return folder / "bin"


def run(name: str, arguments: list[str]) -> str:
    """Install and test one environment; returns what came of it in a few words."""
    environment = ENVIRONMENTS[name]
    python = interpreter(environment.python)
    if python is None:
        return f"not run: no python{environment.python} here"
    try:
        programs = install(name, environment, python)
    except subprocess.CalledProcessError as error:
        return f"FAILED to install: {' '.join(error.cmd[-2:])}"
    # Kernels are built and loaded with the ninja of the environment.
    variables = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    results, closing, failures = [], [], []
    for number, (files, which) in enumerate(TESTS.items(), start=1):
        log = FOLDER / f"{name}-{number}.log"
        command = [str(programs / "python"), "-m", "pytest", "-q", *files, *DEFAULT_ARGUMENTS, "-m", which, *arguments]
        with log.open("w") as output:
            results.append(subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=variables))
        lines = log.read_text().rstrip().splitlines() or [""]
        closing.append(lines[-1].strip("= "))
        failures += [f"\n    {line}" for line in lines if line.startswith(("FAILED", "ERROR"))]
    # With `-k`, one of the two may have nothing to run.
    has_passed = {one.returncode for one in results} in ({0}, {0, _NO_TESTS})
    return f"{'passed' if has_passed else 'FAILED'}: {'; '.join(closing)}{''.join(failures)}"


def main(arguments: list[str]) -> int:
    """Print a table of environments; returns 1 if one of them fails or none could be run."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    names, more = arguments[:split] or list(ENVIRONMENTS), arguments[split + 1 :]
    if unknown := set(names) - set(ENVIRONMENTS):
        print(f"No environment is called {', '.join(sorted(unknown))}; there are {', '.join(ENVIRONMENTS)}.")
        return 2
    FOLDER.mkdir(exist_ok=True)
    rows = {}
    for name in names:
        rows[name] = run(name, more)
        print(f"{name}: {rows[name]}", flush=True)
    print(f"\n{'environment':<12} {'python':<7} {'torch':<8} {'lightning':<10} {'transformers':<13} tests")
    for name, row in rows.items():
        environment = ENVIRONMENTS[name]
        torch, lightning, transformers = (environment.pins[key] for key in ("torch", "lightning", "transformers"))
        summary = row.partition("\n")[0]
        print(f"{name:<12} {environment.python:<7} {torch:<8} {lightning:<10} {transformers:<13} {summary}")
    failed, passed = (any(row.startswith(word) for row in rows.values()) for word in ("FAILED", "passed"))
    return int(failed or not passed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
