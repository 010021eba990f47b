"""Check that the public interface is typed: `pyright --verifytypes` knows the types of at least 98 % of its symbols.

    python -m tools.typed

Pyright finds the package as its users do, so `src` and the environment's packages must be on PYTHONPATH (`make check`).
"""

from __future__ import annotations

import json
import subprocess
import sys

LEAST = 0.98


def main() -> None:
    command = ["pyright", "--verifytypes", "patchclamp", "--ignoreexternal", "--outputjson"]
    ran = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
    report = json.loads(ran.stdout)["typeCompleteness"]
    symbols = [one for one in report["symbols"] if one["isExported"] and not one["isTypeKnown"]]
    print(f"{report['completenessScore']:.1%} of the public interface is typed")
    if report["completenessScore"] < LEAST:
        for one in symbols:
            print(f"{one['name']}: {'; '.join(of['message'] for of in one['diagnostics'])}")
        sys.exit(1)


if __name__ == "__main__":
    main()
