"""Rules that a reader relies on, held against the sources: shapes, plain words, no detours."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE = sorted((ROOT / "bflcore").rglob("*.py"))
PLUGINS = sorted(ROOT.glob("plugins/*/bfl_*/**/*.py"))
EXAMPLES = sorted(ROOT.glob("examples/*/bfl_*/**/*.py"))

# What the package is besides: the conformance kit, the model and data zoos, the report, studies of
# many runs, and the two ways in, from Python and from the command line.
BESIDE = ("testing", "models", "data", "report", "studies", "api", "cli")
LARGEST_CORE = 8600  # lines of code: no blanks, comments or docstrings

# A shape in a docstring: ``[K, P]``, ``[...]``, ``[P_shared]``.
SHAPE = re.compile(r"``\[[^\]]*\]``")

# Methods whose shapes the base class gives, once for all subclasses.
SEAM = (
    *("fit", "personalise", "predict", "initial_memory", "curves", "landmarks", "weigh"),
    *("start", "add", "merge", "finish", "encode", "decode", "combine", "check", "fuse"),
    *("summarise", "restore", "memories"),
)

# Words that a native reader stumbles over, and what to write instead.
PLAIN_WORDS = {
    r"usable results": "valid client results",
    r"kept are \d|kept are \{": "N rounds are saved",
    r"goes on from there": "Continue with: bfl resume RUN",
    r"round 0 is it": "reported as round 0",
    r"would not go on as it began|go on nevertheless": "cannot resume RUN unchanged",
    r"in use by a run that goes on": "another process is running in RUN",
    r"stopped before it began": "was interrupted during set-up",
    r"which is no class of": "expected a subclass of",
    r"\bis no hook\b": "unknown hook",
    r"is an oracle": "an upper bound, not a result to report",
    r"what one does not know": "Selective prediction",
    r"with one's own, whose prior": "the prior of each client's personal Gaussian",
    r"what travels keeps out": "the shared model is unaffected",
    r"where nothing validates": "for clients without validation samples",
    r"beside their posteriors to what it was": "add the clients' statistics to the server state",
    r"minimiser that it contains": "rewrite",
    r"\b[Cc]rew\b|\b[Ss]taff\b|\bhire\b|\bdismiss\b": "process pool",
    r"\b[Ss]helf\b|\bticket\b|\broster\b": "memory store, round token, client registry",
    r"owner of every random draw": "random seed",
    r"samples that test\b|that test\b": "held out for testing",
    r"coordinates that travel": "shared parameters",
    r"\ba class and client\b": "per class per client",
}


def name_of(path):
    return str(path.relative_to(ROOT))


def definitions(path):
    """Yield every function with the name of the class around it, if any."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):
                yield child, node


def body_without_docstring(function):
    return function.body[1:] if ast.get_docstring(function) else function.body


@pytest.mark.parametrize("path", CORE + PLUGINS + EXAMPLES, ids=name_of)
def test_no_function_only_imports_and_returns(path):
    detours = [
        f"{function.name}, line {function.lineno}"
        for function, _ in definitions(path)
        if [type(statement) for statement in body_without_docstring(function)]
        in ([ast.ImportFrom, ast.Return], [ast.Import, ast.Return])
    ]
    assert detours == []


@pytest.mark.parametrize("path", CORE, ids=name_of)
def test_public_functions_of_tensors_give_shapes(path):
    def takes_tensors(function):
        named = [*function.args.args, *function.args.kwonlyargs]
        annotations = [a.annotation for a in named] + [function.returns]
        return any(a is not None and "Tensor" in ast.unparse(a) for a in annotations)

    shapeless = []
    for function, owner in definitions(path):
        private = function.name.startswith("_") or (
            isinstance(owner, ast.ClassDef) and owner.name.startswith("_")
        )
        nested = isinstance(owner, ast.FunctionDef)
        if private or nested or function.name in SEAM or not takes_tensors(function):
            continue
        text = (ast.get_docstring(function) or "") + (
            (ast.get_docstring(owner) or "") if isinstance(owner, ast.ClassDef) else ""
        )
        if not SHAPE.search(text):
            shapeless.append(f"{function.name}, line {function.lineno}")
    assert shapeless == []


def test_the_core_stays_small():
    sizes = {name_of(path): lines_of_code(path) for path in CORE}
    core = {
        name: size
        for name, size in sizes.items()
        if not name.startswith(tuple(f"bflcore/{folder}/" for folder in BESIDE))
    }
    assert sum(core.values()) <= LARGEST_CORE, sum(core.values())


def test_the_top_of_the_package_can_be_seen_at_a_glance():
    entries = [path for path in (ROOT / "bflcore").iterdir() if path.name != "__pycache__"]
    # Using a trained model (api) and many runs (studies) are floors above experiments and reports.
    assert len(entries) <= 27, sorted(path.name for path in entries)


def test_no_module_is_longer_than_a_reader_bears():
    long = {
        name_of(path): length
        for path in CORE + PLUGINS
        if (length := len(path.read_text(encoding="utf-8").splitlines())) > 430
    }
    assert long == {}


@pytest.mark.parametrize(("words", "instead"), PLAIN_WORDS.items())
def test_words_are_plain(words, instead):
    del instead
    places = [
        *CORE,
        *PLUGINS,
        *EXAMPLES,
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("plugins/*/README.md"),
        *ROOT.glob("bflcore/cli/template/files/*"),
    ]
    found = [
        f"{name_of(path)}: {line.strip()}"
        for path in places
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(words, line)
    ]
    assert found == []


def lines_of_code(path):
    """Count lines that hold a token of code: no blanks, comments, docstrings."""
    text = path.read_text(encoding="utf-8")
    strings = set()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            value = body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                strings |= set(range(body[0].lineno, body[0].end_lineno + 1))
    skipped = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENCODING,
        tokenize.ENDMARKER,
    }
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - strings)


# Modules without a test file of their name, and where they are tested instead.
TESTED_ELSEWHERE = {
    "bflcore/cli/__main__.py": "runs `main`: tests/cli/test_cli.py",
    "bflcore/cli/fixture.py": "a fixture of many tests: conftest.py",
}


def has_behaviour(path):
    """Say whether a module defines a function or a class; a package that only imports does not."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    defined = any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in body)
    return defined or path.name != "__init__.py"


def test_every_module_has_a_test_file_of_its_name():
    missing = {}
    for path in CORE:
        module = path.parent if path.name == "__init__.py" else path
        folder = path.parent.relative_to(ROOT / "bflcore")
        # A package is tested in its own folder, or beside it where it is like a module.
        places = [ROOT / "tests" / folder / f"test_{module.stem}.py"]
        places.append(ROOT / "tests" / folder.parent / f"test_{module.stem}.py")
        if has_behaviour(path) and not any(place.is_file() for place in places):
            missing[name_of(path)] = str(places[0].relative_to(ROOT))
    assert missing.keys() == TESTED_ELSEWHERE.keys(), missing
