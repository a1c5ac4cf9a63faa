"""The documentation as a site: `make docs-build` makes build/site of the Markdown pages of this repository.

Pages are those that a reader of the repository sees. Every link in them has to lead somewhere, and every page of docs/
has its place in the navigation (docs/index.md); else the build fails.
"""

import os

import latex2mathml.converter
from docutils import nodes
from sphinx.application import Sphinx

import inflight

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

project = "inflight"
version = release = inflight.__version__
copyright = "the authors of inflight, Apache-2.0"

extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "docs/index"
include_patterns = ["docs/*.md", "examples/README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
exclude_patterns = [".*", "benchmarks", "build", "dist", "inflight", "kernels", "runs", "tests"]

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
default_role = "literal"  # docstrings have names between single backticks
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autoclass_content = "both"
maximum_signature_line_length = 100
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"inflight {release}"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_additional_pages = {"index": "redirect.html"}
templates_path = ["."]
html_copy_source = html_show_sourcelink = False
html_math_renderer = "mathml"


def inline_math(translator, node: nodes.math) -> None:
    translator.body.append(latex2mathml.converter.convert(node.astext()))
    raise nodes.SkipNode


def displayed_math(translator, node: nodes.math_block) -> None:
    formula = latex2mathml.converter.convert(node.astext(), display="block")
    translator.body.append(f'<div class="formula">{formula}</div>')
    raise nodes.SkipNode


def show_code(app, what: str, name: str, of: object, options, lines: list[str]) -> None:
    """An indented block of a docstring is code, as in Markdown."""
    for i in range(len(lines) - 1, 0, -1):
        begins = lines[i].startswith("    ") and not lines[i - 1].strip()
        before = next((line for line in reversed(lines[:i]) if line.strip()), "")
        if begins and not before.startswith(" "):
            lines[i:i] = ["::", ""]


def name_pages(app: Sphinx, document: nodes.document, page: str) -> None:
    """Readers of the site see no files: a link that is called `docs/quick-start.md` is called quick start."""
    for link in document.findall(nodes.reference):
        for text in link.findall(nodes.Text):
            if text.endswith(".md"):
                name = text.rsplit("/", 1)[-1].removesuffix(".md").replace("-", " ")
                text.parent.replace(text, nodes.Text(name))


def setup(app: Sphinx) -> None:
    """Formulas become MathML, which browsers draw by themselves: no script is fetched when a page is read."""
    app.add_html_math_renderer("mathml", (inline_math, None), (displayed_math, None))
    app.connect("autodoc-process-docstring", show_code)
    app.connect("doctree-resolved", name_pages)
