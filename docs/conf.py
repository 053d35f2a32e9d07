"""How the documentation site is built: `make site`, offline, from the Markdown pages that GitHub shows as well."""

from __future__ import annotations

import sys
from pathlib import Path

from anisoscope import __version__

sys.path[:0] = [str(Path(__file__).parent / "_site")]  # the extensions below

project = "anisoscope"
author = "the anisoscope maintainers"
project_copyright = "the anisoscope maintainers; under the Apache License 2.0"
version = release = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "further_pages",
    "page_titles",
    "plain_docstrings",
    "repository_links",
    "themed_images",
]
exclude_patterns = ["_build", "_site", "results/*/limits.md", "results/*/finding.md"]  # words that READMEs take in
nitpicky = False
smartquotes = False  # -- is the beginning of an option

# Markdown as GitHub reads it: headings have its anchors, $ is a dollar
myst_heading_anchors = 4
myst_enable_extensions: list[str] = []
nb_execution_mode = "off"  # tests run the notebooks, the site shows what they hold
nb_ipywidgets_js: dict[str, dict[str, str]] = {}  # no page asks another machine for anything

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
default_role = "code"
highlight_language = "none"  # blocks without a language are commands and drawings

html_theme = "furo"
html_title = f"anisoscope {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {
    "navigation_with_keys": True,
    "light_css_variables": {"color-brand-primary": "#0a5c8f", "color-brand-content": "#0a5c8f"},
    "dark_css_variables": {"color-brand-primary": "#7cc4f2", "color-brand-content": "#7cc4f2"},
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
