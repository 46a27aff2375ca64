"""Look the image's packages up in the index of known vulnerabilities (pip-audit); never take silence for good news.

Exit code 0: every package was looked up and none is known to be vulnerable. 1: some are. 3: packages were not looked
up, for instance because the index was not reached; pip-audit by itself ends with 0 then.
"""

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
LISTS = [HERE / "lock.txt", HERE / "tools.txt", HERE.parent.parent / "constraints.txt"]


def verdict(report: str, complaint: str) -> tuple[int, list[str]]:
    """The exit code and what to say, of pip-audit's JSON report and its stderr."""
    try:
        packages = json.loads(report)["dependencies"]
    except (ValueError, KeyError, TypeError):
        packages = []
    if not packages:
        last = (complaint.strip().splitlines() or ["no report"])[-1]
        return 3, [f"NOT AUDITED: nothing was looked up. pip-audit: {last}"]
    vulnerable = [package for package in packages if package.get("vulns")]
    skipped = [package for package in packages if "skip_reason" in package]
    said = []
    for package in vulnerable:
        for known in package["vulns"]:
            mend = ", ".join(known["fix_versions"]) or "none yet"
            said.append(f"VULNERABLE: {package['name']} {package['version']}: {known['id']}; mended in: {mend}")
    looked_up = len(packages) - len(skipped)
    if skipped:
        reason = skipped[0]["skip_reason"]
        names = "nothing was looked up" if not looked_up else ", ".join(package["name"] for package in skipped)
        said.append(f"NOT AUDITED: {names}; {len(skipped)} of {len(packages)} packages. pip-audit: {reason}")
    said.append(f"{looked_up} of {len(packages)} packages looked up, {len(vulnerable)} known to be vulnerable.")
    return (1 if vulnerable else 3 if skipped else 0), said


def main() -> int:
    """Run pip-audit on the lists; the exit code."""
    command = [sys.executable, "-m", "pip_audit", "--no-deps", "--disable-pip", "--format", "json"]
    command += ["--progress-spinner", "off"]
    for path in LISTS:
        command += ["-r", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    code, said = verdict(done.stdout, done.stderr)
    print(*said, sep="\n", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
