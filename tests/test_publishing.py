"""What is published: distributions that work from files, and the pages around them."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.version import Version

import bflcore

ROOT = Path(__file__).parents[1]
HOME = "https://github.com/bflcore/bflcore"
PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))
DISTRIBUTIONS = [ROOT, *PLUGINS]
FORMS = sorted(ROOT.glob(".github/ISSUE_TEMPLATE/*.yml"))


def project(folder):
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def manual():
    """Return MkDocs' settings but for those that only MkDocs can read."""
    lines = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").splitlines()
    return yaml.safe_load("\n".join(line for line in lines if line.startswith("site_")))


def links(text):
    """Return the addresses of links and pictures outside code."""
    prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    written = re.findall(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)", prose, re.MULTILINE)
    return [a or b for a, b in written] + re.findall(r'(?:src|href)="([^"]+)"', prose)


def relative(text):
    """Return the links of a description that lead nowhere when it is read elsewhere."""
    return [one for one in links(text) if not re.match(r"https://|mailto:|#", one)]


def name_of(folder):
    return project(folder)["name"]


def test_all_distributions_have_one_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    versions = {name_of(folder): project(folder)["version"] for folder in DISTRIBUTIONS}
    versions |= {"CITATION.cff": str(citation["version"]), "the module": bflcore.__version__}
    assert set(versions.values()) == {bflcore.__version__}, versions


def test_the_changelog_has_this_version():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(
        rf"^## {re.escape(bflcore.__version__)} \(\d{{4}}-\d\d-\d\d\)$", text, re.MULTILINE
    )


@pytest.mark.parametrize("folder", PLUGINS, ids=name_of)
def test_a_plugin_needs_this_minor_version_of_the_core_and_its_neighbours(folder):
    major, minor = Version(bflcore.__version__).release[:2]
    ours = {name_of(one) for one in DISTRIBUTIONS}
    needed = {one.name: one.specifier for one in map(Requirement, project(folder)["dependencies"])}
    assert "bflcore" in needed
    for name in ours & needed.keys():
        assert needed[name].contains(f"{major}.{minor}.0"), name
        assert not needed[name].contains(f"{major}.{minor + 1}.0"), name
        assert not needed[name].contains(f"{major}.{minor - 1}.9"), name


@pytest.mark.parametrize("folder", DISTRIBUTIONS, ids=name_of)
def test_a_distribution_says_where_it_lives_and_has_the_licence(folder):
    urls = project(folder)["urls"]
    inside = folder.relative_to(ROOT)
    assert urls["Homepage"] == (HOME if folder == ROOT else f"{HOME}/tree/main/{inside}")
    page = "" if folder == ROOT else f"plugins/{folder.name}.html"
    assert urls.pop("Documentation") == manual()["site_url"] + page
    assert {"Source", "Issues", "Changelog"} <= urls.keys()
    assert all(url.startswith(HOME) for url in urls.values())
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert (folder / project(folder)["readme"]).is_file()


@pytest.mark.parametrize("folder", DISTRIBUTIONS, ids=name_of)
def test_a_description_links_to_files_that_there_are_by_their_whole_address(folder):
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert relative(text) == [], f"write {HOME}/blob/main/... (tree for folders)"
    raw = HOME.replace("github.com", "raw.githubusercontent.com")
    for link in links(text):
        found = re.match(rf"(?:{HOME}/(blob|tree)|{raw})/main/([^#]*)", link)
        if found:
            path = ROOT / found[2]
            assert path.is_dir() if found[1] == "tree" else path.is_file(), link


def test_a_relative_link_is_noticed():
    text = '[a](b.md) ![c](d.svg) <img src="e.png"> [f](#g) [h](https://i)\n\n[j]: k.md\n'
    assert relative(text) == ["b.md", "d.svg", "k.md", "e.png"]
    assert relative("```\n[a](b.md)\n```\n") == []


def test_the_citation_names_the_same_home():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["repository-code"] == citation["url"] == HOME


def test_the_workflow_runs_targets_that_there_are_on_pinned_actions():
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    used = [step["uses"] for step in steps if "uses" in step]
    assert used
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@v\d+\.\d+\.\d+", one) for one in used)
    (declared,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    made = re.findall(r"^\s*- run: make (.*)$", text, re.MULTILINE)
    targets = {target for words in made for target in words.split()}
    assert {"lint", "test", "coverage", "test-third-party", "docs"} <= targets
    assert targets <= set(declared.split())
    for script in re.findall(r"tests/\w+\.py", text):
        assert (ROOT / script).is_file()
    deploys = [n for n, job in jobs.items() if "actions/deploy-pages" in str(job["steps"])]
    assert deploys == ["pages"]
    assert jobs["pages"]["if"] == "github.ref == 'refs/heads/main'"
    supported = {c.rpartition(" ")[2] for c in project(ROOT)["classifiers"] if " 3." in c}
    assert set(jobs["test"]["strategy"]["matrix"]["python"]) <= supported


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_is_valid(form):
    content = yaml.safe_load(form.read_text())
    if form.stem == "config":
        assert all(link["url"].startswith(HOME) for link in content["contact_links"])
        return
    assert {"name", "description", "body"} <= content.keys()
    ids = [field["id"] for field in content["body"]]
    assert len(set(ids)) == len(ids) > 2
    for field in content["body"]:
        assert field["type"] in {"input", "textarea", "dropdown", "checkboxes"}
        assert field["attributes"]["label"]


def test_the_paper_cites_what_its_bibliography_has_and_no_more():
    text = (ROOT / "paper" / "paper.md").read_text()
    entries = (ROOT / "paper" / "paper.bib").read_text()
    cited = set(re.findall(r"@([a-z]+\d{4}[a-z]*)", text))
    assert cited == set(re.findall(r"^@\w+\{([^,]+),", entries, re.MULTILINE))
    for entry in entries.split("\n@"):
        assert all(f"{field} = " in entry for field in ("author", "title", "year"))
        assert "doi = " in entry or "url = " in entry


def test_every_figure_of_the_papers_evidence_stands_on_the_page_that_it_names():
    text = (ROOT / "paper" / "paper.md").read_text()
    evidence = text.partition("# Evidence")[2].partition("# Limitations")[0]
    checked = 0
    for paragraph in evidence.split("\n\n"):
        pages = re.findall(r"\(\.\./(docs/results/[\w-]+\.md)\)", paragraph)
        figures = re.findall(r"\d+\.\d+", paragraph)
        found = " ".join((ROOT / page).read_text() for page in pages)
        assert all(figure in found for figure in figures), paragraph
        checked += len(figures)
    assert checked > 10


def files_of(folder):
    """Return the files of a distribution's package, relative to the distribution."""
    name = name_of(folder)
    package = folder / name.replace("-", "_")
    return {
        str(path.relative_to(folder))
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def python(*words, **more):
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=False, **more
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build a source distribution of each, and a wheel from that; return both by name."""
    found = {}
    for folder in DISTRIBUTIONS:
        place = tmp_path_factory.mktemp(name_of(folder))
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            (place / name).write_bytes((folder / name).read_bytes())
        for name in files_of(folder):
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes((folder / name).read_bytes())
        build = "import setuptools.build_meta as backend; backend.build_sdist('dist')"
        python("-c", build, cwd=place)
        (source,) = (place / "dist").glob("*.tar.gz")
        offline = ("--no-deps", "--no-index", "--no-build-isolation", "--quiet")
        python("-m", "pip", "wheel", *offline, "--wheel-dir", str(place / "dist"), str(source))
        (wheel,) = (place / "dist").glob("*.whl")
        found[name_of(folder)] = (folder, source, wheel)
    return found


@pytest.mark.thorough
def test_wheels_and_source_distributions_hold_the_package_and_valid_metadata(built):
    for name, (folder, source, wheel) in built.items():
        with tarfile.open(source) as archive:
            inside = {path.partition("/")[2] for path in archive.getnames()}
        assert {"LICENSE", "README.md", "pyproject.toml", *files_of(folder)} <= inside
        with zipfile.ZipFile(wheel) as archive:
            assert files_of(folder) <= set(archive.namelist())
            (info,) = (path for path in archive.namelist() if path.endswith("/METADATA"))
            metadata = Metadata.from_email(archive.read(info), validate=True)
        assert (metadata.name, str(metadata.version)) == (name, bflcore.__version__)
        assert metadata.description_content_type == "text/markdown"
        assert relative(metadata.description) == []
        assert metadata.description.startswith("# ")
        assert metadata.license_expression == "Apache-2.0"
        assert metadata.license_files == ["LICENSE"]


@pytest.mark.thorough
def test_everything_works_when_installed_from_files(built, tmp_path):
    wheels = [str(wheel) for _, _, wheel in built.values()]
    site = tmp_path / "site"
    python("-m", "pip", "install", "--no-deps", "--no-index", "-q", "--target", str(site), *wheels)
    alone = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PYTHONPATH": str(site)}
    where = python("-c", "import bflcore; print(bflcore.__file__)", cwd=tmp_path, env=alone)
    assert where.startswith(str(site))
    listed = python("-m", "bflcore.cli", "list-plugins", cwd=tmp_path, env=alone)
    for name in built:
        assert re.search(rf"^{name} +{re.escape(bflcore.__version__)} +ok", listed, re.MULTILINE)
    quick = ("--data", "digits", "--clients", "2", "--rounds", "1", "--workers", "1", "--quiet")
    python("-m", "bflcore.cli", "run", "bpfed", *quick, "--out", "run", cwd=tmp_path, env=alone)
    assert "<h2>Single samples: run</h2>" in (tmp_path / "run" / "report.html").read_text()
