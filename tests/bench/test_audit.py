"""`make audit` finds what it is there for, and never passes for want of an answer."""

from __future__ import annotations

import json
import re
import stat
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.audit import locks, secrets
from bench.audit.__main__ import main
from bench.audit.locks import Advisories, is_affected, served
from bench.audit.tools import AuditTools, ToolResult, check_pth, environments, unexpected, write_sbom
from bench.program import WrongArguments

ROOT = Path(__file__).parents[2]
SOUND = {"dependencies": [{"name": "a", "version": "1", "vulns": []}]}
ADVISORY = """
id: PYSEC-2026-1
modified: 2026-02-03T04:05:06Z
affected:
- package: {name: Some.Package, ecosystem: PyPI, purl: pkg:pypi/some-package}
  ranges:
  - type: ECOSYSTEM
    events: [{introduced: "1.2"}, {fixed: "1.10"}, {introduced: "2.0"}, {last_affected: "2.1"}]
  versions: ["0.9"]
"""


def tool(folder: Path, name: str, script: str) -> AuditTools:
    """A stand-in for one of the tools."""
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return AuditTools(folder, Path("bin"))


def said(report: object, code: int = 0, err: str = "") -> ToolResult:
    return ToolResult(code, json.dumps(report).encode() if report is not None else b"", err)


# --- known vulnerabilities -------------------------------------------------------------------------------------------


def test_only_a_full_report_without_findings_passes() -> None:
    """Everything was looked at, and nothing is known about it."""
    assert locks.findings(said(SOUND)) == []


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (said(None, 1, "ConnectionError: no route"), "no advisory service answered"),
        (said(None, 0, ""), "no advisory service answered"),
        (said([], 0), "no advisory service answered"),
        (said({"dependencies": []}), "no package was looked at"),
        (said({"dependencies": [{"name": "a", "skip_reason": "not there"}]}), "a was not looked at: not there"),
        (said({"dependencies": [{"name": "a", "version": "1", "vulns": [{"id": "X-1", "fix_versions": ["2"]}]}]}, 1),
         "a 1: X-1, fixed in ['2']"),
        (said(SOUND, 1, "odd"), "ended with 1: odd"),
    ],
)  # fmt: skip
def test_anything_else_is_a_finding(answer: ToolResult, words: str) -> None:
    """Above all, that nobody answered."""
    (found,) = locks.findings(answer)
    assert words in found


def test_an_unreachable_service_fails_the_audit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code and the words say that nothing is known."""
    (tmp_path / "requirements.lock").write_text("a==1 \\\n    --hash=sha256:00\n")
    tool(tmp_path, "pip-audit", "echo 'ConnectionError: no route' >&2; exit 1\n")
    assert main(["--parts", "vulnerabilities", "--root", str(tmp_path), "--tools", "bin"]) == 1
    assert "vulnerabilities: FAILED" in (out := capsys.readouterr().out) and "nothing is known" in out


def test_no_lock_file_is_a_finding(tmp_path: Path) -> None:
    """Nothing to look at is not nothing found."""
    assert locks.check(tool(tmp_path, "pip-audit", "exit 0\n"), None) == ["there is no requirements*.lock"]


def test_a_requirement_without_a_hash_is_found() -> None:
    """In the form that lock files have."""
    lock = "# a comment\na==1 \\\n    --hash=sha256:00 \\\n    --hash=sha256:11\n    # via b\nb==2 ; sys_platform\n"
    assert list(locks.unhashed(lock)) == ["b==2 has no hash"]


@pytest.mark.parametrize(
    ("version", "affected"),
    [("0.9", True), ("1.0", False), ("1.2", True), ("1.9", True), ("1.10", False), ("1.10rc1", True), ("1.99", False),
     ("2.0", True), ("2.1", True), ("2.2", False), ("odd", True)],
)  # fmt: skip
def test_an_advisory_of_a_copy_is_about_these_versions(version: str, affected: bool, tmp_path: Path) -> None:
    """Versions in order, not as text; one that cannot be read is not taken for sound."""
    (tmp_path / "a.yaml").write_text(ADVISORY)
    known = Advisories(tmp_path)
    assert bool(known.of("some_package", version)) is affected
    assert known.of("another", version) == []
    assert is_affected(known.of("some-package", "1.2")[0]["affected"][0], version) is affected


def test_a_copy_answers_as_the_service_does(tmp_path: Path) -> None:
    """The question of pip-audit, and an answer in JSON with times as OSV writes them; withdrawn ones are left out."""
    (tmp_path / "a.yaml").write_text(ADVISORY)
    (tmp_path / "b.yaml").write_text(ADVISORY.replace("modified", "withdrawn: 2026-03-01T00:00:00Z\nmodified"))
    with served(tmp_path) as address:
        for version, count in (("1.5", 1), ("1.10", 0)):
            body = {"package": {"name": "Some.Package", "ecosystem": "PyPI"}, "version": version}
            with urllib.request.urlopen(address, json.dumps(body).encode(), timeout=30) as answer:
                found = json.load(answer).get("vulns", [])
            assert len(found) == count
            assert all(each["modified"] == "2026-02-03T04:05:06Z" for each in found)
    with pytest.raises(WrongArguments, match="holds no advisories"), served(ROOT / "docs"):
        pass


# --- secrets ---------------------------------------------------------------------------------------------------------


def git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """One commit adds a secret, the next removes it; a file that is not committed has another."""
    git(tmp_path, "init", "-q")
    (tmp_path / ".gitignore").write_text("bin/\n")
    (tmp_path / "a.py").write_text("one = 1\nPASSWORD = 'gone'\n")
    (tmp_path / "x.lock").write_text("hash\n")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "one")
    (tmp_path / "a.py").write_text("one = 1\nform\ffeed = 2\n")
    git(tmp_path, "commit", "-q", "-a", "-m", "two")
    (tmp_path / "b.toml").write_text("token = 'new'\n")
    return tmp_path


TOOL = """
printf '{"results": {'
sep=
for file in lines*; do
  n=0
  while IFS= read -r line; do
    n=$((n + 1))
    case $line in
      *gone*|*new*|*hash*)
        printf '%s"%s": [{"type": "T", "hashed_secret": "h", "line_number": %s}]' "$sep" "$file" $n
        sep=, ;;
    esac
  done < "$file"
done
printf '}}'
"""


def test_a_secret_is_found_in_the_tree_and_in_the_history(repository: Path, tmp_path: Path) -> None:
    """Named by its file and hash; what is listed as known is none, and lock files are not looked at."""
    tools, known = tool(repository, "detect-secrets", TOOL), tmp_path / "known.json"
    known.write_text("[]")
    git(repository, "config", "core.excludesFile", "/dev/null")
    found = secrets.check(tools, known)
    assert sorted(found) == ["a.py (history): T h", "b.toml: T h"]
    known.write_bytes(msgspec.json.encode(secrets.as_known(found)))
    assert secrets.check(tools, known) == []


def test_the_lines_of_a_patch_are_told_from_its_headers() -> None:
    """By the counts of each hunk: a line that begins with pluses or minuses is none of a header, and nothing of a line
    is lost. A removed line is not looked at."""
    log = """diff --git a/old.py b/new.py
--- a/old.py
+++ b/new.py
@@ -1,2 +1,3 @@ def x():
---- a/gone
-+++ b/gone
+++ b/no.lock
+  token = 'x'
+-- y
\\ No newline at end of file
@@ -9 +9 @@
-@@ -1 +1 @@
+@@ -1 +1,5 @@
diff --git a/x.lock b/x.lock
+++ b/x.lock
@@ -0,0 +1 @@
+hash
diff --git a/a b.toml b/a b.toml
+++ b/a b.toml\t
@@ -0,0 +1 @@
+end"""
    assert secrets.added_lines(log) == {
        ".py": dict.fromkeys(["++ b/no.lock", "  token = 'x'", "-- y", "@@ -1 +1,5 @@"], "new.py (history)"),
        ".toml": {"end": "a b.toml (history)"},
    }


def test_a_secret_that_only_a_merge_brought_in_is_found(repository: Path) -> None:
    """Neither parent has it, the next commit takes it out; and a line that looks like a header hides nothing."""
    git(repository, "checkout", "-q", "-b", "side", "HEAD~1")
    (repository / "c.md").write_text("side\n")
    git(repository, "add", "c.md")
    git(repository, "commit", "-q", "-m", "side")
    git(repository, "checkout", "-q", "-")
    git(repository, "merge", "-q", "--no-ff", "--no-commit", "side")
    (repository / "c.md").write_text("++ /dev/null\nsomething new\n")
    git(repository, "add", "c.md")
    git(repository, "commit", "-q", "-m", "merge")
    (repository / "c.md").write_text("side\n")
    git(repository, "commit", "-q", "-m", "out again", "c.md")
    (repository / "known.json").write_text("[]")
    found = secrets.check(tool(repository, "detect-secrets", TOOL), repository / "known.json")
    assert sorted(found) == ["a.py (history): T h", "b.toml: T h", "c.md (history): T h"]


def test_a_tool_that_says_nothing_has_found_nothing_out(repository: Path) -> None:
    """It is no clean bill."""
    with pytest.raises(WrongArguments, match="left no report"):
        secrets.check(tool(repository, "detect-secrets", "echo oops >&2; exit 3\n"))
    (repository / ".git").rename(repository / "no.git")
    with pytest.raises(WrongArguments, match=r"(?s)git log.*in a clone"):
        secrets.check(AuditTools(repository, Path("bin")))


def test_what_is_known_holds_no_secret() -> None:
    """Only hashes of what looks like one, and where it was."""
    known = msgspec.json.decode(secrets.KNOWN.read_bytes(), type=list[secrets.KnownFinding])
    assert known and all(re.fullmatch(r"[0-9a-f]{40}", each.sha1) and each.where for each in known)


# --- .pth files ------------------------------------------------------------------------------------------------------


def test_a_pth_file_that_nobody_expects_is_found(tmp_path: Path) -> None:
    """By name and by content; and modules that Python imports by itself."""
    sound = {"_editable_impl_penstock.pth": "/home/somebody/penstock\n" * 8}
    hostile = {
        "innocent.pth": "/somewhere\n",
        "_editable_impl_penstock2.pth": "/x\n",
        "a1_coverage.pth": "import os; os.system('x')\n",
        "deep/__editable__.penstock-0.1.0.pth": "/x\nimport os; os.system('x')\n",
        "sitecustomize.py": "",
        "usercustomize.py": "",
    }
    for name, text in (sound | hostile).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert {str(path.relative_to(tmp_path)) for path in unexpected(tmp_path)} == set(hostile)
    with pytest.raises(WrongArguments, match="is no folder"):
        check_pth([tmp_path / "none"])


def test_this_environment_has_none() -> None:
    """What the tests themselves run on."""
    assert check_pth(environments(ROOT / ".venv-audit")) == []


# --- what it is made of ----------------------------------------------------------------------------------------------


def test_a_package_that_is_missing_from_the_document_is_found(tmp_path: Path) -> None:
    """Every pin of every lock file is a component; the runtime's document names the default model by its hash."""
    (tmp_path / "requirements.lock").write_text(
        "a==1 \\\n    --hash=sha256:00\nb[x]==2 ; python_version > '3' \\\n    --hash=sha256:00\n"
    )
    document: dict[str, Any] = {"components": [{"name": "a", "version": "1"}]}
    out = tmp_path / "out"
    tools = tool(tmp_path, "cyclonedx-py", f"echo '{json.dumps(document)}'\n")
    assert write_sbom(tools, out) == ["requirements.lock: b 2 is missing from the document"]
    document["components"].append({"name": "b", "version": "2"})
    tool(tmp_path, "cyclonedx-py", f"echo '{json.dumps(document)}'\n")
    assert write_sbom(tools, out) == []
    written = json.loads((out / "requirements.cdx.json").read_text())
    assert written["components"][-1]["type"] == "machine-learning-model"
    assert len(written["components"][-1]["hashes"][0]["content"]) == 64
    tool(tmp_path, "cyclonedx-py", "echo no >&2; exit 4\n")
    assert "ended with 4: no" in write_sbom(tools, out)[0]


def test_without_the_tools_it_says_how_to_get_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And nothing passes."""
    (tmp_path / "requirements.lock").write_text("a==1 --hash=sha256:00\n")
    assert main(["--parts", "vulnerabilities", "--root", str(tmp_path), "--tools", "none"]) == 2
    assert "make audit" in capsys.readouterr().out
