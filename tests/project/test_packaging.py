"""The files around the package agree with it."""

import re
import tomllib
from typing import Any

import yaml
from helpers import ROOT

import deepstack


def load(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def test_the_package_has_its_own_name_one_version_and_every_extra_that_is_named() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == "deepstack-studies" and "version" in project["dynamic"]
    assert project["scripts"] == {"deepstack": "deepstack.cli:main"}
    assert load("CITATION.cff")["version"] == deepstack.__version__
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("deepstack/**/*.py")):
        for extras in re.findall(r"'?\.\[([a-z,]+)\]'", path.read_text(encoding="utf-8")):
            assert set(extras.split(",")) <= set(project["optional-dependencies"]), path


def test_the_workflow_calls_the_script_and_issue_templates_are_forms() -> None:
    assert {"run": ".ci/run"} in load(".github/workflows/ci.yml")["jobs"]["ci"]["steps"]
    assert "mkdocs build --strict" in (ROOT / ".ci/run").read_text(encoding="utf-8")
    for name in ("bug", "scheme"):
        assert {"name", "description", "body"} <= {*load(f".github/ISSUE_TEMPLATE/{name}.yml")}
