"""python -m fuzz [TARGET|all] [SECONDS]: look for bytes that break an invariant.

Each target gets SECONDS (60): with atheris, guided by coverage, where it is installed, and a third
of that time with hypothesis before. What breaks is printed, and kept in .cache/fuzz/TARGET: fix
it, and copy it to fuzz/seeds/TARGET under a name that says what it is.
"""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

SEEDS = Path(__file__).parent / "seeds"
CACHE = Path(".cache/fuzz")
TARGETS = sorted(p.stem for p in (Path(__file__).parent / "targets").glob("[!_]*.py"))


def load(name: str) -> Any:
    """The module of a target."""
    return importlib.import_module(f"fuzz.targets.{name}")


def run_hypothesis(target: Any, seconds: float) -> int:
    """Check generated inputs for so long; raises what the smallest failing one does."""
    from hypothesis import HealthCheck, given, settings

    until = time.monotonic() + seconds
    count = 0

    def check(data: bytes) -> None:
        nonlocal count
        count += 1
        target.check(data)

    examples = settings(
        max_examples=2_000, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    while time.monotonic() < until:
        examples(given(target.INPUTS)(check))()
    return count


def run_atheris(name: str, seconds: float) -> None:
    """Fuzz one target for so long; ends the process."""
    import atheris

    with atheris.instrument_imports(include=["queen_trio", "queen_protocol"]):
        target = load(name)
    cache = CACHE / name
    (cache / "corpus").mkdir(parents=True, exist_ok=True)
    atheris.Setup(
        [
            "fuzz",
            str(cache / "corpus"),
            str(SEEDS / name),
            f"-artifact_prefix={cache}/",
            f"-max_total_time={round(seconds)}",
            "-max_len=4096",
            "-print_final_stats=1",
            "-verbosity=0",
        ],
        target.check,
    )
    atheris.Fuzz()


def main(names: list[str], seconds: float) -> int:
    """Fuzz each target in a process of its own; returns how many failed."""
    failed = 0
    guided = importlib.util.find_spec("atheris") is not None
    for name in names:
        target = load(name)
        invariant = (target.__doc__ or "").splitlines()[0]
        print(f"{name}: {invariant}", flush=True)
        count = run_hypothesis(target, seconds / 3 if guided else seconds)
        print(f"  {count} generated inputs hold", flush=True)
        if guided:
            code = subprocess.call([sys.executable, "-m", "fuzz", "--atheris", name, str(seconds)])
            print(f"  atheris: {'holds' if not code else 'FAILED'}", flush=True)
            failed += code != 0
    return failed


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments[:1] == ["--atheris"]:
        run_atheris(arguments[1], float(arguments[2]))
    chosen = arguments[0] if arguments else "all"
    if chosen != "all" and chosen not in TARGETS:
        sys.exit(f"no target {chosen!r}: {', '.join(TARGETS)}")
    with suppress(KeyboardInterrupt):
        sys.exit(
            main(
                TARGETS if chosen == "all" else [chosen],
                float(arguments[1]) if len(arguments) > 1 else 60.0,
            )
        )
