"""Runs the benchmarks one after another with their defaults and keeps what they print and measure under `out/`.

python benchmarks/all.py [--only forks,reuse] [options that every benchmark takes]
"""

import argparse
import subprocess
import sys
from pathlib import Path

SCRIPTS = ("reuse", "forks", "interference", "contention", "gateway_overhead")
OWN_OPTIONS = ("gateway_overhead",)


def main() -> int:
    """Run them; the exit code is the number of scripts that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SCRIPTS), help="which, separated by commas (default: all)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the figures (default: %(default)s)")
    args, rest = parser.parse_known_args()
    args.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in args.only.split(","):
        script = Path(__file__).with_name(f"{name}.py")
        options = [] if name in OWN_OPTIONS else rest
        print(f"=== {name}", flush=True)
        command = [sys.executable, str(script), "--json", str(args.out / f"{name}.json"), *options]
        failed += subprocess.run(command, check=False).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
