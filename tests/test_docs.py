"""The docs say what the code says: options with their defaults, links that lead somewhere, names that exist."""

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from options_page import filled

import inflight

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
OPTIONS = (ROOT / "docs" / "options.md").read_text()
CODE = sorted(path for folder in ("inflight", "kernels", "examples") for path in ROOT.glob(f"{folder}/**/*.py"))
README_WORDS = 900
REQUIRED = "required"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def without_code(text: str) -> str:
    return re.sub(r"^( *)```.*?^\1```", "", text, flags=re.DOTALL | re.MULTILINE)


def section(page: str, heading: str) -> str:
    """The text below "## heading", up to the next heading of that level."""
    [text] = re.findall(rf"^## {re.escape(heading)}$(.*?)(?=^## |\Z)", page, flags=re.DOTALL | re.MULTILINE)
    return text


def table_of(page: str, heading: str) -> dict[str, str]:
    """Maps the name in the first column of a section's table to its default in the second, without backticks."""
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", section(page, heading), flags=re.MULTILINE)
    return {name: default.strip(" `") for name, default in rows}


def defaults_of(kind: type) -> dict[str, Any]:
    """Maps each field of a struct or dataclass to its default, or to REQUIRED."""
    if issubclass(kind, msgspec.Struct):
        fields = [(f.name, f.default, f.default_factory, msgspec.NODEFAULT) for f in msgspec.structs.fields(kind)]
    else:
        fields = [(f.name, f.default, f.default_factory, dataclasses.MISSING) for f in dataclasses.fields(kind)]
    return {
        name: default if default is not missing else REQUIRED if factory is missing else factory()
        for name, default, factory, missing in fields
    }


def parameters_of(function: Any) -> dict[str, Any]:
    """Maps each named parameter to its default, or to REQUIRED."""
    return {
        parameter.name: REQUIRED if parameter.default is parameter.empty else parameter.default
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name != "self" and parameter.kind is not parameter.VAR_KEYWORD
    }


def differences(table: dict[str, str], defaults: dict[str, Any]) -> list[str]:
    """A sentence for each option that the table lacks, has too many, or gives another default."""
    found = [f"{name} is missing" for name in defaults if name not in table]
    found += [f"{name} does not exist" for name in table if name not in defaults]
    for name in table.keys() & defaults.keys():
        said = REQUIRED if table[name] == REQUIRED else eval(table[name], {"SamplingParams": inflight.SamplingParams})
        if (type(said), said) != (type(defaults[name]), defaults[name]):
            found.append(f"the default of {name} is {defaults[name]!r}, the table says {table[name]}")
    return found


def test_the_page_of_options_is_written_from_the_code():
    assert filled(OPTIONS) == OPTIONS, "run `make options`"


def test_another_text_of_an_option_is_found():
    assert filled(OPTIONS.replace("Whole copies of the weights", "Some copies")) == OPTIONS
    assert filled(OPTIONS.replace("(default `2`)", "(default `3`)")) == OPTIONS


def test_launch_takes_the_options_of_the_engine():
    assert parameters_of(inflight.launch) == defaults_of(inflight.EngineOptions) | {"placement": None}


def test_options_name_what_attach_takes():
    assert differences(table_of(OPTIONS, "attach"), parameters_of(inflight.attach)) == []


def test_options_name_what_a_publisher_takes():
    assert differences(table_of(OPTIONS, "publisher"), parameters_of(inflight.Engine.publisher)) == []


def test_options_name_what_a_scorer_takes():
    assert differences(table_of(OPTIONS, "Scorer"), parameters_of(inflight.Scorer)) == []


def test_what_a_recorder_takes_is_documented():
    page = (ROOT / "docs" / "watch.md").read_text()
    assert differences(table_of(page, "Record a loop of your own"), parameters_of(inflight.RunRecorder)) == []


@pytest.mark.parametrize("kind", [inflight.Rewards, inflight.Evaluation])
def test_options_name_what_is_given_to(kind):
    assert differences(table_of(OPTIONS, kind.__name__), parameters_of(kind)) == []


def test_every_public_name_is_in_the_reference():
    named = set(re.findall(r"\binflight\.(\w+)", (ROOT / "docs" / "api.md").read_text()))
    assert [name for name in inflight.__all__ if name not in named] == []


def test_staleness_rules_are_documented():
    page = (ROOT / "docs" / "staleness.md").read_text()
    assert differences(table_of(page, "Rules for what is too old"), defaults_of(inflight.StalenessRule)) == []


def test_every_field_of_a_rollout_is_documented():
    text = section(OPTIONS, "What a rollout holds")
    identity = {"request_id", "group_id", "sample", "params"}
    assert [f.name for f in dataclasses.fields(inflight.Rollout) if f.name not in identity and f.name not in text] == []


def test_a_new_option_and_another_default_are_found():
    @dataclasses.dataclass
    class Options:
        steps: int = 100
        seed: int = 0

    table = table_of("## Options\n\n| `steps` | `100` | steps |\n| `seed` | `0` | |\n", "Options")
    assert differences(table, defaults_of(Options)) == []
    assert differences({"steps": "100"}, defaults_of(Options)) == ["seed is missing"]
    assert differences({**table, "old": "1"}, defaults_of(Options)) == ["old does not exist"]
    assert differences({**table, "seed": "1"}, defaults_of(Options)) == ["the default of seed is 0, the table says 1"]
    assert differences({**table, "seed": "False"}, defaults_of(Options)) != []


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= README_WORDS


def links_of(page: Path) -> Iterator[str]:
    """Relative links and pictures of a page, with their anchors."""
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if not re.match(r"[a-z]+:", link):
            yield link


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", without_code(page.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    found = []
    for link in links_of(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    assert broken_links(page) == []


def test_a_broken_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A page\n[a](page.md#a-page) [b](page.md#b) [c](no.md) [d](https://example.org)\n")
    assert broken_links(page) == ["page.md#b", "no.md"]


def test_every_page_is_in_the_navigation_of_the_site():
    index = (ROOT / "docs" / "index.md").read_text()
    listed = [
        line for tree in re.findall(r"```{toctree}\n(.*?)```", index, flags=re.DOTALL) for line in tree.split("\n")
    ]
    names = {re.sub(r".*<(.*)>", r"\1", line) for line in listed}
    pages = {page.stem for page in PAGES if page.parent == ROOT / "docs" and page.name != "index.md"}
    assert pages - names == set()


def test_every_page_is_linked_from_another():
    linked = {
        (page.parent / link.partition("#")[0]).resolve()
        for page in PAGES
        for link in links_of(page)
        if not link.startswith("#")
    }
    assert [name_of(page) for page in PAGES if page not in linked and page.name != "README.md"] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent == ROOT / "docs"], ids=name_of)
def test_every_page_opens_with_what_its_reader_can_do(page):
    first = page.read_text().split("\n\n")[1]
    assert first.startswith("After reading this page you "), first


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_names_of_inflight_in_the_docs_exist(page):
    """`inflight.Name` in code, where it is no module."""
    names = set(re.findall(r"(?<![\w/.])inflight\.([A-Za-z_]+)", page.read_text()))
    modules = {path.stem for path in (ROOT / "inflight").iterdir()}
    assert [name for name in sorted(names - modules) if name not in dir(inflight)] == []


def test_python_in_the_docs_compiles():
    """But for the lines that leave something out with an ellipsis."""
    for page in PAGES:
        for code in re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE):
            if "…" not in re.sub(r"#.*", "", code):
                compile(code, name_of(page), "exec", flags=0x2000)  # PyCF_ALLOW_TOP_LEVEL_AWAIT


def excerpts(text: str) -> Iterator[tuple[str, str]]:
    """(file, code) of each block of Python, whose first line names the file that the code is an excerpt of."""
    for block in re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
        first, _, code = block.partition("\n")
        yield first.removeprefix("# "), code


def is_excerpt(code: str, file: str) -> bool:
    """Whether a file holds these lines one after another, at any indentation."""
    return any(textwrap.indent(code.strip("\n"), " " * depth) in file for depth in (0, 4, 8, 12))


@pytest.mark.parametrize(("page", "folder"), [("extending.md", "tests/"), ("quick-start.md", "examples/")])
def test_code_is_that_of_a_file_which_a_test_runs(page, folder):
    found = list(excerpts((ROOT / "docs" / page).read_text()))
    assert found
    for path, code in found:
        assert path.startswith(folder), f"the first line names the file that the code is of, got {path!r}"
        assert is_excerpt(code, (ROOT / path).read_text()), f"{path} does not hold\n{code}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_code_that_names_its_file_is_in_it(page):
    for path, code in excerpts(page.read_text()):
        if re.fullmatch(r"(tests|examples)/\S+\.py", path):
            assert is_excerpt(code, (ROOT / path).read_text()), f"{path} does not hold\n{code}"


def test_code_that_no_test_runs_is_found():
    [(path, code)] = excerpts("```python\n# tests/test_docs.py\nreturn any(\n    1\n)\n```\n")
    assert path == "tests/test_docs.py"
    assert is_excerpt(code, "def f():\n    return any(\n        1\n    )\n")
    assert not is_excerpt(code, "def f():\n    return any(\n        2\n    )\n")


def test_the_code_layout_names_files_that_exist():
    files = {
        path.name
        for folder in ("inflight", "kernels", "tests", "examples", "benchmarks", "docs/site")
        for path in (ROOT / folder).rglob("*")
    }
    named = re.findall(r"`(?:[\w/]*/)?(\w+\.\w+)`", (ROOT / "docs" / "structure.md").read_text())
    assert len(named) > 60
    assert sorted({name for name in named if name.endswith((".py", ".c"))} - files) == []


@pytest.mark.parametrize("page", ["failures.md", "numerics.md"])
def test_what_a_page_says_is_tried_by_tests_that_exist(page):
    """Rows of tables name test files in their last column."""
    named = [re.findall(r"`([\w/]+\.py)`", row) for row in (ROOT / "docs" / page).read_text().splitlines()]
    files = [file for names in named for file in names]
    assert len(files) > 10
    assert [file for file in files if not (ROOT / "tests" / file).exists()] == []


# English

HABITS = {
    "clause as a noun": (0.5, r"what (is|was|are|were|has|have|had|it|they|the|an?|others|comes|came)", "what it drew"),
    "come, go, stand, lie": (0.8, r"comes?|came|goes|(go|going|went) on|stands?|stood|lies?|lay", "the copy goes on"),
    "trailing clause": (1.8, r", (which|whose|who|where)", "It has a copy, which is read."),
    "headless sentence": (
        0.3,
        r"(^|[.:;]\s)(What|Who|Whoever|Whether|How (often|many|much|long)) ",
        "How often it runs.",
    ),
    "literal translation": (
        0.4,
        r"beside|behind|under way|anew|meanwhile|in turn|thereof|by itself",
        "the run under way",
    ),
    "that of, those of": (0.4, r"(that|those) (of|in|that|which|who)", "a limit like that of the engine"),
    "program as a person": (
        0.3,
        r"((is|are|was|were) told|tells? (how|that|what)|(no|some|every|any)body|whoever)",
        "the engine is told",
    ),
    "may": (1.4, r"may", "The engine may stop."),
    "no with a noun": (0.5, r"(is|are) no|(no|not any) more|none (is|are|was|of)", "It is no decoder."),
    "vague amount": (0.2, r"how often|as often|so (many|much|long)|one's own|of (its|their|your) own", "so many"),
    "private metaphor": (
        0.2,
        r"news|kin|heed\w*|homeless|let go|given up|counts? as|hand(s|ed)? (out|over)",
        "the news",
    ),
}
"""Maps a habit to its limit per 1,000 words, its pattern and an example."""


def prose_of(path: Path) -> str:
    """Sentences of a page without code, headings and tables, or docstrings and comments of a program."""
    text = path.read_text()
    if path.suffix == ".md":
        return re.sub(r"^\s*[#|].*$|`[^`]*`", "", without_code(text), flags=re.MULTILINE)
    literals = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
    docstrings = [each.value for each in literals if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    return "\n".join([*docstrings, *re.findall(r"(?:^|  )# (.+)", text, flags=re.MULTILINE)])


def habits_above_limits(files: list[Path]) -> dict[str, str]:
    """Maps a habit that is too frequent in the prose of all files to its rate and its first places."""
    texts = {path: prose_of(path) for path in files}
    words = sum(len(text.split()) for text in texts.values())
    above = {}
    for name, (limit, pattern, _) in HABITS.items():
        find = re.compile(rf"\b(?:{pattern})\b", re.MULTILINE)
        places = [f"{path.name}: {found[0]}" for path, text in texts.items() for found in find.finditer(text)]
        if (rate := 1000 * len(places) / words) > limit:
            above[name] = f"{rate:.1f} per 1,000 words, at most {limit}; {'; '.join(places[:20])}"
    return above


@pytest.mark.medium
@pytest.mark.parametrize("files", [PAGES, CODE], ids=["pages", "code"])
def test_prose_has_few_habits_that_slow_a_reader(files):
    """CONTRIBUTING.md lists them with better sentences."""
    assert habits_above_limits(files) == {}


@pytest.mark.parametrize("habit", HABITS)
@pytest.mark.parametrize("template", ["{}\n", '"""{}"""\n', "x = 1  # {}\n"], ids=["page", "docstring", "comment"])
def test_a_planted_habit_is_found(tmp_path, habit, template):
    planted = tmp_path / ("page.md" if template == "{}\n" else "module.py")
    sentence = "The engine draws a token and sends it to the trainer. " * 40
    planted.write_text(template.format(sentence))
    assert habits_above_limits([planted]) == {}
    planted.write_text(template.format(f"{sentence}{HABITS[habit][2]}"))
    assert habits_above_limits([planted]).keys() == {habit}


def test_code_and_tables_are_not_prose(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("The engine `may` stop.\n```\nit may\n```\n| it may |\n# It may\n")
    assert habits_above_limits([page]) == {}
