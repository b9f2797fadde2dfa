import re
from pathlib import Path

from docutils import nodes

from kvps import __version__

project = "kvps"
copyright = "the kvps contributors"
release = version = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
exclude_patterns = ["_build"]

# The API, from the docstrings of the source.
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "show-inheritance": True}
python_maximum_signature_line_length = 72
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
add_module_names = False
toc_object_entries_show_parents = "hide"
nitpick_ignore_regex = [
    # Other projects' names: the site links to no other host that could be gone.
    (r"py:.*", r"(torch|numpy|np|collections|typing|pathlib|types|abc|concurrent)\b.*"),
    # Internal types of a signature, and type variables.
    (r"py:class", r"kvps\.(runtime|core|store)\..*|kvps\.data\.T|Device"),
    (r"py:mod", r"kvps\.store\.create"),
]

pygments_dark_style = "github-dark"
html_theme = "furo"
html_title = f"kvps {release}"
html_show_sphinx = False
html_favicon = "_static/favicon.svg"
html_static_path = ["_static"]
html_css_files = ["kvps.css"]
html_search_scorer = str(Path(__file__).with_name("_static") / "scorer.js")
html_copy_source = False
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#1d5fbf",
        "color-brand-content": "#1d5fbf",
        "font-stack": "system-ui, -apple-system, 'Segoe UI', Roboto, Ubuntu, Cantarell, sans-serif",
        "font-stack--monospace": "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans "
        "Mono', monospace",
    },
    "dark_css_variables": {"color-brand-primary": "#7db3ff", "color-brand-content": "#7db3ff"},
}
copybutton_exclude = ".linenos, .gp, .go"


def setup(app):
    app.connect("source-read", drop_empty_globs)
    app.connect("doctree-resolved", inline_pictures)


def drop_empty_globs(app, docname, content):
    """Remove the patterns of a toctree that match no page yet: a section may wait for its first page."""
    folder = Path(app.srcdir, docname).parent

    listed = set(content[0].splitlines())

    def has_pages(pattern):
        return any(page.stem not in listed | {"index"} for page in folder.glob(f"{pattern}.md"))

    content[0] = re.sub(
        r"^[./a-z-]*\*\n",
        lambda found: found[0] if has_pages(found[0].strip()) else "",
        content[0],
        flags=re.M,
    )


def inline_pictures(app, doctree, docname):
    """Put each SVG into its page: an <img> would follow the system's colors, and not the button of
    the theme."""
    for image in list(doctree.findall(nodes.image)):
        source = Path(app.srcdir, image["uri"])
        if app.builder.format == "html" and source.suffix == ".svg" and source.is_file():
            svg = source.read_text("utf-8")
            image.replace_self(nodes.raw("", f'<div class="diagram">{svg}</div>', format="html"))
